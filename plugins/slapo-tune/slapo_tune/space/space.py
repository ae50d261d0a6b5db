"""`Space`: the tree of all choices, walked by running the function again for each leaf."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slapo_tune.space.errors import SpaceError
from slapo_tune.space.plain import canonical, shown
from slapo_tune.space.replay import Replay, picked

__all__ = ["Counts", "Leaf", "Space"]

KEPT = 100_000
"""Nodes of the tree that are kept; where there are more, the function is run again."""

COUNTED = 20_000
"""Leaves that a fingerprint and a table look at."""

AGAIN = 64
"""Leaves that are run again, to see whether the function is the same at every run."""

SPREAD = 256
"""Leaves beyond these, spread over the rest, that a fingerprint looks at."""


@dataclass(frozen=True)
class Leaf:
    """The end of one run.

    Args:
        point: what was chosen.
        reason: why it is refused; empty for a point of the space.
        indices: of the candidates chosen.
        candidates: what each symbol was chosen from.
    """

    point: dict[str, Any]
    reason: str
    indices: tuple[int, ...]
    candidates: dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Counts:
    """How many points there are.

    Args:
        points: that the space allows.
        refused: how many are refused, by reason.
        complete: whether all of the space was looked at; if not, there are more of everything.
    """

    points: int
    refused: Mapping[str, int]
    complete: bool


class Space:
    """Everything that a space function allows; nothing is run before it is asked for.

    Two points that are equal are the same point: no symbol has candidates that are equal.

    Args:
        function: the user's, see :class:`~slapo_tune.space.symbols.Symbols`.

    Raises:
        SpaceError: it is no function.
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
        """The space of a function; a space is its own."""
        return function if isinstance(function, Space) else cls(function)

    def points(self) -> Iterator[dict[str, Any]]:
        """Every point, in the order of the candidates, one after the other.

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
        """Choices that ``require`` refused, or that leave a symbol without candidates, and why."""
        return ((dict(leaf.point), leaf.reason) for leaf in self.leaves() if leaf.reason)

    def draw(self, pick: Callable[[str, tuple[Any, ...]], int]) -> dict[str, Any] | None:
        """One point, chosen symbol by symbol.

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

    def counted(self, limit: int = COUNTED) -> Counts:
        """How many points there are, and how many are refused.

        Args:
            limit: leaves that are looked at.
        """
        points, refused = 0, Counter[str]()
        for number, leaf in enumerate(self.leaves()):
            if number == limit:
                return Counts(points, refused, complete=False)
            points += not leaf.reason
            refused.update([leaf.reason] if leaf.reason else [])
        return Counts(points, refused, complete=True)

    def fingerprint(self) -> str:
        """What tells this space from another: the same in every process while names, candidates and points stay.

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
        """The end of every run, the refused ones too, in the order of the candidates."""
        prefix: tuple[int, ...] | None = ()
        while prefix is not None:
            leaf = self.leaf(_first_after(prefix))
            yield leaf
            prefix = _next(leaf)

    def leaf(self, pick: Callable[[str, tuple[Any, ...]], int]) -> Leaf:
        """One run, from what is known of the tree as far as that goes.

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
