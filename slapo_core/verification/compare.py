"""Compare what two runs gave, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slapo_core.verification.counterparts import Counterparts
from slapo_core.verification.precision import dtype_name
from slapo_core.verification.run import KINDS, Observation
from slapo_core.verification.tolerance import Tolerance

__all__ = ["Comparison", "Difference", "Largest", "compare", "label"]

_OF_PARAMETERS = ("gradient", "parameter")


@dataclass(frozen=True)
class Difference:
    """One value that differs beyond the tolerance.

    Args:
        kind: of :data:`~slapo_core.verification.run.KINDS`.
        name: the tensor's name in the scheduled model, or of the output leaf.
        problem: what is wrong, in words and numbers.
        largest: the largest absolute difference; infinite where there is none to measure.
        allowed: the largest allowed.
        hint: what usually causes it.
    """

    kind: str
    name: str
    problem: str
    largest: float
    allowed: float
    hint: str | None = None


@dataclass(frozen=True)
class Largest:
    """The largest difference seen in one kind, and how close it came to what is allowed."""

    kind: str
    compared: int
    difference: float = 0.0
    allowed: float = 0.0
    name: str = ""

    @property
    def fraction(self) -> float:
        return self.difference / self.allowed if self.allowed else (math.inf if self.difference else 0.0)


@dataclass
class Comparison:
    """Everything that a rank found: differences in the order of search, the first one to be blamed first."""

    differences: list[Difference] = field(default_factory=list)
    largest: dict[str, Largest] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)


def label(kind: str, name: str, steps: int) -> str:
    """``"gradient of fc.weight"``, ``"parameter fc.weight after 3 optimiser steps"``."""
    return {
        "output": name,
        "buffer": f"buffer {name} after a training step",
        "gradient": f"gradient of {name}",
        "evaluation output": f"{name} in evaluation mode",
        "input gradient": f"gradient of input {name}",
        "parameter": f"parameter {name} after {steps} optimiser step{'s' if steps != 1 else ''}",
    }[kind]


def compare(
    reference: Observation, candidate: Observation, counterparts: Counterparts, tolerance: Tolerance
) -> Comparison:
    """Hold this rank's ``candidate`` against the untouched model's ``reference``.

    Gradients are looked at in the order in which backward makes them, last layer first, so that the first difference
    is the one nearest to its cause.
    """
    result = Comparison()
    for kind in KINDS:
        if kind not in candidate.values:
            continue
        expected = reference.of(kind)
        biggest = max((_largest(value) for value in expected.values()), default=0.0)
        pairs = _pairs(kind, expected, candidate.of(kind), counterparts, result)
        summary = Largest(kind, 0)
        for name, before, after in pairs:
            allowed = tolerance.allowed(kind, largest=_largest(before), largest_of_kind=biggest)
            difference, largest = _differ(kind, name, before, after, allowed)
            seen = Largest(kind, summary.compared + 1, largest, allowed, name)
            kept = Largest(kind, seen.compared, summary.difference, summary.allowed, summary.name)
            summary = seen if seen.fraction > kept.fraction or not kept.name else kept
            if difference is not None:
                result.differences.append(difference)
        result.largest[kind] = summary
    return result


def _pairs(
    kind: str,
    expected: Mapping[str, Any],
    got: Mapping[str, Any],
    counterparts: Counterparts,
    result: Comparison,
) -> Iterator[tuple[str, Any, Any]]:
    if kind in ("output", "evaluation output"):
        yield from _output_pairs(kind, expected, got, result)
    elif kind == "input gradient":
        for name, before in expected.items():
            yield name, before, got[name]
    else:
        yield from _tensor_pairs(kind, expected, got, counterparts, result)


def _output_pairs(
    kind: str, expected: Mapping[str, Any], got: Mapping[str, Any], result: Comparison
) -> Iterator[tuple[str, Any, Any]]:
    if list(expected) != list(got):
        missing = [name for name in expected if name not in got]
        added = [name for name in got if name not in expected]
        parts = [f"without {', '.join(missing)}"] if missing else []
        parts += [f"with {', '.join(added)} more"] if added else []
        problem = f"the output is another structure: {' and '.join(parts) or 'its parts come in another order'}"
        name = (missing or added or ["output"])[0]
        result.differences.append(Difference(kind, name, problem, math.inf, 0.0))
    for name, before in expected.items():
        if name not in got:
            continue
        if before is None or isinstance(before, (torch.Tensor, bool, int, float, complex, str)):
            yield name, before, got[name]
        elif kind == "output":
            result.not_compared.append(f"{name}: slapo cannot look into a {type(before).__name__}")


def _tensor_pairs(
    kind: str,
    expected: Mapping[str, Any],
    got: Mapping[str, Any],
    counterparts: Counterparts,
    result: Comparison,
) -> Iterator[tuple[str, Any, Any]]:
    covered: set[str] = set()
    names = list(got)
    if (
        kind in _OF_PARAMETERS
    ):  # stable: of tied names, which backward completes at the first place, the first one leads
        names.sort(key=lambda name: -counterparts.places.get(name, 0))
    for name in names:
        after = got[name]
        origin = counterparts.explained(name)
        if origin is not None and origin in expected:
            covered.add(origin)
            before = expected[origin]
            yield name, None if before is None else counterparts.expected(name, before), after
            continue
        answers = counterparts.translated(name, after) if after is not None else {}
        for origin, value in answers.items():
            covered.add(origin)
            yield origin, expected.get(origin), value
        if not answers and kind != "parameter":
            result.not_compared.append(f"{_noun(kind)} {name}: it exists only in the scheduled model")
    if kind != "parameter":
        for name in expected:
            if counterparts.first_name(name) not in covered:
                result.not_compared.append(f"{_noun(kind)} {name}: {counterparts.absence(name)}")


def _noun(kind: str) -> str:
    return "buffer" if kind == "buffer" else "parameter"


def _differ(kind: str, name: str, before: Any, after: Any, allowed: float) -> tuple[Difference | None, float]:
    """The difference if it is too large, and its size in any case."""

    def wrong(problem: str, hint: str | None = None) -> tuple[Difference, float]:
        return Difference(kind, name, problem, math.inf, allowed, hint), math.inf

    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return _differ_plain(kind, name, before, after, allowed)
    if before.shape != after.shape:
        return wrong(
            f"its shape is {tuple(after.shape)}, not {tuple(before.shape)}", _shape_hint(before.shape, after.shape)
        )
    if before.dtype != after.dtype:
        return wrong(f"its type is {dtype_name(after.dtype)}, not {dtype_name(before.dtype)}")
    if before.numel() == 0:
        return None, 0.0
    after = after.to(before.device)
    if not (before.is_floating_point() or before.is_complex()):
        return _differ_exactly(kind, name, before, after)
    return _differ_numerically(kind, name, before, after, allowed)


def _differ_plain(kind: str, name: str, before: Any, after: Any, allowed: float) -> tuple[Difference | None, float]:
    if isinstance(before, float) and isinstance(after, float):
        return _differ(kind, name, torch.tensor(before).double(), torch.tensor(after).double(), allowed)
    if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        if kind in ("gradient", "input gradient"):
            side = "has no gradient" if after is None else "has a gradient where the untouched model has none"
            hint = "the forward does not use it, or uses it detached" if after is None else None
            return Difference(kind, name, f"it {side}", math.inf, allowed, hint), math.inf
        problem = f"it is a {type(after).__name__}, not a {type(before).__name__}"
        return Difference(kind, name, problem, math.inf, allowed), math.inf
    if before == after:
        return None, 0.0
    return Difference(kind, name, f"it is {after!r}, not {before!r}", math.inf, allowed), math.inf


def _differ_exactly(kind: str, name: str, before: torch.Tensor, after: torch.Tensor) -> tuple[Difference | None, float]:
    other = before != after
    count = int(other.sum())
    if not count:
        return None, 0.0
    where = tuple(int(index) for index in other.nonzero()[0])
    largest = float((before.double() - after.double()).abs().max())
    problem = (
        f"{count} of {before.numel()} elements differ; at {_index(where)} it is {after[where].item()}, "
        f"not {before[where].item()}"
    )
    return Difference(kind, name, problem, largest, 0.0), largest


def _differ_numerically(
    kind: str, name: str, before: torch.Tensor, after: torch.Tensor, allowed: float
) -> tuple[Difference | None, float]:
    wide = torch.complex128 if before.is_complex() else torch.float64
    before, after = before.to(wide), after.to(wide)
    same = (before == after) | (before.isnan() & after.isnan())
    gap = torch.where(same, 0.0, (before - after).abs())
    largest_finite = gap.nan_to_num(nan=math.inf, posinf=math.inf)
    place = int(largest_finite.argmax())
    largest = float(largest_finite.flatten()[place])
    if largest <= allowed:
        return None, largest
    where = tuple(int(index) for index in torch.unravel_index(torch.tensor(place), before.shape))
    got, expected = after[where].item(), before[where].item()
    if math.isinf(largest):
        problem = f"at {_index(where)} it is {got}, not {expected}"
    else:
        largest_of_all = float(before.abs().nan_to_num(nan=0.0, posinf=0.0).max())
        problem = (
            f"it differs by up to {largest:.3g} where {allowed:.3g} is allowed: "
            f"at {_index(where)} it is {_number(got)}, not {_number(expected)} (largest element {largest_of_all:.3g})"
        )
    return Difference(kind, name, problem, largest, allowed), largest


def _number(value: complex) -> str:
    return f"{value:.9g}"


def _index(where: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, where))}]" if where else "its one element"


def _largest(value: Any) -> float:
    if not isinstance(value, torch.Tensor):
        return abs(float(value)) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(value.detach().abs().double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max())


def _shape_hint(before: torch.Size, after: torch.Size) -> str | None:
    if len(before) != len(after):
        return None
    smaller = [axis for axis in range(len(before)) if after[axis] != before[axis]]
    if len(smaller) == 1 and after[smaller[0]] and before[smaller[0]] % after[smaller[0]] == 0:
        axis = smaller[0] - len(before)
        return (
            f'a gather along axis {axis} is missing: .sync("fwd_post", "all_gather", axis={axis}) on the module that '
            "gives this output"
        )
    return None
