"""Throughput of a scheduled model against the unscheduled one, under the same runtime and on the same ranks.

The unscheduled model is trained as the runtime's own documentation writes it - by torch's DistributedDataParallel,
``deepspeed.initialize``, or Megatron-core's DistributedDataParallel, optimizer and schedule - with replicas on all
ranks and transformers' own attention. The scheduled one runs one schedule file, the same for every target: every block
traced, attention replaced, and what lies between the products fused by named patterns; tensor parallelism and stages
where the mesh has them. Both see the same samples in a step.

On a CPU the model is small, and Megatron runs by the stand-in for CUDA that the tests have; on a GPU the model has a
billion parameters, and trains in bfloat16. Steps are taken in turn. A table shows losses and step times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dialect_models import ADAM, Setting, adamw, batch_of, make, schedule
from megatron_by_hand import Groups, Stage, train
from report import interleaved, ratio_of, ratio_of_medians, save

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

CLIP = 1.0
COMPARED = 3  # steps whose losses are compared before steps are timed
CLOSE = {"float32": 1e-4, "bfloat16": 2e-2}  # how far losses may be apart, relative

TARGETS = {"torch": "torch", "deepspeed": "deepspeed", "megatron": "megatron-core"}
"""And the packages of their runtimes."""

Step = Callable[[], float]


def megatron_config(setting: Setting) -> dict[str, Any]:
    """Fields of Megatron's ``OptimizerConfig``."""
    bf16 = setting.dtype == "bfloat16"
    precision = {"bf16": bf16, "params_dtype": getattr(torch, setting.dtype)}
    names = {"lr": "lr", "eps": "adam_eps", "weight_decay": "weight_decay"}
    return {"optimizer": "adam", "clip_grad": CLIP, **precision, **{names[key]: ADAM[key] for key in names}}


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

        from slapo_deepspeed.runtime import start

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
    if target == "megatron":
        return by_megatron(setting, run, batch)
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


def by_megatron(setting: Setting, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Step:
    """By hand, with groups beside those of the scheduled model."""
    groups, config = Groups(), megatron_config(setting)
    with groups:
        given = {"optimizer_config": config, "distributed": setting.zero > 0}
        train_step = train(Stage(model), [batch], lambda output: output.loss, **given)

    def step() -> float:
        with groups:
            loss = train_step()
        assert loss is not None
        return mean_over_ranks(loss)

    return step


def scheduled(setting: Setting, target: str, device: torch.device, document: str) -> Step:
    """The same model under the schedule file."""
    mesh = setting.sizes
    model = make(setting, device, attention="eager")
    if target != "deepspeed":  # which turns it by itself
        model = model.to(getattr(torch, setting.dtype))
    samples = setting.batch // mesh.get("dp", 1)
    micro_batches = setting.micro_batches if mesh.get("pp", 1) > 1 else 1
    example = batch_of(setting, device, 0, setting.batch // samples * micro_batches)
    sch = slapo.replay(model, document, mesh=mesh, example_inputs=example)
    given: dict[str, Any] = {"max_grad_norm": CLIP, "optimizer": adamw}
    if target == "deepspeed":
        given = {"config": deepspeed_config(setting, micro_batches, samples), "optimizer": adamw}
    elif target == "megatron":
        distributed = {"use_distributed_optimizer": setting.zero > 0}
        config = {**megatron_config(setting), **distributed}
        given = {"optimizer_config": config, "ddp_config": distributed, "microbatches": micro_batches}
    elif mesh.get("pp", 1) > 1:
        given |= {"pipeline_schedule": "1f1b", "microbatches": micro_batches}
    engine = slapo.build(sch, target=target, **given)
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
    if target == "megatron" and device.type == "cpu":
        from tests.support.cpu_megatron import install

        install()
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
        "seconds a step, scheduled": statistics.median(ours),
        "seconds a step, unscheduled": statistics.median(theirs),
        **ratio_of_medians(theirs, ours),
        "of pairs": ratio_of(theirs, ours),
    }


def main() -> None:
    """Measure every target on every mesh, compare the losses of the same file, print the table and keep it."""
    options = parsed()
    preload_modules(*("tests.support.cpu_megatron" if target == "megatron" else target for target in options.targets))
    rows = []
    for mesh in options.mesh:
        options.mesh = mesh
        setting = Setting(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Setting)})
        found = [measure(setting, target, options.pairs) for target in options.targets]
        print(*lines(setting, found), sep="\n", flush=True)
        rows += found
        for row in found:
            apart = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], found[0]["losses"], strict=True))
            assert apart <= CLOSE[setting.dtype], json.dumps([row["losses"] for row in found])
    if options.json or not options.small:
        gpu = {"gpu": torch.cuda.get_device_name()} if setting.device == "cuda" else {}
        versions = {package: version(package) for package in ("transformers", *map(TARGETS.get, options.targets))}
        file = Path(options.json) if options.json else None
        save(f"dialects_{setting.device}", rows, file=file, **versions, **gpu)


def lines(setting: Setting, rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table of one mesh: losses of the scheduled model, and steps of both."""
    yield f"\n{setting}\n"
    losses = [f"loss {number + 1}" for number in range(COMPARED)]
    yield "| " + " | ".join(["target", *losses, "scheduled", "unscheduled", "throughput", "95 %", "pairs"]) + " |"
    yield "|---" * (COMPARED + 6) + "|"
    for row in rows:
        low, high = row["interval_95"]
        spread = row["of pairs"]
        cells = [
            row["target"],
            *(f"{loss:.6f}" for loss in row["losses"]),
            f"{1000 * row['seconds a step, scheduled']:.0f} ms",
            f"{1000 * row['seconds a step, unscheduled']:.0f} ms",
            f"{row['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{spread['quartile_1']:.3f} to {spread['quartile_3']:.3f}",
        ]
        yield "| " + " | ".join(cells) + " |"


def parsed() -> argparse.Namespace:
    """What the command line asks for: by default a small model on a CPU, a large one on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--pairs", type=int, help="steps of each, in turn (default: 30; 15 on a CPU)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="two narrow layers: whether it runs at all; nothing kept")
    parser.add_argument("--json", metavar="FILE", help="write the results there instead of results/")
    Setting.add_options(parser)
    options = parser.parse_args()
    Setting.fill_in(options)
    options.pairs = options.pairs or (15 if options.device == "cpu" else 30)
    return options


if __name__ == "__main__":
    main()
