"""``shard(shards=)``: ranks that are more than the shards (KV heads) hold the same one, and train as the reference."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import Shard as Placement

import slapo_core as slapo
from slapo_core import Layout
from slapo_core.internals import Internals
from slapo_testing import ModelSnapshot, preload_modules, run_ranks
from slapo_tp import Shard, ShardAttribute, collectives
from tests.messages import Messages

from .checks import differs_from_untouched, rand, same_as_untouched

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


def split(sch: Any, kv_heads: int = 2, layers: str = "layers.*") -> Any:
    for attention in sch[layers]:
        with_bias = "bias" in attention["q_proj"].parameters
        names = ["weight", "bias"] if with_bias else "weight"
        attention["q_proj"].shard(names, axis=0)
        attention["[kv]_proj"].shard(names, axis=0, shards=kv_heads)
        attention.sync("bwd_post", "all_reduce", inputs=(0,))
        attention["o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        attention["*_norm"].sync_gradient(list(attention["q_norm"].parameters))
    return sch


def qwen3(**options: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, use_cache=False, **options,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def split_root(sch: Any) -> Any:
    """One attention, whose input and output are pieces of the sequence."""
    root = sch.root
    root["q_proj"].shard(["weight", "bias"], axis=0)
    root["[kv]_proj"].shard(["weight", "bias"], axis=0, shards=2)
    root.sync("fwd_pre", "all_gather", axis=1)
    root["o_proj"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
    root["*_norm"].sync_gradient(["weight", "bias"])
    return sch


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


def check_states_and_training(sch: Any, reference: nn.Module) -> None:
    """Compare values, three steps and their optimizer state with the reference model."""
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


def check_training(kv_heads: int) -> str:
    reference = model(kv_heads)
    size, rank = dist.get_world_size(), dist.get_rank()
    sch = split(slapo.create_schedule(copy.deepcopy(reference), mesh={"tp": size}), kv_heads)
    key = sch.model.layers[0].k_proj
    own = rank * kv_heads // size
    assert torch.equal(key.weight, reference.layers[0].k_proj.weight.chunk(kv_heads)[own])
    assert key.out_features == 4
    assert sch.model.layers[0].n_rep == 4 // size
    check_states_and_training(sch, reference)
    return sch.to_json()


def test_the_attention_may_be_around_a_module_of_the_layer() -> None:
    nested = model()
    nested.layers[0].k_proj = nn.Sequential(nested.layers[0].k_proj)  # type: ignore[union-attr, index]
    sch = slapo.create_schedule(nested, mesh={"tp": 4})
    sch["layers.0.k_proj.0"].shard(["weight", "bias"], axis=0, shards=2)
    assert (nested.layers[0].n_rep, nested.layers[1].n_rep) == (1, 2)  # type: ignore[union-attr, index]
    sch.undo()
    assert nested.layers[0].n_rep == 2  # type: ignore[union-attr, index]


def check_controls() -> None:
    reference = model()
    sch = split(slapo.create_schedule(copy.deepcopy(reference), mesh={"tp": dist.get_world_size()}))
    right, collectives._sum_of_holders = collectives._sum_of_holders, unsummed
    try:
        with pytest.raises(AssertionError, match=r"gradient of layers\.\d\.[kv]_proj"):
            train(sch, reference, 1)
        with pytest.raises(slapo.VerifyError, match=r"[kv]_proj\.(weight|bias)"):
            slapo.verify(sch, batch(), blame_seconds=0)
    finally:
        collectives._sum_of_holders = right
    with torch.no_grad():  # replicas: those with the same shard, of the second one too
        sch.model.layers[0].v_proj.weight += dist.get_rank() == 3
    with pytest.raises(slapo.ReplicaError) as differs:
        slapo.state_dict(sch)
    assert (differs.value.tensor, list(differs.value.ranks)) == ("layers.0.v_proj.weight", [2, 3])


def check_on_four_ranks() -> str:
    check_controls()
    return check_training(2)


@pytest.mark.ranks
def test_ranks_with_the_same_kv_head_train_as_the_reference_and_replay_anywhere() -> None:
    document = json.loads(run_ranks(check_on_four_ranks, world_size=4)[0])
    for size in (1, 2):
        sch = slapo.replay(model(), document, mesh={"tp": size})
        key = sch["layers.0.k_proj"]
        assert tuple(key.module.weight.shape) == (8 // size, 8)
        assert key.module.__dict__.get("forward") is None


def check_other_models() -> None:
    check_training(1)
    for attention in ("eager", "sdpa"):
        sch = slapo.create_schedule(qwen3(attention_bias=True, attn_implementation=attention), mesh={"tp": 4})
        split(sch, 2, "model.layers.*.self_attn")
        slapo.verify(sch, batch())


@pytest.mark.breadth
@pytest.mark.ranks
def test_single_kv_head_and_qwen3_with_biases_and_norms() -> None:
    run_ranks(check_other_models, world_size=4)


def check_pieces_of_the_sequence() -> None:
    x = rand(2, 8, 8)

    def traced(sch: Any) -> Any:
        split_root(sch)
        sch.trace(flatten=True, example_inputs=x)
        assert "copy(self.k_proj.weight)" in str(sch.root.graph)

    def retraced(sch: Any) -> None:
        sch.trace(flatten=True, example_inputs=x)
        split_root(sch)

    def compiled(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="aot_eager")

    def build() -> nn.Module:
        return Attention(2)

    sch = same_as_untouched(build, split_root, (x,), piece_axis=1)
    same_as_untouched(build, traced, (x,), piece_axis=1)
    same_as_untouched(build, retraced, (x,), piece_axis=1)
    same_as_untouched(build, split_root, (x,), piece_axis=1, run=compiled)
    same_as_untouched(build, lambda sch: split_root(sch).checkpoint(), (x,), piece_axis=1)
    right, collectives._sum_of_holders = collectives._sum_of_holders, unsummed
    try:
        differs_from_untouched(build, split_root, (x,), piece_axis=1)
    finally:
        collectives._sum_of_holders = right
    copied = copy.deepcopy(sch.model)
    for each in (copied, sch.model):
        each.zero_grad()
        each(x.chunk(4, 1)[dist.get_rank()]).square().sum().backward()
    assert torch.equal(copied.k_proj.weight.grad, sch.model.k_proj.weight.grad)
    own = sch.model.k_proj.weight.grad  # replicas to the last bit
    holders = [torch.empty_like(own) for _ in range(4)]
    dist.all_gather(holders, own)
    assert torch.equal(own, holders[dist.get_rank() ^ 1])
    assert not torch.equal(own, holders[dist.get_rank() ^ 2])
    # gradients of gradients
    group = collectives.RankGroup(dist.group.WORLD.group_name, 4, dist.get_rank(), "", holders=2)
    w = rand(3).requires_grad_()
    first = torch.autograd.grad((collectives.copy(w, group) ** 3).sum(), w, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), w)[0]
    torch.testing.assert_close(first, 6 * w**2, **CLOSE)
    torch.testing.assert_close(second, 12 * w, **CLOSE)


@pytest.mark.breadth
@pytest.mark.ranks
def test_pieces_of_the_sequence_graphs_and_compiled_models() -> None:
    run_ranks(check_pieces_of_the_sequence, world_size=4)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return model()


def initial(mesh: dict[str, int]) -> dict[str, torch.Tensor]:
    return slapo.build(split(slapo.create_schedule(on_meta(), mesh=mesh))).state_dict()


def engine_on(mesh: dict[str, int]) -> Any:
    sch = split(slapo.create_schedule(model(), mesh=mesh, example_inputs=batch(0, 2)))
    if mesh.get("pp", 1) > 1:
        sch["layers.0"].pipeline_split()
        return slapo.build(sch, optimizer=adam, max_grad_norm=CLIP, microbatches=2)
    return slapo.build(sch, optimizer=adam, max_grad_norm=CLIP, accumulate=2 // mesh.get("dp", 1))


def train_on(mesh: dict[str, int], steps: int, *, load: str = "", save: str = "") -> dict[str, torch.Tensor]:
    engine = engine_on(mesh)
    replicas = mesh.get("dp", 1)
    rank = engine._state.mesh.rank("dp")
    if load:
        engine.load(load)
    for _ in range(steps):
        engine.train_step(batch(rank, replicas))
    if save:
        engine.save(save)
    engine.check_replicas()
    return engine.state_dict()


def check_storage(directory: str) -> tuple[dict[str, torch.Tensor], ...]:
    mesh = {"tp": 4}
    started = initial(mesh)
    trained = train_on(mesh, 2, save=directory)
    again = train_on(mesh, 1, load=directory)
    sch = split(slapo.create_schedule(model(), mesh=mesh))
    slapo.save_pretrained(sch, f"{directory}/pretrained")
    check_written_once()
    return started, trained, again


def check_written_once() -> None:
    """Each element of a checkpoint of shards is one rank's."""
    engine = engine_on({"tp": 4})
    engine.train_step(batch())
    own = engine._state.shards(optimizer=engine.optimizer).own
    blocks = [(one.kind, one.name, one.shape, one.offset, one.value) for one in own]
    by_rank: list[Any] = [None] * 4
    dist.all_gather_object(by_rank, blocks)
    count: dict[tuple[str, str], torch.Tensor] = {}
    for kind, name, shape, offset, value in (block for theirs in by_rank for block in theirs):
        at = tuple(slice(begin, begin + size) for begin, size in zip(offset, value.shape, strict=True))
        count.setdefault((kind, name), torch.zeros(shape))[at] += 1
    assert ("optimizer", "layers.0.k_proj.weight::exp_avg") in count
    assert all(torch.equal(found, torch.ones_like(found)) for found in count.values())


