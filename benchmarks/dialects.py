"""Throughput of a scheduled model against the unscheduled one, under the same runtime and on the same ranks.

The unscheduled model is trained as the runtime's own documentation writes it - DistributedDataParallel, or
``deepspeed.initialize`` - with replicas on all ranks and transformers' own attention. The scheduled one runs one
schedule file, the same for every target: every block traced, attention replaced, and what lies between the products
fused by named patterns; tensor parallelism and stages where the mesh has them. Both see the same samples in a step.

On a CPU the model is small; on a GPU it has a billion parameters, and trains in bfloat16. Steps are taken in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dialect_models import Setting, adamw, batch_of, make, schedule
from report import interleaved, ratio_of, ratio_of_medians, save

import slapo_core as slapo
from slapo_core.testing import preload_modules, run_ranks

CLIP = 1.0
COMPARED = 3  # steps whose losses are compared before steps are timed
CLOSE = {"float32": 1e-4, "bfloat16": 2e-2}  # how far losses may be apart, relative

Step = Callable[[], float]


def deepspeed_config(setting: Setting, micro_batches: int, samples: int) -> dict[str, Any]:
    """Of a replica that takes so many samples in a step."""
    return {
        "train_micro_batch_size_per_gpu": samples // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": min(setting.zero, 1) if setting.size("pp") > 1 else setting.zero},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": setting.dtype == "bfloat16"},
        "steps_per_print": 10**9,
    }


def unscheduled(setting: Setting, target: str, device: torch.device) -> Step:
    """The model as its author wrote it, by the runtime as it comes."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = make(setting, device, attention=setting.attention)
    batch = batch_of(setting, device, rank, ranks)
    samples = setting.batch // ranks
    if target == "deepspeed":
        import deepspeed

        from slapo_deepspeed.starting import start

        start(None)  # on a CPU, without compiling an operator for minutes
        config = deepspeed_config(dataclasses.replace(setting, mesh=""), 1, samples)
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

        def step() -> float:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            return mean_over_ranks(loss)

        return step
    run = model.to(getattr(torch, setting.dtype))
    if ranks > 1:
        run = torch.nn.parallel.DistributedDataParallel(run, device_ids=None if device.type == "cpu" else [device])
    optimizer = adamw(model.parameters())

    def torch_step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = run(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return mean_over_ranks(loss)

    return torch_step


def scheduled(setting: Setting, target: str, device: torch.device, document: str) -> Step:
    """The same model under the schedule file."""
    mesh = setting.sizes
    model = make(setting, device, attention="eager")
    if target == "torch":
        model = model.to(getattr(torch, setting.dtype))
    samples = setting.batch // mesh.get("dp", 1)
    micro_batches = setting.micro_batches if mesh.get("pp", 1) > 1 else 1
    example = batch_of(setting, device, 0, setting.batch // samples * micro_batches)
    sch = slapo.replay(model, document, mesh=mesh, example_inputs=example)
    given: dict[str, Any] = {"max_grad_norm": CLIP}
    if target == "deepspeed":
        given = {"config": deepspeed_config(setting, micro_batches, samples)}
    elif mesh.get("pp", 1) > 1:
        given |= {"pipeline_schedule": "1f1b", "microbatches": micro_batches}
    engine = slapo.build(sch, target=target, optimizer=adamw, **given)
    assert sch.mesh is not None
    replicas = sch.mesh.size("dp")
    batch = batch_of(setting, device, sch.mesh.rank("dp"), replicas)
    return lambda: mean_over_ranks(engine.train_step(batch).loss)


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The ranks of a replica have the same, so that it is the mean over replicas."""
    total = loss.detach().float().clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def schedule_file(setting: Setting) -> str:
    """What is replayed under every target, as JSON."""
    device = device_of(setting)
    example = batch_of(setting, device, 0, setting.batch)
    sch = slapo.create_schedule(make(setting, device, attention="eager"), mesh=setting.sizes, example_inputs=example)
    schedule(sch, setting)
    return sch.to_json()


def device_of(setting: Setting) -> torch.device:
    if setting.device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(dist.get_rank())
    return torch.device("cuda", dist.get_rank())


def compare(setting: Setting, target: str, pairs: int) -> dict[str, Any]:
    """On every rank: the losses of both, and seconds of their steps in turn."""
    torch.set_num_threads(1)
    device = device_of(setting)
    as_it_is = unscheduled(setting, target, device)
    by_schedule = scheduled(setting, target, device, schedule_file(setting))
    losses = [(by_schedule(), as_it_is()) for _ in range(COMPARED)]
    for ours, plain in losses:
        assert abs(ours - plain) <= CLOSE[setting.dtype] * abs(plain), (target, losses)
    ours, theirs = interleaved(by_schedule, as_it_is, pairs=pairs, clock=time.perf_counter)
    return {"losses": [first for first, _ in losses], "scheduled": ours, "unscheduled": theirs}


def measure(setting: Setting, target: str, pairs: int) -> dict[str, Any]:
    """One line of the table; ratios are of throughputs: above 1, the scheduled model is faster."""
    backend = "gloo" if setting.device == "cpu" else "nccl"
    found = run_ranks(compare, setting, target, pairs, world_size=setting.ranks, backend=backend, timeout=3600)[0]
    ours, theirs = found["scheduled"], found["unscheduled"]
    return {
        "target": target,
        "setting": dataclasses.asdict(setting),
        "losses": found["losses"],
        "samples a second, scheduled": setting.batch / statistics.median(ours),
        "samples a second, unscheduled": setting.batch / statistics.median(theirs),
        **ratio_of_medians(theirs, ours),
        "of pairs": ratio_of(theirs, ours),
    }


def main() -> None:
    """Measure every target, compare their losses with each other, print it and keep it."""
    options = parsed()
    setting = Setting(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Setting)})
    preload_modules(*options.targets)
    rows = []
    for target in options.targets:
        row = measure(setting, target, options.pairs)
        rows.append(row)
        low, high = row["interval_95"]
        spread = row["of pairs"]
        print(
            f"{target:<10} {setting}: {row['samples a second, scheduled']:.1f} samples a second scheduled, "
            f"{row['samples a second, unscheduled']:.1f} unscheduled: ratio {row['ratio']:.3f} (95 %: {low:.3f} to "
            f"{high:.3f}; pairs {spread['quartile_1']:.3f} to {spread['quartile_3']:.3f})",
            flush=True,
        )
    first, *others = rows
    for row in others:
        apart = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], first["losses"], strict=True))
        print(
            f"losses of {COMPARED} steps of the same schedule file, {row['target']} against {first['target']}: "
            f"{apart:.1e} apart ({row['losses'][0]:.6f} to {row['losses'][-1]:.6f}), allowed {CLOSE[setting.dtype]:.0e}"
        )
        assert apart <= CLOSE[setting.dtype], json.dumps([row["losses"] for row in rows])
    if options.json or not options.small:
        gpu = {"gpu": torch.cuda.get_device_name()} if setting.device == "cuda" else {}
        versions = {name: version(name) for name in ("transformers", "deepspeed")}
        file = Path(options.json) if options.json else None
        save(f"dialects_{setting.device}", rows, file=file, **versions, **gpu)


def parsed() -> argparse.Namespace:
    """What the command line asks for: by default a small model on a CPU, a large one on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["torch", "deepspeed"], choices=("torch", "deepspeed"))
    parser.add_argument("--pairs", type=int, default=30, help="steps of each, in turn (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="two narrow layers: whether it runs at all; nothing kept")
    parser.add_argument("--json", metavar="FILE", help="write the results there instead of results/")
    Setting.add_options(parser)
    options = parser.parse_args()
    Setting.fill_in(options)
    return options


if __name__ == "__main__":
    main()
