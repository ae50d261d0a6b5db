"""Find the steps that broke the model, and a fix that was tried: repeat parts of the schedule on fresh copies."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_core.errors import HookError
from slapo_core.internals import Internals
from slapo_core.primitive import Change, Record, Suggestion
from slapo_verify.search import SINGLE_STEPS, Failed, Part, Search, Try, block_pattern, is_below, nearest

if TYPE_CHECKING:
    from slapo_core import Schedule


def suggestions(schedule: Schedule, gradients: Sequence[str]) -> list[Suggestion]:
    """Collect the suggestions of the plugins that a schedule names.

    Raises:
        HookError: a plugin's ``slapo_suggest`` raised, or gave something else than suggestions.
    """
    found: list[Suggestion] = []
    for distribution, answer in Internals(schedule).hooks.call_each(
        "slapo_suggest", schedule=schedule, gradients=tuple(gradients)
    ):
        given = list(answer) if isinstance(answer, Iterable) and not isinstance(answer, str) else [answer]
        for item in given:
            if not isinstance(item, Suggestion):
                raise HookError(
                    f"hook slapo_suggest of {distribution} must yield Suggestion objects (got {item!r})",
                    plugin=distribution,
                    hint="yield Suggestion((Change(path, primitive),))",
                )
        found += given
    return found


_MOST = 6


def as_the_others(records: Sequence[Record], paths: Sequence[str]) -> list[Suggestion]:
    """Suggest for a module whose steps differ from those at the same place in other blocks: these other steps.

    Args:
        records: the whole schedule.
        paths: of all modules.

    Returns:
        the rarest variants first; empty where all blocks are equal, or all differ.
    """
    steps: dict[str, list[Record]] = {}
    for record in records:
        steps.setdefault(record.path, []).append(record)
    places: dict[str, list[str]] = {}
    for path in paths:
        places.setdefault(block_pattern(path), []).append(path)
    found: list[tuple[int, Suggestion]] = []
    for alike in places.values():
        if len(alike) < 2 or not any(path in steps for path in alike):
            continue
        variants = {path: tuple(steps.get(path, ())) for path in alike}
        counts = Counter(map(_texts, variants.values()))
        if len(counts) < 2 or len(counts) > 3:
            continue
        for path, own in variants.items():
            if counts[_texts(own)] == max(counts.values()) and len(set(counts.values())) > 1:
                continue
            for other in _unlike(own, variants.values()):
                changes = tuple(_changes(path, own, other))
                if changes:
                    found.append((counts[_texts(own)], Suggestion(changes, likely=True)))
    found.sort(key=lambda item: item[0])
    return [suggestion for _, suggestion in found][:_MOST]


def _texts(steps: Part) -> tuple[str, ...]:
    return tuple(sorted(str(record.primitive) for record in steps))


def _unlike(own: Part, variants: Iterable[Part]) -> list[Part]:
    unlike: dict[tuple[str, ...], Part] = {}
    for other in variants:
        if _texts(other) != _texts(own):
            unlike.setdefault(_texts(other), other)
    return list(unlike.values())


def _changes(path: str, own: Part, other: Part) -> Iterator[Change]:
    """Return the changes that turn the steps at a module into those of another."""
    wanted = Counter(_texts(other)) - Counter(_texts(own))
    surplus = Counter(_texts(own)) - Counter(_texts(other))
    added = [record for record in other if _take(wanted, record)]
    removed = [record for record in own if _take(surplus, record)]
    while removed and added and (pair := _pair(removed, added)):
        old, new = pair
        removed.remove(old)
        added.remove(new)
        yield Change(path, new.primitive, instead_of=old)
    for record in removed:
        yield Change(path, instead_of=record)
    for record in added:
        yield Change(path, record.primitive, first=record is other[0])


def _pair(removed: Sequence[Record], added: Sequence[Record]) -> tuple[Record, Record] | None:
    return next(((old, new) for old in removed for new in added if old.name == new.name), None)


def _take(counter: Counter[str], record: Record) -> bool:
    text = str(record.primitive)
    if not counter[text]:
        return False
    counter[text] -= 1
    return True


_LIKELY = 12  # trials, before the steps are narrowed down
_TOGETHER = 3  # at most this many steps are an answer

Suggest = Callable[[], Sequence[Suggestion]]


@dataclass(frozen=True)
class Cure:
    """Changes that make the schedule agree.

    Args:
        suggestion: the changes.
        likewise: paths at which the same is needed besides.
        of_part: whether only the part that was looked at agrees with them, and the whole schedule has more mistakes.
    """

    suggestion: Suggestion
    likewise: tuple[str, ...] = ()
    of_part: bool = False


def applied(records: Sequence[Record], changes: Sequence[Change]) -> Part:
    """Return the steps with the changes made."""
    found: list[Record] = []
    instead = {change.instead_of.index: change.primitive for change in changes if change.instead_of is not None}
    waiting = [change for change in changes if change.instead_of is None]
    for record in records:
        early = [change for change in waiting if change.first and change.path == record.path]
        waiting = [change for change in waiting if change not in early]
        found += map(_added, early)
        primitive = instead.get(record.index, record.primitive)
        if primitive is not None:
            found.append(dataclasses.replace(record, primitive=primitive))
    return (*found, *map(_added, waiting))


def _added(change: Change) -> Record:
    assert change.primitive is not None
    return Record(0, change.primitive, change.path, "", "")


def without_one(search: Search, part: Part) -> Cure | None:
    """Find a step of ``part`` without which all others agree; several, if only together."""
    steps = part if len(search.steps) > 1 else ()
    changes = [Change(record.path, instead_of=record) for record in steps if search.agrees_without(record)]
    return Cure(Suggestion(tuple(changes))) if 0 < len(changes) <= _TOGETHER else None


def first_cure(search: Search, suggestions: Sequence[Suggestion]) -> Cure | None:
    """Try likely changes before the search; return the first that makes the whole schedule agree."""
    end, seen = search.trials + _LIKELY, set[object]()
    for suggestion in suggestions:
        key = tuple(
            (block_pattern(each.path), str(each.primitive), each.instead_of is None) for each in suggestion.changes
        )
        for variant, likewise in _variants(search, suggestion) if suggestion.likely else ():
            if variant is not suggestion and key in seen:
                continue
            if search.trials < end and search.agrees(applied(search.steps, variant.changes)):
                return Cure(suggestion, likewise)
        seen.add(key)
    return None


def find_cure(search: Search, part: Part, suggestions: Sequence[Suggestion]) -> Cure | None:
    """Find the first suggestion that makes the schedule agree, those near ``part`` first.

    Args:
        search: what tries.
        part: the steps that were found to fail.
        suggestions: what may be changed.
    """
    ordered = sorted(suggestions, key=lambda each: _distance(each, part))
    everywhere_first = bool(search.likewise)
    for suggestion in ordered:
        variants = _variants(search, suggestion)
        for variant, likewise in reversed(variants) if everywhere_first else variants:
            if search.agrees(applied(search.steps, variant.changes)):
                return Cure(suggestion, likewise)
    if len(part) == len(search.steps):
        return None
    for suggestion in ordered:
        if _is_within(suggestion, part) and search.agrees(applied(part, suggestion.changes)):
            return Cure(suggestion, of_part=True)
    return None


def _variants(search: Search, suggestion: Suggestion) -> list[tuple[Suggestion, tuple[str, ...]]]:
    """Extend a suggestion to all repeated blocks; with the paths of further changes."""
    changes = {(str(each), each.first): each for change in suggestion.changes for each in _alike(search, change)}
    if len(changes) <= len(suggestion.changes):
        return [(suggestion, ())]
    own = {change.path for change in suggestion.changes}
    others = dict.fromkeys(change.path for change in changes.values() if change.path not in own)
    return [(suggestion, ()), (Suggestion(tuple(changes.values())), tuple(others))]


def _alike(search: Search, change: Change) -> Iterator[Change]:
    if change.instead_of is not None:
        old, place = str(change.instead_of.primitive), block_pattern(change.path)
        for record in search.steps:
            if str(record.primitive) == old and block_pattern(record.path) == place:
                yield dataclasses.replace(change, path=record.path, instead_of=record)
        return
    has = {record.path for record in search.steps if str(record.primitive) == str(change.primitive)}
    for path in search.paths if "*" in block_pattern(change.path) else (change.path,):
        if block_pattern(path) == block_pattern(change.path) and path not in has:
            yield dataclasses.replace(change, path=path)


def _is_within(suggestion: Suggestion, part: Part) -> bool:
    indices = {record.index for record in part}
    return all(change.instead_of is None or change.instead_of.index in indices for change in suggestion.changes)


def _distance(suggestion: Suggestion, part: Part) -> int:
    """Return how many levels above the part's steps a change is."""
    return max(min(_up(record.path, change.path) for record in part) for change in suggestion.changes)


