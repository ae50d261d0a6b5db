"""The bias that a layer split on its input axis leaves out: added once, behind the reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from slapo_core import ArgumentError
from slapo_tp import collectives
from slapo_tp.collectives import RankGroup

__all__ = ["AddBias", "FunctionHook"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class AddBias:
    """Forward hook: add the bias that the forward left out; the output is the whole sum by now.

    Args:
        feature_axis: the output's axis that holds the output features, counted from the end.
        pieces: the group over which the output is in pieces, so that each rank sees a part of the bias' gradient;
            None where the output is whole.
    """

    feature_axis: int
    pieces: RankGroup | None = None
    slapo_is_inlined = True

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Tensor) -> Tensor:
        return _with_bias(module, output, self.feature_axis, self.pieces)


@dataclass(frozen=True)
class FunctionHook:
    """Forward hook: a function of the user's reduces the partial sum, then the bias that the forward left out is added.

    The shape of what the function gives says what it is: that of the partial sum is the whole sum, and an equal piece
    of it is this rank's piece, of which each rank sees a part of the bias' gradient.

    Args:
        function: with the signature of torch's hook; None as its answer leaves the output, maybe changed in place.
        feature_axis: the output's axis that holds the output features, counted from the end.
        group: the ranks.
        path: of the module, for messages.
    """

    function: Callable[..., Any]
    feature_axis: int
    group: RankGroup
    path: str

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Tensor) -> Tensor:
        partial = tuple(output.shape)
        answer = self.function(module, args, kwargs, output)
        reduced = output if answer is None else answer
        axis = self.feature_axis + len(partial)
        pieces = [
            (*partial[:each], extent // self.group.size, *partial[each + 1 :])
            for each, extent in enumerate(partial)
            if each != axis and extent % self.group.size == 0
        ]
        shape = tuple(reduced.shape) if isinstance(reduced, Tensor) else None
        if shape != partial and shape not in pieces:
            given = type(reduced).__name__ if shape is None else f"shape {shape}"
            choices = f", or this rank's piece of it, {' or '.join(map(str, pieces))}" if pieces else ""
            raise ArgumentError(
                f"tp.sync at '{self.path}': the function gave {given} for a partial sum of shape {partial}, and the "
                "bias that the layer left out cannot be added to that",
                path=self.path,
                hint=f"return the whole sum, {partial}{choices}",
            )
        partitioned = None if shape == partial else self.group
        return _with_bias(module, reduced, self.feature_axis, partitioned)


def _with_bias(module: nn.Module, output: Tensor, feature_axis: int, pieces: RankGroup | None) -> Tensor:
    bias: Tensor = module.bias  # type: ignore[assignment]
    if pieces is not None:
        bias = collectives.copy(bias, pieces)
    if feature_axis != -1:
        bias = bias.view(-1, *[1] * (-1 - feature_axis))
    return output + bias.type_as(output)
