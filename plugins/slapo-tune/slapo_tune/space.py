"""`Space`: a symbolic space, defined by running a function again for each point."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn, Protocol

from slapo_tune.errors import SpaceError

LARGEST = 100_000
"""Candidates of one symbol; more are taken for an iterator without end."""


def encode(point: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point as JSON has it: tuples are lists."""
    return {name: _listed(value) for name, value in point.items()}


def decode(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the point that :func:`encode` was given, read from JSON: lists are tuples."""
    return {name: _tupled(value) for name, value in data.items()}


def shown(point: Mapping[str, Any]) -> str:
    """Format a point for a message: ``batch=96, checkpoint=0.5``."""
    return ", ".join(f"{name}={value!r}" for name, value in point.items()) or "nothing"


def plain_candidates(name: str, candidates: Iterable[Any]) -> tuple[Any, ...]:
    """Check the candidates of a symbol.

    Raises:
        SpaceError: with the call to write instead.
    """
    call = f"s.choose({name!r}, "
    if isinstance(candidates, str):
        raise SpaceError(
            f"the candidates of {name!r} are one string, {candidates!r}",
            hint=f"{call}[{candidates!r}]) chooses from one",
        )
    if isinstance(candidates, Set):
        raise SpaceError(
            f"the candidates of {name!r} are a set: each process has another order of it",
            hint=f"{call}sorted({{...}}))",
        )
    try:
        values = tuple(itertools.islice(candidates, LARGEST + 1))
    except TypeError:
        raise SpaceError(
            f"the candidates of {name!r} must be a list, a range or another iterable (got {candidates!r})",
            hint=f"{call}[{candidates!r}])",
        ) from None
    if len(values) > LARGEST:
        raise SpaceError(f"{name!r} has more than {LARGEST} candidates", hint=f"{call}range(96, 193, 8))")
    if set(map(type, values)) <= {bool, int, str} and len(set(values)) == len(values):
        return values
    seen: dict[Any, Any] = {}
    for value in values:
        problem = _problem(value)
        if problem:
            raise SpaceError(f"{value!r}, a candidate of {name!r}, {problem[0]}", hint=f"{call}[{problem[1]}, ...])")
        if value in seen:
            twice = "is there twice" if repr(seen[value]) == repr(value) else f"equals {seen[value]!r}, another one"
            raise SpaceError(
                f"{value!r}, a candidate of {name!r}, {twice}",
                hint=f"{call}dict.fromkeys(candidates)) leaves doubles out",
            )
        seen[value] = value
    return values


def _problem(value: Any) -> tuple[str, str] | None:
    """What keeps a value from being plain, and what to write in its place."""
    if value is None or type(value) in (bool, int, str):
        return None
    if type(value) is float:
        return None if math.isfinite(value) else ("is not a number that JSON can store", "None")
    if type(value) is tuple:
        return next((problem for item in value if (problem := _problem(item))), None)
    name = type(value).__name__
    if isinstance(value, (list, Set)):
        return ("can be changed later; tuples cannot", "(...)" if not isinstance(value, list) else repr(tuple(value)))
    for plain in (int, float, str):
        if isinstance(value, plain):
            return (f"is a {name}, no plain {plain.__name__}", repr(plain(value)))
    if callable(item := getattr(value, "item", None)) and getattr(value, "shape", None) in ((), None):
        return (f"is a {name}, not plain data", repr(item()))
    return (f"is a {name}, not plain data", repr(str(getattr(value, "__name__", value)).rpartition(".")[2]))


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, (list, tuple)) else value


def canonical(path: Iterable[tuple[str, Any]]) -> str:
    """Encode choices in order, as one line of JSON that is the same in every process."""
    return json.dumps([[name, _listed(value)] for name, value in path], separators=(",", ":"), allow_nan=False)


class RefusedError(Exception):
    """``require`` refused the point: ends the run of the space function; never seen by users."""


class Symbols(Protocol):
    """The choices of one point, made in order: later candidates may depend on earlier choices.

    The function is run again for each point, so it must do the same whenever it is told the same: no random numbers, no
    clock, no state. Symbols may be chosen in another order in other branches, or in some branches only.
    """

    def choose(self, name: str, candidates: Iterable[Any]) -> Any:
        """Choose one of the candidates.

        Args:
            name: of the symbol; chosen again in the same run, it gives the same value.
            candidates: plain data (None, booleans, numbers, strings, tuples of these), in their natural order, e.g.
                from small to large: a list, a range, a generator. Where there are none, the point is refused.

        Raises:
            SpaceError: candidates that are not plain data, or twice the same; a symbol that was chosen in this run
                already, from other candidates.
        """

    def require(self, condition: bool, reason: str) -> None:
        """Refuse the point unless ``condition`` holds.

        Args:
            condition: of the choices so far.
            reason: what must hold, in words, e.g. ``"the batch divides over dp"``; shown in the report.
        """


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
            SpaceError: the function uses unsupported candidates or conditions, or raised.
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
        if self.reason:  # the function caught the refusal; the first one stays
            raise RefusedError(self.reason)

    def _refuse(self, reason: str) -> NoReturn:
        self.reason = reason
        raise RefusedError(reason)

    def _wrong(self, message: str, hint: str | None) -> SpaceError:
        after = f" (after choosing {shown(self.point)})" if self.point else ""
        return SpaceError(message + after, hint=hint)


def picked(pick: Callable[[str, tuple[Any, ...]], int], name: str, candidates: tuple[Any, ...]) -> int:
    """Return the index that ``pick`` gives.

    Raises:
        SpaceError: the candidate does not exist.
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


KEPT = 100_000
"""Nodes of the tree that are kept; where there are more, the function is run again."""

COUNTED = 20_000
"""Leaves that a fingerprint and a description look at."""

AGAIN = 64
"""Leaves that are run again, to see whether the function is the same at every run."""

SPREAD = 256
"""Leaves beyond these, spread over the rest, that a fingerprint looks at."""


@dataclass(frozen=True)
class Leaf:
    """The end of one run.

    Args:
        point: the choices.
        reason: why it is refused; empty for a point of the space.
        indices: of the candidates chosen.
        candidates: what each symbol was chosen from.
    """

    point: dict[str, Any]
    reason: str
    indices: tuple[int, ...]
    candidates: dict[str, tuple[Any, ...]]


class Space:
    """Everything that a space function allows; nothing is run before it is asked for.

    Two points that are equal are the same point: no symbol has candidates that are equal.

    Args:
        function: the user's, see :class:`~slapo_tune.space.Symbols`.

    Raises:
        SpaceError: it is not a function.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        if not callable(function):
            raise SpaceError(
                f"a space is a function (got {function!r})",
                hint='def space(s): s.choose("batch", [8, 16])',
            )
        self._function = function
        self._nodes: dict[tuple[int, ...], tuple[str, tuple[Any, ...]] | str] = {}

    @classmethod
    def of(cls, function: Callable[[Any], Any] | Space) -> Space:
        """Return the space of a function; a space is its own."""
        return function if isinstance(function, Space) else cls(function)

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield every point, in the order of the candidates, one after the other.

        Raises:
            SpaceError: there is none; with the reasons.
        """
        empty = True
        for leaf in self.leaves():
            if not leaf.reason:
                empty = False
                yield dict(leaf.point)
        if empty:
            self._raise_empty()

    def refused(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield choices that ``require`` refused, or that leave a symbol without candidates; and why."""
        return ((dict(leaf.point), leaf.reason) for leaf in self.leaves() if leaf.reason)

    def draw(self, pick: Callable[[str, tuple[Any, ...]], int]) -> dict[str, Any] | None:
        """Return one point, chosen symbol by symbol.

        Args:
            pick: gives the index of a candidate, of the symbol's name and candidates.

        Returns:
            the point; None if the choices are refused.
        """
        leaf = self.leaf(pick)
        return None if leaf.reason else leaf.point

    def __contains__(self, point: object) -> bool:
        if not isinstance(point, Mapping):
            return False
        is_there = True

        def pick(name: str, candidates: tuple[Any, ...]) -> int:
            nonlocal is_there
            if name in point and point[name] in candidates:
                return candidates.index(point[name])
            is_there = False
            return 0

        leaf = self.leaf(pick)
        return is_there and not leaf.reason and leaf.point == dict(point)

    def fingerprint(self) -> str:
        """Return what tells this space from another: the same in every process while names, candidates and points stay.

        Of a space with more than 20,000 leaves these are looked at, and 256 of the rest.

        Raises:
            SpaceError: the function is not the same at every run (some runs are made again to see it).
        """
        digest = hashlib.sha256()
        for number, leaf in enumerate(self.leaves()):
            if number < AGAIN:
                self._run(leaf.indices, lambda name, candidates: 0)
            if number == COUNTED:
                for spread in range(SPREAD):
                    digest.update(_line(self.leaf(_spread(spread))))
                break
            digest.update(_line(leaf))
        return digest.hexdigest()

    def leaves(self) -> Iterator[Leaf]:
        """Yield the end of every run, the refused ones too, in the order of the candidates."""
        prefix: tuple[int, ...] | None = ()
        while prefix is not None:
            leaf = self.leaf(_first_after(prefix))
            yield leaf
            prefix = _next(leaf)

    def leaf(self, pick: Callable[[str, tuple[Any, ...]], int]) -> Leaf:
        """Run once, following the known part of the tree.

        Raises:
            SpaceError: see `Replay`; the function did something else than before.
        """
        indices: tuple[int, ...] = ()
        point: dict[str, Any] = {}
        candidates: dict[str, tuple[Any, ...]] = {}
        while (node := self._nodes.get(indices)) is not None:
            if isinstance(node, str):
                return Leaf(point, node, indices, candidates)
            name, values = node
            index = picked(pick, name, values)
            point[name], candidates[name] = values[index], values
            indices = (*indices, index)
        return self._run(indices, pick)

    def _run(self, known: tuple[int, ...], pick: Callable[[str, tuple[Any, ...]], int]) -> Leaf:
        taken: list[int] = []

        def take(name: str, candidates: tuple[Any, ...]) -> int:
            self._keep(tuple(taken), (name, candidates))
            index = known[len(taken)] if len(taken) < len(known) else pick(name, candidates)
            taken.append(index)
            return index

        run = Replay(take)
        run.run(self._function)
        self._keep(tuple(taken), run.reason)
        return Leaf(run.point, run.reason, tuple(taken), run.candidates)

    def _keep(self, indices: tuple[int, ...], node: tuple[str, tuple[Any, ...]] | str) -> None:
        before = self._nodes.get(indices)
        if before is None:
            if len(self._nodes) < KEPT:
                self._nodes[indices] = node
        elif before != node:
            chosen = {}
            for depth, index in enumerate(indices):
                node_before = self._nodes[indices[:depth]]
                if not isinstance(node_before, str):
                    chosen[node_before[0]] = node_before[1][index]
            raise SpaceError(
                f"the space function is not the same at every run: after choosing {shown(chosen)} it "
                f"{_did(before)}, and now it {_did(node)}",
                hint="let candidates and conditions depend on earlier choices alone: no random numbers, clock or state",
            )

    def _raise_empty(self) -> None:
        refused: dict[str, list[Any]] = {}
        for point, reason in self.refused():
            refused.setdefault(reason, [0, point])[0] += 1
        most = sorted(refused.items(), key=lambda item: -item[1][0])
        reasons = "; ".join(f"{count} x {reason!r}, e.g. {shown(point)}" for reason, (count, point) in most[:5])
        more = f"; and {len(most) - 5} other reasons" if len(most) > 5 else ""
        raise SpaceError(
            f"the space has no point; refused: {reasons}{more}", hint="widen the candidates, or require less"
        )


def _first_after(prefix: tuple[int, ...]) -> Callable[[str, tuple[Any, ...]], int]:
    """Picks the prefix, then always the first."""
    rest = iter(prefix)
    return lambda name, candidates: next(rest, 0)


def _spread(number: int) -> Callable[[str, tuple[Any, ...]], int]:
    """Picks that are the same in every process and version of Python."""

    def pick(name: str, candidates: tuple[Any, ...]) -> int:
        digest = hashlib.sha256(f"{number} {name}".encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") % len(candidates)

    return pick


def _next(leaf: Leaf) -> tuple[int, ...] | None:
    counts = [len(values) for values in leaf.candidates.values()]
    for depth in reversed(range(len(counts))):
        if leaf.indices[depth] + 1 < counts[depth]:
            return (*leaf.indices[:depth], leaf.indices[depth] + 1)
    return None


def _line(leaf: Leaf) -> bytes:
    return f"{'-' if leaf.reason else '+'}{canonical(leaf.point.items())}\n".encode()


def _did(node: tuple[str, tuple[Any, ...]] | str) -> str:
    if isinstance(node, str):
        return f"refused ({node})" if node else "ended"
    name, values = node
    return f"chose {name!r} from {list(values[:6])!r}"[:200]


def describe(space: Space, limit: int = COUNTED) -> str:
    """Return how many points a space has, what each symbol is chosen from, and why points are refused, line by line.

    Args:
        space: to describe.
        limit: runs of the function that are looked at.
    """
    points, refused, candidates = 0, Counter[str](), dict[str, dict[Any, None]]()
    leaves = space.leaves()
    for leaf in islice(leaves, limit):
        points += not leaf.reason
        refused.update([leaf.reason] if leaf.reason else [])
        for name, values in leaf.candidates.items():
            candidates.setdefault(name, {}).update(dict.fromkeys(values))
    more = ", and more" if next(leaves, None) is not None else ""
    lines = [f"{points} point{'s' * (points != 1)}, {refused.total()} refused{more}"]
    for name, found in candidates.items():
        more = f", ... ({len(found)})" if len(found) > 32 else ""
        lines.append(f"{name}  {', '.join(map(str, islice(found, 32)))}{more}")
    return "\n".join([*lines, *(f"refused {number}: {reason}" for reason, number in refused.most_common())])
