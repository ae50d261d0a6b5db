"""What fusing by schedule gives: throughput, cold start and peak memory, against eager and whole-model compilation.

The model is the stack of blocks of a transformers model, forward and backward. On a CPU it is BERT-base, in float32 and
bfloat16; on a GPU, in bfloat16, a GPT and a LLaMA of a billion parameters with sequences of 2,048 tokens.

    eager      as its author wrote it, attention written out
    sdpa       the same with the attention that transformers takes by default
    whole      torch.compile of the stack
    scheduled  every layer traced; attention replaced, and what lies between the products fused, by named patterns
    regional   every layer compiled by itself

Throughput is measured in one process, in turn. Cold start - the first step less a later one, nothing cached on disk -
and peak memory are measured in a process of their own for each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from report import save
from rich.progress import Progress
from torch import nn

import slapo_core as slapo

HOWS = ("eager", "sdpa", "whole", "scheduled", "regional")
COMPILED = ("whole", "scheduled", "regional")
ALLOWED = {"throughput": 0.97, "cold start": 0.25}


@dataclass(frozen=True)
class Setting:
    """One line of the table.

    Args:
        model: ``"bert"``, ``"gpt"`` or ``"llama"``.
        dtype: of parameters and activations.
        layers: how many blocks.
        batch: sequences a step.
        length: tokens a sequence.
    """

    model: str
    dtype: str
    layers: int
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.model}, {self.layers} layers, {self.dtype}, batch {self.batch} x {self.length}"


ON_CPU = (Setting("bert", "float32", 12, 4, 128), Setting("bert", "bfloat16", 12, 4, 128))
ON_GPU = (Setting("gpt", "bfloat16", 24, 2, 2048), Setting("llama", "bfloat16", 22, 2, 2048))


class Blocks(nn.Module):
    """The blocks of a model, called as the model calls them."""

    def __init__(self, setting: Setting, attention: str) -> None:
        super().__init__()
        self.kind = setting.model
        if self.kind == "bert":
            from transformers import BertConfig
            from transformers.models.bert.modeling_bert import BertLayer

            # No dropout of attention weights: with it, torch has no fused attention on a CPU.
            config: Any = BertConfig(num_hidden_layers=setting.layers, attention_probs_dropout_prob=0.0)
            make: Callable[[int], nn.Module] = lambda index: BertLayer(config, layer_idx=index)  # noqa: E731
        elif self.kind == "gpt":
            from transformers import GPT2Config
            from transformers.models.gpt2.modeling_gpt2 import GPT2Block

            config = GPT2Config(n_embd=1792, n_layer=setting.layers, n_head=14, n_positions=setting.length)
            make = lambda index: GPT2Block(config, layer_idx=index)  # noqa: E731
        else:
            from transformers import LlamaConfig
            from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

            config = LlamaConfig(
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=setting.layers,
                num_attention_heads=16,
                num_key_value_heads=16,
                max_position_embeddings=setting.length,
            )
            make = lambda index: LlamaDecoderLayer(config, index)  # noqa: E731
            self.rotary = LlamaRotaryEmbedding(config)
        config._attn_implementation = attention
        self.width = config.hidden_size
        self.layer = nn.ModuleList(make(index) for index in range(setting.layers))
        mask = torch.full((setting.length, setting.length), torch.finfo(getattr(torch, setting.dtype)).min)
        self.register_buffer("mask", mask.triu(1)[None, None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more: dict[str, Any] = {} if self.kind == "bert" else {"attention_mask": self.mask}
        if self.kind == "llama":
            more["position_embeddings"] = self.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layer:
            out = layer(x, **more)
            x = out[0] if isinstance(out, tuple) else out
        return x


def schedule(sch: slapo.Schedule, kind: str, device: str) -> None:
    """Attention, and what lies between the products; on a CPU without GELU, where torch's own is as fast."""
    layers = sch["layer.*"]
    layers.trace(flatten=True)
    layers.replace(match="fusion.sdpa")
    for pattern in PATTERNS[kind]:
        if device == "cpu" and pattern == "fusion.bias_gelu":
            continue
        layers.fuse(pattern, name=pattern.partition(".")[2])


PATTERNS = {
    "bert": ("fusion.bias_gelu", "fusion.bias_dropout_add_norm"),
    "gpt": ("fusion.gelu_tanh",),
    "llama": ("fusion.rms_norm", "fusion.rotary", "fusion.swiglu"),
}


