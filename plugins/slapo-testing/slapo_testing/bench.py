"""Set up a fresh model of a case under a schedule, with its earlier steps applied."""

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
from slapo_testing.case import Case, Making, made
from slapo_testing.check import CheckError
from slapo_testing.device import move, resolve_device

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Node


SEED = 20
"""Every model and every batch of a case is made under this random seed."""


@contextlib.contextmanager
def seeded(seed: int = SEED) -> Iterator[None]:
    """Torch's random numbers from a fixed seed, the stream of the caller put back afterwards."""
    with fork_rng():
        torch.manual_seed(seed)
        yield


def build_model(case: Case) -> nn.Module:
    """A fresh model; the same weights every time."""
    with seeded():
        model = case.model()
    if not isinstance(model, torch.nn.Module):
        raise CheckError(
            "the case's model is not an nn.Module",
            required="model=: a function that returns a torch.nn.Module",
            got=repr(model),
            hint="model=lambda: MyModel(...)",
        )
    return model.to(resolve_device(case.device))


def build_inputs(case: Case) -> Any:
    """A fresh batch; the same numbers every time."""
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
    """A schedule of a fresh model, ready for the primitive of a case."""

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
        """A primitive as its preconditions see it at ``path``: with matches for patterns."""
        return Internals(self.schedule).bound(self.node_at(path), primitive)

    def apply(self) -> None:
        """Apply the case's primitive."""
        Internals(self.schedule).apply(self.node, self.primitive)

    def apply_after(self) -> None:
        """Apply the steps after it."""
        _apply_all(self.schedule, self.case, "after")


def prepare(case: Case, *, mesh_size: int) -> Bench:
    """A fresh bench.

    Args:
        case: what to set up.
        mesh_size: ranks in the last of the case's mesh dimensions: 1, or 2 for a schedule that plays rank 0 of two.
    """
    mesh = case.mesh_sizes(mesh_size)
    schedule = create_schedule(build_model(case), mesh=mesh, example_inputs=build_inputs(case))
    _apply_all(schedule, case, "before")
    return Bench(case, schedule, _placed(case.value(), case))


def _placed(primitive: Primitive, case: Case) -> Primitive:
    """Move the modules among the arguments of a primitive to the device of the case."""
    for value in primitive.arguments().values():
        if isinstance(value, torch.nn.Module):
            move(value, resolve_device(case.device))
    return primitive


def _apply_all(schedule: Schedule, case: Case, field: Literal["before", "after"]) -> None:
    steps: Iterable[tuple[str, Making]] = getattr(case, field)
    for path, making in steps:
        primitive = _placed(made(making), case)
        try:
            Internals(schedule).apply(Internals(schedule).node(path), primitive)
        except SlapoError as error:
            raise CheckError(
                f"a step of {field}= cannot be applied: {primitive} at '{path}'",
                required=f"every step of {field}= is accepted",
                got=str(error),
                hint=f"correct {field}= of the case",
            ) from error


@contextlib.contextmanager
def registered(*primitives: Primitive) -> Iterator[Registry]:
    """A registry that knows the class of each of ``primitives``: the current one, or one that has them added."""
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
