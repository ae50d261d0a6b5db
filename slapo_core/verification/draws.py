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
    expected: Sequence[Draw], got: Sequence[Draw], *, is_random: bool, is_split: Callable[[str], bool]
) -> DrawnAlike:
    """Compare what one forward of each model draws.

    Args:
        expected: by the untouched model.
        got: by the scheduled model.
        is_random: whether a step promises no more than the same distribution.
        is_split: whether steps split tensors around a module, so that it may draw in other pieces.
    """
    if [draw.stream for draw in expected] == [draw.stream for draw in got]:
        return DrawnAlike()
    if is_random:
        return DrawnAlike(other_stream="a step promises the same distribution only (RANDOM)")
    before, after = Counter(draw.p for draw in expected), Counter(draw.p for draw in got)
    if before == after:
        return DrawnAlike(other_stream=_other_stream(expected, got))
    path = _first_place(expected, got)
    theirs, ours = ([draw.p for draw in draws if draw.path == path] for draws in (expected, got))
    if before.keys() == after.keys() and is_split(path):
        return DrawnAlike(other_stream=f"'{path}' draws {_times(len(ours))}, not {_times(len(theirs))}")
    return DrawnAlike(_problem(theirs, ours), path)


def _problem(theirs: list[float], ours: list[float]) -> str:
    if not ours:
        return f"it drops nothing, where the untouched model drops with p={_probabilities(theirs)}"
    if not theirs:
        return f"it drops with p={_probabilities(ours)}, where the untouched model drops nothing"
    if set(theirs) == set(ours):
        return f"it drops {_times(len(ours))}, not {_times(len(theirs))}, with p={_probabilities(ours)}"
    return f"it drops with p={_probabilities(ours)}, not p={_probabilities(theirs)}"


def _first_place(expected: Sequence[Draw], got: Sequence[Draw]) -> str:
    """The first module that draws otherwise in the two models; "" if they draw alike module by module."""
    for path in dict.fromkeys(draw.path for draw in (*expected, *got)):
        by_model = [Counter(draw.p for draw in draws if draw.path == path) for draws in (expected, got)]
        if by_model[0] != by_model[1]:
            return path
    return ""


def _other_stream(expected: Sequence[Draw], got: Sequence[Draw]) -> str:
    before, after = next((one, other) for one, other in zip(expected, got, strict=True) if one.stream != other.stream)
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