def _up(path: str, other: str) -> int:
    levels, others = path.split("."), other.split(".")
    common = 0
    while common < min(len(levels), len(others)) and levels[common] == others[common]:
        common += 1
    return len(levels) - common


MAX_CURES = 60  # further trials of other steps
_FEW = 24  # steps tried one by one in the remaining part
_REPEATED = 8  # repeated blocks tried for a mistake found in one
_NAMED = 3  # steps named at most where the cause among them is not known


@dataclass(frozen=True)
class Blame:
    """The steps to blame, and how they were found.

    Args:
        records: the steps that most likely broke the model, oldest first.
        proven: whether these steps alone reproduce the failure, or taking them away, or changing them, cures it; False
            means that they are only those nearest to the first tensor that differs.
        likewise: paths of repeated blocks whose steps fail in the same way.
        trials: how many copies were tried.
        suggestion: what makes the schedule agree, tried on a copy; None if nothing did.
        of_part: whether only the part that was looked at agrees with it, because there are more mistakes.
        alone: whether there is one step, which fails alone.
        among: the number of steps that fail only together, of which the records are the nearest; 0 if they are all.
        ran_out: whether the trials ended before the search did.
        stopped: whether the time for the search was over.
        placed: whether no trial was needed, because only these steps change that place.
    """

    records: tuple[Record, ...]
    proven: bool
    likewise: tuple[str, ...] = ()
    trials: int = 0
    suggestion: Suggestion | None = None
    of_part: bool = False
    alone: bool = False
    among: int = 0
    ran_out: bool = False
    stopped: bool = False
    placed: bool = False

    @classmethod
    def by_place(cls, records: Sequence[Record]) -> Blame:
        """Blame the first of steps that each cause the failure at their own path; list the other paths."""
        likewise = tuple(dict.fromkeys(record.path for record in records[1:] if record.path != records[0].path))
        return cls(tuple(records[:1]), proven=True, likewise=likewise, placed=True)

    def __str__(self) -> str:
        if not self.records and self.proven and self.suggestion is None:
            return (
                "  no step causes it: the same steps on a fresh copy of the reference model agree, so the "
                "scheduled model, or its weights, were changed outside of the schedule"
            )
        shown = [*map(_line, self.records)]
        likewise = [f"  and likewise at {', '.join(self.likewise)}"] if self.likewise else []
        copy = "a copy with the steps around it alone" if self.of_part else "a copy"
        cured = [f"  suggestion, tried on {copy}, which then agrees: {self.suggestion}"] if self.suggestion else []
        return "\n".join([f"  {self._how()}", *shown, *likewise, *cured])

    def _how(self) -> str:
        if self.placed:
            return "the step that causes it, the only one at or above this module:"
        ended = ", which is as many as there may be" if self.ran_out else ""
        ended = "; search stopped: verify(..., blame_seconds=None) goes on" if self.stopped else ended
        if not self.proven and self.among:
            return (
                f"the cause is not known: {self.among} steps fail only together, as far as {self.trials} trials tell"
                f"{ended}; those nearest to this tensor are:"
            )
        if not self.proven:
            found = f"the cause could not be narrowed down in {self.trials} trials{ended}"
            if not self.records:
                return f"{found}: it may be any of the steps"
            return f"{found}; the steps nearest to this tensor are:"
        if self.suggestion is not None and all(change.instead_of is None for change in self.suggestion.changes):
            return f"a step is missing{' at these' if self.records else ''}, tried on fresh copies of the model:"
        return "the steps that cause it, tried on fresh copies of the model:"


