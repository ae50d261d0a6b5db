"""Forwards of split modules: wrappers for ``edit.wrap_forward``, plain functions that take the module first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from slapo_core.spec.edit import Forward

__all__ = ["OwnRows", "fresh", "gives_fresh_output", "leave_bias_out", "look_up_own_rows"]


def gives_fresh_output(module: nn.Module) -> bool:
    """Whether the module's forward makes its output anew and keeps no reference to it, for a module of a known kind.

    So does the forward of its class, and so do those below; what others put in its place, or around it, may keep it.
    """
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    function = getattr(forward, "__func__", None)
    # The mark is the function itself: functools.wraps copies marks onto functions that keep the output.
    return function is not None and getattr(function, _FRESH, None) is function


def fresh(function: Forward) -> Forward:
    """Mark a forward whose output is made anew and kept by nobody, and that a static graph can hold."""
    setattr(function, _FRESH, function)
    function.slapo_is_inlined = function  # type: ignore[attr-defined]
    return function


_FRESH = "_slapo_tp_fresh"


def leave_bias_out(without_bias: Forward) -> Callable[[Forward], Forward]:
    """For a weight split along its input axis: the partial sum, to which ``sync`` adds the bias after the reduction.

    Args:
        without_bias: the kind's forward with the bias left out.
    """
    return functools.partial(bias_left_out, without_bias)


def bias_left_out(without_bias: Forward, forward: Forward) -> Forward:
    return without_bias


def look_up_own_rows(start: int, vocabulary: int) -> Callable[[Forward], Forward]:
    """For an embedding split along its vocabulary: this rank's rows, and zeros for the ids of other ranks.

    An id outside of the whole vocabulary stays an error, as in the reference module.

    Args:
        start: the first id of this rank, e.g. 15000.
        vocabulary: the number of ids of all ranks, e.g. 30000.
    """
    return functools.partial(own_rows_looked_up, start, vocabulary)


def own_rows_looked_up(start: int, vocabulary: int, forward: Forward) -> Forward:
    return OwnRows(start, vocabulary)


@dataclass(frozen=True)
class OwnRows:
    """The forward of an embedding of which this rank holds some rows.

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
        return found.masked_fill(others.unsqueeze(-1), 0.0)
