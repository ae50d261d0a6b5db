"""Test plugins: the kit of checks, bit-exact snapshots, fake distributions, real ranks.

A plugin's test file needs one decorator::

    import torch
    from torch import nn
    from slapo_core.testing import Case, parametrize_checks
    from slapo_hello.freeze import Freeze

    @parametrize_checks([
        Case(
            Freeze("weight"),
            model=lambda: nn.Linear(4, 4),
            inputs=lambda: (torch.randn(2, 4),),
            rejects=[Freeze("wieght")],
        ),
    ])
    def test_freeze(check):
        check()

and gets one test for every check, e.g. ``test_freeze[freeze-undo_is_exact]``. The test of a dialect needs one as well::

    from slapo_core.testing import DialectCase, parametrize_dialect_checks

    @parametrize_dialect_checks([DialectCase("accumulate", config={"micro_batches": 3})])
    def test_accumulate(check):
        check()

``slapo plugins check`` runs the same code on the cases that a plugin ships. Names are loaded when they are first used:
neither torch nor pytest is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_core.ranks.launcher import (
        preload_modules as preload_modules,
        run_ranks as run_ranks,
    )
    from slapo_core.testing.case import (
        Case as Case,
    )
    from slapo_core.testing.check import (
        Check as Check,
        CheckError as CheckError,
        NotApplicable as NotApplicable,
    )
    from slapo_core.testing.checks import (
        CHECKS as CHECKS,
    )
    from slapo_core.testing.dialects.case import (
        DialectCase as DialectCase,
    )
    from slapo_core.testing.dialects.checks import (
        DIALECT_CHECKS as DIALECT_CHECKS,
    )
    from slapo_core.testing.distributions import (
        FakeDistribution as FakeDistribution,
        FakeEnvironment as FakeEnvironment,
        primitive_source as primitive_source,
    )
    from slapo_core.testing.fixtures import (
        fake_distributions as fake_distributions,
        isolated_registry as isolated_registry,
    )
    from slapo_core.testing.parametrize import (
        BoundCheck as BoundCheck,
        parametrize_checks as parametrize_checks,
        parametrize_dialect_checks as parametrize_dialect_checks,
    )
    from slapo_core.testing.snapshot import (
        ModelSnapshot as ModelSnapshot,
        assert_bit_identical as assert_bit_identical,
    )

_PUBLIC = {
    "BoundCheck": "slapo_core.testing.parametrize",
    "CHECKS": "slapo_core.testing.checks",
    "Case": "slapo_core.testing.case",
    "Check": "slapo_core.testing.check",
    "CheckError": "slapo_core.testing.check",
    "DIALECT_CHECKS": "slapo_core.testing.dialects.checks",
    "DialectCase": "slapo_core.testing.dialects.case",
    "FakeDistribution": "slapo_core.testing.distributions",
    "FakeEnvironment": "slapo_core.testing.distributions",
    "ModelSnapshot": "slapo_core.testing.snapshot",
    "NotApplicable": "slapo_core.testing.check",
    "assert_bit_identical": "slapo_core.testing.snapshot",
    "fake_distributions": "slapo_core.testing.fixtures",
    "isolated_registry": "slapo_core.testing.fixtures",
    "parametrize_checks": "slapo_core.testing.parametrize",
    "parametrize_dialect_checks": "slapo_core.testing.parametrize",
    "preload_modules": "slapo_core.ranks.launcher",
    "primitive_source": "slapo_core.testing.distributions",
    "run_ranks": "slapo_core.ranks.launcher",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'slapo_core.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
