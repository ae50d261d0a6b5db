"""One run of a space function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from slapo_tune.space.errors import SpaceError
from slapo_tune.space.plain import plain_candidates, shown
from slapo_tune.space.symbols import RefusedError

__all__ = ["Replay", "picked"]

MOST_CALLS = 10_000
"""Of ``choose`` in one run; more are taken for a loop without end."""


class Replay:
    """What one run of the function is given (see `Symbols`), and what became of it.

    Args:
        pick: gives the index of the candidate to choose, of the symbol's name and candidates.
    """

    def __init__(self, pick: Callable[[str, tuple[Any, ...]], int]) -> None:
        self._pick = pick
        self._calls = 0
        self._ended = False
        self._failed: BaseException | None = None
        self.candidates: dict[str, tuple[Any, ...]] = {}
        self.point: dict[str, Any] = {}
        self.reason = ""

    def choose(self, name: str, candidates: Iterable[Any]) -> Any:
        try:
            return self._choose(name, candidates)
        except RefusedError:
            raise
        except BaseException as error:
            self._failed = error
            raise

    def require(self, condition: bool, reason: str) -> None:
        self._go_on()
        if not isinstance(reason, str) or not reason or isinstance(condition, str):
            self._failed = self._wrong(
                f"require takes a condition and the reason in words (got {condition!r}, {reason!r})",
                's.require(batch % dp == 0, "the batch divides over dp")',
            )
            raise self._failed
        if not condition:
            self._refuse(reason)

    def run(self, function: Callable[[Any], Any]) -> None:
        """Run the function to its end, or until the point is refused.

        Raises:
            SpaceError: the function does what a space cannot be made of, or raised.
        """
        try:
            result = function(self)
            if inspect.isgenerator(result) or inspect.iscoroutine(result):
                result.close()
                self._failed = self._wrong(
                    "the space function has `yield` or `async`: calling it chooses nothing",
                    'def space(s): s.choose("batch", [8, 16])',
                )
        except RefusedError:
            pass
        except (Exception, SystemExit) as error:
            if self._failed is None:
                raise self._wrong(f"the space function raised {type(error).__name__}: {error}", None) from error
        finally:
            self._ended = True
        if self._failed is not None:  # also where the function caught it
            raise self._failed

    def _choose(self, name: str, candidates: Iterable[Any]) -> Any:
        self._go_on()
        if not isinstance(name, str) or not name:
            raise self._wrong(f"the name of a symbol must be a string (got {name!r})", 's.choose("batch", [8, 16])')
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise self._wrong(f"the space function calls choose more than {MOST_CALLS} times", "end the loop")
        try:
            values = plain_candidates(name, candidates)
        except SpaceError as error:
            raise self._wrong(error.message, error.hint) from None
        if name in self.point:
            if values != self.candidates[name]:
                raise self._wrong(
                    f"{name!r} is chosen twice, from {_few(self.candidates[name])} and then from {_few(values)}",
                    f"another name for the second one, e.g. {name + '_2'!r}",
                )
            return self.point[name]
        if not values:
            self._refuse(f"{name!r} has no candidates")
        index = picked(self._pick, name, values)
        self.candidates[name] = values
        self.point[name] = values[index]
        return values[index]

    def _go_on(self) -> None:
        if self._ended:
            raise SpaceError(
                "choose and require belong to the space function, which has ended",
                hint="the schedule gets its values from the point: p['batch']",
            )
        if self.reason:  # the function caught the refusal; what it says first stays
            raise RefusedError(self.reason)

    def _refuse(self, reason: str) -> NoReturn:
        self.reason = reason
        raise RefusedError(reason)

    def _wrong(self, message: str, hint: str | None) -> SpaceError:
        after = f" (after choosing {shown(self.point)})" if self.point else ""
        return SpaceError(message + after, hint=hint)


def picked(pick: Callable[[str, tuple[Any, ...]], int], name: str, candidates: tuple[Any, ...]) -> int:
    """The index that ``pick`` gives.

    Raises:
        SpaceError: there is no such candidate.
    """
    index = pick(name, candidates)
    if not isinstance(index, int) or not 0 <= index < len(candidates):
        raise SpaceError(
            f"candidate {index!r} of {name!r} was picked, which has {len(candidates)}",
            hint="pick(name, candidates) gives an index from 0 to len(candidates) - 1",
        )
    return index


def _few(values: tuple[Any, ...]) -> str:
    return repr(list(values)) if len(values) <= 8 else f"[{', '.join(map(repr, values[:6]))}, ...]"
