"""Target "megatron" on one GPU, by Megatron-core as it is: does it train, and as target "torch" does?

The same GPT under both targets, in one process, in float32, by Megatron's plain and by its distributed optimizer; and
in bfloat16 by the distributed one, against a loop in PyTorch that keeps masters in float32. Compared are the losses of
every step, and all weights after the last one. It says which Adam Megatron takes: Transformer Engine's, Apex's or
torch's. ``--small`` runs it on a CPU, by the stand-in for CUDA that the tests have; nothing is kept.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dialect_models import Setting, batch_of, make
from report import save
from torch import nn

import slapo_core as slapo

ADAM = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0}  # so large an epsilon that rounded zeros are no steps
CLIP = 1.0
SIZES = {"layers": 12, "width": 1024, "heads": 16, "batch": 8, "length": 512, "vocabulary": 8192}
SMALL = {"layers": 2, "width": 32, "heads": 2, "batch": 4, "length": 16, "vocabulary": 128}
ALLOWED = {"float32": (2e-5, 2e-4), "bfloat16": (5e-3, 2e-2)}
"""How far losses may be apart, relative; and weights, relative to the largest element of each tensor."""

WAYS = (("float32", False), ("float32", True), ("bfloat16", True))

Step = Callable[[], float]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **ADAM)


def by_megatron(setting: Setting, device: torch.device, distributed: bool) -> tuple[Step, Any]:
    """A step, and the engine."""
    batch = batch_of(setting, device, 0, 1)
    dtype = getattr(torch, setting.dtype)
    sch = slapo.create_schedule(make(setting, device, setting.attention), example_inputs=batch)
    engine = slapo.build(
        sch,
        target="megatron",
        optimizer_config={
            "lr": ADAM["lr"],
            "adam_eps": ADAM["eps"],
            "weight_decay": ADAM["weight_decay"],
            "clip_grad": CLIP,
            "bf16": dtype is torch.bfloat16,
            "params_dtype": dtype,
            "use_distributed_optimizer": distributed,
        },
        ddp_config={"use_distributed_optimizer": distributed},
    )
    return lambda: engine.train_step(batch).loss.item(), engine


def by_torch(setting: Setting, device: torch.device) -> tuple[Step, Any]:
    """The same by target "torch"."""
    batch = batch_of(setting, device, 0, 1)
    sch = slapo.create_schedule(make(setting, device, setting.attention), example_inputs=batch)
    engine = slapo.build(sch, target="torch", optimizer=adamw, max_grad_norm=CLIP)
    return lambda: engine.train_step(batch).loss.item(), engine


def with_masters(setting: Setting, device: torch.device) -> tuple[Step, Any]:
    """Gradients in bfloat16, everything else of the optimizer in float32: what Megatron does, in PyTorch alone."""
    batch = batch_of(setting, device, 0, 1)
    model = make(setting, device, setting.attention).to(torch.bfloat16)
    masters = [nn.Parameter(one.detach().float()) for one in model.parameters()]  # of what is rounded, as Megatron's
    optimizer = adamw(masters)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(**batch).loss
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        return loss.item()

    state = {name: master for (name, _), master in zip(model.named_parameters(), masters, strict=True)}
    return step, SimpleNamespace(state_dict=lambda: state, close=lambda: None)


def compare(setting: Setting, device: torch.device, distributed: bool, steps: int) -> dict[str, Any]:
    """Both in turn; on the same samples in every step."""
    ours, engine = by_megatron(setting, device, distributed)
    theirs, other = (by_torch if setting.dtype == "float32" else with_masters)(setting, device)
    losses: list[tuple[float, float]] = []
    seconds: list[tuple[float, float]] = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = ours()
        between = time.perf_counter()
        losses.append((loss, theirs()))
        seconds.append((between - start, time.perf_counter() - between))
    assert losses[-1][0] < losses[0][0], f"it does not train: {losses}"
    state, wanted = engine.state_dict(), other.state_dict()
    weights = max(
        float((state[name].float() - tensor.float()).abs().max() / tensor.float().abs().max().clamp_min(ADAM["lr"]))
        for name, tensor in wanted.items()
    )
    apart = max(abs(a - b) / abs(b) for a, b in losses)
    allowed = ALLOWED[setting.dtype]
    assert apart <= allowed[0], (apart, allowed, losses)
    assert weights <= allowed[1], (weights, allowed)
    (chained, *_) = engine.megatron.optimizer.chained_optimizers
    inner = type(chained.optimizer)
    row = {
        "dtype": setting.dtype,
        "optimizer": "distributed" if distributed else "plain",
        "adam": f"{inner.__module__}.{inner.__qualname__}",
        "steps": steps,
        "first_loss": losses[0][0],
        "last_loss": losses[-1][0],
        "losses_apart": apart,
        "weights_apart": weights,
        "allowed": allowed,
        "seconds_megatron": statistics.median(one for one, _ in seconds[2:]),
        "seconds_torch": statistics.median(one for _, one in seconds[2:]),
    }
    engine.close()
    other.close()
    return row


def main() -> None:
    """Every way to run; the table is printed, and kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU: whether it runs at all")
    options = parser.parse_args()
    if options.small:
        from tests.support.cpu_megatron import install

        install()
        device = torch.device("cpu")
    elif torch.cuda.is_available():
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    else:
        parser.error("no GPU is here; --small tries the same on the CPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    print("| dtype | optimizer | Adam | first loss | last loss | losses apart | weights apart | Megatron | torch |")
    print("|---|---|---|---|---|---|---|---|---|")
    for dtype, distributed in WAYS:
        given = {"model": "gpt", "dtype": dtype, "mesh": "dp 1", "zero": int(distributed), "micro_batches": 1}
        rest = {"checkpoint": 0, "attention": "sdpa", "compiler": "eager", "device": device.type}
        setting = Setting(**(SMALL if options.small else SIZES), **given, **rest)
        row = compare(setting, device, distributed, options.steps)
        rows.append(row)
        print(
            f"| {dtype} | {row['optimizer']} | {row['adam']} | {row['first_loss']:.6f} | {row['last_loss']:.6f} | "
            f"{row['losses_apart']:.1e} | {row['weights_apart']:.1e} | {1000 * row['seconds_megatron']:.0f} ms | "
            f"{1000 * row['seconds_torch']:.0f} ms |",
            flush=True,
        )
    if not options.small:
        versions = {"megatron-core": version("megatron-core"), "transformers": version("transformers")}
        save("megatron_gpu", rows, **versions, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
