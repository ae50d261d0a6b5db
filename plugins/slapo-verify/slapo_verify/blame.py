"""Find the steps that broke the model, by trials on fresh copies."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slapo_core.internals import fold_numbers, fold_paths
from slapo_core.primitive import Change, Record, Suggestion
from slapo_verify.fixes import Fix, Suggest, applied, as_the_others, change_pattern, find_fix, first_fix, without_one
from slapo_verify.search import SINGLE_STEPS, Failed, Search, Steps, Try, block_pattern, is_below, nearest, record_lines

_MAX_FIX_TRIALS = 60  # further trials of other steps
_FEW = 24  # steps tried one by one in the remaining part
_REPEATED = 8  # repeated blocks tried for a mistake found in one
_NAMED = 3  # steps named at most where the cause among them is not known


@dataclass(frozen=True)
class Blame:
    """Name the steps to blame, and how they were found.

    Args:
        records: the steps that most likely broke the model, oldest first.
        proven: whether these steps alone reproduce the failure, or taking them away, or changing them, cures it; False
            means that they are only those nearest to the first tensor that differs.
        likewise: paths of repeated blocks whose steps fail in the same way.
        trials: how many copies were tried.
        suggestion: what makes the schedule agree, tried on a copy; None if nothing did.
        paths: of all modules.
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
    paths: Sequence[str] = ()
    of_part: bool = False
    alone: bool = False
    among: int = 0
    ran_out: bool = False
    stopped: bool = False
    placed: bool = False

    @classmethod
    def by_place(cls, records: Sequence[Record]) -> Blame:
        """Blame the first step of a failure at each step's own path."""
        likewise = tuple(dict.fromkeys(record.path for record in records[1:] if record.path != records[0].path))
        return cls(tuple(records[:1]), proven=True, likewise=likewise, placed=True)

    def __str__(self) -> str:
        if not self.records and self.proven and self.suggestion is None:
            return (
                "  no step causes it: the same steps on a fresh copy of the reference model agree, so the "
                "scheduled model, or its weights, were changed outside of the schedule"
            )
        likewise = [f"  and likewise at {_folded(self.likewise)}"] if self.likewise else []
        changes = _changes(self.suggestion.changes, self.paths) if self.suggestion is not None else ()
        tried = "a copy with only the steps around it, which then agrees; other mistakes may remain"
        tried = tried if self.of_part else "a copy, which then agrees"
        fixed = [f"  suggestion, tried on {tried}: {'; '.join(changes)}"] if changes else []
        return "\n".join([f"  {self._how()}", *record_lines(self._shown()), *likewise, *fixed])

    def _adds(self) -> bool:
        """Return whether steps are missing, and none is wrong."""
        return self.suggestion is not None and all(change.instead_of is None for change in self.suggestion.changes)

    def _shown(self) -> Sequence[Record]:
        """Return the steps to list: none where steps are missing at other modules only."""
        if not self.proven or self.suggestion is None or not self._adds():
            return self.records
        missing = {block_pattern(change.path) for change in self.suggestion.changes}
        is_there = any(block_pattern(record.path) in missing for record in self.records)
        return self.records if is_there else ()

    def _how(self) -> str:
        if self.placed:
            return "the step that causes it, the only one at or above this module:"
        ended = ", the trial limit" if self.ran_out else ""
        ended = "; search stopped: verify(..., blame_seconds=None) goes on" if self.stopped else ended
        if not self.proven and self.among:
            return (
                f"no single step explains it: {self.among} steps are wrong only in combination, or there are several "
                f"mistakes ({self.trials} trials{ended}); those nearest to this tensor, not necessarily wrong, are:"
            )
        if not self.proven:
            found = f"the cause could not be narrowed down in {self.trials} trials{ended}"
            if not self.records:
                return f"{found}: it may be any of the steps"
            return f"{found}; the steps nearest to this tensor are:"
        if self._adds():
            return f"a step is missing{' at these' if self._shown() else ''}, tried on fresh copies of the model:"
        return "the steps that cause it, tried on fresh copies of the model:"


def _folded(paths: Sequence[str]) -> str:
    """Format paths; equal ones in repeated blocks as one."""
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(block_pattern(path), []).append(path)
    return ", ".join(map(fold_paths, alike.values()))


def _changes(changes: Sequence[Change], paths: Sequence[str]) -> Iterator[str]:
    """Format changes; equal ones in all repeated blocks as one call.

    Args:
        changes: of a suggestion.
        paths: of all modules.
    """
    alike: dict[tuple[object, ...], list[Change]] = {}
    for change in changes:
        old = str(change.instead_of.primitive) if change.instead_of is not None else None
        alike.setdefault((*change_pattern(change), old), []).append(change)
    for first, *others in alike.values():
        same = sorted((first, *others), key=lambda each: each.instead_of.index if each.instead_of is not None else 0)
        places = [each.path for each in same]
        levels = zip(*(path.split(".") for path in places), strict=True)
        glob = ".".join(level[0] if len(set(level)) == 1 else "*" for level in levels)
        selected = re.compile(re.escape(glob).replace(r"\*", "[^.]*"))
        steps = [each.instead_of for each in same if each.instead_of is not None]
        numbers = fold_numbers([step.index for step in steps]) if steps else ""
        if not others:
            yield str(first)
        elif first.primitive is None:
            yield f"leave #{numbers} {steps[0].primitive} at {_folded(places)} out"
        elif set(places) == {path for path in paths if selected.fullmatch(path)}:
            yield (
                str(dataclasses.replace(first, path=glob, instead_of=None))
                if not steps
                else (f"write sch['{glob}'].{first.primitive} in place of #{numbers}")
            )
        else:
            likewise = _folded([path for path in places if path != first.path])
            yield f"{first}, and likewise at {likewise}"


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
        records: all steps of the schedule.
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
    outcome = search.outcome(steps)
    if outcome == "agrees":
        return Blame((), proven=True, trials=search.trials)
    search.target = outcome if isinstance(outcome, Failed) and (failed is None or outcome.is_like(failed)) else failed
    if search.target is None:
        return Blame(nearest(steps, near)[:_NAMED], proven=False, trials=search.trials, among=len(steps))
    found = _find(search, suggest)
    if found.alone:
        search.budget = search.trials + SINGLE_STEPS + _REPEATED
        found = dataclasses.replace(found, suggestion=_instead(search, found.records[0], suggest()))
        if found.suggestion is None and not found.likewise:
            first, likewise = _repeated(search, found.records[0])
            found = dataclasses.replace(found, records=(first,), likewise=likewise)
    return dataclasses.replace(found, trials=search.trials, stopped=search.stopped, paths=paths)


