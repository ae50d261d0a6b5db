"""`Comparison`: what an estimate predicted, beside what training steps did."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from slapo_core.cli import table_lines
from slapo_core.errors import ArgumentError
from slapo_runtime.sizes import format_bytes

if TYPE_CHECKING:
    from slapo_estimate.results import CollectiveCall, Estimate, RankEstimate
    from slapo_runtime.receipts.memory import Memory
    from slapo_runtime.receipts.observation import Observation, RankObservation


@dataclass(frozen=True)
class Collectives:
    """Collectives of one kind in a training step.

    Args:
        count: how many.
        bytes: that this rank gives, all together.
    """

    count: float = 0
    bytes: float = 0


class CollectiveKind(NamedTuple):
    """Collectives that are compared together.

    Args:
        kind: e.g. ``"all_reduce"``.
        mesh_dim: the mesh dimension; ``""`` for another group.
        phase: ``"forward"``, ``"backward"`` (with recomputed forwards) or ``"optimizer"``.
        dtype: e.g. ``"float32"``.
    """

    kind: str
    mesh_dim: str
    phase: str
    dtype: str


@dataclass(frozen=True)
class RankComparison:
    """The prediction for one kind of rank, beside what one of them did.

    Args:
        rank: the global rank that was observed.
        collectives: predicted and seen, in a step.
        memory: predicted and seen, at the peak.
        time: seconds of a step, predicted (None without a device) and seen (None with ``keep=True``).
    """

    rank: int
    collectives: Mapping[CollectiveKind, tuple[Collectives, Collectives]]
    memory: tuple[Memory, Memory]
    time: tuple[float | None, float | None]

    @property
    def differing(self) -> dict[CollectiveKind, tuple[Collectives, Collectives]]:
        """The collectives whose number or bytes differ, predicted and seen."""
        return {kind: pair for kind, pair in self.collectives.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class Comparison:
    """An estimate beside an observation; print it.

    Args:
        ranks: one of each kind of rank.
    """

    ranks: tuple[RankComparison, ...]

    @property
    def collectives_agree(self) -> bool:
        """Whether all collectives were predicted, with their bytes."""
        return not any(one.differing for one in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values, for ``json.dumps``."""
        return {
            "collectives_agree": self.collectives_agree,
            "ranks": [
                {
                    "collectives": [
                        {**kind._asdict(), "predicted": dataclasses.asdict(predicted), "seen": dataclasses.asdict(seen)}
                        for kind, (predicted, seen) in one.collectives.items()
                    ],
                    "memory": {
                        name: {**dataclasses.asdict(memory), "total": memory.total}
                        for name, memory in zip(("predicted", "seen"), one.memory, strict=True)
                    },
                    "rank": one.rank,
                    "time": dict(zip(("predicted", "seen"), one.time, strict=True)),
                }
                for one in self.ranks
            ],
        }

    def __str__(self) -> str:
        return "\n\n".join("\n".join(_lines(one, name=len(self.ranks) > 1)) for one in self.ranks)


def beside(estimate: Estimate, observation: Observation) -> Comparison:
    """Compare an estimate with an observation.

    Raises:
        ArgumentError: they are of different meshes, or a kind of rank was not observed.
    """
    sizes = {name: size for name, size in estimate.mesh.items() if size > 1}
    seen = {name: size for name, size in observation.mesh.items() if size > 1}
    if sizes != seen:
        raise ArgumentError(
            f"the estimate is of another mesh (estimate: {dict(estimate.mesh)}, observation: {dict(observation.mesh)})",
            hint="observe(sch, batch).compare(sch.estimate(batch))",
        )
    ranks = {one.rank: one for one in observation.ranks}
    return Comparison(tuple(_of_rank(kind, ranks[kind.rank], observation.steps) for kind in estimate.kinds))


def _of_rank(predicted: RankEstimate, seen: RankObservation, steps: int) -> RankComparison:
    both: dict[CollectiveKind, list[Collectives]] = {}
    for side, calls in enumerate((((one, 1) for one in predicted.collectives), seen.record.collectives.items())):
        for call, count in calls:
            pair = both.setdefault(_kind(call), [Collectives(), Collectives()])
            pair[side] = Collectives(pair[side].count + count, pair[side].bytes + call.bytes * count)
    collectives = {
        kind: (before, Collectives(_per_step(after.count, steps), _per_step(after.bytes, steps)))
        for kind, (before, after) in sorted(both.items())
    }
    return RankComparison(seen.rank, collectives, (predicted.memory, seen.memory), (predicted.time, seen.seconds))


def _kind(call: CollectiveCall) -> CollectiveKind:
    phase = "backward" if call.phase == "recomputation" else call.phase
    return CollectiveKind(call.kind, call.mesh_dim, phase, call.dtype)


def _per_step(total: float, steps: int) -> float:
    """Return a whole number, unless steps differ."""
    return total / steps if total % steps else total // steps


def _lines(one: RankComparison, *, name: bool) -> Iterator[str]:
    if name:
        yield f"rank {one.rank}"
    rows: list[tuple[str, ...]] = []
    for kind, (predicted, seen) in one.collectives.items():
        what = f"{kind.kind} over '{kind.mesh_dim or 'other ranks'}' in {kind.phase}, {kind.dtype}"
        rows.append((what, _shown(predicted), _shown(seen), "" if predicted == seen else "differs"))
    predicted_memory, seen_memory = (memory.by_kind() for memory in one.memory)
    for kind_of_memory, size in predicted_memory.items():
        if size or seen_memory[kind_of_memory]:
            rows.append((kind_of_memory, format_bytes(size), format_bytes(seen_memory[kind_of_memory]), ""))
    totals = [format_bytes(memory.total) for memory in one.memory]
    rows.append(("memory at the peak", *totals, f"x {one.memory[1].total / max(1, one.memory[0].total):.3g}"))
    if any(one.time):
        times = ["-" if seconds is None else f"{seconds:.4g} s" for seconds in one.time]
        ratio = f"x {one.time[1] / one.time[0]:.3g}" if one.time[0] and one.time[1] else ""
        rows.append(("a step", *times, ratio))
    yield from table_lines(("", "PREDICTED", "SEEN", ""), rows)


def _shown(one: Collectives) -> str:
    return f"{one.count:g}, {format_bytes(round(one.bytes))}" if one.count else "none"
