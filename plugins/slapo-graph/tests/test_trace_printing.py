"""A graph is printed as Python that one can read next to the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        batch, length, _ = x.shape
        y = F.gelu(self.fc(x)).view(batch, length, 2, -1)
        if length > 3:
            y = y * 2
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            gate = y.detach().sigmoid()
        y = -y[:, 0] @ self.scale[:4] if mask is not None else y + gate
        return {"y": y, "more": (None, length)}


def test_a_graph_is_printed_as_readable_python() -> None:
    sch = slapo.create_schedule(nn.Sequential(Block()))
    sch["0"].trace(example_inputs=torch.ones(2, 5, 8), tracer="record")
    line = Block.forward.__code__.co_firstlineno + 3
    assert str(sch["0"].graph) == (
        f"""def forward(self, x):
    fc = self.fc(x)
    gelu = F.gelu(fc)
    view = gelu.view(x.shape[0], x.shape[1], 2, -1)
    assert x.shape[1] > 3  # {__file__.rpartition("/")[2]}:{line}
    mul = view.mul(2)
    # from here: gradients off, autocast cpu bfloat16
    detach = mul.detach()
    sigmoid = detach.sigmoid()
    # from here: gradients on, autocast off
    add = mul.add(sigmoid)
    return {{'y': add, 'more': (None, x.shape[1])}}"""
    )


def test_operators_slices_and_further_variants_are_printed() -> None:
    sch = slapo.create_schedule(nn.Sequential(Block()))
    x = torch.ones(2, 5, 8)
    sch["0"].trace(example_inputs=(x, x))
    text = str(sch["0"].graph)
    assert "[:, 0]" in text
    assert "self.scale[:4]" in text
    assert "mask" in text.splitlines()[0]
    sch.model[0](x, x), sch.model[0](x)
    assert str(sch["0"].graph).startswith("# the first of 2 variants\ndef forward(self, x, mask):")
