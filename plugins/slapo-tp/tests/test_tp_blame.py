"""What verify says of a wrong schedule: the step that is wrong, or the call that is missing, tried on a copy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from slapo_tp import Shard, ShardAttribute, Sync, SyncGradient

pytestmark = pytest.mark.ranks
preload_modules("transformers.models.gpt2.modeling_gpt2", "transformers.models.qwen3.modeling_qwen3")
preload_modules("transformers.models.t5.modeling_t5", "transformers.models.phi3.modeling_phi3")

Steps = list[tuple[str, slapo.Primitive]]
IDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(3))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_embd=16, n_head=4, n_inner=24, n_layer=2, n_positions=12, use_cache=False)
    return GPT2LMHeadModel(config)


def split_gpt2() -> Steps:
    steps: Steps = []
    for block in ("transformer.h.0", "transformer.h.1"):
        steps += [
            (f"{block}.attn.c_attn", Shard(("weight", "bias"), axis=1, packed=3)),
            (f"{block}.attn.c_attn", Sync("backward")),
            (f"{block}.attn", ShardAttribute(("num_heads", "embed_dim", "split_size"))),
            (f"{block}.attn.c_proj", Shard("weight", axis=0)),
            (f"{block}.attn.c_proj", Sync("forward")),
            (f"{block}.mlp.c_fc", Shard(("weight", "bias"), axis=1)),
            (f"{block}.mlp.c_fc", Sync("backward")),
            (f"{block}.mlp.c_proj", Shard("weight", axis=0)),
            (f"{block}.mlp.c_proj", Sync("forward")),
        ]
    return steps


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, use_cache=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def split_qwen3() -> Steps:
    steps: Steps = []
    for layer in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
        steps += [(f"{layer}.{name}_proj", Shard("weight", axis=0)) for name in "qkv"]
        steps += [(layer, Sync("bwd_post", "all_reduce", inputs=("hidden_states",)))]
        steps += [(f"{layer}.o_proj", Shard("weight", axis=1)), (f"{layer}.o_proj", Sync("forward"))]
        steps += [(f"{layer}.{name}_norm", SyncGradient("weight")) for name in "qk"]
    return steps


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return Phi3ForCausalLM(config)


def split_phi3(packed: int = 2) -> Steps:
    steps: Steps = []
    for mlp in ("model.layers.0.mlp", "model.layers.1.mlp"):
        steps += [(f"{mlp}.gate_up_proj", Shard("weight", axis=0, packed=packed))]
        steps += [(f"{mlp}.gate_up_proj", Sync("backward"))]
        steps += [(f"{mlp}.down_proj", Shard("weight", axis=1)), (f"{mlp}.down_proj", Sync("forward"))]
    return steps


def t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, use_cache=False)
    return T5EncoderModel(config)


def split_t5() -> Steps:
    """Every attention adds the bias of the first one, which is split by heads: none works without the others."""
    steps: Steps = []
    for index in range(2):
        attention = f"encoder.block.{index}.layer.0.SelfAttention"
        for name in "qkv":
            steps += [(f"{attention}.{name}", Shard("weight", axis=0)), (f"{attention}.{name}", Sync("backward"))]
        steps += [(f"{attention}.o", Shard("weight", axis=1)), (f"{attention}.o", Sync("forward"))]
        steps += [(attention, ShardAttribute(("n_heads", "inner_dim")))]
    steps += [("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", Shard("weight", axis=1))]
    return steps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class SequenceParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def split_sequence() -> Steps:
    steps: Steps = [("embed", Shard("weight", axis=0)), ("embed", Sync("fwd_post", "reduce_scatter", axis=1))]
    for layer in ("layers.0", "layers.1"):
        steps += [
            (f"{layer}.up", Shard(("weight", "bias"), axis=0)),
            (f"{layer}.up", Sync("fwd_pre", "all_gather", axis=1)),
            (f"{layer}.down", Shard("weight", axis=1)),
            (f"{layer}.down", Sync("fwd_post", "reduce_scatter", axis=1)),
            (f"{layer}.norm", SyncGradient(("weight", "bias"))),
        ]
    head = [Sync("fwd_pre", "all_gather", axis=1), Sync("fwd_post", "all_gather")]
    return [*steps, ("head", Shard("weight", axis=0)), *(("head", sync) for sync in head)]


class LowRank(nn.Module):
    """A frozen linear layer, and a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(8, 12), nn.Linear(8, 2, bias=False), nn.Linear(2, 12, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class LowRankBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = LowRank()


class Ids(nn.Module):
    """Blocks on embedded ids."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, 8), nn.Sequential(*(self.block() for _ in range(2)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embed(ids))


class LowRankModel(Ids):
    block = LowRankBlock


def split_low_rank(*more: tuple[str, slapo.Primitive]) -> Steps:
    """What ``more`` gives is put at both layers; without it, every gradient is summed once."""
    steps: Steps = []
    for layer in ("layers.0", "layers.1"):
        steps += [(f"{layer}.up.base", Shard(("weight", "bias"), axis=0)), (f"{layer}.up.base", Sync("backward"))]
        steps += [(f"{layer}.up.b", Shard("weight", axis=0)), (f"{layer}.up.b", Sync("backward"))]
        steps += [(f"{layer}.{path}", primitive) for path, primitive in more]
        steps += [(f"{layer}.down", Shard("weight", axis=1)), (f"{layer}.down", Sync("forward"))]
    return steps


def split_blocks(*backward_at: str) -> Steps:
    steps: Steps = []
    for layer, place in zip(("layers.0", "layers.1"), backward_at, strict=True):
        steps += [(f"{layer}.up", Shard(("weight", "bias"), axis=0)), (place, Sync("bwd_post", "all_reduce"))]
        steps += [(f"{layer}.down", Shard("weight", axis=1)), (f"{layer}.down", Sync("forward"))]
    return steps


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class PlainModel(Ids):
    block = PlainBlock


def split_plain(*forward_at: str) -> Steps:
    steps: Steps = []
    for layer, place in zip(("layers.0", "layers.1"), forward_at, strict=True):
        steps += [(f"{layer}.up", Shard(("weight", "bias"), axis=0)), (f"{layer}.up", Sync("backward"))]
        steps += [(f"{layer}.down", Shard("weight", axis=1)), (place, Sync("fwd_post", "all_reduce"))]
    return steps


class Scaled(nn.Module):
    """A split layer with two arguments that need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8))

    def forward(self, x: torch.Tensor, scale: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) * scale


class ScaledBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = Scaled(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x), self.scale(x))))


class ScaledModel(Ids):
    block = ScaledBlock


def split_scaled() -> Steps:
    steps: Steps = []
    for layer in ("layers.0", "layers.1"):
        steps += [(f"{layer}.up", Shard("weight", axis=0))]
        steps += [(f"{layer}.up", Sync("bwd_post", "all_reduce", inputs=("scale",)))]
        steps += [(f"{layer}.down", Shard("weight", axis=1)), (f"{layer}.down", Sync("forward"))]
    return steps


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.conv2 = nn.Conv1d(8, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(torch.relu(self.bn1(self.conv1(x.mT)))).mT


class ChannelsModel(Ids):
    block = Channels


def split_channels(*norm: str) -> Steps:
    steps: Steps = []
    for layer in ("layers.0", "layers.1"):
        steps += [(f"{layer}.conv1", Shard(("weight", "bias"), axis=0)), (f"{layer}.conv1", Sync("backward"))]
        steps += [(f"{layer}.bn1", Shard(norm, axis=0))] if norm else []
        steps += [(f"{layer}.conv2", Shard("weight", axis=1)), (f"{layer}.conv2", Sync("forward"))]
    return steps


class Gate(nn.Module):
    """One layer of values and of narrower gates, which it splits."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.up, self.down = 12, nn.Linear(8, 16), nn.Linear(12, 8)
        self.gates = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, gates = self.up(x).split([self.values, self.gates], dim=-1)
        return x + self.down(values * gates.repeat_interleave(3, -1))


class GateModel(Ids):
    block = Gate


def split_gates(packed: Any = (12, 4), *, counts: bool = True) -> Steps:
    steps: Steps = []
    for layer in ("layers.0", "layers.1"):
        steps += [(f"{layer}.up", Shard(("weight", "bias"), axis=0, packed=packed)), (f"{layer}.up", Sync("backward"))]
        steps += [(layer, ShardAttribute(("values", "gates")))] if counts else []
        steps += [(f"{layer}.down", Shard("weight", axis=1)), (f"{layer}.down", Sync("forward"))]
    return steps


class Expert(nn.Module):
    """Bare parameters, as GPT-OSS has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12, 8))
        self.down_proj_bias = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.up_proj) @ self.down_proj + self.down_proj_bias