def find_steps(
    records: Sequence[Record],
    try_steps: Try,
    *,
    near: str | None,
    tied: Sequence[frozenset[str]] = (),
    failed: Failed | None = None,
    suggest: Suggest = tuple,
    paths: Sequence[str] = (),
    stop: Callable[[], bool] = lambda: False,
) -> Blame:
    """Find the part of ``records`` that fails alone in the same way.

    A few steps, or those at the first tensor that differs, are tried one by one first: a step that fails alone, and
    without which the rest agrees, is the cause. Then steps that are likely missing are tried. Then the search narrows
    by sub-tree, from the top: a group that fails alone with the same numbers is followed, and repeated blocks
    (``layer.0``, ``layer.1``) stand for themselves, so among several that fail the first is followed and the others are
    named. Steps at modules that share a parameter stay together: a tied vocabulary is split in one place and
    synchronized in another. In the part that is left single steps are tried alone, and left out, and changed as
    plugins suggest: what makes the schedule agree is the cause.

    Args:
        records: the whole schedule.
        try_steps: repeats some steps on a fresh copy; every rank must get the same answer.
        near: the module that owns the first tensor that differs, for when nothing is found; None if there is none.
        tied: the paths of modules that share a parameter, one set for each such parameter.
        failed: in which way the schedule was seen to fail; None if ``try_steps`` knows only one.
        suggest: asks for other steps to try.
        paths: of all modules.
        stop: asked before each trial: whether the search ends there.
    """
    steps = tuple(records)
    if not steps:
        return Blame((), proven=False)
    search = Search(steps, try_steps, tied, near=near, paths=paths, stop=stop)
    whole = search.outcome(steps)
    if whole == "agrees":
        return Blame((), proven=True, trials=search.trials)
    search.target = whole if isinstance(whole, Failed) and (failed is None or whole.is_like(failed)) else failed
    if search.target is None:
        return Blame(nearest(steps, near)[:_NAMED], proven=False, trials=search.trials, among=len(steps))
    found = _find(search, suggest)
    if found.alone:
        search.budget = search.trials + SINGLE_STEPS + _REPEATED
        found = dataclasses.replace(found, suggestion=_instead(search, found.records[0], suggest()))
        if found.suggestion is None and not found.likewise:
            first, likewise = _repeated(search, found.records[0])
            found = dataclasses.replace(found, records=(first,), likewise=likewise)
    return dataclasses.replace(found, trials=search.trials, stopped=search.stopped)


