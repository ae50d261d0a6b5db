"""A training step of transformers' LLaMA: eager, compiled, by Liger's kernels and by schedules; parts of gpu.py."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from report import device_seconds, in_turn, ratio_of
from torch import nn

import slapo_core as slapo
import slapo_models
from slapo_tune.training import MemoryMeter

if TYPE_CHECKING:
    from gpu import Run

ALLOWED = 0.01
"""How far the first losses may be from those of eager, relative; in bfloat16, by steps that change them by more."""
COMPARED = 3
ROUNDS = 20
NOMINAL = {"NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA H200": 989.4e12}
"""Dense bfloat16 FLOP/s of the data sheets, by the device's name."""

Batch = Mapping[str, torch.Tensor]
Step = Callable[[], torch.Tensor]


def adamw(width: int) -> functools.partial[torch.optim.AdamW]:
    """By a rate with which the first steps move the loss by percents, at every width."""
    return functools.partial(torch.optim.AdamW, lr=0.1 / width, fused=True)


@dataclass(frozen=True)
class Size:
    """A LLaMA with one matrix for embeddings and head, and a batch.

    Args:
        layers: of the model.
        width: of the hidden states.
        heads: of queries.
        kv_heads: of keys and values.
        inner: width of the feed-forward.
        vocabulary: tokens of it.
        batch: sequences of a step.
        length: tokens of a sequence.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    batch: int
    length: int

    def model(self, attention: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The same weights at each call."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.length,
            tie_word_embeddings=True,
            use_cache=False,
        )
        torch.manual_seed(0)
        with torch.device(device):
            made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        return made.train()

    def inputs(self, device: torch.device) -> Batch:
        torch.manual_seed(1)
        ids = torch.randint(self.vocabulary, (self.batch, self.length), device=device)
        return {"input_ids": ids, "labels": ids}

    def flops(self, parameters: int) -> float:
        """Of a step: 6N a token for the products, 12 L h s for attention, of which causal masks save nothing here."""
        tokens = self.batch * self.length
        return tokens * (6.0 * parameters + 12.0 * self.layers * self.width * self.length)


LARGE = Size(16, 2048, 32, 8, 8192, 128_256, 2, 2048)
NARROW = Size(16, 1024, 16, 8, 4096, 128_256, 1, 512)
SMALL = Size(2, 64, 4, 2, 128, 256, 2, 16)


class UnavailableError(Exception):
    """Signal a variant that cannot run here; the message is the reason."""


# -- variants: each takes a model and gives its step -----------------------------------------------------------------


def eager(model: nn.Module, batch: Batch, compiler: str) -> Step:
    return _loop(model, model, batch)


def autocast(model: nn.Module, batch: Batch, compiler: str) -> Step:
    return _loop(model, model, batch, torch.autocast(batch["input_ids"].device.type, torch.bfloat16))


def whole(model: nn.Module, batch: Batch, compiler: str) -> Step:
    return _loop(torch.compile(model, backend=compiler), model, batch)


def whole_with_graphs(model: nn.Module, batch: Batch, compiler: str) -> Step:
    """By ``mode="reduce-overhead"``, which is inductor's."""
    mode: Any = {"mode": "reduce-overhead"} if compiler == "inductor" else {}
    step = _loop(torch.compile(model, backend=compiler, **mode), model, batch)

    def marked() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step()

    return marked


