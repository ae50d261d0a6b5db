"""Models train under `fully_shard` as in plain PyTorch: on replicas, beside tensor parallelism, and in stages."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import slapo_core as slapo
from slapo_runtime.storage import sharded_over
from slapo_testing import preload_modules, run_ranks
from tests.support.checkpoints import newest

preload_modules("transformers.models.llama.modeling_llama", "torch.distributed.fsdp", "slapo_tp", "slapo_loss")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40}
TEXT = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> nn.Module:
    """The weight of the embedding is that of the head, too, and has 61 rows, which 2 ranks do not divide."""
    return BertForMaskedLM(BertConfig(max_position_embeddings=16, **TEXT, **SIZES, **OFF))


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(num_key_value_heads=2, use_cache=False, tie_word_embeddings=False, **TEXT, **SIZES)
    )


def gpt2() -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(n_embd=24, n_layer=4, n_head=4, n_positions=16, **TEXT, **off))


def t5() -> nn.Module:
    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, use_cache=False, **sizes, **TEXT))


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=5, **SIZES, **OFF))


def lora() -> nn.Module:
    """Frozen, but for a branch of low rank in each block."""
    model = llama()
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    return model


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 3, bias=False)
        self.up = nn.Linear(3, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Scaled(nn.Module):
    """Tied and scaled at both ends: the root owns a parameter that two stages read, and one that none reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(4))
        self.scale, self.unread = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return {"loss": (self.last(x) * self.scale - labels).square().mean()}


BLOCKS = {
    Scaled: "blocks.*",
    bert: "bert.encoder.layer.*",
    llama: "model.layers.*",
    lora: "model.layers.*",
    gpt2: "transformer.h.*",
    t5: "encoder.block.*",
    vit: "vit.layers.*",
}
Make = Callable[[], nn.Module]


