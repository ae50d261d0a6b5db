"""Find the steps that broke the model: repeat parts of the schedule on fresh copies, and narrow down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from slapo_core.spec.record import Record

__all__ = ["Blame", "Outcome", "find_steps"]

Outcome = Literal["agrees", "differs", "other", "refused"]
"""Of a trial: it agrees with the untouched model; it fails as the whole schedule does (first in the same tensor, or by
the same exception at the same place); it fails in another way, so it is another failure, or the part does not stand on
its own; a step was refused without the others."""

MAX_TRIALS = 40
SINGLE_STEPS = 6  # so many are tried one by one before anything else


@dataclass(frozen=True)
class Blame:
    """Steps, and how they were found.

    Args:
        records: what most likely broke the model, oldest first.
        proven: whether these steps alone reproduce the failure, or taking them away cures it; False means that they
            are only those nearest to the first tensor that differs.
        likewise: paths of repeated blocks whose steps fail in the same way.
        trials: how many copies were tried.
    """

    records: tuple[Record, ...]
    proven: bool
    likewise: tuple[str, ...] = ()
    trials: int = 0

    def __str__(self) -> str:
        if not self.records:
            return (
                "  no step does it: the same steps on a fresh copy of the untouched model agree with it, so the "
                "scheduled model, or its weights, were changed outside of the schedule"
            )
        how = (
            "the steps that do it, tried on fresh copies of the model:"
            if self.proven
            else f"the cause could not be narrowed down in {self.trials} trials; the steps nearest to this tensor are:"
        )
        if len(self.records) > 12:
            shown = [*map(_line, self.records[:8]), f"    ... {len(self.records) - 8} more"]
        else:
            shown = [*map(_line, self.records)]
        likewise = [f"  and likewise at {', '.join(self.likewise)}"] if self.likewise else []
        return "\n".join([f"  {how}", *shown, *likewise])


def find_steps(
    records: Sequence[Record],
    try_steps: Callable[[Sequence[Record]], Outcome],
    *,
    near: str | None,
    tied: Sequence[frozenset[str]] = (),
) -> Blame:
    """Narrow ``records``, which fail together, down to a part that fails alone, and in the same way.

    A few steps, or those at the first tensor that differs, are tried one by one first: a step that fails alone, and
    without which the rest agrees, is it. Then the steps are grouped by sub-tree, from the top: if exactly one group
    fails alone, or without exactly one group the rest agrees, the search goes on inside of that group; or else
    sub-trees are left out as long as the rest fails.
    Repeated blocks (``layer.0``, ``layer.1``) stand for themselves, so among several that fail the first is followed
    and the others are named. Steps at modules that share a parameter stay together: a tied vocabulary is split in one
    place and synchronised in another.

    Args:
        records: the whole schedule.
        try_steps: repeats some steps on a fresh copy; every rank must get the same answer.
        near: the module that owns the first tensor that differs, for when nothing is found; None if there is none.
        tied: the paths of modules that share a parameter, one set for each such parameter.
    """
    if not records:
        return Blame((), proven=False)
    search = _Search(try_steps, tied)
    whole = search.outcome(tuple(records))
    if whole == "agrees":
        return Blame((), proven=True, trials=search.trials)
    single = search.single(tuple(records), near)
    if single is not None:
        return Blame((single,), proven=True, trials=search.trials)
    part, likewise = search.narrow(tuple(records))
    proven = len(part) < len(records) or (len(records) == 1 and whole == "differs")
    if not proven:
        return Blame(_nearest(records, near), proven=False, trials=search.trials)
    return Blame(part, proven=True, likewise=tuple(likewise), trials=search.trials)


class _Search:
    def __init__(self, try_steps: Callable[[Sequence[Record]], Outcome], tied: Sequence[frozenset[str]]) -> None:
        self._try = try_steps
        self._tied = _joined(tied)
        self._known: dict[tuple[int, ...], Outcome] = {}
        self.trials = 0

    def outcome(self, part: tuple[Record, ...]) -> Outcome:
        if not part:
            return "agrees"
        key = tuple(record.index for record in part)
        if key not in self._known:
            if self.trials >= MAX_TRIALS:
                return "refused"
            self.trials += 1
            self._known[key] = self._try(part)
        return self._known[key]

    def single(self, records: tuple[Record, ...], near: str | None) -> Record | None:
        """The step that fails alone, and without which the rest agrees."""
        likely = records if len(records) <= SINGLE_STEPS else tuple(r for r in records if r.path == near)
        for record in likely[:SINGLE_STEPS] if len(records) > 1 else ():
            rest = tuple(other for other in records if other is not record)
            if self.outcome((record,)) == "differs" and self.outcome(rest) == "agrees":
                return record
        return None

    def narrow(self, part: tuple[Record, ...]) -> tuple[tuple[Record, ...], list[str]]:
        likewise: list[str] = []
        while len(part) > 1:
            groups = _groups(part, self._tied)
            guilty = self._guilty(part, groups, likewise)
            if guilty is None:
                guilty = self._shrunk(part, groups)
            if len(guilty) == len(part):
                break
            part = guilty
        return part, likewise

    def _shrunk(self, part: tuple[Record, ...], groups: dict[str, tuple[Record, ...]]) -> tuple[Record, ...]:
        """Without the sub-trees that the failure does not need."""
        if len({record.path for record in part}) == 1:
            return part  # single steps at one module belong together: a shard without its sync fails by itself
        for group in groups.values():
            rest = tuple(record for record in part if record not in group)
            if rest and self.outcome(rest) == "differs":
                part = rest
        return part

    def _guilty(
        self, part: tuple[Record, ...], groups: dict[str, tuple[Record, ...]], likewise: list[str]
    ) -> tuple[Record, ...] | None:
        blocks = {path for path in groups if path.rpartition(".")[2].isdigit()}
        failing = [path for path, group in groups.items() if self.outcome(group) == "differs"]
        if len(failing) == 1:
            return groups[failing[0]]
        failing_blocks = [path for path in failing if path in blocks]
        if failing_blocks and len(failing_blocks) == len(failing):
            likewise.extend(failing_blocks[1:])
            return groups[failing_blocks[0]]
        cures = []
        for path in failing or list(groups):
            rest = tuple(record for record in part if record not in groups[path])
            if rest and self.outcome(rest) == "agrees":
                cures.append(path)
        return groups[cures[0]] if len(cures) == 1 else None


def _joined(tied: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Sets that have a path in common, as one set."""
    joined: list[frozenset[str]] = []
    for paths in tied:
        apart = [other for other in joined if not other & paths]
        joined = [*apart, paths.union(*(other for other in joined if other & paths))]
    return joined


