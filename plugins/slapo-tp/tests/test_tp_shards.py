"""``shard(shards=)``: ranks that are more than the shards (KV heads) hold the same one, and train as the reference."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import ModelSnapshot, preload_modules, run_ranks
from slapo_tp import Shard, ShardAttribute, collectives
from tests.messages import Messages

preload_modules("transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama")

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
CLIP = 0.05  # below the norm of every step


class Attention(nn.Module):
    """Attention of grouped heads with biases and norms of queries and keys, exact in float64."""

    def __init__(self, kv_heads: int, heads: int = 4) -> None:
        super().__init__()
        self.num_key_value_heads = kv_heads
        self.head_dim = 4
        self.n_rep = heads // kv_heads
        self.q_proj = nn.Linear(8, heads * 4)
        self.k_proj = nn.Linear(8, kv_heads * 4)
        self.v_proj = nn.Linear(8, kv_heads * 4)
        self.o_proj = nn.Linear(heads * 4, 8)
        self.q_norm, self.k_norm = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (each.repeat_interleave(self.n_rep, 1) for each in (self.k_norm(k), v))
        y = (self.q_norm(q) @ k.mT).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Attention(kv_heads) for _ in range(2))
        self.head = nn.Linear(8, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(kv_heads: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Model(kv_heads).double()


def split(sch: Any, kv_heads: int = 2, layers: str = "layers.*", groups: str = "n_rep") -> Any:
    for attention in sch[layers]:
        with_bias = "bias" in attention["q_proj"].parameters
        names = ["weight", "bias"] if with_bias else "weight"
        attention["q_proj"].shard(names, axis=0)
        attention["[kv]_proj"].shard(names, axis=0, shards=kv_heads)
        attention.shard_attribute(groups, holders_of=kv_heads).sync("bwd_post", "all_reduce", inputs=(0,))
        attention["o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        attention["*_norm"].sync_gradient(["weight", "bias"] if with_bias else "weight")
    return sch


def qwen3(**options: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, use_cache=False, **options,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def batch(replica: int = 0, replicas: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(3)).chunk(replicas)[replica]
    return {"input_ids": ids, "labels": ids}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-3)


def unsummed(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return tensor.clone()


def compare(sch: slapo.Schedule, reference: nn.Module, kind: str) -> None:
    for name, parameter in sch.model.named_parameters():
        path, _, own = name.rpartition(".")
        found = parameter.grad if kind == "gradient" else parameter.detach()
        wanted = reference.get_parameter(name)
        wanted = wanted.grad if kind == "gradient" else wanted.detach()
        assert found is not None
        assert wanted is not None
        wanted = sch.root[path].layout(own).local(wanted, sch.mesh)
        torch.testing.assert_close(found, wanted, **CLOSE, msg=lambda m, name=name: f"{kind} of {name}: {m}")


def train(sch: slapo.Schedule, reference: nn.Module, steps: int = 3) -> list[torch.optim.Optimizer]:
    """Compare a loop of one's own with the reference: loss, gradients over two micro-batches, norm, AdamW's steps."""
    optimizers = [adam(each.parameters()) for each in (reference, sch.model)]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(2):
            losses = [each(**batch(micro, 2)) for each in (reference, sch.model)]
            torch.testing.assert_close(losses[1], losses[0], **CLOSE)
            for loss in losses:
                loss.backward()
        compare(sch, reference, "gradient")
        norm = nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
        torch.testing.assert_close(slapo.clip_grad_norm_(sch, CLIP), norm, **CLOSE)
        compare(sch, reference, "gradient")
        for optimizer in optimizers:
            optimizer.step()
        compare(sch, reference, "value")
    return optimizers


def check_training(kv_heads: int) -> str:
    reference = model(kv_heads)
    size, rank = dist.get_world_size(), dist.get_rank()
    sch = split(slapo.create_schedule(copy.deepcopy(reference), mesh={"tp": size}), kv_heads)
    key = sch.model.layers[0].k_proj
    own = rank * kv_heads // size
    assert torch.equal(key.weight, reference.layers[0].k_proj.weight.chunk(kv_heads)[own])
    assert key.out_features == 4
    assert sch.model.layers[0].n_rep == 4 // size
    slapo.verify(sch, batch())
    plain = reference.state_dict()
    for name, tensor in slapo.state_dict(sch).items():
        assert torch.equal(tensor, plain[name]), name
    optimizers = train(sch, reference)
    saved = slapo.optimizer_state_dict(sch, optimizers[1])["state"]
    for name, parameter in reference.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(saved[name][moment], optimizers[0].state[parameter][moment], **CLOSE)
    slapo.load_state_dict(sch, plain)
    for name, tensor in slapo.state_dict(sch).items():
        assert torch.equal(tensor, plain[name]), name
    return sch.to_json()


def check_controls() -> None:
    reference = model()
    sch = split(slapo.create_schedule(copy.deepcopy(reference), mesh={"tp": dist.get_world_size()}))
    right, collectives._sum_of_holders = collectives._sum_of_holders, unsummed
    try:
        with pytest.raises(AssertionError, match=r"gradient of layers\.\d\.[kv]_proj"):
            train(sch, reference, 1)
        with pytest.raises(slapo.VerifyError, match=r"[kv]_proj\.(weight|bias)"):
            slapo.verify(sch, batch())
    finally:
        collectives._sum_of_holders = right
    slapo.verify(sch, batch())
    with torch.no_grad():  # replicas: those with the same shard, of the second one too
        sch.model.layers[0].v_proj.weight += dist.get_rank() == 3
    with pytest.raises(slapo.ReplicaError) as differs:
        slapo.state_dict(sch)
    assert (differs.value.tensor, list(differs.value.ranks)) == ("layers.0.v_proj.weight", [2, 3])


def check_on_four_ranks() -> str:
    check_controls()
    check_training(1)
    return check_training(2)


@pytest.mark.ranks
def test_ranks_with_the_same_kv_head_train_as_the_reference_and_replay_anywhere() -> None:
    document = json.loads(run_ranks(check_on_four_ranks, world_size=4)[0])
    for size in (1, 2):
        sch = slapo.replay(model(), document, mesh={"tp": size})
        key = sch["layers.0.k_proj"]
        assert tuple(key.module.weight.shape) == (8 // size, 8)
        assert key.module.__dict__.get("forward") is None
    verified = slapo.replay(model(), document, mesh={"tp": 1})
    slapo.verify(verified, batch())


def saved_by(directory: str, mesh: dict[str, int], *, resume: bool) -> dict[str, torch.Tensor]:
    start = model() if resume else _on_meta()
    sch = split(slapo.create_schedule(start, mesh=mesh))
    engine = slapo.build(sch, optimizer=adam, clip_grad_norm=CLIP, accumulate=2)
    replica, replicas = (sch.mesh.rank("dp"), sch.mesh.size("dp")) if sch.mesh is not None else (0, 1)
    if resume:
        engine.load(directory)
    else:
        for _ in range(3):
            engine.train_step(batch(replica, replicas))
        engine.save(directory)
    engine.train_step(batch(replica, replicas))
    engine.check_replicas()
    return engine.state_dict()


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return model()


def initial(mesh: dict[str, int]) -> dict[str, torch.Tensor]:
    return slapo.build(split(slapo.create_schedule(_on_meta(), mesh=mesh))).state_dict()
