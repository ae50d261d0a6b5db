"""``shard(packed=, shards=(None, k, k))``: fused queries, keys and values on more ranks than KV heads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard as Placement

import slapo_core as slapo
from slapo_core import Layout
from slapo_core.internals import Internals
from slapo_core.layout import Mesh
from slapo_testing import ModelSnapshot, preload_modules, run_ranks
from slapo_tp import Axis, LayerType, Shard, ShardAttribute, collectives, register_layer
from tests.messages import Messages

from .checks import rand, same_as_untouched
from .test_tp_shards import CLIP, adam, batch, check_states_and_training, close, train, unsummed

preload_modules(
    "transformers.models.phi3.modeling_phi3",
    "transformers.models.gpt_bigcode.modeling_gpt_bigcode",
    "transformers.models.falcon.modeling_falcon",
    "transformers.models.dbrx.modeling_dbrx",
)

PACKED = {"rows": (16, 4, 4), "columns": (16, 4, 4), "groups": (8, 2, 2)}


class Attention(nn.Module):
    """Eight query heads and two KV heads of two elements from one layer, exact in float64.

    Args:
        kind: ``"rows"`` as Phi3; ``"columns"`` the same with Conv1D; ``"groups"`` as Falcon: each KV head behind its
            queries.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.kind, self.num_heads, self.num_key_value_heads, self.head_dim = kind, 8, 2, 2
        self.qkv = Conv1D(24, 8) if kind == "columns" else nn.Linear(8, 24)
        nn.init.normal_(self.qkv.bias)
        self.out = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, heads = self.num_heads, self.num_key_value_heads
        fused = self.qkv(x)
        if self.kind == "groups":
            fused = fused.unflatten(-1, (heads, queries // heads + 2, 2))
            q, k, v = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
        else:
            q, k, v = fused.unflatten(-1, (-1, 2)).split([queries, heads, heads], 2)
        k, v = (each.repeat_interleave(queries // heads, 2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = (q @ k.mT).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Attention(kind) for _ in range(2))
        self.head = nn.Linear(8, 32)

    def _init_weights(self, module: nn.Module) -> None:
        from transformers.pytorch_utils import Conv1D

        if isinstance(module, Conv1D):  # which has no reset_parameters()
            nn.init.normal_(module.weight), nn.init.normal_(module.bias)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(kind).double()


def split(sch: Any, kind: str) -> Any:
    for attention in sch["layers.*"]:
        axis = 1 if kind == "columns" else 0
        attention["qkv"].shard(["weight", "bias"], axis=axis, packed=PACKED[kind], shards=(None, 2, 2))
        attention.shard_attribute("num_heads").shard_attribute("num_key_value_heads", shards=2)
        attention.sync("bwd_post", "all_reduce", inputs=(0,))
        attention["out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return sch


def scheduled(kind: str, size: int, rank: int = 0) -> Any:
    return slapo.create_schedule(model(kind), mesh={"tp": size}, rank=rank)


# -- over ranks -----------------------------------------------------------------------------------------------


def check_training(kind: str) -> str:
    reference = model(kind)
    sch = split(slapo.create_schedule(copy.deepcopy(reference), mesh={"tp": dist.get_world_size()}), kind)
    check_states_and_training(sch, reference)
    return sch.to_json()


def check_controls(kind: str) -> None:
    reference = model(kind)
    sch = split(slapo.create_schedule(copy.deepcopy(reference), mesh={"tp": 4}), kind)
    right, collectives._sum_of_holders = collectives._sum_of_holders, unsummed
    try:
        with pytest.raises(AssertionError, match=r"gradient of layers\.\d\.qkv"):
            train(sch, reference, 1)
        with pytest.raises(slapo.VerifyError, match=r"qkv\.(weight|bias)"):
            slapo.verify(sch, batch(), blame_seconds=0)
    finally:
        collectives._sum_of_holders = right
    with (
        mock.patch("slapo_runtime.gradients.is_distributed", return_value=True),
        pytest.raises(slapo.BuildError, match=r"qkv\.(weight|bias)"),
    ):
        slapo.clip_grad_norm_(sch, CLIP)
    with torch.no_grad():  # of the second KV head, whose rows only two ranks hold
        sch.model.layers[0].qkv.bias[-1] += dist.get_rank() == 3
    with pytest.raises(slapo.ReplicaError) as differs:
        slapo.state_dict(sch)
    assert (differs.value.tensor, list(differs.value.ranks)) == ("layers.0.qkv.bias[6:8]", [2, 3])


def check_on_four_ranks(kind: str, directory: str) -> tuple[Any, ...]:
    document = check_training(kind)
    check_controls(kind)
    started = slapo.build(split(slapo.create_schedule(on_meta(kind), mesh={"tp": 4}), kind)).state_dict()
    trained = train_on(kind, {"tp": 4}, 2, save=directory)
    again = train_on(kind, {"tp": 4}, 1, load=directory)
    check_written_once(kind)
    return document, started, trained, again


def on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return Model(kind).double()


def engine_on(kind: str, mesh: dict[str, int]) -> Any:
    sch = split(slapo.create_schedule(model(kind), mesh=mesh, example_inputs=batch(0, 2)), kind)
    return slapo.build(sch, optimizer=adam, max_grad_norm=CLIP, accumulate=2 // mesh.get("dp", 1))


def train_on(kind: str, mesh: dict[str, int], steps: int, *, load: str = "", save: str = "") -> dict[str, torch.Tensor]:
    engine, replicas = engine_on(kind, mesh), mesh.get("dp", 1)
    if load:
        engine.load(load)
    for _ in range(steps):
        engine.train_step(batch(engine._state.mesh.rank("dp"), replicas))
    if save:
        engine.save(save)
    engine.check_replicas()
    return engine.state_dict()


def check_written_once(kind: str) -> None:
    engine = engine_on(kind, {"tp": 4})
    engine.train_step(batch())
    own = engine._state.shards(optimizer=engine.optimizer).own
    by_rank: list[Any] = [None] * 4
    dist.all_gather_object(by_rank, [(one.kind, one.name, one.shape, one.offset, one.value) for one in own])
    count: dict[tuple[str, str], torch.Tensor] = {}
    for family, name, shape, offset, value in (block for theirs in by_rank for block in theirs):
        at = tuple(slice(begin, begin + size) for begin, size in zip(offset, value.shape, strict=True))
        count.setdefault((family, name), torch.zeros(shape))[at] += 1
    assert ("optimizer", "layers.0.qkv.weight::exp_avg") in count
    assert all(torch.equal(found, torch.ones_like(found)) for found in count.values())
    bias, right = engine.module.layers[0].qkv.bias, engine.state_dict()
    with torch.no_grad():
        bias[-1] += dist.get_rank() == 3
    with pytest.warns(UserWarning, match="differ between ranks"):
        engine.check_replicas(repair=True)
    assert all(torch.equal(tensor, right[name]) for name, tensor in engine.state_dict().items())


def trained_alone(kind: str, steps: int) -> dict[str, torch.Tensor]:
    reference = model(kind)
    optimizer = adam(reference.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        reference(**batch()).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
        optimizer.step()
    return dict(reference.state_dict())


@pytest.mark.ranks
def test_four_ranks_share_two_kv_heads() -> None:
    run_ranks(check_training, "rows", world_size=4)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("kind", PACKED)
def test_fused_heads_train_as_the_reference_and_replay_and_load_anywhere(kind: str, tmp_path: Path) -> None:
    document, started, trained, again = run_ranks(check_on_four_ranks, kind, str(tmp_path), world_size=4)[3]
    alone = slapo.build(slapo.create_schedule(on_meta(kind))).state_dict()
    assert all(torch.equal(started[name], tensor) for name, tensor in alone.items())
    three = trained_alone(kind, 3)
    close(trained, trained_alone(kind, 2))
    close(again, three)
    close(train_on(kind, {"tp": 1}, 1, load=str(tmp_path)), three)
    for size in (1, 2, 8):
        sch = slapo.replay(model(kind), json.loads(document), mesh={"tp": size})
        queries, heads = 8 // size, max(1, 2 // size)
        weight = sch["layers.0.qkv"].module.weight
        assert weight.shape[kind == "columns"] == 2 * (queries + 2 * heads)
        assert (sch.model.layers[0].num_heads, sch.model.layers[0].num_key_value_heads) == (queries, heads)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("kind", PACKED)
def test_two_ranks_have_a_kv_head_each(kind: str) -> None:
    run_ranks(check_training, kind, world_size=2)


@pytest.mark.breadth
@pytest.mark.ranks
def test_replicas_beside_fused_heads() -> None:
    for state in run_ranks(train_on, "groups", {"dp": 2, "tp": 4}, 3, world_size=8)[::7]:
        close(state, trained_alone("groups", 3))


def check_pieces_of_the_sequence() -> None:
    x = rand(2, 8, 8)

    def steps(sch: Any) -> Any:
        root = sch.root
        root["qkv"].shard(["weight", "bias"], axis=0, packed=PACKED["groups"], shards=(None, 2, 2))
        root.shard_attribute("num_heads").shard_attribute("num_key_value_heads", shards=2)
        root.sync("fwd_pre", "all_gather", axis=1)
        root["out"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
        return sch

    def traced(sch: Any) -> None:
        steps(sch).trace(flatten=True, example_inputs=x)
        assert "copy(self.qkv.weight)" in str(sch.root.graph)

    def compiled(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="aot_eager")

    def build() -> nn.Module:
        return Attention("groups")

    same_as_untouched(build, steps, (x,), piece_axis=1)
    same_as_untouched(build, traced, (x,), piece_axis=1)
    same_as_untouched(build, steps, (x,), piece_axis=1, run=compiled)
    same_as_untouched(build, lambda sch: steps(sch).checkpoint(), (x,), piece_axis=1)


@pytest.mark.breadth
@pytest.mark.ranks
def test_pieces_of_the_sequence_graphs_and_compiled_models() -> None:
    run_ranks(check_pieces_of_the_sequence, world_size=4)


# -- transformers ---------------------------------------------------------------------------------------------


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, labels=labels, use_cache=False).loss  # type: ignore[no-any-return]


SIZES = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 8, "hidden_size": 32}


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**SIZES, intermediate_size=16, num_key_value_heads=2, pad_token_id=0))


def bigcode() -> nn.Module:
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    config = GPTBigCodeConfig(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPTBigCodeForCausalLM(config)


def falcon(**options: Any) -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    return FalconForCausalLM(FalconConfig(**SIZES, **options))


def dbrx() -> nn.Module:
    from transformers import DbrxConfig, DbrxForCausalLM

    config = DbrxConfig(
        vocab_size=32, d_model=32, n_heads=8, n_layers=1, max_seq_len=16,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 32},
    )  # fmt: skip
    return DbrxForCausalLM(config)


FAMILIES: dict[str, tuple[Any, str, tuple[int, int, int], int, tuple[str, ...], bool]] = {
    # how it is made, where its fused layer is, packed, KV heads, attributes that count query heads, in float64
    "phi3": (phi3, "layers.*.self_attn:qkv_proj:o_proj", (32, 8, 8), 2, ("config.num_attention_heads",), False),
    "dbrx": (dbrx, "blocks.*.norm_attn_norm.attn:Wqkv:out_proj", (32, 8, 8), 2, ("hidden_size", "num_heads"), False),
    "bigcode": (bigcode, "h.*.attn:c_attn:c_proj", (32, 4, 4), 1, ("embed_dim", "num_heads"), True),
    "falcon": (falcon, "h.*.self_attention:query_key_value:dense", (32, 4, 4), 1, ("num_heads",), True),
    "falcon bias": (
        lambda: falcon(bias=True),
        "h.*.self_attention:query_key_value:dense", (32, 4, 4), 1, ("num_heads",), True,
    ),
    "falcon groups": (
        lambda: falcon(new_decoder_architecture=True, num_kv_heads=2),
        "h.*.self_attention:query_key_value:dense", (16, 4, 4), 2, ("num_heads",), True,
    ),
}  # fmt: skip


def split_family(sch: Any, name: str) -> Any:
    _, place, packed, kv, counts, _ = FAMILIES[name]
    attentions, fused, out = place.split(":")
    base = "model.model." if name == "phi3" else "model.transformer."
    for attention in sch[base + attentions]:
        own = list(attention[fused].parameters)
        attention[fused].shard(own, axis=0, packed=packed, shards=(None, kv, kv)).sync("bwd_post", "all_reduce")
        attention[out].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        attention.shard_attribute(counts)
        keys = [each for each in ("num_key_value_heads", "num_kv_heads") if each in vars(attention.module)]
        attention.shard_attribute(keys, shards=kv) if keys else None
    return sch


def without_bias(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.T


def check_family(name: str) -> None:
    torch.manual_seed(0)
    make, *_, exact = FAMILIES[name]
    if name == "falcon bias":  # with a bias, which the layer that sums must leave out
        from transformers.models.falcon.modeling_falcon import FalconLinear

        axes = (Axis("output", "out_features"), Axis("input", "in_features"))
        register_layer(FalconLinear, LayerType("FalconLinear", axes, without_bias=without_bias))
    reference = Loss(make())
    reference = reference.double() if exact else reference
    sch = split_family(slapo.create_schedule(copy.deepcopy(reference), mesh={"tp": dist.get_world_size()}), name)
    slapo.verify(sch, batch())
    if exact:
        train(sch, reference)


def check_families() -> None:
    for name in FAMILIES:
        check_family(name)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 4])
def test_families_of_transformers_with_fused_heads(size: int) -> None:
    run_ranks(check_families, world_size=size)


# -- without processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("packing", "size", "own"), [
    ((16, 4, 4), 2, (range(8, 16), range(18, 20), range(22, 24))),
    ((16, 4, 4), 4, (range(12, 16), range(18, 20), range(22, 24))),
    ((8, 2, 2) * 2, 2, (range(12, 24),)),
    ((8, 2, 2) * 2, 4, (range(16, 20), range(20, 24))),
])  # fmt: skip
def test_layout_of_the_last_rank(packing: tuple[int, ...], size: int, own: tuple[range, ...]) -> None:
    layout = Layout("w", (24,), (("tp", Placement(0)),), ((0, packing),), shard_counts=(("tp", (None, 2, 2)),))
    mesh = Mesh({"tp": size}, rank=size - 1)
    assert layout.local(torch.arange(24), mesh).tolist() == [row for each in own for row in each]
    assert layout.holders(mesh, "tp") == (size - 1,)
    shared = [part.places for part in layout.parts(mesh)]
    assert shared == ([(3,), (2, 3), (2, 3)] if size == 4 else [])


def test_undo_takes_everything_back() -> None:
    reference = model("groups")
    before = ModelSnapshot(reference)
    sch = split(slapo.create_schedule(reference, mesh={"tp": 4}), "groups")
    assert tuple(reference.layers[0].qkv.weight.shape) == (8, 8)
    assert "at most (all, 2, 2) shards along tp" in str(sch["layers.0.qkv"].layout("weight"))
    sch.undo(to=0)
    assert before.differences(reference) == []


def test_an_attention_gets_a_configuration_of_its_own() -> None:
    reference = phi3()
    sch: Any = slapo.create_schedule(reference, mesh={"tp": 4})
    attention = reference.model.layers[0].self_attn
    sch["model.layers.0.self_attn"].shard_attribute("config.num_attention_heads")
    assert (attention.config.num_attention_heads, reference.config.num_attention_heads) == (2, 8)
    assert attention.config._attn_implementation == reference.config._attn_implementation
    sch.undo(to=0)
    assert attention.config is reference.config


def test_fused_head_refusals_carry_the_corrected_call(message: Messages) -> None:
    phi: Any = slapo.create_schedule(phi3(), mesh={"tp": 4})
    phi["model.layers.0.self_attn"].shard_attribute("config.num_attention_heads")

    def fused(size: int, packed: Any, shards: Any) -> tuple[Any, str, Any]:
        return scheduled("rows", size), "layers.0.qkv", Shard("weight", axis=0, packed=packed, shards=shards)

    cases: list[tuple[Any, str, Any, str]] = [
        (*fused(4, 1, 2), "packed=(16, 4, 4), shards=(None, 2, 2)"),
        (*fused(4, (16, 4, 4), 2), "shards=(None, 2, 2)"),
        (*fused(4, (16, 4, 4), (None, 2)), "for 2 packed matrices"),
        (*fused(4, 1, (2,)), "for 1 packed matrices"),
        (*fused(4, (16, 4, 4), (None, 2, 1)), "one number"),
        (*fused(4, (16, 4, 4), (None, None, None)), "one number"),
        (*fused(4, (16, 4, 2), (None, 2, 2)), "each of 2 groups"),
        (*fused(3, (16, 4, 4), (None, 2, 2)), "neither divides the other"),
        (*fused(16, (16, 4, 4), (None, 2, 2)), "num_heads"),
        (*fused(16, (8, 2, 2), (None, 2, 2)), "8 ranks that would hold the same group"),
        (phi, "model.layers.0.self_attn", ShardAttribute("config.num_attention_heads"), "already"),
        (phi, "model.layers.0.self_attn", ShardAttribute("config.heads"), "config.heads"),
    ]
    for sch, path, primitive, word in cases:
        with pytest.raises(slapo.PreconditionError) as refused:
            sch[path].apply(primitive)
        message(refused, word)


def test_gathered_shared_shards_and_full_biases_are_refused_before_the_first_step() -> None:
    arguments: Any = {"axis": 0, "packed": (16, 4, 4), "shards": (None, 2, 2)}
    for names, steps, word in (
        (["weight", "bias"], ["all_gather"], "would repeat them"),
        ("weight", [], 'shard("bias", axis=0, packed=(16, 4, 4), shards=(None, 2, 2))'),
    ):
        sch = scheduled("rows", 4)
        fused = sch["layers.0.qkv"].shard(names, **arguments)
        for op in steps:
            fused.sync("fwd_post", op)
        found = [each for answer in Internals(sch).hooks.call("slapo_check", schedule=sch) for each in answer]
        assert word in "\n".join(f"{each.message} {each.hint}" for each in found)
