"""Memory and collectives of a training step as data, by an estimate that samples memory after each operation."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from slapo_estimate.estimates import estimate_source
from slapo_estimate.source import of_schedule
from slapo_runtime.launcher import preload_modules
from slapo_runtime.schedule_copies import installed_modules

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_estimate.results import Estimate, RankEstimate
    from slapo_estimate.simulation import Trackers

KINDS = ("parameters", "buffers", "inputs", "optimizer", "gradients", "activations", "temporaries")
"""The kinds of memory, in the order of a stack: what stays over a step comes first."""

_MOST = 200  # samples of a step


def predict(schedule: Schedule, batch: Any, **arguments: Any) -> dict[str, Any]:
    """Estimate a training step, and return its memory over time and its collectives as plain values.

    Args:
        schedule: not sealed.
        batch: as of :func:`slapo_core.estimate`.
        arguments: likewise.

    Raises:
        SlapoError: see :func:`slapo_core.estimate`.
    """
    source = of_schedule(schedule)
    preload_modules(*installed_modules(source.model), __name__)
    mesh = None if schedule.mesh is None else schedule.mesh.sizes
    return _plain(estimate_source(source, batch, mesh=mesh, observer=_Samples, **arguments))


def _plain(estimate: Estimate) -> dict[str, Any]:
    return {
        "assumptions": list(estimate.assumptions),
        "kinds": [_rank(kind) for kind in estimate.kinds],
        "names": list(KINDS),
    }


def _rank(kind: RankEstimate) -> dict[str, Any]:
    memory = {**dataclasses.asdict(kind.memory), "total": kind.memory.total}
    return {
        "collectives": together((dataclasses.asdict(call), 1) for call in kind.collectives),
        "flops": kind.flops,
        "peak": memory,
        "rank": kind.rank,
        "ranks": list(kind.ranks),
        **kind.observed,
    }


def together(calls: Iterable[tuple[Mapping[str, Any], int]]) -> list[dict[str, Any]]:
    """Return equal collectives of a module and step together, with their number and bytes.

    Args:
        calls: each the fields of a ``CollectiveCall``, and how often it was made.
    """
    counts, sizes = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for call, count in calls:
        key = tuple(str(call[name]) for name in _SAME)
        counts[key] += count
        sizes[key] += call["bytes"] * count
    return [
        {**dict(zip(_SAME, key, strict=True)), "bytes": sizes[key], "count": count} for key, count in counts.items()
    ]


_SAME = ("module", "record", "kind", "mesh_dim", "phase", "dtype")


def _total(sample: tuple[int, tuple[int, ...], str, str]) -> int:
    return sample[0]


class _Samples:
    """Sample the bytes in use: of neighboring operations the one with most, at most 200 of a step.

    Args:
        schedule: is not read.
        trackers: of the rank.
    """

    def __init__(self, schedule: Schedule, trackers: Trackers) -> None:
        self._trackers = trackers
        self.begin()

    def begin(self) -> None:
        self._found: list[tuple[int, tuple[int, ...], str, str]] = []
        self._operations, self._stride = 0, 1

    def on_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        memory, at = self._trackers.memory, self._trackers.position
        is_new = self._operations % self._stride == 0
        self._operations += 1
        if is_new or memory.total > self._found[-1][0]:
            sample = (memory.total, tuple(map(memory.of, KINDS)), at.phase, at.module)
            self._found[len(self._found) - (not is_new) :] = [sample]
        if len(self._found) == 2 * _MOST and self._operations % self._stride == 0:
            pairs = zip(self._found[::2], self._found[1::2], strict=True)
            self._found, self._stride = [max(pair, key=_total) for pair in pairs], 2 * self._stride

    def result(self) -> dict[str, Any]:
        pairs = [self._found[start : start + 2] for start in range(0, len(self._found), 2)]
        found = self._found if len(self._found) <= _MOST else [max(pair, key=_total) for pair in pairs]
        return {
            "operations": self._operations,
            "samples": [list(sizes) for _, sizes, _, _ in found],
            "places": [[phase, module] for _, _, phase, module in found],
        }