class ExpertsModel(Ids):
    block = Expert


def split_experts() -> Steps:
    steps: Steps = []
    for layer in ("layers.0", "layers.1"):
        steps += [(layer, Shard("up_proj", axis=1)), (layer, Shard("down_proj", axis=0))]
        steps += [(layer, Sync(mode, "all_reduce")) for mode in ("bwd_post", "fwd_post")]
    return steps


def without(steps: Steps, *wrong: tuple[str, str]) -> Steps:
    """Without the steps of a name at a path."""
    kept = [each for each in steps if (each[0], each[1].name) not in wrong]
    assert len(kept) < len(steps)
    return kept


def with_other(steps: Steps, path: str, name: str, **changes: Any) -> Steps:
    """With other arguments of the step of a name at a path."""
    changed: Steps = []
    for place, primitive in steps:
        is_it = (place, primitive.name) == (path, name)
        changed.append((place, dataclasses.replace(cast(Any, primitive), **changes) if is_it else primitive))
    assert changed != steps
    return changed


H, L = "transformer.h.1", "model.layers.1.self_attn"
STATISTICS = ("weight", "bias", "running_mean", "running_var")
Q = "model.layers.{}.self_attn.{}_norm"
T = "encoder.block.{}.layer.0.SelfAttention"
NORMS = [(Q.format(layer, name), "tp.sync_gradient") for layer in range(2) for name in "qk"]

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Steps]]] = {
    "counts of heads": (gpt2, lambda: [each for each in split_gpt2() if each[1].name != "tp.shard_attribute"]),
    "counts of one layer": (gpt2, lambda: without(split_gpt2(), (f"{H}.attn", "tp.shard_attribute"))),
    "packed": (gpt2, lambda: with_other(split_gpt2(), f"{H}.attn.c_attn", "tp.shard", packed=1)),
    "packed in all layers": (phi3, lambda: split_phi3(packed=1)),
    "other sizes": (GateModel, lambda: split_gates((4, 12))),
    "sizes of the parts": (GateModel, lambda: split_gates(counts=False)),
    "packed, and a sync": (GateModel, lambda: without(split_gates(1), ("layers.1.down", "tp.sync"))),
    "other axis": (
        gpt2,
        lambda: [
            (path, Shard("weight", axis=1) if path.endswith("mlp.c_proj") and step.name == "tp.shard" else step)
            for path, step in split_gpt2()
        ],
    ),
    "other axis, gathered": (
        qwen3,
        lambda: [
            (path, Shard("weight", axis=0) if step.name == "tp.shard" else Sync("fwd_post", "all_gather"))
            if path.endswith("o_proj")
            else (path, step)
            for path, step in split_qwen3()
        ],
    ),
    "other axis of one": (qwen3, lambda: with_other(split_qwen3(), f"{L}.o_proj", "tp.shard", axis=0)),
    "norms of heads": (qwen3, lambda: without(split_qwen3(), *NORMS)),
    "one norm of heads": (qwen3, lambda: without(split_qwen3(), NORMS[3])),
    "coupled attention": (t5, lambda: without(split_t5(), (f"{T.format(1)}.k", "tp.sync"))),
    "coupled attentions": (t5, lambda: without(split_t5(), *((f"{T.format(i)}.k", "tp.sync") for i in range(2)))),
    "relative bias": (t5, lambda: without(split_t5(), (f"{T.format(0)}.relative_attention_bias", "tp.shard"))),
    "norms of the sequence": (
        SequenceParallel,
        lambda: without(split_sequence(), *((f"layers.{index}.norm", "tp.sync_gradient") for index in range(2))),
    ),
    "axis of the sequence": (
        SequenceParallel,
        lambda: with_other(
            split_sequence(), "layers.1.up", "tp.sync", mode="bwd_post", op="all_reduce", axis=-1
        ),
    ),
    "a sum too many": (LowRankModel, lambda: split_low_rank(("up.a", SyncGradient("weight")))),
    "two reductions": (
        LowRankModel, lambda: split_low_rank(("up", Sync("backward")), ("up.a", SyncGradient("weight")))
    ),
    "residuals": (Ids, lambda: split_blocks("layers.0", "layers.1")),
    "sums around residuals": (PlainModel, lambda: split_plain("layers.0", "layers.1")),
    "an argument too few": (ScaledModel, split_scaled),
    "one residual": (Ids, lambda: split_blocks("layers.0.up", "layers.1")),
    "norms of channels": (ChannelsModel, split_channels),
    "bias of experts": (ExpertsModel, split_experts),
    "no gather of the sequence": (SequenceParallel, lambda: without(split_sequence(), ("layers.1.up", "tp.sync"))),
}  # fmt: skip


