"""The paper's evaluation again: seven models, each with the steps of its ablation, predicted, trained and compared.

Predicted are step time, memory and traffic at the paper's sizes on its machines, by the roofline (``slapo.estimate``).
Trained are smaller models on this machine's ranks (gloo): each step of the ablation against the unscheduled model,
DistributedDataParallel, DTensor's ``parallelize_module``, DeepSpeed, and Megatron-core's own layers. All take the same
samples, steps are taken in turn, and their losses are compared.

    python benchmarks/paper.py                        # the rest of results/paper.json; writes docs/results/paper.md
    python benchmarks/paper.py --only llama --again   # one model, measured again
    python benchmarks/paper.py --parts predicted      # without training: may run on a busy machine
    python benchmarks/paper.py --small                # tiny models, two rounds: whether it runs; nothing is kept

Every part is written when it is done, so that it can be stopped at any time, and goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paper_systems
from paper_models import MODELS, STEPS, batch_of, loss_of, make, schedule, schedule_lines
from report import RESULTS, ratio_of_medians, save

import slapo_core as slapo
from slapo_estimate.device import DeviceSpec, Link
from slapo_testing import preload_modules, run_ranks

RESULT = RESULTS / "paper.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "paper.md"
CLOSE = 1e-4  # how far losses may be apart, of the first one: float32 sums in another order
MICROBATCHES = 4

V100 = DeviceSpec(
    "p3dn.24xlarge: 8 NVIDIA V100 SXM2 32GB (data sheet)",
    {"float16": 125e12, "float32": 15.7e12},
    bandwidth=900e9,
    launch=5e-6,
    memory=32 * 10**9,
    links={"tp": Link(150e9, 1e-5), "*": Link(12.5e9 / 8, 2e-5)},
    type="cuda",
)
"""The paper's machine: 300 GB/s of NVLink a GPU, half of it in one direction; 100 Gbit/s between nodes for 8 GPUs.

Source: paper, evaluation, setups; NVIDIA V100 data sheet (2018). Launch and latencies are usual values.
"""

TRAINED = {"ALONE": 1, "TOGETHER": 2, "BESIDE_MEGATRON": 2}
"""Tables of paper_systems, and on how many ranks they are trained."""

BASES = {
    "ALONE": "unscheduled",
    "TOGETHER": "DistributedDataParallel",
    "BESIDE_MEGATRON": "Megatron-core's layers, tp 2",
}
"""What the others of a table are compared with."""

NORMALIZES_BY_REPLICA = ("DistributedDataParallel", "DeepSpeed", "dp 2", "pp 2")
"""Where a batch norm sees a part of the samples, so that losses of a model that has some are others."""

adamw = functools.partial(torch.optim.AdamW, lr=1e-4)
Document = dict[str, dict[str, Any]]
"""Of each model, what is known of each part."""


def predicted(name: str, step: str, size: str) -> dict[str, Any]:
    """Seconds, bytes and traffic of a training step on the paper's machine."""
    mesh = dict(STEPS[step].machine)
    if size == "small":
        mesh = {dim: min(ranks, 2) for dim, ranks in mesh.items()}
    dtype = torch.float32 if name == "wide_resnet" else torch.float16
    pipeline = {"microbatches": MICROBATCHES, "pipeline_schedule": "1f1b"} if "pp" in mesh else {}
    found = slapo.estimate_functions(
        functools.partial(make, name, size, dtype=dtype),
        schedule,
        batch_of(name, size, dtype=dtype),
        arguments=(name, STEPS[step].options),
        mesh=mesh,
        optimizer=adamw,
        loss=loss_of(name),
        device=V100,
        **pipeline,
    )
    traffic = max(sum(one.bytes for one in kind.collectives) for kind in found.kinds)
    return {"mesh": mesh, "seconds": found.time, "memory": found.memory.total, "traffic": traffic}


