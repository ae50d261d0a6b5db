"""What DeepSpeed's norm counts follows from layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import slapo_core as slapo
from slapo_core.layout import Layout, Mesh
from slapo_deepspeed.marks import SHARDED, mark_tensors
from slapo_runtime.correspondence.storage import LiveTensor
from tests.messages import Messages


def marks_of(shards: int, tp: int) -> list[bool]:
    layout = Layout("w", (4, 6), (("tp", Shard(0)),), shard_counts=(("tp", shards),))
    one = LiveTensor("", "w", nn.Parameter(torch.zeros(2, 6)), layout, True, True)
    mesh: Any = SimpleNamespace(size=lambda dim: 4 if dim == "tp" else 1, rank=lambda dim: tp if dim == "tp" else 0)
    mark_tensors([one], mesh)
    return [getattr(one.tensor, name, False) for name in SHARDED]


def test_replicated_shard_is_counted_on_its_first_rank() -> None:
    assert [any(marks_of(2, tp)) for tp in range(4)] == [True, False, True, False]
    assert all(all(marks_of(4, tp)) for tp in range(4))


def test_fused_heads_of_which_ranks_share_only_keys_and_values_are_refused(message: Messages) -> None:
    fused = {"packing": ((0, (4, 2, 2)),), "shard_counts": (("tp", (None, 2, 2)),)}
    layout = Layout("w", (8, 6), (("tp", Shard(0)),), **fused)
    one = LiveTensor("", "w", nn.Parameter(torch.zeros(3, 6)), layout, True, True)
    mark_tensors([one], Mesh({"tp": 2}))
    assert all(getattr(one.tensor, name) for name in SHARDED)
    with pytest.raises(slapo.BuildError) as refused:
        mark_tensors([one], Mesh({"tp": 4}))
    message(refused, "'w'", "counts a shard in full or not at all")