def trained_alone(steps: int) -> dict[str, torch.Tensor]:
    reference = model()
    optimizer = adam(reference.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        reference(**batch()).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
        optimizer.step()
    return dict(reference.state_dict())


def close(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.ranks
def test_a_checkpoint_of_four_ranks_loads_on_two_and_one_and_starts_from_the_same_weights(tmp_path: Path) -> None:
    started, trained, again = run_ranks(check_storage, str(tmp_path), world_size=4)[3]
    alone = slapo.build(slapo.create_schedule(on_meta())).state_dict()
    assert all(torch.equal(started[name], tensor) for name, tensor in alone.items())
    two, three = trained_alone(2), trained_alone(3)
    close(trained, two)
    close(again, three)
    close(train_on({"tp": 1}, 1, load=str(tmp_path)), three)
    close(run_ranks(train_on, {"tp": 2}, 1, load=str(tmp_path), world_size=2)[1], three)
    written = load_file(tmp_path / "pretrained" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in model().state_dict().items())


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 4}, {"pp": 2, "tp": 4}], ids=str)
def test_replicas_and_stages_beside_shared_shards(mesh: dict[str, int]) -> None:
    for state in run_ranks(train_on, mesh, 3, world_size=8)[::7]:
        close(state, trained_alone(3))


