"""slapo: a schedule language for PyTorch training.

``import slapo_core as slapo`` gives the public names below. They are loaded when they are first used, so that the
command line and the plugin machinery start without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_core.building.phases import (
        build as build,
    )
    from slapo_core.errors import (
        AmbiguousNameError as AmbiguousNameError,
        ApplyError as ApplyError,
        ArgumentError as ArgumentError,
        BrokenPluginError as BrokenPluginError,
        BuildError as BuildError,
        ConflictingPluginError as ConflictingPluginError,
        DisabledPluginError as DisabledPluginError,
        HookError as HookError,
        IncompatiblePluginError as IncompatiblePluginError,
        LaunchError as LaunchError,
        MeshError as MeshError,
        OptimizerError as OptimizerError,
        PathError as PathError,
        PluginConfigError as PluginConfigError,
        PluginError as PluginError,
        PostconditionError as PostconditionError,
        PreconditionError as PreconditionError,
        RankFailedError as RankFailedError,
        RankMismatchError as RankMismatchError,
        RankTimeoutError as RankTimeoutError,
        RejectedPluginError as RejectedPluginError,
        ReplayError as ReplayError,
        SealedError as SealedError,
        SerializationError as SerializationError,
        SlapoError as SlapoError,
        StaleNodeError as StaleNodeError,
        UndoError as UndoError,
        UnknownNameError as UnknownNameError,
        VerifyError as VerifyError,
        WeightsError as WeightsError,
    )
    from slapo_core.plugins.local import (
        register_primitive as register_primitive,
    )
    from slapo_core.schedule.creation import (
        create_schedule as create_schedule,
    )
    from slapo_core.schedule.replaying import (
        replay as replay,
    )
    from slapo_core.schedule.schedule import (
        Schedule as Schedule,
    )
    from slapo_core.spec.dialect import (
        Dialect as Dialect,
        Plan as Plan,
    )
    from slapo_core.spec.doctor import (
        Fact as Fact,
        Problem as Problem,
    )
    from slapo_core.spec.edit import (
        Edit as Edit,
    )
    from slapo_core.spec.engine import (
        Engine as Engine,
        StepResult as StepResult,
    )
    from slapo_core.spec.equivalence import (
        Equivalence as Equivalence,
    )
    from slapo_core.spec.hookspecs import (
        hookimpl as hookimpl,
    )
    from slapo_core.spec.layout import (
        Layout as Layout,
    )
    from slapo_core.spec.mesh import (
        Mesh as Mesh,
    )
    from slapo_core.spec.node import (
        Node as Node,
    )
    from slapo_core.spec.primitive import (
        Primitive as Primitive,
    )
    from slapo_core.spec.record import (
        Record as Record,
    )
    from slapo_core.spec.violation import (
        Violation as Violation,
    )
    from slapo_core.verification import (
        verify as verify,
    )

_PUBLIC = {
    "AmbiguousNameError": "slapo_core.errors",
    "ApplyError": "slapo_core.errors",
    "ArgumentError": "slapo_core.errors",
    "BrokenPluginError": "slapo_core.errors",
    "BuildError": "slapo_core.errors",
    "ConflictingPluginError": "slapo_core.errors",
    "Dialect": "slapo_core.spec.dialect",
    "DisabledPluginError": "slapo_core.errors",
    "Edit": "slapo_core.spec.edit",
    "Engine": "slapo_core.spec.engine",
    "Equivalence": "slapo_core.spec.equivalence",
    "Fact": "slapo_core.spec.doctor",
    "HookError": "slapo_core.errors",
    "IncompatiblePluginError": "slapo_core.errors",
    "LaunchError": "slapo_core.errors",
    "Layout": "slapo_core.spec.layout",
    "Mesh": "slapo_core.spec.mesh",
    "MeshError": "slapo_core.errors",
    "Node": "slapo_core.spec.node",
    "OptimizerError": "slapo_core.errors",
    "PathError": "slapo_core.errors",
    "Plan": "slapo_core.spec.dialect",
    "PluginConfigError": "slapo_core.errors",
    "PluginError": "slapo_core.errors",
    "PostconditionError": "slapo_core.errors",
    "PreconditionError": "slapo_core.errors",
    "Primitive": "slapo_core.spec.primitive",
    "Problem": "slapo_core.spec.doctor",
    "RankFailedError": "slapo_core.errors",
    "RankMismatchError": "slapo_core.errors",
    "RankTimeoutError": "slapo_core.errors",
    "Record": "slapo_core.spec.record",
    "RejectedPluginError": "slapo_core.errors",
    "ReplayError": "slapo_core.errors",
    "Schedule": "slapo_core.schedule.schedule",
    "SealedError": "slapo_core.errors",
    "SerializationError": "slapo_core.errors",
    "SlapoError": "slapo_core.errors",
    "StaleNodeError": "slapo_core.errors",
    "StepResult": "slapo_core.spec.engine",
    "UndoError": "slapo_core.errors",
    "UnknownNameError": "slapo_core.errors",
    "VerifyError": "slapo_core.errors",
    "Violation": "slapo_core.spec.violation",
    "WeightsError": "slapo_core.errors",
    "build": "slapo_core.building.phases",
    "create_schedule": "slapo_core.schedule.creation",
    "hookimpl": "slapo_core.spec.hookspecs",
    "register_primitive": "slapo_core.plugins.local",
    "replay": "slapo_core.schedule.replaying",
    "verify": "slapo_core.verification",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'slapo_core' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
