"""Run split modules: wrappers of forwards, and hooks that add a left-out bias."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from slapo_core import ArgumentError
from slapo_core.errors import InputError, place
from slapo_core.observers import Forward
from slapo_tp import collectives
from slapo_tp.collectives import RankGroup


def gives_fresh_output(module: nn.Module) -> bool:
    """Return whether the forward makes a new output and keeps no reference to it.

    So does the forward of its class, and so do those below; what others put in its place, or around it, may keep it.
    """
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    function = getattr(forward, "__func__", None)
    # The mark is the function itself: functools.wraps copies marks onto functions that keep the output.
    return function is not None and getattr(function, _FRESH, None) is function


def fresh(function: Forward) -> Forward:
    """Mark a forward whose output is new, without other references, and traceable."""
    setattr(function, _FRESH, function)
    function.slapo_is_inlined = function  # type: ignore[attr-defined]
    return function


_FRESH = "_slapo_tp_fresh"


def leave_bias_out(without_bias: Forward) -> Callable[[Forward], Forward]:
    """Wrap the forward of a weight split along its input axis: a partial sum.

    Args:
        without_bias: the kind's forward with the bias left out.
    """
    return functools.partial(bias_left_out, without_bias)


def bias_left_out(without_bias: Forward, forward: Forward) -> Forward:
    return without_bias


def look_up_own_rows(start: int, vocabulary: int) -> Callable[[Forward], Forward]:
    """Wrap an embedding split along its vocabulary: zeros for other ranks' ids.

    An id outside of the full vocabulary stays an error, as in the reference module.

    Args:
        start: the first id of this rank, e.g. 15000.
        vocabulary: the number of ids of all ranks, e.g. 30000.
    """
    return functools.partial(own_rows_looked_up, start, vocabulary)


def own_rows_looked_up(start: int, vocabulary: int, forward: Forward) -> Forward:
    return OwnRows(start, vocabulary)


@dataclass(frozen=True)
class OwnRows:
    """Look up this rank's rows of an embedding.

    Args:
        start: the first id of this rank.
        vocabulary: the number of ids of all ranks.
    """

    start: int
    vocabulary: int
    slapo_is_inlined = True

    @property
    def _slapo_tp_fresh(self) -> OwnRows:
        return self

    def __call__(self, module: Any, input: Tensor) -> Tensor:
        return self.look_up(module, input)[0]

    def look_up(self, module: Any, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of the ids, and a mask of other ranks' ids."""
        rows = module.weight.shape[0]
        stop = self.start + rows
        others = ((input >= 0) & (input < self.start)) | ((input >= stop) & (input < self.vocabulary))
        padding = module.padding_idx
        if padding is not None:
            padding = padding - self.start if self.start <= padding < stop else None
        own = (input - self.start).masked_fill(others, 0)
        if stop > self.vocabulary:  # an id in the padding is an error, as on the other ranks
            own = own.masked_fill(input >= self.vocabulary, rows)
        found = F.embedding(own, module.weight, padding, sparse=module.sparse)
        return found.masked_fill(others.unsqueeze(-1), 0.0), others


def look_up_own_rows_below(start: int, vocabulary: int) -> Callable[[Forward], Forward]:
    """Wrap a subclass of nn.Embedding whose ``super().forward`` looks up this rank's rows.

    The result is zero for the ids of other ranks, whatever the subclass does with a row.

    Args:
        start: the first id of this rank.
        vocabulary: the number of ids of all ranks.
    """
    return functools.partial(own_rows_looked_up_below, start, vocabulary)


def own_rows_looked_up_below(start: int, vocabulary: int, forward: Forward) -> Forward:
    rows = OwnRows(start, vocabulary)

    @functools.wraps(forward)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        own: Any = type(module)
        cls = _with_rows(own)
        view = cls.__new__(cls)
        view.__dict__ = module.__dict__
        lookups: list[tuple[Tensor, Tensor]] = []

        def look_up(ids: Tensor) -> Tensor:
            lookups.append(rows.look_up(view, ids))
            return lookups[-1][0]

        object.__setattr__(view, "look_up", look_up)
        output = forward(view, *args, **kwargs)
        others = lookups[0][1] if len(lookups) == 1 else None
        if others is None or not isinstance(output, Tensor) or output.shape[: others.dim()] != others.shape:
            raise InputError(
                f"shard of the rows of a {type(module).__name__}: its forward must look up ids once and give a tensor "
                f"with their axes first (got {len(lookups)} lookups)",
                hint="split its features, axis=1",
            )
        return output.masked_fill(others.view(*others.shape, *[1] * (output.dim() - others.dim())), 0.0)

    run.slapo_is_inlined = run  # type: ignore[attr-defined]
    return run


class _Rows(nn.Embedding):
    __slots__ = ("look_up",)
    look_up: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return self.look_up(input)


@functools.lru_cache(maxsize=64)
def _with_rows(cls: Any) -> Any:
    """Return a subclass of ``cls`` whose methods' ``super().forward`` is that of `_Rows`."""
    return type(cls.__name__, (cls, _Rows), {"__module__": cls.__module__})


Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class AddBias:
    """Add the bias that the forward left out to the full sum (forward hook).

    Args:
        feature_axis: the output's axis that holds the output features, counted from the end.
        shards: the group over which the output is in shards, so that each rank sees a part of the bias' gradient;
            None for a full output.
    """

    feature_axis: int
    shards: RankGroup | None = None
    slapo_is_inlined = True

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Tensor) -> Tensor:
        return _with_bias(module, output, self.feature_axis, self.shards)


@dataclass(frozen=True)
class FunctionHook:
    """Reduce the partial sum by the user's function, then add the left-out bias (forward hook).

    The shape of the function's result decides: the partial sum's shape means the full sum, and an equal shard
    of it is this rank's shard, of which each rank sees a part of the bias' gradient.

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
        shards = [
            (*partial[:each], extent // self.group.size, *partial[each + 1 :])
            for each, extent in enumerate(partial)
            if each != axis and extent % self.group.size == 0
        ]
        shape = tuple(reduced.shape) if isinstance(reduced, Tensor) else None
        if shape != partial and shape not in shards:
            given = type(reduced).__name__ if shape is None else f"shape {shape}"
            choices = f", or this rank's shard of it, {' or '.join(map(str, shards))}" if shards else ""
            raise ArgumentError(
                f"tp.sync at {place(self.path)}: the function gave {given} for a partial sum of shape {partial}, and "
                "the bias that the layer left out cannot be added to that",
                path=self.path,
                hint=f"return the full sum, {partial}{choices}",
            )
        in_shards = None if shape == partial else self.group
        return _with_bias(module, reduced, self.feature_axis, in_shards)


def _with_bias(module: nn.Module, output: Tensor, feature_axis: int, shards: RankGroup | None) -> Tensor:
    bias: Tensor = module.bias  # type: ignore[assignment]
    if shards is not None:
        bias = collectives.copy(bias, shards)
    if feature_axis != -1:
        bias = bias.view(-1, *[1] * (-1 - feature_axis))
    return output + bias.type_as(output)