# -- without processes ----------------------------------------------------------------------------------------


def scheduled(size: int, kv_heads: int = 2, rank: int = 0) -> Any:
    return slapo.create_schedule(model(kv_heads), mesh={"tp": size}, rank=rank)


@pytest.mark.parametrize(("size", "shards", "own"), [(1, 2, 0), (2, 2, 1), (4, 2, 1), (4, 4, 3), (4, 1, 0), (2, 4, 1)])
def test_layout_holders_and_values_of_the_last_rank(size: int, shards: int, own: int) -> None:
    mesh = scheduled(size, rank=size - 1).root.mesh
    layout = Layout("w", (8, 3), (("tp", Placement(0)),), shard_counts=(("tp", shards),))
    full = torch.arange(24.0).view(8, 3)
    assert torch.equal(layout.local(full, mesh), full.chunk(min(size, shards))[own])
    assert layout.holders(mesh, "tp") == tuple(range(size))[-max(1, size // shards) :]
    assert layout.holders(mesh, "dp") == (0,)


def test_shards_that_cannot_be_shared_equally_have_no_layout() -> None:
    layout = Layout("w", (8,), (("tp", Placement(0)),), shard_counts=(("tp", 3),))
    with pytest.raises(slapo.MeshError, match="do not divide its 4 ranks"):
        layout.local_shape(scheduled(4).root.mesh)


def test_undo_takes_everything_back_and_redo_shares_again() -> None:
    reference = model()
    before = ModelSnapshot(reference)
    sch = split(slapo.create_schedule(reference, mesh={"tp": 4}))
    assert tuple(reference.layers[0].k_proj.weight.shape) == (4, 8)
    assert "at most 2 shards along tp" in str(sch["layers.0.k_proj"].layout("weight"))
    sch.undo(to=0)
    assert before.differences(reference) == []


def test_packed_matrices_are_sharded_alike() -> None:
    holder = nn.Sequential(nn.Linear(3, 8))
    full = holder[0].weight.detach().clone()
    sch: Any = slapo.create_schedule(holder, mesh={"tp": 4}, rank=2)
    sch["0"].shard("weight", axis=0, packed=2, shards=2)
    assert torch.equal(holder[0].weight, torch.cat([full[2:4], full[6:8]]))


def test_attributes_follow_the_shards() -> None:
    for size, kv, groups in ((1, 2, 2), (2, 1, 2), (4, 1, 1)):
        sch = scheduled(size)
        sch.model.layers[0].repeats = 2
        sch["layers.0"].shard_attribute("num_key_value_heads", shards=2).shard_attribute("repeats", holders_of=2)
        attention = sch.model.layers[0]
        assert (attention.num_key_value_heads, attention.repeats) == (kv, groups)


def test_shards_refusals_carry_the_corrected_call(message: Messages) -> None:
    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(8, 8), nn.Embedding(8, 8), nn.MultiheadAttention(8, 2))
    fused = model()
    fused.layers[0].qkv = nn.Linear(8, 32)
    fused.layers[0].num_heads = 4
    divided = scheduled(4)
    divided["layers.0.k_proj"].shard("weight", axis=0, shards=2)
    cases: list[tuple[Any, str, Any, str]] = [
        (
            slapo.create_schedule(fused, mesh={"tp": 4}),
            "layers.0.qkv",
            Shard("weight", axis=0, shards=2),
            "queries, keys and values",
        ),
        (scheduled(4), "layers.0.k_proj", Shard("weight", axis=0, shards=3), "neither divides the other"),
        (scheduled(4), "layers.0.k_proj", Shard("weight", axis=0, shards=0), "must be positive"),
        (scheduled(3), "layers.0.k_proj", Shard("weight", axis=0, shards=3), "not divisible by shards=3"),
        (scheduled(4), "layers.0.k_proj", Shard("weight", axis=0, shards=1), "use shards=2"),
        (scheduled(4), "layers.0.k_proj", Shard("weight", axis=0, shards=2, pad=True), "one shard a rank"),
        (scheduled(4), "layers.0.o_proj", Shard("weight", axis=1, shards=2), "input axis of nn.Linear"),
        (scheduled(16), "layers.0.k_proj", Shard("weight", axis=0), "shards=2"),
        (scheduled(4), "layers.0.k_proj", Shard("weight", axis=0, shards=2, mesh_dim="cp"), "mesh_dim 'cp'"),
        (slapo.create_schedule(norm, mesh={"tp": 4}), "2", Shard("weight", axis=0, shards=2), "vocabulary axis"),
        (slapo.create_schedule(norm, mesh={"tp": 4}), "3", Shard("in_proj_weight", axis=0, shards=2), "replace"),
        (scheduled(4), "layers.0", ShardAttribute("num_key_value_heads"), "shards=2"),
        (scheduled(4), "layers.0", ShardAttribute("head_dim", shards=3), "neither divides the other"),
        (scheduled(8), "layers.0", ShardAttribute("n_rep", holders_of=2), "not divisible by the 4 ranks"),
        (scheduled(8), "layers.0.k_proj", Shard("weight", axis=0, shards=2), "'n_rep' of the attention around it"),
        (divided, "layers.0", ShardAttribute("n_rep", holders_of=2), "divided over mesh_dim 'tp' already"),
        (scheduled(4), "layers.0", ShardAttribute("n_rep", shards=2, holders_of=2), "one call for each"),
    ]
    for sch, path, primitive, word in cases:
        with pytest.raises(slapo.PreconditionError) as refused:
            sch[path].apply(primitive)
        message(refused, word)


def test_schedules_that_would_train_wrongly_are_refused_before_the_first_step(message: Messages) -> None:
    def cut(sch: Any) -> None:
        sch["layers.*.k_proj"].shard(["weight", "bias"], axis=0)

    def repeated(sch: Any) -> None:
        sch["layers.0.k_proj"].shard(["weight", "bias"], axis=0, shards=2).sync("fwd_post", "all_gather")

    def without_bias(sch: Any) -> None:
        sch["layers.0.v_proj"].shard("weight", axis=0, shards=2)

    for apply, words in (
        (cut, ("cuts a head", "shards=2")),
        (repeated, ("repeat",)),
        (without_bias, ('shard("bias", axis=0, shards=2)',)),
    ):
        sch = scheduled(4)
        apply(sch)
        found = [each for answer in Internals(sch).hooks.call("slapo_check", schedule=sch) for each in answer]
        text = "\n".join(f"{each.message} {each.hint}" for each in found)
        for word in words:
            assert word in text, (apply.__name__, text)