def _groups(part: tuple[Record, ...], tied: Sequence[frozenset[str]]) -> dict[str, tuple[Record, ...]]:
    """The steps of each sub-tree below the deepest module that holds them all; single steps if that is one module.

    Steps at tied modules that would come into several of these groups make one of their own.
    """
    paths = [record.path.split(".") if record.path else [] for record in part]
    depth = 0
    while all(len(path) > depth for path in paths) and len({path[depth] for path in paths}) == 1:
        depth += 1
    same_place = len({record.path for record in part}) == 1
    keys = {
        record.index: f"{record.path}#{record.index}" if same_place else ".".join(path[: depth + 1])
        for record, path in zip(part, paths, strict=True)
    }
    for together in tied if not same_place else ():
        members = [record for record in part if record.path in together]
        if len({keys[record.index] for record in members}) > 1:
            keys.update({record.index: " and ".join(sorted(together)) for record in members})
    groups: dict[str, list[Record]] = {}
    for record in part:
        groups.setdefault(keys[record.index], []).append(record)
    return {key: tuple(group) for key, group in groups.items()}


def _nearest(records: Sequence[Record], near: str | None) -> tuple[Record, ...]:
    """The steps at a module; or else at the nearest one around it, below it; or else all."""
    if near is None:
        return tuple(records)
    place = near
    while True:
        at = tuple(record for record in records if record.path == place)
        if at:
            return at
        if not place:
            break
        place = place.rpartition(".")[0]
    below = tuple(record for record in records if record.path.startswith(f"{near}."))
    return below or tuple(records)


def _line(record: Record) -> str:
    return f"    {record}" + (f"  ({record.location})" if record.location else "")
