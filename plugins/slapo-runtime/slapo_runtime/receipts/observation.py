"""`Observation`: what training steps did on each rank, as a value, a table and JSON."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.cli import table_lines
from slapo_core.errors import ArgumentError
from slapo_core.internals import fold_numbers, fold_paths
from slapo_runtime.receipts.receipt import Finding
from slapo_runtime.sizes import format_bytes

if TYPE_CHECKING:
    from slapo_runtime.receipts.memory import Memory
    from slapo_runtime.receipts.watch import Allocation, Observed


@dataclass(frozen=True)
class Kernel:
    """A CUDA kernel in the observed steps.

    Args:
        name: of the kernel.
        count: how often it ran.
        seconds: of the device, all runs together.
    """

    name: str
    count: int
    seconds: float

    @property
    def short_name(self) -> str:
        """Its name without the result's type, arguments, and template arguments."""
        return re.split(r"[<(]", self.name.replace("(anonymous namespace)::", "").removeprefix("void "))[0]


@dataclass(frozen=True)
class RankObservation:
    """What training steps did on one rank.

    Args:
        rank: the global rank.
        findings: each expected effect with what was seen, and what nothing explains.
        record: everything else that was seen, by module and step.
        memory: at the peak of the observed steps.
        types: kind of stored tensors -> their types: ``"parameters"``, ``"gradients"``, ``"main weights"``,
            ``"optimizer state"``.
        seconds: of a training step that is not observed; None with ``keep=True``.
        kernels: of CUDA, the longest first; empty on a CPU.
    """

    rank: int
    findings: tuple[Finding, ...]
    record: Observed
    memory: Memory
    types: Mapping[str, tuple[str, ...]]
    seconds: float | None = None
    kernels: tuple[Kernel, ...] = ()

    @property
    def largest(self) -> Allocation | None:
        """The largest result of an operation; None if nothing ran."""
        return max(self.record.largest.values(), key=lambda one: one.bytes, default=None)


@dataclass(frozen=True)
class Observation:
    """What training steps did; print it for a table by equal steps.

    Args:
        steps: the number of observed training steps.
        mesh: the sizes of the mesh.
        ranks: each rank's own.
    """

    steps: int
    mesh: Mapping[str, int]
    ranks: tuple[RankObservation, ...]

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Each expected effect with what was seen, and what nothing explains; with the ranks where they differ."""
        by_rank: dict[Finding, list[int]] = {}
        for one in self.ranks:
            for finding in one.findings:
                ranks = by_rank.setdefault(finding, [])
                if not ranks or ranks[-1] != one.rank:
                    ranks.append(one.rank)
        everywhere = [one.rank for one in self.ranks]
        return tuple(
            finding if ranks == everywhere else dataclasses.replace(finding, ranks=tuple(ranks))
            for finding, ranks in by_rank.items()
        )

    @property
    def missing(self) -> tuple[Finding, ...]:
        """The effects that were expected and not seen, and collectives that neither a step nor the runtime explains."""
        return tuple(one for one in self.findings if not one.is_seen)

    @property
    def record(self) -> Observed:
        """What was seen on the first rank, by module and step."""
        return self.ranks[0].record

    def compare(self, estimate: Any) -> Any:
        """Compare with the prediction for these steps: collectives, memory and time.

        Args:
            estimate: of :func:`slapo_core.estimate`, for the same mesh, batch, target and optimizer.

        Returns:
            a :class:`slapo_estimate.comparison.Comparison`; print it.

        Raises:
            ArgumentError: not an estimate, or one of another mesh.
        """
        beside = getattr(estimate, "beside", None)
        if beside is None:
            raise ArgumentError(
                f"compare takes an estimate (got {type(estimate).__name__})",
                hint="observe(sch, batch).compare(sch.estimate(batch))",
            )
        return beside(self)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values, for ``json.dumps``."""
        return {
            "findings": [dataclasses.asdict(one) for one in self.findings],
            "mesh": dict(self.mesh),
            "missing": len(self.missing),
            "ranks": [_plain_rank(one) for one in self.ranks],
            "steps": self.steps,
        }

    def __str__(self) -> str:
        seen = sum(one.is_seen for one in self.findings)
        ranks = f"{len(self.ranks)} ranks" if len(self.ranks) > 1 else "1 process"
        times = f"{self.steps} training step{'s' if self.steps > 1 else ''}"
        parts = [[f"effects seen: {seen} of {len(self.findings)} ({times}, {ranks})"]]
        if self.findings:
            parts.append(table_lines(("STEP", "AT", "EXPECTED", "SEEN"), list(_finding_rows(self.findings))))
        for one in self.ranks[: 1 if self._are_alike else None]:
            parts.append(_rank_lines(one, name=not self._are_alike))
        parts.append([f"missing: {one}" for one in self.missing])
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    @functools.cached_property
    def _are_alike(self) -> bool:
        first = self.ranks[0]
        return all(
            (one.record.collectives, one.memory.total) == (first.record.collectives, first.memory.total)
            for one in self.ranks
        )


# -- text ------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"(?<=[.'])\d+(?=[.'])")
_STEP = re.compile(r"#(\d+) (.*) at (?:'([^']*)'|the root)", re.DOTALL)


