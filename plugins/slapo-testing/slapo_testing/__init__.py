"""Test plugins: kits of checks, bit-exact snapshots, fake distributions, real ranks.

A plugin's test file needs one decorator::

    import torch
    from torch import nn
    from slapo_testing import Case, parametrize_checks
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

which gives one test for each check, e.g. ``test_freeze[freeze-undo_is_exact]``. The test of a dialect needs one
decorator, too::

    from slapo_testing import DialectCase, parametrize_dialect_checks

    @parametrize_dialect_checks([DialectCase("accumulate", config={"micro_batches": 3})])
    def test_accumulate(check):
        check()

``slapo plugins check`` runs the same checks on the cases that a plugin ships. Names are loaded at their first use:
neither torch nor pytest is imported before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_runtime.launcher import (
        preload_modules as preload_modules,
        run_ranks as run_ranks,
    )
    from slapo_testing.case import (
        Case as Case,
    )
    from slapo_testing.check import (
        Check as Check,
        CheckError as CheckError,
        NotApplicable as NotApplicable,
    )
    from slapo_testing.checks import (
        CHECKS as CHECKS,
    )
    from slapo_testing.dialects.case import (
        DialectCase as DialectCase,
    )
    from slapo_testing.dialects.checks import (
        DIALECT_CHECKS as DIALECT_CHECKS,
    )
    from slapo_testing.distributions import (
        FakeDistribution as FakeDistribution,
        FakeEnvironment as FakeEnvironment,
        primitive_source as primitive_source,
    )
    from slapo_testing.fixtures import (
        fake_distributions as fake_distributions,
        isolated_registry as isolated_registry,
    )
    from slapo_testing.parametrize import (
        BoundCheck as BoundCheck,
        parametrize_checks as parametrize_checks,
        parametrize_dialect_checks as parametrize_dialect_checks,
    )
    from slapo_testing.snapshot import (
        ModelSnapshot as ModelSnapshot,
        assert_bit_identical as assert_bit_identical,
    )

_PUBLIC = {
    "BoundCheck": "slapo_testing.parametrize",
    "CHECKS": "slapo_testing.checks",
    "Case": "slapo_testing.case",
    "Check": "slapo_testing.check",
    "CheckError": "slapo_testing.check",
    "DIALECT_CHECKS": "slapo_testing.dialects.checks",
    "DialectCase": "slapo_testing.dialects.case",
    "FakeDistribution": "slapo_testing.distributions",
    "FakeEnvironment": "slapo_testing.distributions",
    "ModelSnapshot": "slapo_testing.snapshot",
    "NotApplicable": "slapo_testing.check",
    "assert_bit_identical": "slapo_testing.snapshot",
    "fake_distributions": "slapo_testing.fixtures",
    "isolated_registry": "slapo_testing.fixtures",
    "parametrize_checks": "slapo_testing.parametrize",
    "parametrize_dialect_checks": "slapo_testing.parametrize",
    "preload_modules": "slapo_runtime.launcher",
    "primitive_source": "slapo_testing.distributions",
    "run_ranks": "slapo_runtime.launcher",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'slapo_testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
