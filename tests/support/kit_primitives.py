"""Primitives for the tests of the kit: two good ones, and for every check bad ones that break just that promise."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_core import Equivalence, Primitive, Violation

COUNTER = itertools.count()
SEEN: set[str] = set()


def prose(text: str) -> str:
    """The message of a check, without what was got instead, and without measured numbers, hashes and counts."""
    text = re.sub(r"(?s)\n  got: .*?(?=\n  hint: )", "", text)
    text = re.sub(r" at 0x[0-9a-f]+", " at 0x", text)
    return re.sub(r"\d+\.\d+(e[+-]\d+)?|-?\d{6,}|(?<=-> )\d+(?=')|\d+(?=th )|(?<=number )\d+", "N", text)


class Net(nn.Module):
    """A model with parameters, a buffer, dropout, and a config object."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.fc2 = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.drop(torch.relu(self.norm(self.fc1(x)))))


class LambdaNet(Net):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = lambda x: x


def batch() -> tuple[torch.Tensor]:
    return (torch.randn(6, 4),)


@dataclass(frozen=True)
class Good(Primitive):
    """Give a parameter new memory, and call the forward through a wrapper.

    Args:
        parameter: one of the module's own.

    rewrite:
        ``y = f(x)`` -> ``y = f(x)``
    """

    name = "kit.good"
    equivalence = Equivalence.EXACT
    parameter: str = "weight"

    def preconditions(self, node: Any) -> Any:
        if self.parameter not in node.parameters:
            yield Violation(f"no parameter '{self.parameter}'", f"one of {list(node.parameters)}")

    def apply(self, node: Any, edit: Any) -> None:
        edit.set_parameter(node, self.parameter, node.parameters[self.parameter].detach().clone())
        edit.wrap_forward(node, through)
        edit.set_attribute(node, "wrapped", True)


def through(forward: Any) -> Any:
    return lambda module, *args, **kwargs: forward(module, *args, **kwargs)


@dataclass(frozen=True)
class GoodOnMesh(Primitive):
    """Compare the output with that of the other ranks.

    rewrite:
        ``y = f(x)`` -> ``y = f(x)``, after an all-reduce of its mean
    """

    name = "kit.good_on_mesh"
    equivalence = Equivalence.EXACT

    def apply(self, node: Any, edit: Any) -> None:
        mesh = node.mesh
        if mesh.size("tp") == 1:
            edit.note("mesh_dim 'tp' has one rank")
            return

        def agree(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            mean = output.detach().mean().reshape(1)
            total = mean.clone()
            torch.distributed.all_reduce(total, group=mesh.group("tp"))
            assert torch.allclose(total, 2 * mean)

        edit.add_hook(node, "forward", agree)


class Bad(Good):
    """What the bad ones share; each is documented as if it were good."""

    def __init_subclass__(cls) -> None:
        cls.name = "kit." + "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).lstrip("_")
        cls.__doc__ = Good.__doc__


# -- json_round_trip ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GrowsWhenMade(Bad):
    number: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", self.number + 1)


@dataclass(frozen=True)
class HasDictionary(Bad):
    options: Any = None


@dataclass(frozen=True)
class HashedByIdentity(Bad):
    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True)
class DependsOnGlobalState(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        edit.set_attribute(node, "token", next(COUNTER))


# -- preconditions_mutate_nothing, rejected_cases_change_nothing ----------------------------------------------


@dataclass(frozen=True)
class PreconditionsMark(Bad):
    def preconditions(self, node: Any) -> Any:
        node.module.seen = True
        return iter(())


@dataclass(frozen=True)
class PreconditionsDraw(Bad):
    def preconditions(self, node: Any) -> Any:
        torch.rand(1)
        return iter(())


@dataclass(frozen=True)
class PreconditionsForget(Bad):
    def preconditions(self, node: Any) -> Any:
        yield Violation(f"refused for the {next(COUNTER)}th time", "stop asking")


@dataclass(frozen=True)
class AcceptsAnything(Bad):
    def preconditions(self, node: Any) -> Any:
        return iter(())

    def apply(self, node: Any, edit: Any) -> None:
        edit.set_attribute(node, "wrapped", self.parameter)


@dataclass(frozen=True)
class FindsOutTooLate(Bad):
    def preconditions(self, node: Any) -> Any:
        return iter(())


@dataclass(frozen=True)
class GivesNoHint(Bad):
    def preconditions(self, node: Any) -> Any:
        if self.parameter not in node.parameters:
            yield Violation("wrong parameter")


@dataclass(frozen=True)
class RefusesAndMarks(Bad):
    def preconditions(self, node: Any) -> Any:
        if self.parameter not in node.parameters:
            node.module.weight.data[0, 0] = 7.0
            yield Violation("wrong parameter", "another one")


# -- faults_roll_back, undo_is_exact --------------------------------------------------------------------------


@dataclass(frozen=True)
class WritesInPlace(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        node.module.weight.data[1, 2] = 7.0
        super().apply(node, edit)


@dataclass(frozen=True)
class SwallowsErrors(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        try:
            super().apply(node, edit)
        except Exception:  # noqa: BLE001 - what a bad primitive does
            edit.note("never mind")


@dataclass(frozen=True)
class HidesErrors(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        try:
            super().apply(node, edit)
        except Exception:  # noqa: BLE001 - what a bad primitive does
            failed = True
        else:
            failed = False
        if failed:
            raise ValueError("something went wrong")


@dataclass(frozen=True)
class WorksThreeTimes(Bad):
    """Three edits make three faults; then it is spent."""

    def apply(self, node: Any, edit: Any) -> None:
        if len(SEEN) > 3:
            raise ValueError("done already")
        SEEN.add(f"time {len(SEEN)}")
        super().apply(node, edit)


@dataclass(frozen=True)
class PatchesTheClass(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        super().apply(node, edit)
        type(node.module).patched = True


@dataclass(frozen=True)
class AddsHookBehindOurBack(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        super().apply(node, edit)
        node.module.register_forward_hook(silent)


def silent(module: Any, args: Any, output: Any) -> None:
    return None


# -- deepcopy_runs_on_itself, mesh_of_one_is_free -------------------------------------------------------------


@dataclass(frozen=True)
class HoldsTheModule(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        module = node.module
        edit.wrap_forward(node, lambda forward: lambda _, *args: forward(module, *args))


@dataclass(frozen=True)
class KnowsTheOriginal(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        known = id(node.module)

        def double(forward: Any) -> Any:
            return lambda module, x: forward(module, x) * (1 if id(module) == known else 2)

        edit.wrap_forward(node, double)


@dataclass(frozen=True)
class AlwaysPays(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        edit.add_hook(node, "forward", lambda module, args, kwargs, output: None)


# -- forward_and_gradients ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComputesSomethingElse(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        edit.wrap_forward(node, lambda forward: lambda module, x: forward(module, x) * 1.5)


@dataclass(frozen=True)
class LosesTheGradient(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        edit.wrap_forward(node, lambda forward: lambda module, x: forward(module, x.detach()))


@dataclass(frozen=True)
class WrongOnTwoRanks(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        factor = float(node.mesh.size("tp"))
        edit.wrap_forward(node, lambda forward: lambda module, x: forward(module, x) * factor)


@dataclass(frozen=True)
class RaisesOnRankOne(Bad):
    def apply(self, node: Any, edit: Any) -> None:
        if node.mesh.rank("tp") == 1:
            raise ValueError("rank 1 is not thought of")
        edit.note("nothing to do on rank 0")
