"""How much a scheduled model may differ from the untouched one, and why that much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from slapo_core.spec.equivalence import Equivalence
from slapo_core.verification.precision import dtype_name

__all__ = ["Tolerance"]

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

    ``rtol`` follows from the coarsest floating-point type in which the untouched model computes, and from the
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
        """The tolerance for a type and promises; the user's ``rtol`` and ``atol`` replace what follows from them."""
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
        """The largest absolute difference allowed in one tensor.

        Args:
            kind: what is compared, e.g. ``"gradient"``.
            largest: the largest finite absolute value of the reference tensor.
            largest_of_kind: the same over all tensors of that kind.
        """
        scale = min(largest_of_kind, 1.0) if any(part in kind for part in _OWN_SCALE) else largest_of_kind
        return self.rtol * largest + self.floor * scale + self.atol

    def __str__(self) -> str:
        absolute = f" + {self.atol:g}" if self.atol else ""
        floor = f" + {self.floor:.2g} * scale" if self.floor else ""
        return f"{self.rtol:.2g} * max|reference|{floor}{absolute} ({dtype_name(self.dtype)}, {self.promise})"