def step_of(how: str, setting: Setting, device: str) -> Callable[[], None]:
    """A training step without an optimizer."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Blocks(setting, "sdpa" if how in ("sdpa", "regional") else "eager")
        model = model.to(getattr(torch, setting.dtype)).train()
        x = torch.randn(setting.batch, setting.length, model.width, dtype=getattr(torch, setting.dtype))
    run: Callable[..., torch.Tensor] = model
    if how == "whole":
        run = torch.compile(model)
    elif how in ("scheduled", "regional"):
        sch = slapo.create_schedule(model, example_inputs=x)
        if how == "scheduled":
            schedule(sch, setting.model, device)
        else:
            sch["layer.*"].compile()
        sch.seal()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        run(x).float().square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def alone(how: str, setting: Setting, device: str) -> dict[str, float]:
    """In this process and nothing else: seconds of cold start, bytes at the peak."""
    begin = time.perf_counter()
    step = step_of(how, setting, device)
    made = time.perf_counter() - begin
    first = timed(step)
    later = min(timed(step) for _ in range(3))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = float(torch.cuda.max_memory_allocated())
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return {"cold start": first - later, "making": made, "peak": peak}


def in_a_process(how: str, setting: Setting, device: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        arguments = json.dumps({"how": how, "setting": vars(setting), "device": device})
        done = subprocess.run(
            [sys.executable, __file__, "--alone", arguments], env=environment, stdout=subprocess.PIPE, check=True
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def in_turn(setting: Setting, device: str, rounds: int, progress: Progress) -> dict[str, list[float]]:
    """Seconds a step of each, in turn; the order turns too."""
    steps = {how: step_of(how, setting, device) for how in HOWS}
    for step in steps.values():
        step()
        step()
    gc.collect()
    times: dict[str, list[float]] = {how: [] for how in HOWS}
    task = progress.add_task(f"{setting}: steps in turn", total=rounds)
    for number in range(rounds):
        shift = number % len(HOWS)
        for how in (*HOWS[shift:], *HOWS[:shift]):
            times[how].append(timed(steps[how]))
        progress.advance(task)
    return times


def measure(setting: Setting, device: str, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    task = progress.add_task(f"{setting}: processes of their own", total=len(HOWS))
    own = {}
    for how in HOWS:
        own[how] = in_a_process(how, setting, device)
        progress.advance(task)
    times = in_turn(setting, device, rounds, progress)
    best = min(("eager", "sdpa", "whole"), key=lambda how: statistics.median(times[how]))
    rows = []
    for how in HOWS:
        ratios = [b / a for a, b in zip(times[how], times[best], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "setting": str(setting),
                "how": how,
                "tokens a second": setting.batch * setting.length / statistics.median(times[how]),
                "throughput against the best": middle,
                "quartile_1": low,
                "quartile_3": high,
                "best": best,
                "rounds": rounds,
                "cold start in s": own[how]["cold start"],
                "cold start against whole": own[how]["cold start"] / own["whole"]["cold start"],
                "scheduling in s": own[how]["making"],
                "peak in GiB": own[how]["peak"] / 2**30,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each, in turn (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="two layers and short sequences: whether it runs at all")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        given = json.loads(options.alone)
        print(json.dumps(alone(given["how"], Setting(**given["setting"]), given["device"])))
        return
    settings = ON_CPU if options.device == "cpu" else ON_GPU
    if options.small:
        settings = tuple(Setting(kind, "float32", 2, 2, 16) for kind in PATTERNS)
    rows = []
    with Progress() as progress:
        for setting in settings:
            rows += measure(setting, options.device, options.rounds, progress)
    for row in rows:
        print(
            f"{row['setting']:<45} {row['how']:<10} {row['tokens a second']:9.0f} tokens/s"
            f"  {row['throughput against the best']:.3f} of {row['best']}"
            f" ({row['quartile_1']:.3f} to {row['quartile_3']:.3f})"
            f"  cold start {row['cold start in s']:6.1f} s = {row['cold start against whole']:.2f} of whole"
            f"  peak {row['peak in GiB']:.2f} GiB"
        )
    print(f"allowed for 'scheduled': throughput {ALLOWED['throughput']}, cold start {ALLOWED['cold start']} of 'whole'")
    if not options.small:
        save(f"fusion_{options.device}", rows)


if __name__ == "__main__":
    main()
