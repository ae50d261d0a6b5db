"""Write a study for `slapo tune` of the best predicted meshes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_models.choice.search import Choice

MOST = 5
"""Meshes in a study."""


def study_source(
    choice: Choice,
    *,
    model: str,
    batch: Sequence[str],
    schedule: str | None,
    optimizer: str,
    loss: str | None,
) -> str:
    """Return the source of a study: the best meshes, other numbers of micro-batches, and of checkpointed blocks.

    Args:
        choice: the predicted candidates.
        model: ``"module:function"`` that returns the model.
        batch: the words of ``--batch``.
        schedule: ``"module:function"`` of the steps for ``tp``; None for ``slapo_models.auto``.
        optimizer: as for ``--optimizer``.
        loss: ``"module:function"``; None for the model's loss.
    """
    meshes = {}
    for candidate in choice.candidates[:MOST]:
        layout, blocks = candidate.layout, len(choice.blocks)
        name = " ".join([*(f"{key}={size}" for key, size in layout.mesh.items()), *["shards"] * layout.shards])
        predicted = len(candidate.prediction.checkpointed)
        meshes[name or "one device"] = {
            "mesh": candidate.mesh,
            "shards": layout.shards,
            "cuts": list(candidate.prediction.cuts),
            "microbatches": _near(layout.microbatches, layout.microbatches * candidate.samples),
            "checkpoint": sorted({0, predicted, (predicted + blocks) // 2, blocks}),
        }
    steps = _import(schedule, "steps") if schedule else "from slapo_models import auto as steps"
    lines = [
        '"""Measure the best predicted meshes: slapo tune run FILE."""',
        "",
        "import slapo_tune",
        "from slapo_core.cli import batch_of",
        "from slapo_estimate.commands import optimizer_of",
        "from slapo_estimate.depth import first_samples, samples_of",
        steps,
        _import(model, "make_model"),
        *([_import(loss, "loss")] if loss else []),
        "",
        f"BATCH = {json.dumps(list(batch))}  # of a step of all replicas",
        f"BLOCKS = {json.dumps(list(choice.blocks))}",
        f"MESHES = {_pretty(meshes)}",
        "",
        "",
        "def space(s):",
        '    mesh = MESHES[s.choose("mesh", tuple(MESHES))]',
        '    s.choose("microbatches", mesh["microbatches"])',
        '    s.choose("checkpoint", mesh["checkpoint"])',
        "",
        "",
        "def mesh(p):",
        '    return MESHES[p["mesh"]]["mesh"]',
        "",
        "",
        "def schedule(sch, p):",
        "    steps(sch)",
        '    for path in BLOCKS[: p["checkpoint"]]:',
        "        sch[path].checkpoint()",
        '    for number in MESHES[p["mesh"]]["cuts"]:',
        "        sch[BLOCKS[number]].pipeline_split()",
        "",
        "",
        "def batch(p):",
        "    inputs = batch_of(BATCH)",
        '    return first_samples(inputs, samples_of(inputs) // mesh(p).get("dp", 1))',
        "",
        "",
        "def options(p):",
        '    chosen = {"data_parallel": "fsdp"} if MESHES[p["mesh"]]["shards"] else {}',
        '    name = "microbatches" if mesh(p).get("pp", 1) > 1 else "accumulate"',
        '    return {**chosen, name: p["microbatches"]}',
        "",
        "",
        "study = slapo_tune.Study(",
        "    make_model,",
        "    space,",
        "    schedule,",
        f"    world_size={_world_size(choice)},",
        "    mesh=mesh,",
        "    batch=batch,",
        f"    optimizer=optimizer_of({json.dumps(optimizer)}),",
        *(["    loss=loss,"] if loss else []),
        "    options=options,",
        *([f"    memory={choice.memory},"] if choice.memory is not None else []),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _near(count: int, samples: int) -> list[int]:
    """Return numbers of micro-batches around a predicted one that divide a replica's samples."""
    return [each for each in range(max(1, count // 2), 2 * count + 1) if samples % each == 0]


def _import(name: str, alias: str) -> str:
    place, _, function = name.partition(":")
    module = Path(place).stem if place.endswith(".py") else place
    return f"from {module} import {function}" + (f" as {alias}" if function != alias else "")


def _pretty(value: Any) -> str:
    lines = [f"    {json.dumps(key)}: {_python(each)}," for key, each in value.items()]
    return "\n".join(["{", *lines, "}"])


def _python(value: dict[str, Any]) -> str:
    return json.dumps(value).replace(": true", ": True").replace(": false", ": False")


def _world_size(choice: Choice) -> int:
    layout = choice.best.layout
    return layout.dp * layout.pp * layout.tp