def liger(model: nn.Module, batch: Batch, compiler: str) -> Step:
    """Liger replaces names of transformers' module for the whole process: here they hold during its steps only."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise UnavailableError("liger-kernel is not installed")
    if batch["input_ids"].device.type == "cpu":
        raise UnavailableError("Liger's kernels need a GPU")
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    names = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")
    with mock.patch.multiple(modeling_llama, **{name: getattr(modeling_llama, name) for name in names}):
        apply_liger_kernel_to_llama(model=model)
        rotary = modeling_llama.apply_rotary_pos_emb
    step = _loop(model, model, batch)

    def patched() -> torch.Tensor:
        with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", rotary):
            return step()

    return patched


def scheduled(
    model: nn.Module,
    batch: Batch,
    compiler: str,
    *,
    kernels: bool = False,
    layers: bool = False,
    graphs: bool = False,
    **options: Any,
) -> Step:
    """Built for target ``"torch"``.

    Args:
        model: on its device.
        batch: likewise.
        compiler: of fused regions and layers.
        kernels: whether layers are traced, attention and norms replaced, rotary embeddings and SwiGLU fused.
        layers: whether each layer is compiled.
        graphs: whether each layer is launched as a CUDA graph.
        options: of ``build``.
    """
    sch = slapo.create_schedule(model, mesh={"tp": 1}, example_inputs=batch)
    blocks: Any = sch["model.layers.*"]
    if kernels:
        slapo_models.llama(sch, attention="fusion.causal_sdpa", compiler=compiler)
    if layers:
        blocks.compile(backend=compiler)
    if graphs:
        blocks.cudagraphify()
    engine = slapo.build(sch, target="torch", optimizer=adamw(model.config.hidden_size), **options)
    return lambda: engine.train_step(batch).loss


def _loop(
    call: Callable[..., Any],
    model: nn.Module,
    batch: Batch,
    precision: contextlib.AbstractContextManager[Any] | None = None,
) -> Step:
    lowered = precision or contextlib.nullcontext()
    optimizer = adamw(model.config.hidden_size)(model.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with lowered:
            loss: torch.Tensor = call(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


Variants = Mapping[str, tuple[str, Callable[[nn.Module, Batch, str], Step]]]
"""By name: the attention that the model is made with, and what makes the step."""

WITHOUT_GRAPHS: Variants = {
    "eager": ("sdpa", eager),
    "slapo, kernels": ("eager", functools.partial(scheduled, kernels=True)),
    "slapo, compiled layers": ("sdpa", functools.partial(scheduled, layers=True)),
    "Liger": ("sdpa", liger),
    "torch.compile": ("sdpa", whole),
}
WITH_GRAPHS: Variants = {
    "eager": ("sdpa", eager),
    "slapo, CUDA graphs": ("sdpa", functools.partial(scheduled, graphs=True)),
    "slapo, compiled layers": ("sdpa", functools.partial(scheduled, layers=True)),
    "slapo, compiled layers, CUDA graphs": ("sdpa", functools.partial(scheduled, layers=True, graphs=True)),
    "slapo, kernels": ("eager", functools.partial(scheduled, kernels=True)),
    "slapo, kernels, CUDA graphs": ("eager", functools.partial(scheduled, kernels=True, graphs=True)),
    "torch.compile, CUDA graphs": ("sdpa", whole_with_graphs),
}
MIXED: Variants = {
    "eager": ("sdpa", autocast),
    "slapo, bf16-mixed": ("sdpa", functools.partial(scheduled, precision="bf16-mixed")),
    "slapo, bf16-mixed, fsdp": (
        "sdpa",
        functools.partial(scheduled, precision="bf16-mixed", data_parallel="fsdp"),
    ),
}
"""In float32, computed in bfloat16; eager is plain torch.autocast."""


# -- parts -----------------------------------------------------------------------------------------------------------


def llama_1b(run: Run) -> None:
    """A billion parameters, sequences of 2,048 tokens: two, and four where the device has more than 100 GiB."""
    size = SMALL
    if not run.small:
        memory = torch.cuda.get_device_properties(run.device).total_memory
        size = replace(LARGE, batch=4 if memory > 100 * 2**30 else 2)
    compare(run, size, WITHOUT_GRAPHS)


def mixed_precision(run: Run) -> None:
    """A billion parameters in float32: three models with their moments are 45 GB, so that one sequence is left."""
    compare(run, SMALL if run.small else replace(LARGE, batch=1), MIXED, torch.float32)


def launch_bound(run: Run) -> None:
    """Half as wide, one sequence of 512 tokens: kernels shorter than their launches."""
    compare(run, SMALL if run.small else NARROW, WITH_GRAPHS)


def compare(run: Run, size: Size, variants: Variants, dtype: torch.dtype = torch.bfloat16) -> None:
    """Train every variant, in turn, as soon as there are two; the rows are kept after each round."""
    product = peak_flops(run)
    nominal = NOMINAL.get(run.setting["device"])
    batch = size.inputs(run.device)
    torch.compile(lambda x: x * 2, backend=run.compiler)(batch["input_ids"])  # starts what all compilations share
    run.facts.update(**vars(size), measured_flops=product, nominal_flops=nominal)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], float]] = {}
    rounds: list[dict[str, float]] = []

    def one_round() -> None:
        rounds.append(in_turn(steps, len(rounds)))
        for name in steps:
            rows[name].update(_figures(run.facts, rounds, name))
        run.keep(rows.values())

    for name, (attention, make_step) in variants.items():
        row = rows[name] = {"variant": name}
        try:
            steps[name] = _prepared(
                run, size, batch, functools.partial(size.model, attention, run.device, dtype), make_step, row
            )
            require_losses(row["losses"], rows["eager"]["losses"])
        except UnavailableError as why:
            row["failed"] = f"skipped: {why}"
        except Exception as error:  # noqa: BLE001 - is a result
            steps.pop(name, None)
            row["failed"] = run.failure(error)
        gc.collect()
        run.say(row)
        run.keep(rows.values())
        for _ in range(2 if name in steps and len(steps) > 1 else 0):
            one_round()
    if "eager" not in steps:
        raise RuntimeError(f"eager: {rows['eager']['failed']}")
    began, least = time.monotonic(), len(rounds)
    while len(rounds) < (least + 1 if run.small else ROUNDS):
        if run.left() < 2 * (time.monotonic() - began) / max(1, len(rounds) - least) + 1:
            break
        one_round()
    run.say(f"{len(rounds)} rounds")


def _prepared(
    run: Run,
    size: Size,
    batch: Batch,
    make_model: Callable[[], nn.Module],
    make_step: Callable[..., Step],
    row: dict[str, Any],
) -> Callable[[], float]:
    """Give what times the steps of a turn, after three of them; what these took is in the row.

    Gradients are dropped after each turn: the others need the memory.
    """
    held = torch.cuda.memory_allocated() if run.device.type == "cuda" else 0
    meter = MemoryMeter(str(run.device))
    with meter.measuring():
        model = make_model()
        run.facts.setdefault("parameters", sum(parameter.numel() for parameter in model.parameters()))
        run.facts.setdefault("flops_per_step", size.flops(run.facts["parameters"]))
        run.synchronize()
        with meter.steps():
            begin = time.perf_counter()
            step = make_step(model, batch, run.compiler)
            losses = [float(step())]
            row["first_step_seconds"] = time.perf_counter() - begin
            losses += [float(step()) for _ in range(COMPARED - 1)]
    row.update(losses=losses, peak_bytes=meter.peak - held)
    model.zero_grad(set_to_none=True)

    def turn() -> float:
        seconds = device_seconds(run.device, step, 1 if run.small else 3)
        model.zero_grad(set_to_none=True)
        return seconds

    return turn


def require_losses(losses: list[float], expected: list[float]) -> None:
    """Raise if they are not those of eager, of which each may be off by 1 %."""
    apart = [abs(one / other - 1) for one, other in zip(losses, expected, strict=True)]
    if not all(each <= ALLOWED for each in apart):  # also nan
        raise AssertionError(f"losses {losses} are off by {apart} of those of eager, {expected}")


def _figures(facts: Mapping[str, Any], rounds: list[dict[str, float]], name: str) -> dict[str, Any]:
    """Throughput, and its ratio to that of eager in the rounds that have both."""
    own = [each[name] for each in rounds if name in each]
    seconds = statistics.median(own)
    found: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_second": facts["batch"] * facts["length"] / seconds,
        "mfu_measured": facts["flops_per_step"] / seconds / facts["measured_flops"],
    }
    if facts["nominal_flops"]:
        found["mfu"] = facts["flops_per_step"] / seconds / facts["nominal_flops"]
    if len(own) > 1:
        found["against_eager"] = ratio_of([each["eager"] for each in rounds if name in each], own)
    return found


def peak_flops(run: Run) -> float:
    """FLOP/s of a bfloat16 product of square matrices."""
    rows = 128 if run.small else 8192
    a, b = (torch.randn(rows, rows, device=run.device).bfloat16() for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * rows**3 / min(device_seconds(run.device, lambda: a @ b, 10) for _ in range(3))
