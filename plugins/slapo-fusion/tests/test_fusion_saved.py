"""A saved schedule names the patterns of plugins, as it names primitives."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + self.bias)


def test_patterns_of_plugins_are_saved_by_name() -> None:
    x = torch.randn(2, 6)
    model = nn.Sequential(Block(), Block())
    sch = slapo.create_schedule(copy.deepcopy(model), example_inputs=x)
    sch["*"].trace()
    sch["*"].fuse("fusion.bias_gelu", compiler="eager")
    document = json.loads(sch.to_json())
    assert [saved["name"] for saved in document["patterns"]] == ["fusion.bias_gelu"]
    assert document["patterns"][0]["distribution"] == "slapo-fusion"
    replayed = slapo.replay(copy.deepcopy(model), document, example_inputs=x)
    assert "fused(" in str(replayed["1"].graph)
    torch.testing.assert_close(replayed.model(x), model(x))
    for name, reason in (("fusion.bias_gel", "no installed plugin provides pattern"), (7, "no plugin provides it")):
        document["patterns"][0]["name"] = name
        with pytest.raises(slapo.ReplayError, match=f"(?s)step 3, fusion.fuse.*is the pattern {name!r}.*{reason}"):
            slapo.replay(copy.deepcopy(model), document, example_inputs=x)
