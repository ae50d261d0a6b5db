"""A scheduled model is still a model: a copy of it runs on its own weights."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slapo_core.testing.bench import build_inputs, call, prepare
from slapo_core.testing.case import Case
from slapo_core.testing.check import CheckError

__all__ = ["deepcopy_runs_on_itself"]

_HINT = (
    "hooks and wrapped forwards are given the module as an argument: use that one, "
    "and keep no module or parameter in a closure"
)


def deepcopy_runs_on_itself(case: Case) -> None:
    """A deep copy of the scheduled model computes the same, and does not depend on the original."""
    bench = prepare(case, mesh_size=1)
    bench.apply()
    bench.apply_after()
    original = bench.model.eval()
    twin = copy.deepcopy(original)
    batch = build_inputs(case)
    expected = _tensors(original, batch)
    first = _tensors(twin, batch)
    _compare(
        expected, first, "a deep copy of the scheduled model computes something else", "the output of the original"
    )
    with torch.no_grad():
        for tensor in (*original.parameters(), *original.buffers()):
            tensor.add_(1) if tensor.is_floating_point() or tensor.is_complex() else tensor.zero_()
    _compare(
        first,
        _tensors(twin, batch),
        "the deep copy's output changes when the original's weights change",
        "a copy that runs on its own weights",
    )


def _tensors(model: nn.Module, batch: object) -> list[torch.Tensor]:
    with torch.no_grad():
        return [
            leaf.clone() for leaf in tree_leaves(call(model, copy.deepcopy(batch))) if isinstance(leaf, torch.Tensor)
        ]


def _compare(expected: list[torch.Tensor], got: list[torch.Tensor], violation: str, required: str) -> None:
    if len(expected) != len(got):
        raise CheckError(violation, required=required, got=f"{len(got)} tensors, not {len(expected)}", hint=_HINT)
    for number, (one, other) in enumerate(zip(expected, got, strict=True), start=1):
        if one.shape != other.shape or not torch.equal(one.nan_to_num(), other.nan_to_num()):
            what = f"shape {tuple(other.shape)}, not {tuple(one.shape)}"
            if one.shape == other.shape:
                what = f"a difference of up to {(one.double() - other.double()).abs().max().item():.3g}"
            raise CheckError(violation, required=required, got=f"tensor {number} of the output: {what}", hint=_HINT)
