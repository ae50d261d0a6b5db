"""Search for the smallest part of a schedule that fails in the same way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from slapo_core.internals import fold_numbers, fold_paths
from slapo_core.primitive import Record
from slapo_runtime.ranks.trial_groups import Failure
from slapo_verify.compare import Difference

_SAME_SIZE = 1e-4
_MOST_NOISE = 0.05  # of a difference hardly larger than the tolerance


def block_pattern(path: str) -> str:
    """Replace the numbers of repeated blocks in a path: ``"layer.0.fc"`` -> ``"layer.*.fc"``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def is_below(path: str, place: str) -> bool:
    """Return whether a path equals another, or is below it."""
    return not place or f"{path}.".startswith(f"{place}.")


def record_lines(records: Sequence[Record]) -> list[str]:
    """Format steps with the lines that applied them; equal ones of repeated blocks on one line."""
    alike: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        alike.setdefault((block_pattern(record.path), str(record.primitive), record.location), []).append(record)
    return [
        f"    #{fold_numbers([each.index for each in same])} {primitive} at {fold_paths([each.path for each in same])}"
        + (f"  ({location})" if location else "")
        for (_, primitive, location), same in alike.items()
    ]


@dataclass(frozen=True)
class Failed:
    """Describe how a schedule fails.

    Args:
        kind: of the first difference, or the type of the exception.
        place: the tensor's name, or the line that raised; blocks of a repeated one count as the same.
        size: of the difference, or the exception's text; None where a failure has none.
        raises: whether it is an exception.
        noise: by how much the size may come out otherwise because of rounding.
    """

    kind: str
    place: str
    size: float | str | None = None
    raises: bool = False
    noise: float = 0.0

    @classmethod
    def by(cls, found: Difference) -> Failed:
        size = found.problem if math.isinf(found.largest) else found.largest
        return cls(found.kind, block_pattern(found.name), size, noise=found.allowed)

    @classmethod
    def with_exception(cls, failure: Failure) -> Failed:
        place = f"{failure.where} {block_pattern(failure.module)}"
        return cls(failure.kind, place, failure.text, raises=True)

    def is_like(self, other: Failed) -> bool:
        """Return whether two failures are at the same tensor or line."""
        return (self.kind, self.place, self.raises) == (other.kind, other.place, other.raises)

    def is_same(self, other: Failed) -> bool:
        """Return whether two failures have equal numbers, too."""
        if not self.is_like(other) or self.size is None or other.size is None:
            return False
        if isinstance(self.size, str) or isinstance(other.size, str):
            return self.size == other.size
        noise = min(max(self.noise, other.noise), _MOST_NOISE * self.size)
        return math.isclose(self.size, other.size, rel_tol=_SAME_SIZE, abs_tol=noise)


TrialOutcome = Failed | Literal["agrees", "refused"]
"""Of a trial: in which way it fails; or that it agrees with the reference model; or that a step was refused without the
others."""

Try = Callable[[Sequence[Record]], TrialOutcome]
"""Repeats some steps on a fresh copy; every rank must get the same answer."""


Steps = tuple[Record, ...]

MAX_TRIALS = 40
SINGLE_STEPS = 6  # steps tried one by one before anything else
_MANY = 8  # more groups than this are halved, not tried one by one


