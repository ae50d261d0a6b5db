"""slapo: a schedule language for PyTorch training.

``import slapo_core as slapo`` gives the public names below, of slapo-core and of the project's other distributions.
They are loaded at their first use, so that the command line and the plugin machinery start without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slapo_core import errors
from slapo_core.errors import *  # noqa: F403 - all of it is public, and it imports nothing

if TYPE_CHECKING:
    from slapo_core.cli.main import (
        Command as Command,
    )
    from slapo_core.dialect import (
        Dialect as Dialect,
        Engine as Engine,
        Plan as Plan,
        StepResult as StepResult,
    )
    from slapo_core.hookspecs import (
        Fact as Fact,
        Problem as Problem,
        hookimpl as hookimpl,
    )
    from slapo_core.layout import (
        Layout as Layout,
        Mesh as Mesh,
    )
    from slapo_core.plugins.current import (
        register_primitive as register_primitive,
    )
    from slapo_core.primitive import (
        Change as Change,
        Equivalence as Equivalence,
        Primitive as Primitive,
        Record as Record,
        Suggestion as Suggestion,
        Violation as Violation,
    )
    from slapo_core.schedule.creation import (
        create_schedule as create_schedule,
        replay as replay,
    )
    from slapo_core.schedule.schedule import (
        Schedule as Schedule,
    )
    from slapo_core.tree.edit import Edit as Edit
    from slapo_core.tree.node import Node as Node
    from slapo_estimate.device import (
        DeviceSpec as DeviceSpec,
        Link as Link,
    )
    from slapo_estimate.estimates import (
        estimate as estimate,
        estimate_functions as estimate_functions,
    )
    from slapo_estimate.fit import (
        fit as fit,
    )
    from slapo_fusion.compilers import (
        Compiler as Compiler,
    )
    from slapo_graph import patterns as patterns
    from slapo_graph.match import (
        Match as Match,
        Pattern as Pattern,
    )
    from slapo_graph.protocol import (
        Tracer as Tracer,
    )
    from slapo_runtime.build import (
        build as build,
    )
    from slapo_runtime.context import (
        BuildContext as BuildContext,
    )
    from slapo_runtime.stages import (
        stages as stages,
    )
    from slapo_runtime.weights.live import (
        clip_grad_norm_ as clip_grad_norm_,
        load_optimizer_state_dict as load_optimizer_state_dict,
        load_state_dict as load_state_dict,
        optimizer_state_dict as optimizer_state_dict,
        save_pretrained as save_pretrained,
        state_dict as state_dict,
    )
    from slapo_tune.samplers import (
        Sampler as Sampler,
        Trial as Trial,
    )
    from slapo_verify import (
        verify as verify,
    )

DISTRIBUTIONS = (
    "slapo-core",
    "slapo-deepspeed",
    "slapo-estimate",
    "slapo-fusion",
    "slapo-graph",
    "slapo-loss",
    "slapo-megatron",
    "slapo-models",
    "slapo-pipeline",
    "slapo-runtime",
    "slapo-testing",
    "slapo-torch",
    "slapo-tp",
    "slapo-tune",
    "slapo-verify",
)
"""The project's distributions, which own their names whether or not they are installed."""

OWNERS = {
    ("commands", "device"): "slapo-estimate",
    ("commands", "patterns"): "slapo-graph",
    ("commands", "plugins.check"): "slapo-testing",
    ("commands", "plugins.new"): "slapo-testing",
    ("losses", "torch"): "slapo-loss",
    ("primitives", "bind"): "slapo-fusion",
    ("primitives", "compile"): "slapo-fusion",
    ("primitives", "cudagraphify"): "slapo-fusion",
    ("primitives", "decompose"): "slapo-fusion",
    ("primitives", "find"): "slapo-graph",
    ("primitives", "fit"): "slapo-estimate",
    ("primitives", "fork_rng"): "slapo-tp",
    ("primitives", "fuse"): "slapo-fusion",
    ("primitives", "linear_cross_entropy"): "slapo-loss",
    ("primitives", "merge"): "slapo-graph",
    ("primitives", "pipeline_split"): "slapo-pipeline",
    ("primitives", "quantize"): "slapo-fusion",
    ("primitives", "shard"): "slapo-tp",
    ("primitives", "shard_attribute"): "slapo-tp",
    ("primitives", "sync"): "slapo-tp",
    ("primitives", "sync_gradient"): "slapo-tp",
    ("primitives", "trace"): "slapo-graph",
}
"""Kind and name -> the distribution, for names that do not begin with its namespace."""

_PUBLIC = {
    "BuildContext": "slapo_runtime.context",
    "Change": "slapo_core.primitive",
    "Command": "slapo_core.cli.main",
    "Compiler": "slapo_fusion.compilers",
    "DeviceSpec": "slapo_estimate.device",
    "Dialect": "slapo_core.dialect",
    "Edit": "slapo_core.tree.edit",
    "Engine": "slapo_core.dialect",
    "Equivalence": "slapo_core.primitive",
    "Fact": "slapo_core.hookspecs",
    "Layout": "slapo_core.layout",
    "Link": "slapo_estimate.device",
    "Match": "slapo_graph.match",
    "Mesh": "slapo_core.layout",
    "Node": "slapo_core.tree.node",
    "Pattern": "slapo_graph.match",
    "Plan": "slapo_core.dialect",
    "Primitive": "slapo_core.primitive",
    "Problem": "slapo_core.hookspecs",
    "Record": "slapo_core.primitive",
    "Sampler": "slapo_tune.samplers",
    "Schedule": "slapo_core.schedule.schedule",
    "StepResult": "slapo_core.dialect",
    "Suggestion": "slapo_core.primitive",
    "Tracer": "slapo_graph.protocol",
    "Trial": "slapo_tune.samplers",
    "Violation": "slapo_core.primitive",
    "build": "slapo_runtime.build",
    "clip_grad_norm_": "slapo_runtime.weights.live",
    "create_schedule": "slapo_core.schedule.creation",
    "estimate": "slapo_estimate.estimates",
    "estimate_functions": "slapo_estimate.estimates",
    "fit": "slapo_estimate.fit",
    "hookimpl": "slapo_core.hookspecs",
    "load_optimizer_state_dict": "slapo_runtime.weights.live",
    "load_state_dict": "slapo_runtime.weights.live",
    "optimizer_state_dict": "slapo_runtime.weights.live",
    "register_primitive": "slapo_core.plugins.current",
    "replay": "slapo_core.schedule.creation",
    "save_pretrained": "slapo_runtime.weights.live",
    "stages": "slapo_runtime.stages",
    "state_dict": "slapo_runtime.weights.live",
    "verify": "slapo_verify",
}
"""Public name -> module. The distribution of ``slapo_x`` is ``slapo-x``."""

_PUBLIC |= dict.fromkeys(errors.__all__, "slapo_core.errors")

_MODULES = {"patterns": "slapo_graph.patterns"}

__all__ = sorted((*_PUBLIC, *_MODULES))


def __getattr__(name: str) -> Any:
    place = _MODULES.get(name) or _PUBLIC.get(name)
    if place is None:
        raise AttributeError(f"module 'slapo_core' has no attribute {name!r}")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        package = place.partition(".")[0]
        if error.name != package:
            raise
        distribution = package.replace("_", "-")
        raise errors.UnknownNameError(
            f"slapo.{name} is part of {distribution}, which is not installed",
            plugin=distribution,
            hint=f"pip install {distribution}",
        ) from None
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