def _instead(search: Search, step: Record, suggestions: Sequence[Suggestion]) -> Suggestion | None:
    """Find a suggestion at the step's path that makes the schedule agree."""
    for suggestion in suggestions:
        is_local = all(change.path == step.path and change.instead_of in (None, step) for change in suggestion.changes)
        if is_local and search.agrees(applied(search.steps, suggestion.changes)):
            return suggestion
    return None


def _repeated(search: Search, step: Record) -> tuple[Record, tuple[str, ...]]:
    """Find the first of the same steps in repeated blocks that fail alone, and the blocks of the others."""
    same = [record for record in search.steps if _kind(record) == _kind(step)]
    others = len(same) <= _REPEATED and not search.agrees_without(step)
    failing = [other for other in same if other is step or (others and search.is_like((other,)))]
    blocks = [_block(other.path, failing[0].path) for other in failing[1:]]
    return failing[0], tuple(dict.fromkeys(blocks))


def _kind(record: Record) -> tuple[str, str]:
    """Return a key that equal steps in repeated blocks share."""
    return block_pattern(record.path), str(record.primitive)


def _block(path: str, other: str) -> str:
    """Return a path up to the number in which it differs from another."""
    levels = path.split(".")
    differing = [place for place, (own, its) in enumerate(zip(levels, other.split("."), strict=True)) if own != its]
    return ".".join(levels[: differing[0] + 1]) if differing else path


def _find(search: Search, suggest: Suggest) -> Blame:
    single = search.single()
    if single is not None:
        return Blame((single,), proven=True, alone=True)
    steps, near, advice = search.steps, search.near, suggest()
    suggestions = [*as_the_others(steps, search.paths), *advice] if len(steps) > 1 or suggest is not tuple else []
    cure = first_cure(search, suggestions)
    if cure is not None:
        return _cured(search, cure, advice)
    part = search.narrow(steps)
    ran_out = search.ran_out
    search.budget = search.trials + MAX_CURES
    found = _in_part(search, part, suggestions, advice)
    if found is None and search.stopped_at_blocks:
        search.into_blocks = True
        smaller = search.narrow(part)
        if len(smaller) < len(part) and search.agrees(_without_alike(steps, smaller)):
            part = smaller
            found = _in_part(search, part, suggestions, advice)
    if found is not None:
        return found
    likewise = tuple(search.likewise)
    if len(part) == len(steps):
        shown = nearest(steps, near)[:_NAMED] if near is not None or search.stopped else ()
        return Blame(shown, proven=False, ran_out=ran_out)
    if len(part) <= _NAMED:
        return Blame(part, proven=_tells_by_numbers(search), likewise=likewise, ran_out=search.ran_out)
    shown = nearest(part, near)[:_NAMED]
    return Blame(shown, proven=False, likewise=likewise, among=len(part), ran_out=search.ran_out)