FURTHER = {
    "right t5", "coupled attention", "coupled attentions", "relative bias", "right blocks", "residuals",
    "sums around residuals", "one residual", "right channels", "right channels, called", "norms of channels",
}  # fmt: skip
"""Those of the tests that are marked as breadth."""


def verify(make: Callable[[], nn.Module], steps: Steps, *, runs_before: bool) -> slapo.VerifyError | None:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    for path, primitive in steps:
        sch[path].apply(primitive)
    if runs_before:
        model(IDS)
    try:
        slapo.verify(
            sch, (IDS,) if isinstance(model, (SequenceParallel, Ids)) else {"input_ids": IDS}, optimizer_steps=1
        )
    except slapo.VerifyError as error:
        return error
    return None


def verify_all() -> dict[str, tuple[str, tuple[str, ...]] | None]:
    right = {
        "right gpt2": (gpt2, split_gpt2), "right qwen3": (qwen3, split_qwen3), "right t5": (t5, split_t5),
        "right sequence": (SequenceParallel, split_sequence), "right low rank": (LowRankModel, split_low_rank),
        "right blocks": (Ids, lambda: split_blocks("layers.0.up", "layers.1.up")),
        "right phi3": (phi3, split_phi3), "right gates": (GateModel, split_gates),
        "right channels": (ChannelsModel, lambda: split_channels(*STATISTICS)),
        "right channels, called": (ChannelsModel, lambda: split_channels(*STATISTICS)),
    }  # fmt: skip
    errors = {
        name: verify(make, steps(), runs_before=name.endswith("called"))
        for name, (make, steps) in {**right, **CASES}.items()
        if name not in FURTHER or os.environ.get("SLAPO_TEST_WHOLE")
    }
    return {name: None if error is None else (error.message, error.steps) for name, error in errors.items()}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    first, second = run_ranks(verify_all, world_size=2, timeout=600)
    assert first == second
    return first


def suggested(answer: tuple[str, tuple[str, ...]]) -> str:
    lines = (line for line in answer[0].splitlines() if line.startswith("  suggestion"))
    return next(lines, "").partition(": ")[2]


