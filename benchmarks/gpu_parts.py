"""Fused regions, estimates beside what was measured, and the host time of traced layers; three parts of gpu.py."""

from __future__ import annotations

import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from report import device_seconds, in_turn, ratio_of
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import slapo_core as slapo
import slapo_models
from slapo_estimate.device_benchmark import measure_device
from slapo_testing import preload_modules
from slapo_tune.training import MemoryMeter

if TYPE_CHECKING:
    from gpu import Run

adamw = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)


# -- fused_regions: what lies between the products of a transformer's layer -------------------------------------------


class BiasGelu(nn.Module):
    """Of a feed-forward's first half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + self.bias)


class BiasDropoutAddNorm(nn.Module):
    """Between two halves of BERT's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias, self.norm, self.dropout = nn.Parameter(torch.zeros(width)), nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.norm(self.dropout(x + self.bias) + residual)


class SwiGlu(nn.Module):
    """Of LLaMA's feed-forward."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up


class Rotary(nn.Module):
    """As transformers' LLaMA has it, of queries and keys."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        return apply_rotary_pos_emb(query, key, cos, sin)


class Attention(nn.Module):
    """Written out, with a causal mask."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5 + mask
        return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), value)


class Alone(nn.Module):
    """A region below a root, as it is in a model."""

    def __init__(self, region: nn.Module) -> None:
        super().__init__()
        self.region = region

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.region(*inputs)


def region(name: str, width: int) -> nn.Module:
    if name == "fusion.rms_norm":
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        return Alone(LlamaRMSNorm(width))
    made: dict[str, Callable[[], nn.Module]] = {
        "fusion.bias_gelu": lambda: BiasGelu(width),
        "fusion.bias_dropout_add_norm": lambda: BiasDropoutAddNorm(width),
        "fusion.swiglu": SwiGlu,
        "fusion.rotary": Rotary,
        "fusion.sdpa": Attention,
    }
    return Alone(made[name]())


def region_inputs(name: str, batch: int, length: int, width: int, device: torch.device) -> list[torch.Tensor]:
    """In bfloat16; those of several axes that a layer computes require gradients."""
    make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    heads = (batch, width // 64, length, 64)
    if name == "fusion.sdpa":
        mask = torch.full((length, length), torch.finfo(torch.bfloat16).min, device=device, dtype=torch.bfloat16)
        return [*(make(heads).requires_grad_() for _ in range(3)), mask.triu(1)[None, None]]
    if name == "fusion.rotary":
        return [*(make(heads).requires_grad_() for _ in range(2)), *(make(batch, length, 64) for _ in range(2))]
    several = 2 if name in ("fusion.swiglu", "fusion.bias_dropout_add_norm") else 1
    return [make(batch, length, width).requires_grad_() for _ in range(several)]


REGIONS = {
    "fusion.bias_gelu": ("fuse",),
    "fusion.bias_dropout_add_norm": ("fuse",),
    "fusion.rms_norm": ("fuse", "replace"),
    "fusion.rotary": ("fuse",),
    "fusion.swiglu": ("fuse",),
    "fusion.sdpa": ("replace",),
}


def fused_regions(run: Run) -> None:
    """Forward and backward of each region: eager, by ``torch.compile``, and by each primitive that takes it."""
    batch, length, width = (1, 16, 128) if run.small else (4, 2048, 4096)
    run.facts.update(batch=batch, length=length, width=width, dtype="bfloat16")
    rows: list[dict[str, Any]] = []
    for name, primitives in REGIONS.items():
        inputs = region_inputs(name, batch // 2 or 1 if name == "fusion.sdpa" else batch, length, width, run.device)
        found: dict[str, dict[str, Any]] = {}
        steps: dict[str, Callable[[], None]] = {}
        expected: Any = None
        torch.compiler.reset()  # regions share the forward of their root, and torch.compile its limit of variants
        for variant in ("eager", "torch.compile", *primitives):
            found[variant] = {"region": name, "variant": variant}
            rows.append(found[variant])
            try:
                call, step = _region_step(run, name, variant, width, inputs)
                output = call()
                expected = output if expected is None else expected
                torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)
                step()
                steps[variant] = step
            except Exception as error:  # noqa: BLE001 - is a result
                found[variant]["failed"] = run.failure(error)
        rounds = []
        for number in range(3 if run.small else 20):
            measures = {way: functools.partial(device_seconds, run.device, step, 3) for way, step in steps.items()}
            rounds.append(in_turn(measures, number))
        for variant in steps:
            own = [each[variant] for each in rounds]
            found[variant]["seconds"] = statistics.median(own)
            if "eager" in steps:
                found[variant]["against_eager"] = ratio_of([each["eager"] for each in rounds], own)
        for row in found.values():
            run.say(row)
        run.keep(rows)


def _region_step(
    run: Run, name: str, variant: str, width: int, inputs: list[torch.Tensor]
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """A call without dropout, whose output all variants share, and a forward and backward."""
    torch.manual_seed(0)
    model = region(name, width).to(run.device, torch.bfloat16)
    call: Callable[..., Any] = model
    if variant == "torch.compile":
        call = torch.compile(model, backend=run.compiler)
    elif variant != "eager":
        sch = slapo.create_schedule(model, example_inputs=tuple(inputs))
        traced: Any = sch["region"].trace(flatten=True)
        traced.fuse(name, compiler=run.compiler) if variant == "fuse" else traced.replace(match=name)
        sch.seal()
    leaves = [each for each in (*inputs, *model.parameters()) if each.requires_grad]

    def without_dropout() -> Any:
        model.eval()
        with torch.no_grad():
            output = call(*inputs)
        model.train()
        return output

    gradients = tree_map(torch.ones_like, without_dropout())

    def step() -> None:
        torch.autograd.grad(call(*inputs), leaves, gradients)

    return without_dropout, step


# -- estimates: predicted beside measured, of twelve schedules --------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A schedule of a model and its batch.

    Args:
        family: ``"bert"``, ``"gpt"`` or ``"llama"``.
        how: ``"plain"``, ``"checkpoint"``, ``"traced"`` or ``"kernels"``.
        small: whether sizes are those of a CPU.
    """

    family: str
    how: str
    small: bool

    def model(self) -> nn.Module:
        """On the default device, in bfloat16."""
        import transformers

        width, layers = (64, 2) if self.small else (1024, 4)
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 32}
        sizes["vocab_size"] = self.vocabulary
        configs: dict[str, Callable[[], Any]] = {
            "bert": lambda: transformers.BertConfig(**sizes, intermediate_size=4 * width),
            "gpt": lambda: transformers.GPT2Config(
                **sizes, n_positions=512, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0
            ),
            "llama": lambda: transformers.LlamaConfig(**sizes, intermediate_size=3 * width, use_cache=False),
        }
        auto = transformers.AutoModelForMaskedLM if self.family == "bert" else transformers.AutoModelForCausalLM
        attention = "eager" if self.how == "kernels" else "sdpa"
        torch.manual_seed(0)
        made = auto.from_config(configs[self.family](), dtype=torch.bfloat16, attn_implementation=attention)
        return made.train()

    @property
    def vocabulary(self) -> int:
        return 256 if self.small else 32_000

    def inputs(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        ids = torch.randint(self.vocabulary, (2, 32) if self.small else (8, 512))
        return {"input_ids": ids, "labels": ids}


LAYERS = {"bert": "bert.encoder.layer.*", "gpt": "transformer.h.*", "llama": "model.layers.*"}
CASES = [(family, how) for how in ("plain", "checkpoint", "traced", "kernels") for family in LAYERS]


def schedule_case(sch: slapo.Schedule, case: Case, compiler: str) -> None:
    layers: Any = sch[LAYERS[case.family]]
    if case.how == "checkpoint":
        layers.checkpoint()
    elif case.how == "traced":
        layers.trace(flatten=True)
    elif case.how == "kernels":
        getattr(slapo_models, case.family)(sch, kernels=True, compiler=compiler)


def estimates(run: Run) -> None:
    """The peak of memory and the time of a step, before anything runs, and then both as they are."""
    spec = measure_device(dtypes=("bfloat16", "float32"), size=256 if run.small else None)
    run.facts["device_spec"] = spec.to_json()
    run.say(str(spec))
    preload_modules("slapo_models", "slapo_estimate.simulation")
    preload_modules(*(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama")))
    cases = [Case(*each, small=run.small) for each in CASES]
    rows: list[dict[str, Any]] = [{"model": case.family, "schedule": case.how} for case in cases]

    def predict(case: Case) -> slapo.Estimate | str:
        try:
            return slapo.estimate_functions(
                functools.partial(Case.model, case),
                schedule_case,
                case.inputs(),
                arguments=(case, run.compiler),
                mesh={"tp": 1},
                optimizer=adamw,
                device=spec,
            )
        except Exception as error:  # noqa: BLE001 - is a result
            return run.failure(error)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for row, found in zip(rows, pool.map(predict, cases), strict=True):
            if isinstance(found, str):
                row["failed"] = found
            else:
                row.update(predicted_bytes=found.memory.total, predicted_seconds=found.time)
            run.say(row)
            run.keep(rows)
    _library_memory(run)
    for row, case in zip(rows, cases, strict=True):
        try:
            row.update(_measured(run, case))
        except Exception as error:  # noqa: BLE001 - is a result
            row["failed"] = run.failure(error)
        gc.collect()
        run.say(row)
        run.keep(rows)


def _library_memory(run: Run) -> None:
    """Let cuBLAS take its workspace, of the forward's thread and of the backward's."""
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.ones(256, 256, device=run.device, dtype=dtype, requires_grad=True)
        (a @ a).sum().backward()


def _measured(run: Run, case: Case) -> dict[str, Any]:
    held = torch.cuda.memory_allocated() if run.device.type == "cuda" else 0
    meter = MemoryMeter(str(run.device))
    with meter.measuring():
        with run.device:
            model, batch = case.model(), case.inputs()
        sch = slapo.create_schedule(model, mesh={"tp": 1}, example_inputs=batch)
        schedule_case(sch, case, run.compiler)
        engine = slapo.build(sch, target="torch", optimizer=adamw)
        with meter.steps():
            for _ in range(2):
                engine.train_step(batch)
            run.synchronize()
    seconds = [device_seconds(run.device, lambda: engine.train_step(batch)) for _ in range(3 if run.small else 10)]
    return {"measured_bytes": meter.peak - held, "measured_seconds": statistics.median(seconds)}


# -- host_time: what a call of a traced layer costs the host ----------------------------------------------------------


def host_time(run: Run) -> None:
    """CPU time of the thread in a forward of one small layer, batch 1, traced against untraced."""
    rows = []
    calls, pairs = (5, 3) if run.small else (20, 30)
    for family, pattern in LAYERS.items():
        measures = {}
        for how in ("untraced", "traced", "traced, flatten"):
            case = Case(family, "plain", small=True)
            with run.device:
                model, batch = case.model(), {name: ids[:1] for name, ids in case.inputs().items()}
            layer, args, kwargs = _call_of(model, pattern.replace("*", "0"), batch)
            if how != "untraced":
                sch = slapo.create_schedule(model, example_inputs=batch)
                sch[pattern].trace(flatten=how == "traced, flatten")
                sch.seal()
            measures[how] = functools.partial(_host_seconds, run, layer, args, kwargs, calls)
            measures[how]()
        rounds = [in_turn(measures, number) for number in range(pairs)]
        for how in measures:
            own = [each[how] for each in rounds]
            row = {"model": family, "layer": how, "seconds": statistics.median(own)}
            rows.append({**row, "against_untraced": ratio_of(own, [each["untraced"] for each in rounds])})
            run.say(row)
        run.keep(rows)


def _call_of(model: nn.Module, path: str, batch: Mapping[str, torch.Tensor]) -> tuple[nn.Module, Any, Any]:
    """A layer, and the arguments that its model calls it with."""
    layer, seen = model.get_submodule(path), []

    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((args, kwargs))

    with torch.no_grad():
        handle = layer.register_forward_pre_hook(look, with_kwargs=True)
        model(**batch)
        handle.remove()
    return layer, *seen[0]


def _host_seconds(run: Run, layer: nn.Module, args: Any, kwargs: Any, calls: int) -> float:
    run.synchronize()
    begin = time.thread_time()
    for _ in range(calls):
        layer(*args, **kwargs)
    return (time.thread_time() - begin) / calls
