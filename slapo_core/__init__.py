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
    from slapo_core import effects as effects
    from slapo_core.cli.main import Command as Command
    from slapo_core.dialect import Dialect as Dialect, Engine as Engine, Plan as Plan, StepResult as StepResult
    from slapo_core.effects import Effect as Effect
    from slapo_core.hookspecs import Fact as Fact, Problem as Problem, hookimpl as hookimpl
    from slapo_core.layout import Layout as Layout, Mesh as Mesh
    from slapo_core.plugins.current import register_primitive as register_primitive
    from slapo_core.primitive import (
        Change as Change,
        Equivalence as Equivalence,
        Primitive as Primitive,
        Record as Record,
        Suggestion as Suggestion,
        Violation as Violation,
    )
    from slapo_core.schedule.creation import create_schedule as create_schedule, replay as replay
    from slapo_core.schedule.schedule import Schedule as Schedule
    from slapo_core.tree.edit import Edit as Edit
    from slapo_core.tree.node import Node as Node
    from slapo_estimate.device import DeviceSpec as DeviceSpec, Link as Link
    from slapo_estimate.estimates import estimate as estimate, estimate_functions as estimate_functions
    from slapo_estimate.fit import fit as fit
    from slapo_fusion.compilers import Compiler as Compiler
    from slapo_graph import patterns as patterns
    from slapo_graph.match import Match as Match, Pattern as Pattern
    from slapo_graph.protocol import Tracer as Tracer
    from slapo_models.choice.search import auto_schedule as auto_schedule
    from slapo_runtime.build import build as build
    from slapo_runtime.context import BuildContext as BuildContext
    from slapo_runtime.receipts.observation import Observation as Observation
    from slapo_runtime.receipts.observing import observe as observe
    from slapo_runtime.stages import stages as stages
    from slapo_runtime.weights.live import (
        clip_grad_norm_ as clip_grad_norm_,
        load_optimizer_state_dict as load_optimizer_state_dict,
        load_state_dict as load_state_dict,
        optimizer_state_dict as optimizer_state_dict,
        parameter_groups as parameter_groups,
        save_pretrained as save_pretrained,
        state_dict as state_dict,
    )
    from slapo_torch.sharded_data import fully_shard as fully_shard
    from slapo_tune.samplers import Sampler as Sampler, Trial as Trial
    from slapo_verify import verify as verify

DISTRIBUTIONS = (
    "slapo-core",
    "slapo-deepspeed",
    "slapo-estimate",
    "slapo-fusion",
    "slapo-graph",
    "slapo-lightning",
    "slapo-loss",
    "slapo-megatron",
    "slapo-models",
    "slapo-pipeline",
    "slapo-runtime",
    "slapo-testing",
    "slapo-torch",
    "slapo-tp",
    "slapo-transformers",
    "slapo-tune",
    "slapo-verify",
    "slapo-view",
)
"""The project's distributions, which own their names whether or not they are installed."""

OWNERS = {
    ("commands", "checkpoint"): "slapo-runtime",
    ("commands", "device"): "slapo-estimate",
    ("commands", "observe"): "slapo-estimate",
    ("commands", "patterns"): "slapo-graph",
    ("commands", "plugins.check"): "slapo-testing",
    ("commands", "plugins.new"): "slapo-testing",
    ("commands", "show"): "slapo-view",
    ("commands", "suggest"): "slapo-models",
    ("losses", "torch"): "slapo-loss",
    ("primitives", "bind"): "slapo-fusion",
    ("primitives", "compile"): "slapo-fusion",
    ("primitives", "cudagraphify"): "slapo-fusion",
    ("primitives", "decompose"): "slapo-fusion",
    ("primitives", "find"): "slapo-graph",
    ("primitives", "fit"): "slapo-estimate",
    ("primitives", "fork_rng"): "slapo-tp",
    ("primitives", "fully_shard"): "slapo-torch",
    ("primitives", "fuse"): "slapo-fusion",
    ("primitives", "linear_cross_entropy"): "slapo-loss",
    ("primitives", "merge"): "slapo-graph",
    ("primitives", "picture"): "slapo-view",
    ("primitives", "pipeline_split"): "slapo-pipeline",
    ("primitives", "quantize"): "slapo-fusion",
    ("primitives", "shard"): "slapo-tp",
    ("primitives", "shard_attribute"): "slapo-tp",
    ("primitives", "sync"): "slapo-tp",
    ("primitives", "sync_gradient"): "slapo-tp",
    ("primitives", "trace"): "slapo-graph",
}
"""Kind and name -> the distribution, for names that do not begin with its namespace."""

_NAMES = {
    "slapo_core.cli.main": ("Command",),
    "slapo_core.dialect": ("Dialect", "Engine", "Plan", "StepResult"),
    "slapo_core.effects": ("Effect",),
    "slapo_core.hookspecs": ("Fact", "Problem", "hookimpl"),
    "slapo_core.layout": ("Layout", "Mesh"),
    "slapo_core.plugins.current": ("register_primitive",),
    "slapo_core.primitive": ("Change", "Equivalence", "Primitive", "Record", "Suggestion", "Violation"),
    "slapo_core.schedule.creation": ("create_schedule", "replay"),
    "slapo_core.schedule.schedule": ("Schedule",),
    "slapo_core.tree.edit": ("Edit",),
    "slapo_core.tree.node": ("Node",),
    "slapo_estimate.device": ("DeviceSpec", "Link"),
    "slapo_estimate.estimates": ("estimate", "estimate_functions"),
    "slapo_estimate.fit": ("fit",),
    "slapo_fusion.compilers": ("Compiler",),
    "slapo_graph.match": ("Match", "Pattern"),
    "slapo_graph.protocol": ("Tracer",),
    "slapo_models.choice.search": ("auto_schedule",),
    "slapo_runtime.build": ("build",),
    "slapo_runtime.context": ("BuildContext",),
    "slapo_runtime.receipts.observation": ("Observation",),
    "slapo_runtime.receipts.observing": ("observe",),
    "slapo_runtime.stages": ("stages",),
    "slapo_runtime.weights.live": (
        "clip_grad_norm_",
        "load_optimizer_state_dict",
        "load_state_dict",
        "optimizer_state_dict",
        "parameter_groups",
        "save_pretrained",
        "state_dict",
    ),
    "slapo_torch.sharded_data": ("fully_shard",),
    "slapo_tune.samplers": ("Sampler", "Trial"),
    "slapo_verify": ("verify",),
    "slapo_core.errors": tuple(errors.__all__),
}
"""Module -> its public names. The distribution of ``slapo_x`` is ``slapo-x``."""

PUBLIC = {name: module for module, names in _NAMES.items() for name in names}

_MODULES = {"effects": "slapo_core.effects", "patterns": "slapo_graph.patterns"}

__all__ = sorted((*PUBLIC, *_MODULES))


def __getattr__(name: str) -> Any:
    place = _MODULES.get(name) or PUBLIC.get(name)
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
