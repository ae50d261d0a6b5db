"""How far rounding in a model's own floating-point types takes its numbers from those of a finer type.

A model is run in its own types so that code which asks for the type is seen. How close two right orders of summation
come there depends on the model: its depth, its conditioning. So the untouched model is the measure: what its own
rounding does to a tensor, a scheduled model's may do too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from slapo_core.verification.precision import is_inexact
from slapo_core.verification.run import Observation
from slapo_core.verification.values import gap, largest

__all__ = ["OF_NORM", "room_for_rounding"]

OF_NORM = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 0.2}
"""Of a gradient's norm: where the input of a ReLU rounds to the other side of zero, single elements jump. Seen on tiny
tensor-parallel models, jumps included: 1e-6, 4e-3 and 0.16. In half precision of an output's too: where the scores of a
router round to another order, whole rows jump."""

_TIMES = 4.0
"""Two runs that each stray as far as the untouched one, and twice that for luck."""

_AT_MOST = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.25}
"""Of a tensor's largest element: where rounding goes further, a wrong term could hide in it."""

_OF_THE_KIND = 1e-2
"""A tensor that is much smaller than the others of its kind is rounding noise of theirs: counted as this much."""


def room_for_rounding(
    fine: Observation, own: Observation, types: Mapping[tuple[str, str], torch.dtype]
) -> dict[tuple[str, str], float]:
    """The absolute difference to be allowed in each tensor beside the tolerance of its type.

    Args:
        fine: the untouched model in a finer type: ``"output"``, ``"gradient"``, ...
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
