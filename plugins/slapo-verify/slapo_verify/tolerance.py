"""Tolerances: how much a scheduled model may differ from the reference model, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slapo_core.primitive import Equivalence
from slapo_verify.phases import Observation
from slapo_verify.precision import dtype_name, is_inexact

_REORDERED: dict[torch.dtype, float] = {
    # Sums of n terms associated differently differ by about sqrt(n) roundings, layer upon layer: an estimated
    # tens to hundreds of roundings of the largest element; a wrong term is 1e-3 and more.
    torch.float64: 1e-10,  # 450,000 roundings: room for ill-conditioned layers, and still seven digits stricter
    torch.float32: 2e-5,  # 170 roundings
    torch.float16: 8e-3,  # 8 roundings: fewer, because kernels of these types accumulate in float32
    torch.bfloat16: 4e-2,  # 5 roundings
}
_COARSER = 0.25  # eight-bit types: two digits at most
_EXACT_ROUNDINGS = 16.0
_FLOOR = 1e-2
_OWN_SCALE = ("output", "buffer")  # any kind of them


@dataclass(frozen=True)
class Tolerance:
    """The difference allowed in each tensor: ``rtol * max|reference| + floor``.

    ``rtol`` follows from the coarsest floating-point type in which the reference model computes, and from the
    weakest promise among the steps:

    ============  ==========================  =====================================================
    type          EXACT (16 roundings)        REORDERED and RANDOM (with dropout off)
    ============  ==========================  =====================================================
    float64       3.6e-15                     1e-10
    float32       1.9e-6                      2e-5
    float16       1.6e-2, so 8e-3             8e-3
    bfloat16      1.3e-1, so 4e-2             4e-2
    ============  ==========================  =====================================================

    APPROXIMATE(rtol, atol) adds its own to the REORDERED ones. EXACT is not bitwise, because parallel kernels may
    add in another order from run to run. The floor lets pass what is zero in real numbers and rounding noise in
    floating point (the gradient of an attention's key bias): one percent of ``rtol``, at least 16 roundings, of the
    largest gradient (or parameter) of the whole model; for outputs and buffers, whose scales have nothing to do with
    one another, of 1 or the largest of them, whichever is smaller.

    Args:
        dtype: the coarsest type seen.
        promise: the weakest promise of the steps.
        rtol: relative to the largest element of the reference tensor.
        atol: absolute, added to the floor.
        floor: relative to the scale of the kind; 0 where the user gave ``atol``.
        of_norm: a tensor whose difference has no more than this part of the reference's norm passes, however large it
            is in single elements; 0: none does.
    """

    dtype: torch.dtype
    promise: Equivalence
    rtol: float
    atol: float
    floor: float
    of_norm: float = 0.0

    @classmethod
    def of(
        cls, dtype: torch.dtype, promises: Iterable[Equivalence], *, rtol: float | None, atol: float | None
    ) -> Tolerance:
        """Return the tolerance for a type and promises; given ``rtol`` and ``atol`` replace the derived ones."""
        promise = Equivalence.weakest(promises)
        reordered = _REORDERED.get(dtype, _COARSER)
        exact = min(_EXACT_ROUNDINGS * torch.finfo(dtype).eps, reordered)
        relative = exact if promise.is_exact else reordered + promise.rtol
        return cls(
            dtype=dtype,
            promise=promise,
            rtol=relative if rtol is None else rtol,
            atol=promise.atol if atol is None else atol,
            floor=max(_FLOOR * (exact if promise.is_exact else reordered), exact) if atol is None else 0.0,
        )

    def allowed(self, kind: str, *, largest: float, largest_of_kind: float) -> float:
        """Return the largest absolute difference allowed in one tensor.

        Args:
            kind: of the values, e.g. ``"gradient"``.
            largest: the largest finite absolute value of the reference tensor.
            largest_of_kind: the same over all tensors of that kind.
        """
        scale = min(largest_of_kind, 1.0) if any(part in kind for part in _OWN_SCALE) else largest_of_kind
        return self.rtol * largest + self.floor * scale + self.atol

    def __str__(self) -> str:
        absolute = f" + {self.atol:g}" if self.atol else ""
        floor = f" + {self.floor:.2g} * scale" if self.floor else ""
        return f"{self.rtol:.2g} * max|reference|{floor}{absolute} ({dtype_name(self.dtype)}, {self.promise})"


OF_NORM = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 0.2}
"""Of a gradient's norm: where the input of a ReLU rounds to the other side of zero, single elements jump. Seen on tiny
tensor-parallel models, jumps included: 1e-6, 4e-3 and 0.16."""

_TIMES = 4.0
"""Two runs that each stray as far as the reference model, and twice that for luck."""

_AT_MOST = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.25}
"""Of a tensor's largest element: where rounding goes further, a wrong term could hide in it."""

_OF_THE_KIND = 1e-2
"""A tensor that is much smaller than the others of its kind is rounding noise of theirs: counted as this much."""


def room_for_rounding(
    fine: Observation, own: Observation, types: Mapping[tuple[str, str], torch.dtype]
) -> dict[tuple[str, str], float]:
    """Compute the absolute difference allowed in each tensor besides the tolerance of its type.

    Args:
        fine: the reference model in a finer type: ``"output"``, ``"gradient"``, ...
        own: the same in its own types: ``"own output"``, ...
        types: kind and name of the tensors of ``own`` -> the coarsest type that led to it.

    Returns:
        kind and name -> the difference; infinite where only the own types overflow.
    """
    room: dict[tuple[str, str], float] = {}
    for kind, values in own.values.items():
        finer = fine.of(kind.removeprefix("own "))
        numbers = {name: value for name, value in values.items() if is_inexact(value) and value.numel()}
        sizes = {name: size for name, value in numbers.items() if math.isfinite(size := largest(value))}
        scale = _OF_THE_KIND * max(sizes.values(), default=0.0)
        for name, value in numbers.items():
            before = finer.get(name)
            if not isinstance(before, torch.Tensor) or not is_inexact(before) or before.shape != value.shape:
                continue
            strayed = gap(before, value)
            most = _AT_MOST.get(types[kind, name], 0.25) * max(sizes.get(name, 0.0), scale)
            room[kind, name] = min(_TIMES * strayed, most) if math.isfinite(strayed) else math.inf
    return room


_CHUNK = 1 << 20  # elements that are widened at a time, so that comparing takes no memory to speak of


def gap(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors; equal infinite or NaN elements do not count, others are
    an infinite difference."""
    wide = torch.complex128 if before.is_complex() else torch.float64
    found = 0.0
    chunks = zip(before.reshape(-1).split(_CHUNK), after.reshape(-1).split(_CHUNK), strict=True)
    for one, other in ((one.to(wide), other.to(wide)) for one, other in chunks):
        apart = largest(one - other) if one.numel() else 0.0
        if not math.isfinite(apart):
            same = (one == other) | (one.isnan() & other.isnan())
            apart = largest(torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf, posinf=math.inf))
        found = max(found, apart)
    return found


def is_close_in_norm(before: Any, after: Any, share: float) -> bool:
    """Return whether the norm of the difference is at most ``share`` of the norm of the first tensor."""
    if not share or not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if before.shape != after.shape or not before.is_floating_point():
        return False
    apart = float(torch.linalg.vector_norm(before.double() - after.to(before.device).double()))
    return apart <= share * float(torch.linalg.vector_norm(before.double()))


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value of a floating-point or complex tensor; NaN if there is one."""
    return float(torch.linalg.vector_norm(tensor.detach(), ord=math.inf)) if tensor.numel() else 0.0


def marks(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the norm and a weighted sum, which together tell tensors apart."""
    wide = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1).double()
    weights = torch.arange(wide.numel(), device=wide.device, dtype=torch.float64).cos_()
    return float(torch.linalg.vector_norm(wide)), float(torch.dot(wide, weights)) / math.sqrt(wide.numel() or 1)