def test_the_right_schedules_agree(answers: dict[str, Any]) -> None:
    right = {name: answer for name, answer in answers.items() if name.startswith("right")}
    assert set(right) >= {"right gpt2", "right qwen3", "right sequence", "right low rank"}
    assert set(right.values()) == {None}


def test_attributes_that_nobody_divided_are_named_with_the_call(answers: dict[str, Any]) -> None:
    message, steps = answers["counts of heads"]
    assert "modeling_gpt2.py:" in message  # the line that raises
    assert all(".attn" in step for step in steps)
    divide = "shard_attribute(('num_heads', 'embed_dim', 'split_size'))"
    assert suggested(answers["counts of heads"]) == f"add sch['transformer.h.*.attn'].{divide}"
    both = "add sch['layers.*'].shard_attribute(('values', 'gates'))"
    assert suggested(answers["sizes of the parts"]) == both


def test_an_argument_whose_gradient_is_not_reduced_or_too_many_are_is_named(answers: dict[str, Any]) -> None:
    sync = "sync('bwd_post', op='all_reduce', inputs=('scale', 'x'))"
    write = f"write sch['layers.*.up'].{sync} in place of #2,6"
    assert suggested(answers["an argument too few"]) == write
    assert len(answers["an argument too few"][1]) == 2


def test_a_step_that_one_of_several_layers_lacks_is_named(answers: dict[str, Any]) -> None:
    assert suggested(answers["counts of one layer"]) == (
        f"add sch['{H}.attn'].shard_attribute(('num_heads', 'embed_dim', 'split_size'))"
    )
    assert suggested(answers["one norm of heads"]) == f"add sch['{NORMS[3][0]}'].sync_gradient('weight')"
    assert "likewise" not in answers["one norm of heads"][0]


def test_a_fused_weight_that_is_split_as_one_is_named(answers: dict[str, Any]) -> None:
    assert suggested(answers["packed"]) == (
        f"write sch['{H}.attn.c_attn'].shard(('weight', 'bias'), axis=1, packed=3) in place of #10"
    )
    assert answers["packed"][1] == (f"#10 shard(('weight', 'bias'), axis=1) at '{H}.attn.c_attn'",)


def test_the_sizes_into_which_the_model_splits_an_output_are_tried_as_packed(answers: dict[str, Any]) -> None:
    write = "write sch['model.layers.*.mlp.gate_up_proj'].shard('weight', axis=0, packed=2) in place of #1,5"
    assert suggested(answers["packed in all layers"]) == write
    assert "#1,5 shard('weight', axis=0) at 'model.layers.{0-1}.mlp.gate_up_proj'" in answers["packed in all layers"][0]
    write = "write sch['layers.*.up'].shard(('weight', 'bias'), axis=0, packed=(12, 4)) in place of #1,6"
    assert suggested(answers["other sizes"]) == write
    assert "packed=(" not in suggested(answers["packed, and a sync"])  # alone it makes nothing agree


def test_a_split_of_the_other_axis_is_named_with_the_layer_that_raises(answers: dict[str, Any]) -> None:
    message, _ = answers["other axis"]
    write = "write sch['transformer.h.*.mlp.c_proj'].shard('weight', axis=0) in place of #8,17"
    assert suggested(answers["other axis"]) == write
    where = message.splitlines()[0].partition("(in 'transformer.h.0.mlp.c_proj', ")[2]
    assert "/transformers/" in where  # the innermost line outside of torch and slapo
    write = f"write sch['{L}.o_proj'].shard('weight', axis=1) in place of #13"
    assert suggested(answers["other axis of one"]) == write
    both = suggested(answers["other axis, gathered"]).split("; ")
    assert [each.partition(" in place")[0] for each in both] == [
        f"write sch['model.layers.*.self_attn.o_proj'].{call}"
        for call in ("shard('weight', axis=1)", "sync('fwd_post', op='all_reduce')")
    ]


