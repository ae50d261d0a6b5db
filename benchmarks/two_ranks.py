"""Tensor parallelism over two ranks with the loss from split logits: slapo's full schedules and what else does it.

Each system takes the same samples in turn, one thread a rank, gloo, and nothing is recomputed. All but the former
schedule keep logits split: Megatron-core's own layers by its ``vocab_parallel_cross_entropy``, DTensor by
``loss_parallel``. Losses are compared first; those of Megatron-core, which has other initial values, are not.

    python benchmarks/two_ranks.py                          # all; writes results/two_ranks.json
    python benchmarks/two_ranks.py --only llama --pairs 10  # one model, fewer steps; nothing is kept
    python benchmarks/two_ranks.py --minutes 5              # as many steps as fit, at most --pairs
    python benchmarks/two_ranks.py --profile llama          # where the time of a step goes, on rank 0
    python benchmarks/two_ranks.py --small                  # whether it runs
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dialect_models import adamw
from dialects import mean_over_ranks
from paper_models import STEPS, batch_of, make, schedule
from paper_systems import _PLANS, Step, megatron
from report import ratio_of_medians, save

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

MODELS = ("bert", "gpt", "llama", "opt")
CLOSE = 1e-4  # how far losses may be apart, of the first one: float32 sums in another order
COMPARED = 3
OPTIONS = {**(STEPS["+ shard embeddings"].options or {}), "checkpoint": 0.0}


def scheduled(name: str, size: str, compiler: str, *, gathered: bool = False) -> Step:
    """Train under slapo-models' schedule; ``gathered``: with all logits on every rank in the loss's place."""
    batch = batch_of(name, size)
    sch = slapo.create_schedule(make(name, size), mesh={"tp": dist.get_world_size()}, example_inputs=batch)
    schedule(sch, name, OPTIONS, compiler)
    if gathered:
        document = json.loads(sch.to_json())
        (loss,) = [each for each in document["records"] if each["primitive"] == "loss.linear_cross_entropy"]
        arguments = {"mode": "fwd_post", "op": "all_gather"}
        loss.update(primitive="tp.sync", arguments=arguments, distribution="slapo-tp")
        sch = slapo.replay(make(name, size), json.dumps(document), example_inputs=batch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was never verified")  # the losses are compared
        engine = slapo.build(sch, optimizer=adamw)
    return lambda: mean_over_ranks(engine.train_step(batch).loss)


def dtensor(name: str, size: str, compiler: str) -> Step:
    """Train with DTensor's ``parallelize_module``, embeddings and head included, under ``loss_parallel``."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model, ranks = make(name, size, None), dist.get_world_size()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    layers, first, second = _PLANS[name]
    plan: dict[str, Any] = {}
    for path, module in model.named_modules():
        for patterns, style in ((first, ColwiseParallel), (second, RowwiseParallel)):
            if any(fnmatchcase(path, f"{layers}.{pattern}") for pattern in patterns):
                plan[path] = style()
        if module is embeddings:
            plan[path] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        if module is head:
            plan[path] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    is_tied = head.weight is embeddings.weight
    parallelize_module(model, dist.init_device_mesh("cpu", (ranks,)), plan)
    if is_tied:
        head.weight = embeddings.weight
    for module in model.modules() if name == "opt" else ():  # forwards that count heads by themselves
        if isinstance(getattr(module, "num_heads", None), int):
            module.num_heads //= ranks  # type: ignore[operator, assignment]
    batch, optimizer = batch_of(name, size), adamw(model.parameters())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            loss = model(**batch).loss
            loss.backward()
        optimizer.step()
        return mean_over_ranks(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

    return step


OWN = "slapo-models"
SYSTEMS: dict[str, Callable[..., Step]] = {
    OWN: scheduled,
    "slapo-models, logits gathered": functools.partial(scheduled, gathered=True),
    "DTensor, loss_parallel": dtensor,
    "Megatron-core's layers": megatron,
}
"""Megatron-core comes last: the CPU shim changes methods of tensors."""


def measure(
    name: str, size: str, systems: Sequence[str], compiler: str, pairs: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Take steps of the systems in turn, on every rank.

    Returns:
        by system: ``losses``, ``seconds`` and ``cpu`` (seconds of processor time, mean of the ranks), or ``refused``,
        why it does not train the model.
    """
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for system in systems:
        try:
            step = SYSTEMS[system](name, size, compiler)
            found[system] = {"losses": [step() for _ in range(COMPARED)], "seconds": [], "cpu": []}
            steps[system] = step
        except Exception as error:  # noqa: BLE001 - a result, too
            found[system] = {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    begin = time.perf_counter()
    for number in range(pairs):
        order = list(steps)
        for system in (*order[number % len(order) :], *order[: number % len(order)]):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            steps[system]()
            found[system]["seconds"].append(time.perf_counter() - start)
            found[system]["cpu"].append(mean_over_ranks(torch.tensor(time.process_time() - cpu)))
        if mean_over_ranks(torch.tensor(time.perf_counter() - begin)) > seconds and number >= 4:
            break
    return found


def profile(name: str, size: str, systems: Sequence[str], compiler: str) -> dict[str, tuple[str, str]]:
    """Profile steps of each system: operators by their own time, and collectives."""
    from torch.profiler import ProfilerActivity, profile as profiled

    torch.set_num_threads(1)
    found = {}
    for system in systems:
        try:
            step = SYSTEMS[system](name, size, compiler)
        except NotImplementedError:
            continue
        for _ in range(COMPARED):
            step()
        with profiled(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(5):
                step()
        averages = seen.key_averages()
        total = sum(each.self_cpu_time_total for each in averages) / 5e3
        table = averages.table(sort_by="self_cpu_time_total", row_limit=28, max_name_column_width=60)
        found[system] = (f"{total:.1f} ms a step", table)
    return found


def summary(name: str, size: str, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Give a row for each system: its step, and the ratio of its step time to slapo-models'."""
    rows = []
    own = found[OWN]
    assert "refused" not in own, own["refused"]
    for system, result in found.items():
        row: dict[str, Any] = {"model": name, "size": size, "system": system}
        if "refused" in result:
            rows.append({**row, **result})
            continue
        row |= {"step_ms": 1e3 * statistics.median(result["seconds"])}
        quarters = statistics.quantiles(result["seconds"], n=4)
        row |= {"quartiles_ms": [1e3 * quarters[0], 1e3 * quarters[2]]}
        if system != OWN:
            row |= {f"{kind}_to_slapo": ratio_of_medians(result[kind], own[kind]) for kind in ("seconds", "cpu")}
        if system != "Megatron-core's layers":
            pairs = zip(result["losses"], own["losses"], strict=True)
            row["losses_apart"] = max(abs(a - b) for a, b in pairs) / abs(own["losses"][0])
        rows.append(row)
    return rows


def shown(row: dict[str, Any]) -> str:
    place = f"{row['model']:6} {row['size']:8} {row['system']:32}"
    if "refused" in row:
        return f"{place} {row['refused']}"
    said = f"{place} {row['step_ms']:7.1f} ms"
    for kind in ("seconds", "cpu"):
        ratio = row.get(f"{kind}_to_slapo")
        if ratio is not None:
            low, high = ratio["interval_95"]
            said += f"  {kind} {ratio['ratio']:.2f} ({low:.2f}, {high:.2f})"
    return said


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure what is asked for.

    Raises:
        AssertionError: the losses of two systems differ.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--sizes", nargs="+", default=["cpu", "cpu 32k"], help="of paper_models")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--pairs", type=int, default=30, help="steps of each system, in turn")
    parser.add_argument("--minutes", type=float, default=60.0, help="of steps, in all")
    parser.add_argument("--compiler", default="inductor", help="of fused regions")
    parser.add_argument("--profile", choices=MODELS, help="profile a model in place of all else")
    parser.add_argument("--small", action="store_true", help="tiny models, nothing compiled; nothing is kept")
    options = parser.parse_args(arguments)
    preload_modules("slapo_fusion", "slapo_models", "slapo_loss", "megatron.core", "torch._inductor.compile_fx")
    sizes = ["small"] if options.small else options.sizes
    compiler, pairs = ("eager", 5) if options.small else (options.compiler, options.pairs)
    systems = [system for system in SYSTEMS if system in options.systems]
    if options.profile:
        for size in sizes:
            given = (options.profile, size, systems, compiler)
            for system, (total, table) in run_ranks(profile, *given, world_size=2, timeout=900)[0].items():
                print(f"{options.profile}, {size}, {system}: {total}\n{table}")
        return []
    seconds = 60 * options.minutes / (len(options.only) * len(sizes))
    rows: list[dict[str, Any]] = []
    for name in options.only:
        for size in sizes:
            given = (name, size, systems, compiler, pairs, seconds)
            found = run_ranks(measure, *given, world_size=2, timeout=3600)[0]
            rows += summary(name, size, found)
            print("\n".join(shown(row) for row in rows[-len(found) :]), flush=True)
    if set(options.only) == set(MODELS) and set(systems) == set(SYSTEMS) and not options.small:
        save("two_ranks", rows, **{package: version(package) for package in ("transformers", "megatron-core")})
    wrong = [shown(row) for row in rows if row.get("losses_apart", 0) > CLOSE]
    assert not wrong, "\n".join(wrong)
    return rows


if __name__ == "__main__":
    main()
