"""Fused queries, keys and values on more ranks than KV heads, beside other steps, numbers of ranks and loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

pytestmark = [pytest.mark.breadth, pytest.mark.ranks]
preload_modules("slapo_core", "slapo_loss")

PACKED = {"rows": (16, 4, 4), "groups": (8, 2, 2)}
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
CLIP, NORMS = 0.05, (1.0, 3.0, float("inf"), 2.0)


class Attention(nn.Module):
    """Eight query heads and two KV heads of two elements: as Phi3, or in groups, as Falcon."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_heads, self.num_key_value_heads, self.head_dim = kind, 8, 2, 2
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        queries, heads = self.num_heads, self.num_key_value_heads
        if self.kind == "groups":
            fused = self.qkv(x).unflatten(-1, (heads, queries // heads + 2, 2))
            q, k, v = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
        else:
            q, k, v = self.qkv(x).unflatten(-1, (-1, 2)).split([queries, heads, heads], 2)
        k, v = (each.repeat_interleave(queries // heads, 2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two layers, embeddings that are the head's weight, and a vocabulary that no number of ranks divides."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 8)
        self.layers = nn.ModuleList(Attention(kind) for _ in range(2))
        self.head = nn.Linear(8, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(kind).double()


def schedule(model: nn.Module, kind: str, mesh: dict[str, int]) -> slapo.Schedule:
    sch: Any = slapo.create_schedule(model, mesh=mesh, example_inputs=batch(0, 2))
    for attempt in range(2):
        sch.undo(to=0)
        assert sch["layers.0.qkv"].module.weight.shape == (24, 8), attempt
        for attention in sch["layers.*"]:
            attention["qkv"].shard(["weight", "bias"], axis=0, packed=PACKED[kind], shards=(None, 2, 2))
            attention.shard_attribute("num_heads").shard_attribute("num_key_value_heads", shards=2)
            attention.sync("bwd_post", "all_reduce", inputs=(0,))
            attention["out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        sch["embed"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
        sch["head"].sync("bwd_post", "all_reduce").linear_cross_entropy()
        sch["layers.0"].checkpoint()
        sch["layers.1"].trace(flatten=True)
        if mesh.get("pp", 1) > 1:
            sch["layers.0"].pipeline_split()
    return sch  # type: ignore[no-any-return]


def batch(replica: int = 0, replicas: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(33, (4, 6), generator=torch.Generator().manual_seed(3)).chunk(replicas)[replica]
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-3)


def trained_alone(kind: str, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights after some steps, and the norms of the gradients in the last one."""
    reference, norms = model(kind), []
    optimizer = adam(reference.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        reference(**batch()).backward()
        own = list(reference.parameters())
        norms = [float(nn.utils.get_total_norm([each.grad for each in own], norm)) for norm in NORMS]  # type: ignore[misc]
        nn.utils.clip_grad_norm_(own, CLIP)
        optimizer.step()
    return dict(reference.state_dict()), norms


def close(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


def train_on(kind: str, mesh: dict[str, int], steps: int, weights: str, load: str, save: str) -> dict[str, Tensor]:
    """Start on the meta device, from a file of weights or a checkpoint."""
    with torch.device("meta"):
        sch = schedule(Model(kind).double(), kind, mesh)
    replicas, stages = mesh.get("dp", 1), mesh.get("pp", 1)
    parts: Any = {"microbatches": 2} if stages > 1 else {"accumulate": 2 // replicas}
    engine: Any = slapo.build(sch, weights=weights, optimizer=adam, max_grad_norm=CLIP, **parts)
    if load:
        engine.load(load)
    for _ in range(steps):
        engine.train_step(batch(engine._state.mesh.rank("dp"), replicas))
    engine.save(save)
    engine.check_replicas()
    return engine.state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", PACKED)
def test_training_goes_on_with_other_numbers_of_ranks(kind: str, tmp_path: Path) -> None:
    weights = str(tmp_path / "model.safetensors")
    save_file({name: each for name, each in model(kind).state_dict().items() if name != "head.weight"}, weights)
    load = ""
    for step, size in enumerate((4, 8, 2, 1, 4), start=1):
        save = str(tmp_path / str(step))
        for state in run_ranks(train_on, kind, {"tp": size}, 1, weights, load, save, world_size=size):
            close(state, trained_alone(kind, step)[0])
        load = save


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 4}, {"pp": 2, "tp": 4}], ids=str)
def test_replicas_and_stages(mesh: dict[str, int], tmp_path: Path) -> None:
    weights = str(tmp_path / "model.safetensors")
    save_file({name: each for name, each in model("rows").state_dict().items() if name != "head.weight"}, weights)
    for state in run_ranks(train_on, "rows", mesh, 3, weights, "", str(tmp_path / "3"), world_size=8)[::7]:
        close(state, trained_alone("rows", 3)[0])


def step_by_hand(kind: str, path: Path) -> tuple[list[float], dict[str, Tensor]]:
    sch = schedule(model(kind), kind, {"tp": dist.get_world_size()})
    optimizer = adam(sch.model.parameters())
    if path.exists():
        saved = torch.load(path, weights_only=True)
        slapo.load_state_dict(sch, saved["model"])
        slapo.load_optimizer_state_dict(sch, optimizer, saved["optimizer"])
    sch.model(**batch()).backward()
    norms = [float(slapo.clip_grad_norm_(sch, 1e9, norm_type=norm)) for norm in NORMS]
    slapo.clip_grad_norm_(sch, CLIP)
    optimizer.step()
    state = {"model": slapo.state_dict(sch), "optimizer": slapo.optimizer_state_dict(sch, optimizer)}
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(state, path)
    return norms, state["model"]


@pytest.mark.parametrize("kind", PACKED)
def test_norms_and_states_of_a_loop_by_hand_with_other_numbers_of_ranks(kind: str, tmp_path: Path) -> None:
    for step, size in enumerate((4, 8, 2, 8), start=1):
        state, wanted = trained_alone(kind, step)
        for norms, found in run_ranks(step_by_hand, kind, tmp_path / "state.pt", world_size=size):
            assert norms == pytest.approx(wanted, rel=1e-10)
            close(found, state)
