"""An estimate as tables, and as plain values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.cli.output import print_table
from slapo_core.spec.device import format_bytes

if TYPE_CHECKING:
    from slapo_core.estimation.results import Collective, Estimate, RankEstimate
    from slapo_core.spec.device import DeviceSpec

__all__ = ["as_plain", "print_estimate"]

_KINDS = ("parameters", "buffers", "gradients", "optimizer", "activations", "temporaries", "inputs")


def as_plain(estimate: Estimate) -> dict[str, Any]:
    """``{"assumptions", "kinds": [{"collectives", "flops", "memory", "rank", "ranks", "time"}], "mesh", ...}``."""
    kinds = []
    for kind in estimate.kinds:
        value = {
            field.name: getattr(kind, field.name) for field in dataclasses.fields(kind) if field.name != "observed"
        }
        memory = {**dataclasses.asdict(kind.memory), "total": kind.memory.total}
        kinds.append({**value, "memory": memory, "collectives": list(map(dataclasses.asdict, kind.collectives))})
    return {
        "assumptions": list(estimate.assumptions),
        "kinds": kinds,
        "memory": estimate.memory.total,
        "mesh": dict(estimate.mesh),
        "time": estimate.time,
    }


def print_estimate(estimate: Estimate, device: DeviceSpec | None, *, each: bool) -> None:
    """Tables of memory and collectives for each kind of rank, and what else there is to say."""
    for place, kind in enumerate(estimate.kinds):
        if place:
            print()
        if len(estimate.kinds) > 1:
            print(f"{_ranks(kind.ranks)}, played as rank {kind.rank}\n")
        _print_memory(kind, device)
        print()
        _print_collectives(kind.collectives, each=each)
        print(f"\n{kind.flops:.4g} floating-point operations a step")
        if kind.time is not None and device is not None:
            print(f"{kind.time:.4g} s a step on {device.name}")
    for assumption in estimate.assumptions:
        print(f"assumption: {assumption}")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} ({shown})"


def _print_memory(kind: RankEstimate, device: DeviceSpec | None) -> None:
    memory = kind.memory
    rows = [(name, format_bytes(getattr(memory, name))) for name in _KINDS if getattr(memory, name)]
    share = ""
    if device is not None and device.memory is not None:
        share = f" of {format_bytes(device.memory)}"
    print_table(("MEMORY AT THE PEAK", "BYTES"), [*rows, ("total", format_bytes(memory.total) + share)])
    where = f"in '{memory.module}'" if memory.module and memory.module != memory.phase else "in the model"
    print(f"reached {where}, {memory.phase}" if memory.phase != "optimizer" else "reached in the optimizer's step")


def _print_collectives(collectives: Sequence[Collective], *, each: bool) -> None:
    if not collectives:
        print("no collectives")
        return
    columns = ("COLLECTIVE", "MESH DIM", "RANKS", "PHASE", "COUNT", "BYTES", "MODULE", "STEP")
    print_table(columns, [tuple(row) for row in _rows(collectives, each=each)])


def _rows(collectives: Sequence[Collective], *, each: bool) -> Iterator[list[str]]:
    """Those that differ in a layer's number only are one row."""
    together: dict[tuple[str, ...], list[int]] = {}
    for number, one in enumerate(collectives):
        module, record = one.module, one.record
        if not each:
            module = re.sub(r"(?<![^.])\d+(?![^.])", "*", module)
            record = re.sub(r"^#\d+ ", "", record).partition(" at ")[0]
        dimension = one.mesh_dim or "(other)"
        key = (
            one.kind,
            dimension,
            str(one.ranks),
            one.phase,
            module or "(the model)",
            record or "-",
            str(each * number),
        )
        together.setdefault(key, []).append(one.bytes)
    for (kind, dimension, ranks, phase, module, record, _), sizes in together.items():
        yield [kind, dimension, ranks, phase, str(len(sizes)), format_bytes(sum(sizes)), module, record]