def trained(name: str, systems: str, size: str, compiler: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Losses and seconds of every system of a table."""
    ranks = TRAINED[systems]
    given = (name, size, systems, compiler, rounds)
    return run_ranks(paper_systems.measure, *given, world_size=ranks, timeout=3600)[0]  # type: ignore[no-any-return]


def wrong_losses(known: Document) -> Iterator[str]:
    """Systems whose losses are not those of the unscheduled model on one rank."""
    for name, parts in known.items():
        for systems, system, result in _results(parts):
            apart = difference(name, parts, systems, system)
            if "refused" not in result and apart is not None and apart > CLOSE:
                yield f"{name}, {system}: losses {result['losses']} differ by {apart:.1e} of the first"


def difference(name: str, parts: Mapping[str, Any], systems: str, system: str) -> float | None:
    """The largest one of a system's losses, of the first loss; None where there is nothing to compare with."""
    other = name == "wide_resnet" and any(each in system for each in NORMALIZES_BY_REPLICA)
    if "ALONE" not in parts or system == BASES["BESIDE_MEGATRON"] or other:
        return None
    expected = parts["ALONE"][BASES["ALONE"]]["losses"]
    losses = parts[systems][system].get("losses")
    return losses and max(abs(a - b) for a, b in zip(losses, expected, strict=True)) / abs(expected[0])  # type: ignore[no-any-return]


def _results(parts: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for systems in TRAINED:
        for system, result in parts.get(systems, {}).items():
            yield systems, system, result


# -- the page ---------------------------------------------------------------------------------------------------


def page(known: Document) -> str:
    """docs/results/paper.md, of what is known."""
    sections = ("The paper's evaluation", _INTRODUCTION, *_lines(), *_predictions(known), *_measurements(known))
    return "# " + "\n\n".join(section.strip() for section in sections) + "\n"


_INTRODUCTION = """
<!-- Made by benchmarks/paper.py of benchmarks/results/paper.json; change these instead. -->

The seven models of the paper's evaluation, under the schedules of `slapo-models`, with the steps of its ablation:
vanilla, + kernels, + checkpoint (half of the layers), + shard layers, + shard embeddings, + pipeline. Each step has all
those before it. A `-` stands for what was not measured yet.
"""


def _lines() -> Iterator[str]:
    yield "## Lines of schedule"
    yield (
        "Lines of statements as `ruff format` has them, without headers of loops and branches and without docstrings; "
        "helpers count. The paper's are those of its table."
    )
    lines = schedule_lines()
    yield _table(
        ["model", "schedule", "lines", "paper"],
        [[model.title, f"`slapo_models.{name}`", lines[name], model.lines] for name, model in MODELS.items()],
    )


def _predictions(known: Document) -> Iterator[str]:
    yield "## Predicted on the paper's machines"
    yield (
        f"{V100.name}, by the roofline of [estimates](../how/estimates.md): what a step cannot take less than, at peak "
        "rates; fused regions count as their operations. Parameters, gradients and AdamW's state are float16 "
        "(WideResNet: float32). Every step of the ablation takes 8 samples, so that times can be compared; that less "
        "memory allows a larger batch is not in them. `speed` is against vanilla on one GPU. Traffic is what a rank "
        "gives to collectives and messages in a step. *Too much* is more memory than a GPU has. With stages there are "
        f"{MICROBATCHES} micro-batches, and 1F1B."
    )
    rows = []
    for name, model in MODELS.items():
        parts = known.get(name, {})
        vanilla = parts.get("predicted vanilla")
        for step in STEPS:
            found = parts.get(f"predicted {step}")
            cells: list[Any] = ["-"] * 5
            if found is not None:
                mesh = ", ".join(f"{dim} {ranks}" for dim, ranks in found["mesh"].items() if ranks > 1)
                speed = vanilla["seconds"] / found["seconds"] if vanilla else None
                cells = [
                    mesh or "1 GPU",
                    f"{1000 * found['seconds']:.1f} ms",
                    "-" if speed is None else f"{speed:.2f}",
                    f"{found['memory'] / 2**30:.1f} GiB" + (" (too much)" if found["memory"] > V100.memory else ""),
                    f"{found['traffic'] / 1e6:.0f} MB",
                ]
            rows.append([model.title if step == "vanilla" else "", step, *cells])
    yield _table(["model", "step", "mesh", "step time", "speed", "memory", "traffic"], rows)


def _measurements(known: Document) -> Iterator[str]:
    yield "## Measured on the ranks of one machine"
    yield (
        "Four layers of width 256, 8 samples of 128 tokens, float32, AdamW; one thread a rank, gloo. A ratio is of "
        "throughputs: above 1, the system is faster than the first of its table; in brackets where 95 % of it lie. "
        "`losses` is how far the first three are from those of the unscheduled model on one rank, relative to its "
        "first. Where a batch norm sees the samples of one replica or micro-batch only, losses are not compared. "
        "Beside Megatron-core's own model nothing is recomputed; both compute their loss from split logits."
    )
    titles = {
        "ALONE": "One rank",
        "TOGETHER": "Two ranks: replicas, tensor parallelism, stages",
        "BESIDE_MEGATRON": "Two tensor-parallel ranks against Megatron-core's own layers",
    }
    for systems in TRAINED:
        yield f"### {titles[systems]}"
        rows: list[list[Any]] = []
        for name, model in MODELS.items():
            found = known.get(name, {}).get(systems, {})
            title = model.title
            for system in sorted(found, key=lambda system: system != BASES[systems]):
                rows.append([title, system, *_measured(name, known[name], systems, system)])
                title = ""
            if not found:
                rows.append([title, "-", "-", "-", "-"])
        yield _table(["model", "system", "step", "throughput", "losses"], rows)


def _measured(name: str, parts: Mapping[str, Any], systems: str, system: str) -> list[str]:
    found = parts[systems]
    if "refused" in found[system]:
        return [f"does not run: {found[system]['refused']}".replace("|", "\\|"), "-", "-"]
    own, base = found[system]["seconds"], found[BASES[systems]].get("seconds")
    apart = difference(name, parts, systems, system)
    ratio = "-"
    if base and system != BASES[systems]:
        of = ratio_of_medians(base, own)
        ratio = f"{of['ratio']:.2f} ({of['interval_95'][0]:.2f} to {of['interval_95'][1]:.2f})"
    return [f"{1000 * statistics.median(own):.0f} ms", ratio, "-" if apart is None else f"{apart:.0e}"]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# -- the command ------------------------------------------------------------------------------------------------


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS), help="models (default: all)")
    parser.add_argument("--parts", nargs="+", default=["predicted", *TRAINED], choices=["predicted", *TRAINED])
    parser.add_argument("--rounds", type=int, help="steps of each system, in turn (default: 20)")
    parser.add_argument("--again", action="store_true", help="also what is known")
    parser.add_argument("--page", action="store_true", help="only write docs/results/paper.md, of what is known")
    parser.add_argument("--small", action="store_true", help="tiny models, nothing compiled; nothing is kept")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.small else 20)
    return options


