"""slapo: a schedule language for PyTorch training.

``import slapo_core as slapo`` gives the public names below. They are loaded when they are first used, so that the
command line and the plugin machinery start without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slapo_core import errors
from slapo_core.errors import *  # noqa: F403 - all of it is public, and it imports nothing

if TYPE_CHECKING:
    from slapo_core import patterns as patterns
    from slapo_core.building.phases import (
        build as build,
    )
    from slapo_core.estimation.estimates import (
        estimate as estimate,
        estimate_functions as estimate_functions,
    )
    from slapo_core.estimation.fit import (
        fit as fit,
    )
    from slapo_core.live import (
        clip_grad_norm_ as clip_grad_norm_,
        load_state_dict as load_state_dict,
        save_pretrained as save_pretrained,
        state_dict as state_dict,
    )
    from slapo_core.pipeline.stages import (
        stages as stages,
    )
    from slapo_core.plugins.registry import (
        register_primitive as register_primitive,
    )
    from slapo_core.schedule.creation import (
        create_schedule as create_schedule,
        replay as replay,
    )
    from slapo_core.schedule.schedule import (
        Schedule as Schedule,
    )
    from slapo_core.spec.device import (
        DeviceSpec as DeviceSpec,
        Link as Link,
    )
    from slapo_core.spec.dialect import (
        Dialect as Dialect,
        Plan as Plan,
    )
    from slapo_core.spec.edit import (
        Edit as Edit,
    )
    from slapo_core.spec.engine import (
        Engine as Engine,
        StepResult as StepResult,
    )
    from slapo_core.spec.extensions import (
        Command as Command,
        Compiler as Compiler,
        Pattern as Pattern,
        Sampler as Sampler,
        Trial as Trial,
    )
    from slapo_core.spec.graph import (
        Match as Match,
    )
    from slapo_core.spec.hookspecs import (
        Fact as Fact,
        Problem as Problem,
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
        Change as Change,
        Equivalence as Equivalence,
        Primitive as Primitive,
        Record as Record,
        Suggestion as Suggestion,
        Violation as Violation,
    )
    from slapo_core.spec.tracer import (
        Tracer as Tracer,
    )
    from slapo_core.verification import (
        verify as verify,
    )

_PUBLIC = {
    "Change": "slapo_core.spec.primitive",
    "Command": "slapo_core.spec.extensions",
    "Compiler": "slapo_core.spec.extensions",
    "DeviceSpec": "slapo_core.spec.device",
    "Dialect": "slapo_core.spec.dialect",
    "Edit": "slapo_core.spec.edit",
    "Engine": "slapo_core.spec.engine",
    "Equivalence": "slapo_core.spec.primitive",
    "Fact": "slapo_core.spec.hookspecs",
    "Layout": "slapo_core.spec.layout",
    "Link": "slapo_core.spec.device",
    "Match": "slapo_core.spec.graph",
    "Mesh": "slapo_core.spec.mesh",
    "Node": "slapo_core.spec.node",
    "Pattern": "slapo_core.spec.extensions",
    "Plan": "slapo_core.spec.dialect",
    "Primitive": "slapo_core.spec.primitive",
    "Problem": "slapo_core.spec.hookspecs",
    "Record": "slapo_core.spec.primitive",
    "Sampler": "slapo_core.spec.extensions",
    "Schedule": "slapo_core.schedule.schedule",
    "StepResult": "slapo_core.spec.engine",
    "Suggestion": "slapo_core.spec.primitive",
    "Tracer": "slapo_core.spec.tracer",
    "Trial": "slapo_core.spec.extensions",
    "Violation": "slapo_core.spec.primitive",
    "build": "slapo_core.building.phases",
    "clip_grad_norm_": "slapo_core.live",
    "create_schedule": "slapo_core.schedule.creation",
    "estimate": "slapo_core.estimation.estimates",
    "estimate_functions": "slapo_core.estimation.estimates",
    "fit": "slapo_core.estimation.fit",
    "hookimpl": "slapo_core.spec.hookspecs",
    "load_state_dict": "slapo_core.live",
    "register_primitive": "slapo_core.plugins.registry",
    "replay": "slapo_core.schedule.creation",
    "save_pretrained": "slapo_core.live",
    "stages": "slapo_core.pipeline.stages",
    "state_dict": "slapo_core.live",
    "verify": "slapo_core.verification",
}

_PUBLIC |= dict.fromkeys(errors.__all__, "slapo_core.errors")

_MODULES = ("patterns",)

__all__ = sorted((*_PUBLIC, *_MODULES))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"slapo_core.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'slapo_core' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
