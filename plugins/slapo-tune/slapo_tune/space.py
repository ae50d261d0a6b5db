"""`Space`: a symbolic space, defined by a function that runs again for each point."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn, Protocol

from slapo_tune.errors import SpaceError
from slapo_tune.plain_data import canonical, plain_candidates, shown


class RefusedError(Exception):
    """End the run of the space function at a refused point; never seen by users."""


class Symbols(Protocol):
    """The choices of one point, in order; candidates may depend on earlier choices.

    The function runs again for each point, so equal choices must give equal candidates: no random numbers, no clock, no
    state. The order of symbols may differ between branches, and some branches may have further symbols.
    """

    def choose(self, name: str, candidates: Iterable[Any]) -> Any:
        """Choose one of the candidates.

        Args:
            name: the symbol; chosen again in the same run, it has the same value.
            candidates: plain data (None, booleans, numbers, strings, tuples of these), in their natural order, e.g.
                from small to large: a list, a range, a generator. Without candidates the point is refused.

        Raises:
            SpaceError: candidates that are not plain data, or duplicate; or other candidates than before for this
            symbol.
        """

    def require(self, condition: bool, reason: str) -> None:
        """Refuse the point unless ``condition`` holds.

        Args:
            condition: a condition on the choices so far.
            reason: the condition in words, e.g. ``"the batch divides over dp"``; shown in the report.
        """


MOST_CALLS = 10_000
"""Calls of ``choose`` in one run; more count as an endless loop."""


class Replay:
    """The `Symbols` of one run of the function, and the result.

    Args:
        pick: symbol and candidates -> index of the chosen candidate.
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
                f"require needs a condition and a reason in words (got {condition!r}, {reason!r})",
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
                    "the space function must be a plain function (got a generator or coroutine)",
                    'def space(s): s.choose("batch", [8, 16])',
                )
        except RefusedError:
            pass
        except (Exception, SystemExit) as error:
            if self._failed is None:
                raise self._wrong(f"the space function raised {type(error).__name__}: {error}", None) from error
        finally:
            self._ended = True
        if self._failed is not None:  # also if the function caught it
            raise self._failed

    def _choose(self, name: str, candidates: Iterable[Any]) -> Any:
        self._go_on()
        if not isinstance(name, str) or not name:
            raise self._wrong(
                f"the name of a symbol must be a nonempty string (got {name!r})", 's.choose("batch", [8, 16])'
            )
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise self._wrong(f"the space function calls choose more than {MOST_CALLS} times", "end its loop")
        try:
            values = plain_candidates(name, candidates)
        except SpaceError as error:
            raise self._wrong(error.message, error.hint) from None
        if name in self.point:
            if values != self.candidates[name]:
                raise self._wrong(
                    f"{name!r} is chosen from {_shortened(self.candidates[name])} and again from {_shortened(values)}",
                    f"another name for the second symbol, e.g. {name + '_2'!r}",
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
                "choose and require must be called within the space function, which has ended",
                hint="the schedule reads its values from the point: p['batch']",
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
    """Return the index that ``pick`` returns.

    Raises:
        SpaceError: the index is out of range.
    """
    index = pick(name, candidates)
    if not isinstance(index, int) or not 0 <= index < len(candidates):
        raise SpaceError(
            f"pick returned {index!r} for {name!r}, which has {len(candidates)} candidates",
            hint="pick(name, candidates) returns an index from 0 to len(candidates) - 1",
        )
    return index


def _shortened(values: tuple[Any, ...]) -> str:
    return repr(list(values)) if len(values) <= 8 else f"[{', '.join(map(repr, values[:6]))}, ...]"


KEPT = 100_000
"""Nodes of the tree that are cached; for further nodes the function runs again."""

COUNTED = 20_000
"""Leaves that a fingerprint and a description cover."""

AGAIN = 64
"""Leaves that run again, to check that the function is deterministic."""

SPREAD = 256
"""Further leaves of a fingerprint, spread over the rest."""


@dataclass(frozen=True)
class Leaf:
    """The end of one run.

    Args:
        point: the choices.
        reason: why it is refused; empty for a point of the space.
        indices: indices of the chosen candidates.
        candidates: the candidates of each symbol.
    """

    point: dict[str, Any]
    reason: str
    indices: tuple[int, ...]
    candidates: dict[str, tuple[Any, ...]]


class Space:
    """The points of a space function, computed lazily.

    Equal points are the same point: no symbol has equal candidates.

    Args:
        function: the space function, see :class:`~slapo_tune.space.Symbols`.

    Raises:
        SpaceError: not a function.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        if not callable(function):
            raise SpaceError(
                f"space must be a function (got {function!r})",
                hint='def space(s): s.choose("batch", [8, 16])',
            )
        self._function = function
        self._nodes: dict[tuple[int, ...], tuple[str, tuple[Any, ...]] | str] = {}

    @classmethod
    def of(cls, function: Callable[[Any], Any] | Space) -> Space:
        """Return the space of a function, or a space itself."""
        return function if isinstance(function, Space) else cls(function)

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield each point, in the order of the candidates.

        Raises:
            SpaceError: there are no points; with the reasons.
        """
        empty = True
        for leaf in self.leaves():
            if not leaf.reason:
                empty = False
                yield dict(leaf.point)
        if empty:
            self._raise_empty()

    def refused(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield refused choices and the reasons."""
        return ((dict(leaf.point), leaf.reason) for leaf in self.leaves() if leaf.reason)

    def draw(self, pick: Callable[[str, tuple[Any, ...]], int]) -> dict[str, Any] | None:
        """Return one point, chosen symbol by symbol.

        Args:
            pick: symbol and candidates -> index of the chosen candidate.

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
        """Return a hash of symbols, candidates and points; equal in all processes.

        For a space with more than 20,000 leaves it covers these, and 256 of the rest.

        Raises:
            SpaceError: the function is not deterministic (some runs are repeated to check).
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
        """Yield the end of each run, also of refused ones, in the order of the candidates."""
        prefix: tuple[int, ...] | None = ()
        while prefix is not None:
            leaf = self.leaf(_after_prefix(prefix))
            yield leaf
            prefix = _next(leaf)

    def leaf(self, pick: Callable[[str, tuple[Any, ...]], int]) -> Leaf:
        """Run once, along the cached part of the tree.

        Raises:
            SpaceError: see `Replay`; or the function is not deterministic.
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
                f"the space function is not deterministic: after choosing {shown(chosen)} it {_described(before)}, and "
                f"in another run it {_described(node)}",
                hint="compute candidates and conditions from earlier choices alone: no random numbers, clock or state",
            )

    def _raise_empty(self) -> None:
        refused: dict[str, list[Any]] = {}
        for point, reason in self.refused():
            refused.setdefault(reason, [0, point])[0] += 1
        most = sorted(refused.items(), key=lambda item: -item[1][0])
        reasons = "; ".join(f"{count} x {reason!r}, e.g. {shown(point)}" for reason, (count, point) in most[:5])
        more = f"; and {len(most) - 5} other reasons" if len(most) > 5 else ""
        raise SpaceError(f"the space has no points; refused: {reasons}{more}", hint="add candidates, or require less")


def _after_prefix(prefix: tuple[int, ...]) -> Callable[[str, tuple[Any, ...]], int]:
    """Pick the prefix, then always the first candidate."""
    rest = iter(prefix)
    return lambda name, candidates: next(rest, 0)


def _spread(number: int) -> Callable[[str, tuple[Any, ...]], int]:
    """Pick pseudo-randomly, equally in all processes and versions of Python."""

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


def _described(node: tuple[str, tuple[Any, ...]] | str) -> str:
    if isinstance(node, str):
        return f"refused ({node})" if node else "ended"
    name, values = node
    return f"chose {name!r} from {list(values[:6])!r}"[:200]


def describe(space: Space, limit: int = COUNTED) -> str:
    """Describe a space in lines: number of points, candidates of each symbol, reasons of refusals.

    Args:
        space: the space.
        limit: maximum number of runs of the function.
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