class Search:
    """Try parts of a schedule, each once, and at most ``budget``.

    Args:
        steps: all steps of the schedule.
        try_steps: repeats some steps on a fresh copy.
        tied: the paths of modules that share a parameter, one set for each such parameter.
        near: the module that owns the first tensor that differs; None if there is none.
        paths: of all modules.
        stop: called before each trial, on all ranks: whether the search ends there.

    Attributes:
        tied: as given, those that have a path in common joined.
        trials: how many copies were tried.
        stopped: whether the search was ended by ``stop``.
        target: the failure that is looked for.
        likewise: paths of repeated blocks that fail in the same way by themselves.
        into_blocks: whether one repeated block is followed where all of them fail with numbers of their own: each may
            have the same mistake, or none may work without the others.
        stopped_at_blocks: whether the search stopped there.
    """

    def __init__(
        self,
        steps: Steps,
        try_steps: Try,
        tied: Sequence[frozenset[str]],
        *,
        near: str | None,
        paths: Sequence[str],
        stop: Callable[[], bool],
    ) -> None:
        self.steps, self.near, self.paths = steps, near, paths
        self._try, self._stop = try_steps, stop
        self.stopped = False
        self.tied = _joined(tied)
        self._known: dict[tuple[tuple[int, str, str], ...], TrialOutcome] = {}
        self.budget = MAX_TRIALS
        self.trials = 0
        self.target: Failed | None = None
        self.likewise: list[str] = []
        self.into_blocks = False
        self.stopped_at_blocks = False

    @property
    def ran_out(self) -> bool:
        return self.stopped or self.trials >= self.budget

    def outcome(self, part: Steps) -> TrialOutcome:
        if not part:
            return "agrees"
        key = tuple((record.index, record.path, str(record.primitive)) for record in part)
        if key not in self._known:
            self.stopped = self.stopped or (not self.ran_out and self._stop())
            if self.ran_out:
                return "refused"
            self.trials += 1
            self._known[key] = self._try(part)
        return self._known[key]

    def agrees(self, part: Steps) -> bool:
        return self.outcome(part) == "agrees"

    def is_same(self, part: Steps) -> bool:
        """Return whether a part fails with the same numbers."""
        outcome = self.outcome(part)
        return isinstance(outcome, Failed) and self.target is not None and outcome.is_same(self.target)

    def is_like(self, part: Steps) -> bool:
        """Return whether a part fails at the same place."""
        outcome = self.outcome(part)
        return isinstance(outcome, Failed) and self.target is not None and outcome.is_like(self.target)

    def single(self) -> Record | None:
        """Find a step that fails alone, or without which the rest agrees."""
        at = tuple(record for record in self.steps if record.path == self.near)
        likely = self.steps if len(self.steps) <= SINGLE_STEPS else at[:SINGLE_STEPS]
        return next((record for record in likely if self._does_it_alone(record)), None) if len(self.steps) > 1 else None

    def _does_it_alone(self, record: Record) -> bool:
        if self.is_same((record,)) and self.target is not None and not self.target.raises:
            return True
        return self.is_like((record,)) and self.agrees_without(record)

    def agrees_without(self, record: Record) -> bool:
        """Return whether all other steps agree."""
        return self.agrees(tuple(other for other in self.steps if other is not record))

    def narrow(self, part: Steps) -> Steps:
        """Narrow the steps to the smallest part that fails in the same way."""
        while len(part) > 1:
            smaller = self._smaller(part)
            if smaller is None:
                break
            part = smaller
        return part

    def _smaller(self, part: Steps) -> Steps | None:
        groups = _groups(part, self.tied)
        if len(groups) > _MANY and (half := self._half(part, groups)) is not None:
            return half
        across = _across_blocks(part)
        for partition in (groups, across):
            for group in _nearest_first(partition, self.near):
                if len(group) < len(part) and self.is_same(group):
                    return group
        failing = [path for path, group in groups.items() if self.is_like(group)]
        is_sized = self.target is not None and self.target.size is not None
        if len(failing) == 1 and not is_sized:
            return groups[failing[0]] if len(groups) > 1 else None
        if failing and all(path.rpartition(".")[2].isdigit() for path in failing) and len(groups) > 1:
            if is_sized and not self.into_blocks and len(failing) == len(groups):
                self.stopped_at_blocks = True
                return None
            self.likewise.extend(failing[1:])
            self._look_for(groups[failing[0]])
            return groups[failing[0]]
        return self._without_group(part, groups, failing) or self._shrunk(part, groups)

    def _half(self, part: Steps, groups: dict[str, Steps]) -> Steps | None:
        """Return the half of many groups that fails alone, if one does."""
        first = {record.index for group in list(groups.values())[: len(groups) // 2] for record in group}
        halves = [tuple(record for record in part if (record.index in first) is is_first) for is_first in (True, False)]
        same = [half for half in halves if self.is_same(half)]
        like = [half for half in halves if self.is_like(half)]
        found = same or like
        return found[0] if len(found) == 1 else None

    def _without_group(self, part: Steps, groups: dict[str, Steps], failing: Sequence[str]) -> Steps | None:
        """Find the one group without which the rest agrees."""
        groups_to_blame = []
        for path in failing or list(groups):
            rest = tuple(record for record in part if record not in groups[path])
            if rest and self.agrees(rest):
                groups_to_blame.append(path)
        if len(groups_to_blame) != 1 or len(groups[groups_to_blame[0]]) == len(part):
            return None
        group = groups[groups_to_blame[0]]
        if not isinstance(self.outcome(group), Failed):
            return None if self.target is not None and self.target.size is not None else group
        self._look_for(group)
        return group

    def _shrunk(self, part: Steps, groups: dict[str, Steps]) -> Steps | None:
        """Drop the sub-trees that the failure does not need."""
        if len({record.path for record in part}) == 1:
            return None  # single steps at one module belong together: a shard without its sync fails alone
        is_sized = self.target is not None and self.target.size is not None
        before = part
        for group in groups.values():
            rest = tuple(record for record in part if record not in group)
            if rest and (self.is_same(rest) if is_sized else self.is_like(rest)):
                part = rest
        return part if len(part) < len(before) else None

    def _look_for(self, part: Steps) -> None:
        """Search for the failure of this part from here on."""
        outcome = self.outcome(part)
        if isinstance(outcome, Failed):
            self.target = outcome


def nearest(records: Sequence[Record], near: str | None) -> Steps:
    """Return the steps at a module; else around it; else below; else all."""
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


def _joined(tied: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Merge sets that share a path."""
    joined: list[frozenset[str]] = []
    for paths in tied:
        apart = [other for other in joined if not other & paths]
        joined = [*apart, paths.union(*(other for other in joined if other & paths))]
    return joined


def _levels(part: Steps) -> tuple[list[list[str]], int]:
    """Split the paths into levels, and count the common ones."""
    paths = [record.path.split(".") if record.path else [] for record in part]
    depth = 0
    while all(len(path) > depth for path in paths) and len({path[depth] for path in paths}) == 1:
        depth += 1
    return paths, depth


def _groups(part: Steps, tied: Sequence[frozenset[str]]) -> dict[str, Steps]:
    """Group the steps by sub-tree below the deepest common module.

    Steps at tied modules that would come into several of these groups make one of their own.
    """
    paths, depth = _levels(part)
    same_place = len({record.path for record in part}) == 1
    keys = {
        record.index: f"{record.path}#{record.index}" if same_place else ".".join(path[: depth + 1])
        for record, path in zip(part, paths, strict=True)
    }
    for together in tied if not same_place else ():
        members = [record for record in part if record.path in together]
        if len({keys[record.index] for record in members}) > 1:
            keys.update({record.index: " and ".join(sorted(together)) for record in members})
    return _by_key(part, (keys[record.index] for record in part))


def _across_blocks(part: Steps) -> dict[str, Steps]:
    """Group the steps of equal sub-trees of all repeated blocks."""
    paths, depth = _levels(part)
    if not all(len(path) > depth + 1 and path[depth].isdigit() for path in paths):
        return {}
    length = 1
    while len({tuple(path[depth + 1 : depth + 1 + length]) for path in paths}) == 1 and length < max(map(len, paths)):
        length += 1
    return _by_key(part, (".".join(path[depth + 1 : depth + 1 + length]) for path in paths))


def _by_key(part: Steps, keys: Iterable[str]) -> dict[str, Steps]:
    groups: dict[str, list[Record]] = {}
    for record, key in zip(part, keys, strict=True):
        groups.setdefault(key, []).append(record)
    return {key: tuple(group) for key, group in groups.items()}


def _nearest_first(groups: dict[str, Steps], near: str | None) -> list[Steps]:
    def is_far(group: Steps) -> bool:
        return near is None or not any(f"{near}.".startswith(f"{record.path}.") for record in group)

    return sorted(groups.values(), key=is_far)
