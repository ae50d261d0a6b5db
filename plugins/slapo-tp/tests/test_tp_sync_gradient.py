"""``sync_gradient``: whole parameters whose module works on a piece get their whole gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import ModelSnapshot, preload_modules, run_ranks
from slapo_tp import Shard, SyncGradient
from tests.messages import Messages

from .checks import differs_from_untouched, rand, same_as_untouched

preload_modules("transformers.models.qwen3.modeling_qwen3")


class Block(nn.Module):
    """A layer norm, an MLP and a residual connection, on which sequence parallelism runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def split_block(sch: Any, *, summed: bool = True) -> None:
    sch["up"].shard(["weight", "bias"], axis=0).sync("fwd_pre", "all_gather", axis=1)
    sch["down"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
    if summed:
        sch["norm"].sync_gradient(["weight", "bias"])


def traced_and_split(sch: Any, x: torch.Tensor) -> None:
    sch.trace(flatten=True, example_inputs=x)
    split_block(sch)


def split_and_traced(sch: Any, x: torch.Tensor) -> None:
    split_block(sch)
    sch.trace(flatten=True, example_inputs=x)


@pytest.mark.parametrize("steps", [traced_and_split, split_and_traced])
def test_a_static_graph_looks_into_the_module_and_sums_its_gradients(steps: Any) -> None:
    x = rand(2, 4, 6)
    sch = slapo.create_schedule(Block(), mesh={"tp": 2}, example_inputs=x)
    steps(sch, x)
    assert sch.find(lambda x, weight, bias: torch.nn.functional.layer_norm(x, (6,), weight, bias, 1e-5))
    assert "copy(self.norm.weight)" in str(sch.root.graph)
    assert "copy(self.norm.bias)" in str(sch.root.graph)


def check_sequence_parallel_block() -> None:
    x = rand(2, 4, 6)
    sch = same_as_untouched(Block, split_block, (x,), piece_axis=1)
    differs_from_untouched(Block, lambda sch: split_block(sch, summed=False), (x,), piece_axis=1)
    same_as_untouched(Block, lambda sch: traced_and_split(sch, x), (x,), piece_axis=1)
    same_as_untouched(
        Block, split_block, (x,), piece_axis=1, run=lambda model: torch.compile(model, backend="aot_eager")
    )
    copied = copy.deepcopy(sch.model)
    piece = x.chunk(2, 1)[dist.get_rank()]
    for module in (copied, sch.model):
        module.zero_grad()
        module(piece).square().sum().backward()
    assert torch.equal(copied.norm.weight.grad, sch.model.norm.weight.grad)
    assert copied.norm.weight is not sch.model.norm.weight
    assert isinstance(sch.model.norm.weight, nn.Parameter)  # put back behind the forward


@pytest.mark.ranks
def test_sequence_parallel_layer_norm_gets_its_full_gradient() -> None:
    run_ranks(check_sequence_parallel_block, world_size=2)


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, use_cache=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def split_qwen3(sch: Any, *, summed: bool = True) -> None:
    for layer in sch["model.layers.*"]:
        for name in ("q_proj", "k_proj", "v_proj"):
            layer[f"self_attn.{name}"].shard("weight", axis=0)
        layer["self_attn"].sync("bwd_post", "all_reduce", inputs=("hidden_states",))
        layer["self_attn.o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        if summed:
            layer["self_attn.q_norm"].sync_gradient("weight")
            layer["self_attn.k_norm"].sync_gradient("weight")
        layer["mlp.gate_proj"].shard("weight", axis=0)
        layer["mlp.up_proj"].shard("weight", axis=0)
        layer["mlp"].sync("bwd_post", "all_reduce")
        layer["mlp.down_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        layer.checkpoint()


def check_qwen3() -> None:
    ids = {"input_ids": torch.arange(14).view(2, 7)}
    torch.manual_seed(0)
    sch = slapo.create_schedule(qwen3(), mesh={"tp": 2})
    split_qwen3(sch)
    slapo.verify(sch, ids)
    torch.manual_seed(0)
    sch = slapo.create_schedule(qwen3(), mesh={"tp": 2})
    split_qwen3(sch, summed=False)
    with pytest.raises(slapo.VerifyError, match=r"gradient of model\.layers\.1\.self_attn\.[qk]_norm\.weight"):
        slapo.verify(sch, ids)


@pytest.mark.ranks
def test_qwen3_whose_norms_work_on_the_ranks_own_heads_is_the_reference_model() -> None:
    run_ranks(check_qwen3, world_size=2)


def scheduled(size: int = 2) -> slapo.Schedule:
    return slapo.create_schedule(Block(), mesh={"tp": size})


def test_undo_brings_the_untouched_module_back() -> None:
    model = Block()
    before = ModelSnapshot(model)
    split_block(sch := slapo.create_schedule(model, mesh={"tp": 2}))
    assert before.differences(model) != []
    sch.undo(to=0)
    assert before.differences(model) == []


def test_one_rank_records_an_inactive_wrapper() -> None:
    sch = scheduled(1)
    split_block(sch)
    assert sch.records[-1].edits == (
        "forward wrapped by GradientSum, inactive (nothing to do on this mesh)",
        "mesh_dim 'tp' has one rank, which has the full gradient",
    )
    assert "forward" not in sch.model.norm.__dict__


def test_refusals_name_the_call_to_write(message: Messages) -> None:
    sch = scheduled()
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["norm"].apply(SyncGradient("weight"))
    message(refused, "sync_gradient('weight') at 'norm': ", "nothing in the model is split")
    sch["up"].apply(Shard(("weight", "bias"), axis=0))
    for path, primitive, word in (
        ("norm", SyncGradient("gain"), "no parameter 'gain'"),
        ("norm", SyncGradient(()), "no parameter"),
        ("up", SyncGradient("weight"), "'weight' is split over mesh_dim 'tp'"),
    ):
        with pytest.raises(slapo.PreconditionError) as refused:
            sch[path].apply(primitive)
        message(refused, f"cannot apply {primitive} at '{path}': ", word)
    sch["norm"].apply(SyncGradient("weight"))
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["norm"].apply(SyncGradient("weight"))
    message(refused, "already", "#2 sync_gradient('weight') at 'norm'")
    sch["down"].apply(Shard("weight", axis=1))
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["down"].apply(SyncGradient("bias"))
    message(refused, "sync_gradient('bias') at 'down': ", "its full gradient")
    sch = slapo.create_schedule(Block(), mesh={"cp": 2, "tp": 2})
    sch["up"].apply(Shard("weight", axis=1, mesh_dim="cp"))
    sch["down"].apply(Shard("weight", axis=1))
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["down"].apply(SyncGradient("bias", mesh_dim="cp"))
    message(refused, "sync_gradient('bias', mesh_dim='cp') at 'down': ", "mesh_dim 'tp'", "over mesh_dim 'cp'")
    with pytest.raises(slapo.PreconditionError, match="declare one"):
        slapo.create_schedule(Block())["norm"].apply(SyncGradient("weight"))