def _instead(search: Search, step: Record, suggestions: Sequence[Suggestion]) -> Suggestion | None:
    """Find a suggestion at the step's path that makes the schedule agree."""
    for suggestion in suggestions:
        is_local = all(change.path == step.path and change.instead_of in (None, step) for change in suggestion.changes)
        if is_local and search.agrees(applied(search.steps, suggestion.changes)):
            return suggestion
    return None


def _repeated(search: Search, step: Record) -> tuple[Record, tuple[str, ...]]:
    """Find the first of equal steps in repeated blocks that fail alone, and the others."""
    same = [record for record in search.steps if _kind(record) == _kind(step)]
    others = len(same) <= _REPEATED and not search.agrees_without(step)
    failing = [other for other in same if other is step or (others and search.is_like((other,)))]
    blocks = [_block(other.path, failing[0].path) for other in failing[1:]]
    return failing[0], tuple(dict.fromkeys(blocks))


def _kind(record: Record) -> tuple[str, str]:
    """Return a key that equal steps in repeated blocks share."""
    return block_pattern(record.path), str(record.primitive)


def _block(path: str, other: str) -> str:
    """Return a path up to the first level that differs from another path."""
    levels = path.split(".")
    differing = [place for place, (own, its) in enumerate(zip(levels, other.split("."), strict=True)) if own != its]
    return ".".join(levels[: differing[0] + 1]) if differing else path


def _find(search: Search, suggest: Suggest) -> Blame:
    single = search.single()
    if single is not None:
        return Blame((single,), proven=True, alone=True)
    steps, near, advice = search.steps, search.near, suggest()
    suggestions = [*as_the_others(steps, search.paths), *advice] if len(steps) > 1 or suggest is not tuple else []
    fix = first_fix(search, suggestions)
    if fix is not None:
        return _blame_fix(search, fix, advice)
    part = search.narrow(steps)
    ran_out = search.ran_out
    search.budget = search.trials + _MAX_FIX_TRIALS
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
    """Return whether an equal failure proves the mistake."""
    return search.target is not None and not search.target.raises


def _without_alike(steps: Steps, part: Steps) -> Steps:
    """Drop the steps of ``part``, and equal ones in all repeated blocks."""
    alike = set(map(_kind, part))
    return tuple(record for record in steps if _kind(record) not in alike)


def _in_part(
    search: Search, part: Steps, suggestions: Sequence[Suggestion], advice: Sequence[Suggestion]
) -> Blame | None:
    """Find the cause within the remaining part, if it can be shown."""
    found = part if len(part) == 1 and (len(search.steps) > 1 or isinstance(search.outcome(part), Failed)) else ()
    if _NAMED < len(part) <= _FEW:
        found = next(((record,) for record in part if search.is_same((record,))), ())
    if found and (_tells_by_numbers(search) or search.agrees(_without_alike(search.steps, found))):
        return Blame(found, proven=True, likewise=tuple(search.likewise), alone=True)
    fix = without_one(search, part) if len(part) <= _FEW else None
    fix = fix or find_fix(search, part, suggestions)
    return None if fix is None else _blame_fix(search, fix, advice)


def _blame_fix(search: Search, fix: Fix, advice: Sequence[Suggestion]) -> Blame:
    """Blame the changed steps, or else those nearest to an added one.

    Leaving a step out is advice where a plugin suggests it (``advice``); otherwise it only shows the cause.
    """
    changes = fix.suggestion.changes
    wrong = tuple(change.instead_of for change in changes if change.instead_of is not None)
    advised = {frozenset(map(change_pattern, each.changes)) for each in advice}
    is_advice = any(change.primitive for change in changes) or frozenset(map(change_pattern, changes)) in advised
    if not wrong:
        places = dict.fromkeys(record for change in changes for record in _beside(search, change.path)[-1:])
        kinds = list(dict.fromkeys(map(_kind, places)))[:_NAMED]
        wrong = tuple(record for record in places if _kind(record) in kinds)
    wrong = tuple(sorted(wrong, key=lambda record: record.index))
    suggestion = fix.suggestion if is_advice else None
    return Blame(wrong, proven=True, suggestion=suggestion, of_part=fix.of_part)


def _beside(search: Search, path: str) -> Steps:
    """Return the steps at a module, at one tied to it, or around it."""
    together = frozenset[str]().union(*(paths for paths in search.tied if path in paths))
    at = tuple(record for record in search.steps if record.path == path)
    at = at or tuple(record for record in search.steps if record.path in together)
    place = path
    while place and not at:
        at = tuple(record for record in search.steps if is_below(record.path, place))
        place = place.rpartition(".")[0]
    return at
