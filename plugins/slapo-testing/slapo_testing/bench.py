"""Make models, batches and schedules of a case; snapshots of a schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from slapo_core import Schedule, create_schedule
from slapo_core.errors import SlapoError
from slapo_core.internals import Internals
from slapo_core.layout import fork_rng
from slapo_core.plugins import Registry, current_registry, use_registry
from slapo_core.primitive import Primitive
from slapo_testing.case import Case, PrimitiveOrFactory, make_primitive
from slapo_testing.check import CheckError
from slapo_testing.device import move, resolve_device
from slapo_testing.snapshot import ModelSnapshot

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Node


SEED = 20
"""The seed of models and batches of a case."""


@contextlib.contextmanager
def seeded(seed: int = SEED) -> Iterator[None]:
    """Seed torch's RNG during the block, and restore its state afterwards."""
    with fork_rng():
        torch.manual_seed(seed)
        yield


def build_model(case: Case) -> nn.Module:
    """Make a model; equal weights at each call."""
    with seeded():
        model = case.model()
    return require_module(model).to(resolve_device(case.device))


def require_module(model: object) -> nn.Module:
    """Require that the model of a case is a module.

    Raises:
        CheckError: not an ``nn.Module``.
    """
    if not isinstance(model, torch.nn.Module):
        raise CheckError(
            "the case's model is not an nn.Module",
            required="model=: a function that returns a torch.nn.Module",
            got=repr(model),
            hint="model=lambda: MyModel(...)",
        )
    return model


def build_inputs(case: Case) -> Any:
    """Make a batch; equal numbers at each call."""
    with seeded(SEED + 1):
        inputs = case.inputs()
    return move(inputs, resolve_device(case.device))


def call(model: nn.Module, batch: Any) -> Any:
    """Run a model on one batch (a mapping, a tuple, or one argument) with a fixed RNG seed."""
    with seeded(SEED + 2):
        if isinstance(batch, dict):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple) else model(batch)


@dataclass(frozen=True)
class Bench:
    """A schedule of a new model, ready for the primitive of a case."""

    case: Case
    schedule: Schedule
    primitive: Primitive

    @property
    def model(self) -> nn.Module:
        return self.schedule.model

    @property
    def node(self) -> Node:
        return self.node_at(self.case.path)

    def node_at(self, path: str) -> Node:
        return Internals(self.schedule).node(path)

    def bound(self, path: str, primitive: Primitive) -> Primitive:
        """Return a primitive bound to the node at ``path``, with matches for patterns."""
        return Internals(self.schedule).bound(self.node_at(path), primitive)

    def apply(self) -> None:
        """Apply the case's primitive."""
        Internals(self.schedule).apply(self.node, self.primitive)

    def apply_after(self) -> None:
        """Apply the steps of ``after``."""
        _apply_all(self.schedule, self.case, "after")


def prepare(case: Case, *, mesh_size: int) -> Bench:
    """Make the bench of a case.

    Args:
        case: the case.
        mesh_size: ranks in the last of the case's mesh dimensions: 1, or 2 for rank 0 of an abstract mesh.
    """
    mesh = case.mesh_sizes(mesh_size)
    schedule = create_schedule(build_model(case), mesh=mesh, example_inputs=build_inputs(case))
    _apply_all(schedule, case, "before")
    return Bench(case, schedule, _move_modules(case.value(), case))


def _move_modules(primitive: Primitive, case: Case) -> Primitive:
    """Move modules among the arguments of a primitive to the device of the case."""
    for value in primitive.arguments().values():
        if isinstance(value, torch.nn.Module):
            move(value, resolve_device(case.device))
    return primitive


class ScheduleSnapshot:
    """The observable state of a schedule and its model.

    Args:
        schedule: the schedule, which is only read.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._model, self._is_sealed = ModelSnapshot(schedule.model), schedule.is_sealed
        self._records, self._layouts = schedule.records, dict(Internals(schedule).tree.layouts)

    def differences(self) -> list[str]:
        """List the differences of the schedule and its model now, one line each."""
        lines = self.model_differences()
        if self.schedule.records != self._records:
            lines.append("the records of the schedule: changed")
        if self.schedule.is_sealed != self._is_sealed:
            lines.append("the schedule: sealed")
        return lines

    def model_differences(self) -> list[str]:
        """List the differences of the model and its layouts now, one line each."""
        lines = self._model.differences(self.schedule.model)
        if Internals(self.schedule).tree.layouts != self._layouts:
            lines.append("the layouts of the schedule: changed")
        return lines


def _apply_all(schedule: Schedule, case: Case, field: Literal["before", "after"]) -> None:
    steps: Iterable[tuple[str, PrimitiveOrFactory]] = getattr(case, field)
    for path, step in steps:
        primitive = _move_modules(make_primitive(step), case)
        try:
            Internals(schedule).apply(Internals(schedule).node(path), primitive)
        except SlapoError as error:
            raise CheckError(
                f"a step of {field}= cannot be applied: {primitive} at '{path}'",
                required=f"all steps of {field}= are accepted",
                got=str(error),
                hint=f"correct {field}= of the case",
            ) from error


@contextlib.contextmanager
def registered(*primitives: Primitive) -> Iterator[Registry]:
    """Use a registry with the classes of ``primitives``: the current one, or one with additions."""
    registry = current_registry()
    known = {entry.name for plugin in registry.plugins for entry in plugin.entries if entry.kind == "primitives"}
    missing = {type(primitive) for primitive in primitives if primitive.name not in known}
    if not missing:
        yield registry
        return
    with use_registry(Registry.discover()) as extended:
        for cls in sorted(missing, key=lambda cls: cls.name):
            extended.register(cls)
        yield extended