def _tells_by_numbers(search: Search) -> bool:
    """Return whether an equal failure proves the mistake: many mistakes raise the same exception."""
    return search.target is not None and not search.target.raises


def _without_alike(steps: Part, part: Part) -> Part:
    """Drop the steps of ``part``, and equal ones in all repeated blocks."""
    alike = set(map(_kind, part))
    return tuple(record for record in steps if _kind(record) not in alike)


def _in_part(
    search: Search, part: Part, suggestions: Sequence[Suggestion], advice: Sequence[Suggestion]
) -> Blame | None:
    """Find the cause within the remaining part, if it can be shown."""
    found = part if len(part) == 1 and (len(search.steps) > 1 or isinstance(search.outcome(part), Failed)) else ()
    if _NAMED < len(part) <= _FEW:
        found = next(((record,) for record in part if search.is_same((record,))), ())
    if found and (_tells_by_numbers(search) or search.agrees(_without_alike(search.steps, found))):
        return Blame(found, proven=True, likewise=tuple(search.likewise), alone=True)
    cure = without_one(search, part) if len(part) <= _FEW else None
    cure = cure or find_cure(search, part, suggestions)
    return None if cure is None else _cured(search, cure, advice)


def _cured(search: Search, cure: Cure, advice: Sequence[Suggestion]) -> Blame:
    """Blame the changed steps, or else those nearest to an added one.

    Leaving a step out is advice where a plugin suggests it (``advice``); otherwise it only shows the cause.
    """
    given, cure = cure.suggestion.changes, _shortened(cure)
    changes = cure.suggestion.changes
    wrong = tuple(change.instead_of for change in changes if change.instead_of is not None)
    told = any(change.primitive for change in changes) or any(each.changes == given for each in advice)
    if not wrong:
        places = dict.fromkeys(record for change in changes for record in _beside(search, change.path)[-1:])
        wrong = tuple(sorted(places, key=lambda record: record.index))[:_NAMED]
    suggestion = cure.suggestion if told else None
    return Blame(wrong, proven=True, likewise=cure.likewise, suggestion=suggestion, of_part=cure.of_part)


_SHOWN = 4  # changes of a suggestion shown one by one


def _shortened(cure: Cure) -> Cure:
    """Keep the changes of the first of repeated blocks, if there are many, and name the other blocks."""
    changes = cure.suggestion.changes
    first: dict[tuple[str, str, bool], Change] = {}
    for change in changes if len(changes) > _SHOWN else ():
        key = (block_pattern(change.path), str(change.primitive), change.instead_of is None)
        first.setdefault(key, change)
    if not first or len(first) == len(changes):
        return cure
    blocks = (
        _block(change.path, kept.path)
        for change in changes
        if (kept := first[block_pattern(change.path), str(change.primitive), change.instead_of is None]) is not change
    )
    likewise = (*cure.likewise, *dict.fromkeys(blocks))
    return dataclasses.replace(cure, suggestion=Suggestion(tuple(first.values())), likewise=likewise)


def _beside(search: Search, path: str) -> Part:
    """Return the steps at a module, or at one tied to it, or in the smallest sub-tree around it."""
    together = frozenset[str]().union(*(paths for paths in search.tied if path in paths))
    at = tuple(record for record in search.steps if record.path == path)
    at = at or tuple(record for record in search.steps if record.path in together)
    place = path
    while place and not at:
        at = tuple(record for record in search.steps if is_below(record.path, place))
        place = place.rpartition(".")[0]
    return at


def _line(record: Record) -> str:
    return f"    {record}" + (f"  ({record.location})" if record.location else "")