def _finding_rows(findings: Iterable[Finding]) -> Iterable[tuple[str, ...]]:
    """Yield a row for findings that differ in the number of a layer only."""
    groups: dict[Any, list[Finding]] = {}
    for one in findings:
        texts = (one.expected, one.seen, one.cause)
        key = (_step_key(one.source), one.location, one.is_seen, one.ranks, *(_NUMBER.sub("*", text) for text in texts))
        groups.setdefault(key, []).append(one)
    for same in groups.values():
        first = same[0]
        times = f" (x {len(same)})" if len(same) > 1 else ""
        step, at = _folded([one.source for one in same])
        where = f" on rank {', '.join(map(str, first.ranks))}" if first.ranks else ""
        mark = "" if first.is_seen else "MISSING: "
        yield step or "no step", at + times, first.expected, f"{mark}{first.seen}{where}"


def _step_key(source: str) -> tuple[str, ...]:
    """Return what equal steps of repeated layers share."""
    match = _STEP.fullmatch(source)
    return (source,) if match is None else (match[2], _NUMBER.sub("*", f"'{match[3] or ''}'"))


def _folded(sources: Sequence[str]) -> tuple[str, str]:
    """Return the call of equal steps with their numbers, and their paths."""
    matches = [_STEP.fullmatch(source) for source in dict.fromkeys(sources)]
    found = [match for match in matches if match is not None]
    if not found:
        return sources[0], ""
    numbers = fold_numbers(sorted({int(match[1]) for match in found}))
    return f"#{numbers} {found[0][2]}", fold_paths([match[3] or "" for match in found])


def _rank_lines(one: RankObservation, *, name: bool) -> list[str]:
    lines = [f"rank {one.rank}"] if name else []
    rows = list(_work_rows(one.record))
    if rows:
        columns = ("STEP", "AT", "PHASE", "OPERATIONS", "COLLECTIVES", "BYTES")
        lines += table_lines(columns, rows)
    memory, largest = one.memory, one.largest
    lines.append(f"peak memory: {format_bytes(memory.total)} in '{memory.module or 'the model'}', {memory.phase}")
    if largest is not None:
        at = f"'{largest.place.module}'" if largest.place.module else "the model"
        shape = "x".join(map(str, largest.shape)) or "a scalar"
        lines.append(
            f"largest allocation: {format_bytes(largest.bytes)}, {shape} {largest.dtype}, {largest.operator} in {at}, "
            f"{largest.place.phase}"
        )
    lines += [f"{what}: {', '.join(types)}" for what, types in one.types.items()]
    if one.seconds is not None:
        lines.append(f"{one.seconds:.4g} s a step, without the observation")
    if one.kernels:
        rows = [(each.short_name, f"{each.count}", f"{1e6 * each.seconds:.1f} µs") for each in one.kernels[:10]]
        lines += ["", *table_lines(("KERNEL", "RUNS", "TIME"), rows)]
    return lines


def _work_rows(record: Observed) -> Iterable[tuple[str, ...]]:
    """Yield what equal steps did, of a step per phase; the model's own code and the runtime's last."""
    operations: Counter[tuple[str, str]] = Counter()
    collectives: dict[tuple[str, str], Counter[str]] = {}
    sizes: Counter[tuple[str, str]] = Counter()
    for place, counts in record.operators.items():
        operations[place.record, place.phase] += sum(counts.values())
    for call, count in record.collectives.items():
        key = (call.record, call.phase)
        collectives.setdefault(key, Counter())[f"{call.kind} over '{call.mesh_dim or 'other ranks'}'"] += count
        sizes[key] += call.bytes * count
    groups: dict[Any, list[tuple[str, str]]] = {}
    for key in sorted(operations.keys() | collectives.keys(), key=_order):
        groups.setdefault((_step_key(key[0]), key[1]), []).append(key)
    for same in groups.values():
        step, at = _folded([source for source, _ in same])
        made: Counter[str] = Counter()
        for key in same:
            made.update(collectives.get(key, {}))
        shown = ", ".join(f"{count} {what}" for what, count in made.items())
        size = sum(sizes[key] for key in same)
        yield (
            step or "(the model and the runtime)",
            at + (f" (x {len(same)})" if len(same) > 1 else ""),
            same[0][1],
            str(sum(operations[key] for key in same)),
            shown or "-",
            format_bytes(size) if size else "-",
        )


_PHASES = ("forward", "recomputation", "backward", "optimizer")


def _order(key: tuple[str, str]) -> tuple[int, int]:
    match = _STEP.fullmatch(key[0])
    return int(match[1]) if match is not None else 10**9, _PHASES.index(key[1])


# -- JSON ------------------------------------------------------------------------------------------------------


def _plain_rank(one: RankObservation) -> dict[str, Any]:
    record = one.record
    return {
        "calls": {path: _sorted_sets(dataclasses.asdict(calls)) for path, calls in record.calls.items()},
        "collectives": [{**dataclasses.asdict(call), "count": count} for call, count in record.collectives.items()],
        "events": [
            {**each.place._asdict(), "event": each.event, "name": each.name, "facts": dict(each.facts), "count": count}
            for each, count in record.happenings.items()
        ],
        "kernels": [dataclasses.asdict(kernel) for kernel in one.kernels],
        "largest": None if one.largest is None else {**one.largest._asdict(), "place": one.largest.place._asdict()},
        "memory": {**dataclasses.asdict(one.memory), "total": one.memory.total},
        "operators": [{**place._asdict(), "counts": dict(counts)} for place, counts in record.operators.items()],
        "products": [{**place._asdict(), "types": dict(counts)} for place, counts in record.products.items()],
        "rank": one.rank,
        "seconds": one.seconds,
        "types": {what: list(types) for what, types in one.types.items()},
    }


def _sorted_sets(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
