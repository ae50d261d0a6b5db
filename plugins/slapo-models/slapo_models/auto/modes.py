"""Prove splits in the other mode too: a model may compute something else in training or in evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slapo_models.auto.candidates import Candidate, candidates, matrices, prove
from slapo_models.auto.operators import infer
from slapo_models.auto.placement import Graph, LeftWhole
from slapo_models.auto.recording import PARAMETER, Value, record, without_memory

Split = dict[tuple[str, int], tuple[tuple[int, bool], ...]]
"""Path of a parameter and position of the axis -> its matrices, and which of them are split."""


def refused_in_other_mode(
    model: nn.Module, inputs: Any, ranks: int, proved: Sequence[Candidate]
) -> dict[Candidate, str]:
    """Record the model in the mode that it is not in, and prove each split there.

    Args:
        model: only read.
        inputs: one batch.
        ranks: that share an axis.
        proved: in the mode of the model.

    Returns:
        those that are not right there, with the reason; and an assumption where the model cannot be recorded there.
    """
    name = "evaluation" if model.training else "training"
    copy = without_memory(model).train(not model.training)
    try:
        with torch.set_grad_enabled(not model.training):
            recording = record(copy, inputs)
    except Exception as error:  # noqa: BLE001 - whatever the model raises
        text = " ".join(str(error).split())[:120]
        return {}, (f"not recorded in {name} mode, where the model raises {type(error).__name__}: {text}",)
    graph = Graph(recording, infer(recording))
    others = [(_split(each, recording.values), each) for each in candidates(graph, ranks)]
    refused: dict[Candidate, str] = {}
    for candidate in proved:
        own = _split(candidate, recording.values)
        if not own:
            continue
        other = next((each for split, each in others if split == own), None)
        try:
            if other is None:
                raise LeftWhole(_reason(own, recording.values))
            prove(graph, other)
            if other.placement.sums != candidate.placement.sums:
                raise LeftWhole("another module sums over it")
        except LeftWhole as reason:
            refused[candidate] = f"{reason} (in {name} mode)"
    return refused, ()


def _split(candidate: Candidate, values: Mapping[str, Value]) -> Split:
    """Return how a candidate splits the parameters that the other mode reads."""
    found: Split = {}
    for member in candidate.members:
        path = ".".join(filter(None, member.names[0]))
        if member.origin != PARAMETER or not values[path].uses:
            continue
        for position, axis in enumerate(member.axes):
            if not set(candidate.leaves).isdisjoint(axis.leaves()):
                found[path, position] = tuple(matrices(axis, candidate.leaves))
    return found


def _reason(split: Split, values: Mapping[str, Value]) -> str:
    for path, position in split:
        for leaf in values[path].axes[position].leaves():
            if leaf.reasons:
                return f"{next(iter(leaf.reasons))} needs all {leaf.size}"
    return "other parameters share the axis"
