"""Promise: a schedule saved in format 1 is replayed on a fresh model, and computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo

SAVED = Path(__file__).parent / "saved"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / 2.0
        return (torch.softmax(scores, -1) @ value).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.out, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attention(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.Embedding(11, 16)
        self.layer = nn.ModuleList([Layer() for _ in range(2)])
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        for layer in self.layer:
            x = layer(x)
        return x @ self.embeddings.weight.T


IDS = torch.arange(10).reshape(2, 5)


def activated(x: Tensor) -> Tensor:
    return F.gelu(x)


def probabilities(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def replaced(sch: Any) -> None:
    """By the name of a plugin's pattern, and by a function that is saved by its name."""
    sch["layer.*"].trace(flatten=True)
    sch["layer.*"].replace(match="fusion.sdpa")
    sch["layer.*"].replace(activated, match=lambda x: F.gelu(x), name="activation")
    sch["layer.1.norm"].checkpoint(preserve_rng_state=False)


def checkpointed(sch: Any) -> None:
    sch["layer.*"].trace()
    sch["layer.0"].checkpoint(lambda x, weight, bias: F.gelu(F.linear(x, weight, bias)))
    sch["layer.1"].checkpoint(sch["layer.1"].find("up")[0])
    sch["layer.1"].checkpoint(slapo.patterns.any_of("gelu", F.relu))


def fused(sch: Any) -> None:
    sch["layer.*"].trace(flatten=True)
    sch["layer.*"].fuse(lambda x, up, bias: F.gelu(F.linear(x, up, bias)), "eager", name="up_gelu")
    sch["layer.*"].bind(probabilities, match=lambda x: torch.softmax(x, -1))
    matches = [*sch["layer.0"].find("add*"), *sch["layer.1"].find("add*")]
    sch.fuse(matches, compiler="aot_eager")


def merged(sch: Any) -> None:
    sch["layer.*.attention"].trace()
    sch["layer.*.attention"].merge(("query", "key", "value"), name="qkv")
    sch["layer.*.attention"].replace(match="fusion.sdpa")


def sharded(sch: Any) -> None:
    sch["layer.*.up"].shard("weight", axis=0)
    sch["layer.*.up"].shard("bias", axis=0)
    sch["layer.*.up"].sync("backward")
    sch["layer.*.down"].shard("weight", axis=1)
    sch["layer.*.down"].sync("forward")
    sch["layer.*"].trace()
    sch["layer.*"].checkpoint(lambda x: F.gelu(x))


WRITTEN: dict[str, Callable[[Any], None]] = {
    each.__name__: each for each in (replaced, checkpointed, fused, merged, sharded)
}
"""What each document was written from."""


def schedule(mesh: dict[str, int] | None = None) -> slapo.Schedule:
    return slapo.create_schedule(Encoder(), mesh=mesh, example_inputs=IDS)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_document_of_format_1_is_replayed(name: str) -> None:
    document = json.loads((SAVED / f"{name}.json").read_text())
    assert document["format"] == 1
    sch = slapo.replay(Encoder(), document, mesh={"tp": 1}, example_inputs=IDS)
    assert len(sch.records) == len(document["records"])
    slapo.verify(sch, IDS)


@pytest.mark.parametrize("name", WRITTEN)
def test_saved_documents_equal_current_records(name: str) -> None:
    applied = schedule({"tp": 1})
    WRITTEN[name](applied)
    sch = slapo.replay(Encoder(), SAVED / f"{name}.json", mesh={"tp": 1}, example_inputs=IDS)
    assert sch.records == applied.records
    again = slapo.replay(Encoder(), sch.to_json(), example_inputs=IDS)
    assert again.records == sch.records