def test_gradients_that_only_have_to_be_summed_are_named(answers: dict[str, Any]) -> None:
    assert sorted(suggested(answers["norms of heads"]).split("; ")) == [
        f"add sch['{Q.format('*', name)}'].sync_gradient('weight')" for name in "kq"
    ]
    norm = "add sch['layers.*.norm'].sync_gradient(('bias', 'weight'))"
    assert suggested(answers["norms of the sequence"]) == norm
    lines = answers["norms of heads"][0].splitlines()
    assert (
        "  a step is missing, tried on fresh copies of the model:" in lines
    )  # no step is listed: none is at the norms


@pytest.mark.breadth
def test_blocks_that_work_only_together_are_narrowed_down(answers: dict[str, Any]) -> None:
    assert suggested(answers["coupled attention"]) == f"add sch['{T.format(1)}.k'].sync('backward')"
    message, steps = answers["coupled attentions"]
    added = f"add sch['{T.format('*')}.k'].sync('bwd_post', op='all_reduce')"
    assert suggested(answers["coupled attentions"]) == added
    assert "likewise" not in message
    assert all(".k'" in step for step in steps)
    assert answers["relative bias"][1] == (f"#1 shard('weight', axis=0) at '{T.format(0)}.q'",)


def test_a_collective_of_sequence_parallelism_that_is_another_or_missing_is_named(answers: dict[str, Any]) -> None:
    _, steps = answers["axis of the sequence"]
    assert steps == ("#9 sync('bwd_post', op='all_reduce') at 'layers.1.up'",)
    gather = "sync('fwd_pre', op='all_gather', axis=1)"
    assert suggested(answers["axis of the sequence"]) == f"write sch['layers.1.up'].{gather} in place of #9"
    assert suggested(answers["no gather of the sequence"]) == f"add sch['layers.1.up'].{gather}"


def test_a_gradient_that_is_summed_twice_is_blamed_on_the_step_that_sums_it(answers: dict[str, Any]) -> None:
    assert answers["a sum too many"][1] == ("#12 sync_gradient('weight') at 'layers.1.up.a'",)
    assert answers["two reductions"][1] == ("#14 sync_gradient('weight') at 'layers.1.up.a'",)


@pytest.mark.breadth
def test_a_reduction_around_a_residual_is_named_with_its_place(answers: dict[str, Any]) -> None:
    assert suggested(answers["residuals"]) == (
        "leave #2,6 sync('bwd_post', op='all_reduce') at 'layers.{0-1}' out; "
        "add sch['layers.*.up'].sync('bwd_post', op='all_reduce')"
    )
    assert suggested(answers["sums around residuals"]) == (
        "leave #4,8 sync('fwd_post', op='all_reduce') at 'layers.{0-1}' out; "
        "add sch['layers.*.down'].sync('fwd_post', op='all_reduce')"
    )
    moved = "leave #6 sync('bwd_post', op='all_reduce') at 'layers.1' out; add sch['layers.1.up']"
    assert suggested(answers["one residual"]) == f"{moved}.sync('bwd_post', op='all_reduce')"


@pytest.mark.breadth
def test_norms_over_split_channels_that_are_not_split_say_so_where_they_raise(answers: dict[str, Any]) -> None:
    message, steps = answers["norms of channels"]
    assert "running_mean should contain 2 elements not 4" in message
    assert all("at 'layers." in step for step in steps)
    split = "shard(('weight', 'bias', 'running_mean', 'running_var'), axis=0)"
    assert suggested(answers["norms of channels"]) == f"add sch['layers.*.bn1'].{split}"


def test_a_bare_parameter_that_every_rank_adds_is_named(answers: dict[str, Any]) -> None:
    message, _ = answers["bias of experts"]
    assert "  note: every rank holds the full 'layers.0.down_proj_bias'" in message
