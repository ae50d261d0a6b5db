"""Find the steps that broke the model: repeat parts of the schedule on fresh copies, and narrow down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slapo_core.spec.primitive import Record, Suggestion
from slapo_core.verification.cures import Cure, Suggest, applied, as_the_others, find_cure, first_cure, without_one
from slapo_core.verification.search import SINGLE_STEPS, Failed, Part, Search, Try, alike_path, is_below, nearest

MAX_CURES = 60  # so many further trials of other steps
_FEW = 24  # so many steps are tried one by one in the part that is left
_REPEATED = 8  # so many repeated blocks are tried for the mistake that was found in one
_NAMED = 3  # so many steps are named at most where it is not known which of them does it


@dataclass(frozen=True)
class Blame:
    """Steps, and how they were found.

    Args:
        records: what most likely broke the model, oldest first.
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
        placed: whether no trial was needed, because only these steps do what was seen at that place.
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
        """The first of steps each of which does it where it stands, and the places of the others."""
        likewise = tuple(dict.fromkeys(record.path for record in records[1:] if record.path != records[0].path))
        return cls(tuple(records[:1]), proven=True, likewise=likewise, placed=True)

    def __str__(self) -> str:
        if not self.records and self.proven and self.suggestion is None:
            return (
                "  no step does it: the same steps on a fresh copy of the reference model agree with it, so the "
                "scheduled model, or its weights, were changed outside of the schedule"
            )
        shown = [*map(_line, self.records)]
        likewise = [f"  and likewise at {', '.join(self.likewise)}"] if self.likewise else []
        copy = "a copy with the steps around it alone" if self.of_part else "a copy"
        cured = [f"  suggestion, tried on {copy}, which then agrees: {self.suggestion}"] if self.suggestion else []
        return "\n".join([f"  {self._how()}", *shown, *likewise, *cured])

    def _how(self) -> str:
        if self.placed:
            return "the step that does it, as no other stands around this place:"
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
        return "the steps that do it, tried on fresh copies of the model:"


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
    """Find the part of ``records``, which fail together, that fails alone, and in the same way.

    A few steps, or those at the first tensor that differs, are tried one by one first: a step that fails alone, and
    without which the rest agrees, is it. Then what is likely to be missing is tried. Then the steps are narrowed down
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
    """What to write in the place of the step that does it, or beside it."""
    for suggestion in suggestions:
        is_local = all(change.path == step.path and change.instead_of in (None, step) for change in suggestion.changes)
        if is_local and search.agrees(applied(search.steps, suggestion.changes)):
            return suggestion
    return None


def _repeated(search: Search, step: Record) -> tuple[Record, tuple[str, ...]]:
    """The first of the same steps that fail alone in repeated blocks, and the blocks of the others."""
    same = [record for record in search.steps if _kind(record) == _kind(step)]
    others = len(same) <= _REPEATED and not search.agrees_without(step)
    failing = [other for other in same if other is step or (others and search.is_like((other,)))]
    blocks = [_block(other.path, failing[0].path) for other in failing[1:]]
    return failing[0], tuple(dict.fromkeys(blocks))


def _kind(record: Record) -> tuple[str, str]:
    """What a step has in common with the same ones in repeated blocks."""
    return alike_path(record.path), str(record.primitive)


def _block(path: str, other: str) -> str:
    """The part of a path up to the number in which it differs from another."""
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
    """Whether a part that fails in the same way must have the mistake: many mistakes raise the same exception."""
    return search.target is not None and not search.target.raises


def _without_alike(steps: Part, part: Part) -> Part:
    """The steps without those of ``part``, and without the same ones in all repeated blocks."""
    alike = set(map(_kind, part))
    return tuple(record for record in steps if _kind(record) not in alike)


def _in_part(
    search: Search, part: Part, suggestions: Sequence[Suggestion], advice: Sequence[Suggestion]
) -> Blame | None:
    """The cause within the part that is left, if it can be shown."""
    found = part if len(part) == 1 and (len(search.steps) > 1 or isinstance(search.outcome(part), Failed)) else ()
    if _NAMED < len(part) <= _FEW:
        found = next(((record,) for record in part if search.is_same((record,))), ())
    if found and (_tells_by_numbers(search) or search.agrees(_without_alike(search.steps, found))):
        return Blame(found, proven=True, likewise=tuple(search.likewise), alone=True)
    cure = without_one(search, part) if len(part) <= _FEW else None
    cure = cure or find_cure(search, part, suggestions)
    return None if cure is None else _cured(search, cure, advice)


def _cured(search: Search, cure: Cure, advice: Sequence[Suggestion]) -> Blame:
    """The steps that are changed, or else those nearest to what is added.

    To leave a step out is advice where a plugin suggests it (``advice``); elsewhere it only shows which step does it.
    """
    changes = cure.suggestion.changes
    wrong = tuple(change.instead_of for change in changes if change.instead_of is not None)
    told = any(change.primitive for change in changes) or any(each.changes == changes for each in advice)
    if not wrong:
        places = dict.fromkeys(record for change in changes for record in _beside(search, change.path)[-1:])
        wrong = tuple(sorted(places, key=lambda record: record.index))[:_NAMED]
    suggestion = cure.suggestion if told else None
    return Blame(wrong, proven=True, likewise=cure.likewise, suggestion=suggestion, of_part=cure.of_part)


def _beside(search: Search, path: str) -> Part:
    """The steps at a module, or at one that is tied to it, or in the smallest sub-tree around it."""
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
