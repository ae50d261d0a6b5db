"""Hold the dropout of the scheduled model against that of the untouched one: who draws, how often, how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slapo_core.verification.dropout import Draw

__all__ = ["DrawnAlike", "compare_draws"]


@dataclass(frozen=True)
class DrawnAlike:
    """What two runs have in common in what they draw.

    Args:
        wrong: what is wrong in the scheduled model; None if nothing is.
        path: the module where it is wrong.
        other_stream: why the two get other random numbers, rightly; None if they get the same.
    """

    wrong: str | None = None
    path: str = ""
    other_stream: str | None = None


def compare_draws(
    expected: Sequence[Draw],
    got: Sequence[Draw],
    *,
    is_random: bool,
    is_split: Callable[[str], bool],
    is_here: Callable[[str], bool] = lambda path: True,
) -> DrawnAlike:
    """Compare what one forward of each model draws.

    How often each module draws, and with which probability, must be as in the untouched model whatever the steps
    promise: RANDOM means other numbers, and nothing else.

    Args:
        expected: by the untouched model.
        got: by the scheduled model.
        is_random: whether a step promises no more than the same distribution.
        is_split: whether steps split tensors around a module, so that it may draw in other pieces.
        is_here: whether this rank has a module of that path.
    """
    wrong = _wrong(expected, got, is_split, is_here)
    if wrong is not None:
        return wrong
    if is_random:
        return DrawnAlike(other_stream="a step promises the same distribution only (RANDOM)")
    if Counter(draw.p for draw in expected) != Counter(draw.p for draw in got):
        path = _differing(expected, got)[0]
        theirs, ours = ([draw for draw in draws if draw.path == path] for draws in (expected, got))
        return DrawnAlike(other_stream=f"'{path}' draws {_times(len(ours))}, not {_times(len(theirs))}")
    for before, after in zip(expected, got, strict=True):
        if before.stream != after.stream:
            return DrawnAlike(other_stream=_other_stream(before, after))
    return DrawnAlike()


def _wrong(
    expected: Sequence[Draw], got: Sequence[Draw], is_split: Callable[[str], bool], is_here: Callable[[str], bool]
) -> DrawnAlike | None:
    """The first module that draws otherwise, unless it rightly draws for pieces, or the draws only moved."""
    left: dict[str, tuple[list[float], list[float]]] = {}
    for path in _differing(expected, got):
        theirs, ours = ([draw for draw in draws if draw.path == path] for draws in (expected, got))
        if not (is_split(path) and _is_for_pieces(theirs, ours, is_here=is_here(path))):
            left[path] = [draw.p for draw in theirs], [draw.p for draw in ours]
    missing, added = Counter[float](), Counter[float]()
    for before, after in left.values():
        missing += Counter(before)
        added += Counter(after)
    if missing == added:
        return None
    path, (before, after) = next(iter(left.items()))
    return DrawnAlike(_problem(before, after), path)


def _is_for_pieces(theirs: Sequence[Draw], ours: Sequence[Draw], *, is_here: bool) -> bool:
    """Whether a module draws another number of times because it has other pieces: fewer heads, or other shapes."""
    if not ours or not theirs:
        return not ours and not is_here
    if {draw.p for draw in theirs} != {draw.p for draw in ours}:
        return False
    return len(theirs) % len(ours) == 0 or {draw.shape for draw in theirs}.isdisjoint(draw.shape for draw in ours)


def _problem(theirs: list[float], ours: list[float]) -> str:
    if not ours:
        return f"it drops nothing, where the untouched model drops with p={_probabilities(theirs)}"
    if not theirs:
        return f"it drops with p={_probabilities(ours)}, where the untouched model drops nothing"
    if set(theirs) == set(ours):
        return f"it drops {_times(len(ours))}, not {_times(len(theirs))}, with p={_probabilities(ours)}"
    return f"it drops with p={_probabilities(ours)}, not p={_probabilities(theirs)}"


def _differing(expected: Sequence[Draw], got: Sequence[Draw]) -> list[str]:
    """The modules that draw another number of times, or with other probabilities, in the two models."""
    counts = [Counter((draw.path, draw.p) for draw in draws) for draws in (expected, got)]
    places = dict.fromkeys((draw.path, draw.p) for draw in (*expected, *got))
    return list(dict.fromkeys(place[0] for place in places if counts[0][place] != counts[1][place]))


def _other_stream(before: Draw, after: Draw) -> str:
    where = f"'{after.path}'" if after.path else "the model itself"
    if before.shape != after.shape:
        return f"{where} draws for {after.shape}, where the untouched model draws for {before.shape}"
    if before.function != after.function:
        return f"{where} draws by {after.function}, where the untouched model draws by {before.function}"
    return f"{where} draws in another order than the untouched model"


def _probabilities(values: list[float]) -> str:
    return " and ".join(f"{value:g}" for value in dict.fromkeys(values))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