def main(arguments: Sequence[str] | None = None) -> Document:
    """Do what is asked for and not known, keep it and write the page.

    Raises:
        AssertionError: losses differ from those of the unscheduled model.
    """
    options = parsed(arguments)
    known: Document = {}
    if not options.small and RESULT.exists():
        known = {row.pop("model"): row for row in json.loads(RESULT.read_text())["rows"]}
    if not options.page:
        preload_modules("deepspeed", "slapo_fusion", "slapo_models", "slapo_pipeline", "megatron.core")
        preload_modules("torch._inductor.compile_fx", "torch._dynamo")
    for name in () if options.page else options.only:
        parts = known.setdefault(name, {})
        for part, result in _asked_for(options, name, parts):
            parts[part] = result
            print(name, part, _summary(part, result), flush=True)
            if not options.small:
                rows = [{"model": each, **known[each]} for each in MODELS if each in known]
                packages = ("transformers", "deepspeed", "megatron-core")
                save("paper", rows, **{package: version(package) for package in packages})
    if not options.small:
        PAGE.write_text(page(known))
    wrong = list(wrong_losses(known))
    assert not wrong, "\n".join(wrong)
    return known


def _asked_for(options: argparse.Namespace, name: str, parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    size = "small" if options.small else "paper"
    for step in STEPS if "predicted" in options.parts else ():
        if options.again or f"predicted {step}" not in parts:
            yield f"predicted {step}", predicted(name, step, size)
    size, compiler = ("small", "eager") if options.small else ("cpu", "inductor")
    for systems in TRAINED:
        if systems in options.parts and (options.again or systems not in parts):
            yield systems, trained(name, systems, size, compiler, options.rounds)


def _summary(part: str, result: Mapping[str, Any]) -> str:
    if part.startswith("predicted"):
        return (
            f"{1000 * result['seconds']:.2f} ms, {result['memory'] / 2**30:.2f} GiB, {result['traffic'] / 1e6:.1f} MB"
        )
    return "".join(
        f"\n    {system}: "
        + (found.get("refused") or f"{1000 * statistics.median(found['seconds']):.1f} ms, losses {found['losses']}")
        for system, found in result.items()
    )


if __name__ == "__main__":
    main()
