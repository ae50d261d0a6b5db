"""Compare one value with what it should be: by type, shape and number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from slapo_core.verification.precision import dtype_name

__all__ = ["Difference", "differ", "gap", "is_close_in_norm", "largest"]

_PIECE = 1 << 20  # elements that are widened at a time, so that comparing takes no memory to speak of


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
        rule: from which ``allowed`` follows, in words.
        by: the indices of the steps that do it, where that needs no trial.
    """

    kind: str
    name: str
    problem: str
    largest: float
    allowed: float
    hint: str | None = None
    rule: str = ""
    by: tuple[int, ...] = ()


def differ(kind: str, name: str, before: Any, after: Any, allowed: float) -> tuple[Difference | None, float]:
    """The difference if it is too large, and its size in any case."""

    def wrong(problem: str, hint: str | None = None) -> tuple[Difference, float]:
        return Difference(kind, name, problem, math.inf, allowed, hint), math.inf

    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return _differ_plain(kind, name, before, after, allowed)
    if before.shape != after.shape:
        return wrong(
            f"its shape is {tuple(after.shape)}, not {tuple(before.shape)}", _shape_hint(before.shape, after.shape)
        )
    if before.dtype != after.dtype and not (kind.startswith("own ") and _is_finer(after.dtype, before.dtype)):
        return wrong(f"its type is {dtype_name(after.dtype)}, not {dtype_name(before.dtype)}")
    if before.numel() == 0:
        return None, 0.0
    after = after.to(before.device)
    if not (before.is_floating_point() or before.is_complex()):
        return _differ_exactly(kind, name, before, after)
    return _differ_numerically(kind, name, before, after, allowed)


def gap(before: torch.Tensor, after: torch.Tensor) -> float:
    """The largest absolute difference of two tensors of one shape; what is infinite or NaN alike in both is no
    difference, and otherwise an infinite one."""
    wide = torch.complex128 if before.is_complex() else torch.float64
    found = 0.0
    pieces = zip(before.reshape(-1).split(_PIECE), after.reshape(-1).split(_PIECE), strict=True)
    for one, other in ((one.to(wide), other.to(wide)) for one, other in pieces):
        apart = largest(one - other) if one.numel() else 0.0
        if not math.isfinite(apart):
            same = (one == other) | (one.isnan() & other.isnan())
            apart = largest(torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf, posinf=math.inf))
        found = max(found, apart)
    return found


def is_close_in_norm(before: Any, after: Any, share: float) -> bool:
    """Whether two tensors differ, as a whole, by no more than ``share`` of the norm of the first."""
    if not share or not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if before.shape != after.shape or not before.is_floating_point():
        return False
    apart = float(torch.linalg.vector_norm(before.double() - after.to(before.device).double()))
    return apart <= share * float(torch.linalg.vector_norm(before.double()))


def largest(tensor: torch.Tensor) -> float:
    """The largest absolute value in a tensor of floating-point or complex numbers; NaN if there is one."""
    return float(torch.linalg.vector_norm(tensor.detach(), ord=math.inf)) if tensor.numel() else 0.0


def _is_finer(dtype: torch.dtype, other: torch.dtype) -> bool:
    floating = dtype.is_floating_point and other.is_floating_point
    return floating and torch.finfo(dtype).eps <= torch.finfo(other).eps


def _differ_plain(kind: str, name: str, before: Any, after: Any, allowed: float) -> tuple[Difference | None, float]:
    if isinstance(before, float) and isinstance(after, float):
        return differ(kind, name, torch.tensor(before).double(), torch.tensor(after).double(), allowed)
    if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        if "gradient" in kind:
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
    apart = float((before.double() - after.double()).abs().max())
    problem = (
        f"{count} of {before.numel()} elements differ; at {_index(where)} it is {after[where].item()}, "
        f"not {before[where].item()}"
    )
    return Difference(kind, name, problem, apart, 0.0), apart


def _differ_numerically(
    kind: str, name: str, before: torch.Tensor, after: torch.Tensor, allowed: float
) -> tuple[Difference | None, float]:
    apart = gap(before, after)
    if apart <= allowed:
        return None, apart
    wide = torch.complex128 if before.is_complex() else torch.float64
    before, after = before.to(wide), after.to(wide)
    same = (before == after) | (before.isnan() & after.isnan())
    apart_each = torch.where(same, 0.0, (before - after).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    place = int(apart_each.argmax())
    where = tuple(int(index) for index in torch.unravel_index(torch.tensor(place), before.shape))
    got, expected = after[where].item(), before[where].item()
    if math.isinf(apart):
        problem = f"at {_index(where)} it is {got}, not {expected}"
    else:
        largest_of_all = float(before.abs().nan_to_num(nan=0.0, posinf=0.0).max())
        problem = (
            f"it differs by up to {apart:.3g} where {allowed:.3g} is allowed: "
            f"at {_index(where)} it is {_number(got)}, not {_number(expected)} (largest element {largest_of_all:.3g})"
        )
    return Difference(kind, name, problem, apart, allowed), apart


def _number(value: complex) -> str:
    return f"{value:.9g}"


def _index(where: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, where))}]" if where else "its one element"


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