def make_model(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return make().double().train()


def make_batches(make: Make, count: int = 3) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    if make is Scaled:
        both = torch.randn(count, 2, 8, 6, generator=draw, dtype=torch.float64)
        return [{"x": x, "labels": labels} for x, labels in both]
    if make is vit:
        pixels = torch.randn(count, 8, 3, 8, 8, generator=draw, dtype=torch.float64)
        return [{"pixel_values": one, "labels": torch.arange(8) % 5} for one in pixels]
    ids = torch.randint(3, 61, (count, 8, 7), generator=draw)
    batches = [{"input_ids": one, "labels": one.flip(1).clone()} for one in ids]
    for batch in batches:
        for row, kept in enumerate((7, 5, 6, 7, 2, 3, 7, 1)):
            batch["labels"][row, kept:] = -100
    return batches


def tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = batch["labels"]
    return (labels[:, 1:] != -100).sum() if labels.dim() > 1 else torch.tensor(len(labels))


def all_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


WEIGHTS = {
    Scaled: lambda batch: torch.tensor(len(batch["x"])),
    bert: all_tokens,
    t5: all_tokens,
    llama: tokens,
    lora: tokens,
    gpt2: tokens,
    vit: all_tokens,
}


def scheduled(make: Make, mesh: dict[str, int], *steps: str) -> slapo.Schedule:
    """Apply named steps to a fresh model."""
    sch = slapo.create_schedule(make_model(make), mesh=mesh, example_inputs=make_batches(make, 1)[0])
    blocks = sch[BLOCKS[make]]
    if mesh.get("tp", 1) > 1:
        for layer in blocks:
            for name in ("gate_proj", "up_proj"):
                layer[f"mlp.{name}"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
            layer["mlp.down_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if "checkpoint" in steps:
        blocks[0].checkpoint()
        blocks[3].checkpoint()
    if "trace" in steps:
        blocks.trace()
    if "compile" in steps:
        blocks[1].compile(backend="aot_eager")
    if "loss" in steps:
        sch["lm_head"].linear_cross_entropy()
    if "cut" in steps:
        blocks[1].pipeline_split()
    if "cut in four" in steps:
        for number in range(3):
            blocks[number].pipeline_split()
    if "marks" in steps:
        blocks.fully_shard()
        blocks[2]["mlp"].fully_shard(reshard_after_forward=False)
    if "offload" in steps:
        blocks.fully_shard(offload=True)
    return sch


def share(sch: slapo.Schedule, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mesh = sch.mesh
    replicas = mesh.size("dp_replicate") * mesh.size("dp")
    place = mesh.rank("dp_replicate") * mesh.size("dp") + mesh.rank("dp")
    return {name: tensor.chunk(replicas)[place] for name, tensor in batch.items()}


Found = tuple[list[float], dict[str, torch.Tensor]]


def train(make: Make, mesh: dict[str, int], *steps: str, **options: Any) -> Found:
    """The norms of three steps, and the weights after them."""
    sch = scheduled(make, mesh, *steps)
    options = {"max_grad_norm": 0.5, "optimizer": adamw, "loss_weight": WEIGHTS[make], **options}
    engine = slapo.build(sch, data_parallel="fsdp", **options)
    assert all(sharded_over(parameter) for parameter in engine.module.parameters())
    norms = [float(engine.train_step(share(sch, batch)).grad_norm) for batch in make_batches(make)]
    engine.eval_step(share(sch, make_batches(make)[0]))
    assert all(sharded_over(parameter) for parameter in engine.module.parameters())
    engine.check_replicas()
    return norms, engine.state_dict()


def train_plain(make: Make) -> Found:
    model = make_model(make)
    optimizer, norms = adamw([one for one in model.parameters() if one.requires_grad]), []
    for batch in make_batches(make):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return norms, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(found: Found, expected: Found) -> None:
    tolerance = {"rtol": 2e-6, "atol": 2e-6}  # of models of transformers whose loss is in float32
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), **tolerance)
    assert list(found[1]) == list(expected[1])
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


HSDP = {"dp_replicate": 2, "dp": 2}
STAGES = {"pp": 2, "dp": 2}
Case = tuple[Make, dict[str, int], tuple[str, ...], dict[str, Any]]
CASES: dict[str, Case] = {
    "llama, dp 4": (llama, {"dp": 4}, ("checkpoint", "loss"), {}),
    "llama, dp 4, marks": (llama, {"dp": 4}, ("marks", "checkpoint"), {"accumulate": 2}),
    "llama, hsdp": (llama, HSDP, ("trace", "loss"), {"accumulate": 2}),
    "llama, dp x tp": (llama, {"dp": 2, "tp": 2}, ("checkpoint", "marks"), {}),
    "llama, stages": (llama, STAGES, ("cut", "checkpoint", "loss"), {}),
    "llama, zero bubble": (
        llama,
        STAGES,
        ("cut in four",),
        {"pipeline_schedule": "interleaved_zero_bubble", "microbatches": 4},
    ),
    "llama, offload": (llama, HSDP, ("offload",), {}),
    "bert, dp 4": (bert, {"dp": 4}, ("checkpoint",), {"reshard_after_forward": False}),
    "bert, ties over stages": (bert, STAGES, ("cut",), {"microbatches": 4, "pipeline_schedule": "gpipe"}),
    "ties and scales over stages": (Scaled, STAGES, ("cut",), {}),
    "bert, hsdp in stages": (bert, {"pp": 2, "dp_replicate": 2, "dp": 2}, ("cut", "checkpoint"), {}),
    "vit, stages": (vit, STAGES, ("cut",), {}),
    "vit, compiled": (vit, HSDP, ("compile",), {}),
    "gpt2, dp 4": (gpt2, {"dp": 4}, ("trace",), {"accumulate": 2}),
    "t5, hsdp": (t5, HSDP, (), {}),
    "lora, hsdp": (lora, {"dp_replicate": 2, "dp": 2, "tp": 1}, ("checkpoint",), {}),
}
WIDE = "bert, hsdp in stages"  # takes eight ranks
QUICK = ("llama, hsdp", "llama, dp x tp", "ties and scales over stages")


def all_of(names: list[str]) -> dict[str, Found]:
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        make, mesh, steps, options = CASES[name]
        found[name] = train(make, mesh, *steps, **options)
    return found


def compare(names: list[str]) -> None:
    ranks = run_ranks(all_of, names, world_size=math.prod(CASES[names[0]][1].values()), timeout=600)
    for name in names:
        expected = train_plain(CASES[name][0])
        for found in ranks:
            try:
                assert_same(found[name], expected)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def test_sharded_training_equals_one_process() -> None:
    compare(list(QUICK))


@pytest.mark.breadth
def test_more_sharded_models_equal_one_process() -> None:
    compare([name for name in CASES if name not in (*QUICK, WIDE)])
    compare([WIDE])


LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "dp": ({"dp": 4}, "ddp"),
    "fsdp": ({"dp": 4}, "fsdp"),
    "hsdp": (HSDP, "fsdp"),
    "tp": ({"tp": 4}, "ddp"),
    "fsdp x tp": ({"dp": 2, "tp": 2}, "fsdp"),
    "fsdp x pp": (STAGES, "fsdp"),
}


def resumed(names: list[str], directory: str) -> list[dict[str, torch.Tensor]]:
    """The weights after a step under each layout, which goes on where the one before saved."""
    warnings.simplefilter("ignore")
    states = []
    for number, name in enumerate(names):
        mesh, kind = LAYOUTS[name]
        sch = scheduled(llama, mesh, *(("cut",) if "pp" in mesh else ()))
        engine = slapo.build(sch, data_parallel=kind, optimizer=adamw, loss_weight=tokens)
        if number:
            engine.load(directory)
        engine.train_step(share(sch, make_batches(llama, len(names))[number]))
        engine.save(directory)
        states.append(engine.state_dict())
    return states


@pytest.mark.breadth
def test_checkpoints_resume_under_another_layout(tmp_path: Any) -> None:
    names = ["hsdp", "tp", "fsdp", "fsdp x pp", "dp", "fsdp x tp", "hsdp"]
    model = make_model(llama)
    optimizer, expected = adamw(model.parameters()), []
    for batch in make_batches(llama, len(names)):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        expected.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    for states in run_ranks(resumed, names, str(tmp_path), world_size=4, timeout=600):
        for name, state, other in zip(names, states, expected, strict=True):
            assert_same(([], state), ([], other)), name
    assert json.loads((newest(tmp_path) / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def by_hand(mesh: dict[str, int], *steps: str) -> Found:
    """Two steps in a loop by hand, each with the gradients of two batches; the norms, and the weights after them."""
    warnings.simplefilter("ignore")
    sch = scheduled(llama, mesh, *steps)
    engine = slapo.build(sch, data_parallel="fsdp", optimizer=adamw, max_grad_norm=0.5)
    norms, batches = [], full_labels(4)
    for number in range(0, 4, 2):
        for is_last, batch in zip((False, True), batches[number : number + 2], strict=True):
            if "cut" in steps:
                engine.torch.forward_backward(share(sch, batch))
                continue
            with contextlib.nullcontext() if is_last else engine.torch.no_sync():
                engine.torch.module(**share(sch, batch)).loss.backward()
            with torch.no_grad():
                engine.torch.module(**share(sch, batch))  # leaves full parameters without gradients
        norms.append(float(engine.torch.clip_gradients()))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return norms, engine.state_dict()


def full_labels(count: int) -> list[dict[str, torch.Tensor]]:
    """Batches whose samples have equal numbers of labels."""
    return [{**one, "labels": one["input_ids"].flip(1).clone()} for one in make_batches(llama, count)]


class Collectives(TorchDispatchMode):
    """Count the collectives of process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def collectives(kind: str) -> dict[str, int]:
    """Those of a second step, with checkpoints."""
    batches = [{name: one[:4] for name, one in batch.items()} for batch in make_batches(llama, 2)]
    if kind == "by hand":
        model = make_model(llama)
        for layer in model.model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
            torch_fully_shard(layer)
        torch_fully_shard(model)

        def step(batch: dict[str, torch.Tensor]) -> None:
            model(**batch).loss.backward()

    else:
        sch = scheduled(llama, {"dp": 2})
        sch["model.layers.*"].checkpoint()
        if kind == "fused head":
            sch["lm_head"].linear_cross_entropy(chunk=3)
        engine = slapo.build(sch, data_parallel="fsdp", optimizer=adamw)
        step = engine.train_step
    step(batches[0])
    with Collectives() as mode:
        step(batches[1])
    return dict(mode.counts)


def all_collectives() -> dict[str, dict[str, int]]:
    return {kind: collectives(kind) for kind in ("by hand", "scheduled", "fused head")}


def test_checkpoints_and_chunks_of_the_head_gather_no_more_than_by_hand() -> None:
    """Four blocks twice and the root once: its head is there for all chunks."""
    for found in run_ranks(all_collectives, world_size=2):
        assert sorted(found["by hand"].values()) == [5, 9]
        assert found["by hand"] == found["scheduled"] == found["fused head"]


@pytest.mark.parametrize(("mesh", "steps"), [({"dp": 2}, ()), (STAGES, ("cut",))], ids=str)
def test_loops_by_hand_equal_one_process(mesh: dict[str, int], steps: tuple[str, ...]) -> None:
    model = make_model(llama)
    optimizer, norms = adamw(model.parameters()), []
    batches = full_labels(4)
    for number in range(0, 4, 2):
        optimizer.zero_grad()
        for batch in batches[number : number + 2]:
            model(**batch).loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    for found in run_ranks(by_hand, mesh, *steps, world_size=2 * mesh.get("pp", 1), timeout=300):
        assert_same(found, (norms, model.state_dict()))
