"""Select nodes by path and glob: one node, or a group."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self, overload

from slapo_core._vocabulary import NodePrimitives
from slapo_core.errors import PathError

if TYPE_CHECKING:
    from slapo_core.primitive import Primitive
    from slapo_core.tree.node import Node


def is_glob(path: str) -> bool:
    """Return whether ``path`` selects by pattern rather than by name."""
    return any(character in path for character in "*?[")


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that ``pattern`` matches; only ``**`` matches the root."""
    accept = _compile(pattern).fullmatch
    return [path for path in paths if accept(path) and (path or pattern == "**")]


@lru_cache(maxsize=256)
def _compile(pattern: str) -> re.Pattern[str]:
    refuse_number_ranges(pattern)
    parts: list[str] = []
    levels = pattern.split(".")
    for position, level in enumerate(levels):
        last = position == len(levels) - 1
        if level == "**":
            parts.append(r".+" if last and position else r".*" if last else r"(?:[^.]+\.)*")
            continue
        parts.append("".join(_translate(level)) + ("" if last else r"\."))
    return re.compile("".join(parts))


def _translate(level: str) -> Iterator[str]:
    for token in re.findall(r"\[!?[^\]]+\]|.", level):
        if token == "*":
            yield "[^.]*"
        elif token == "?":
            yield "[^.]"
        elif len(token) > 1:
            # A set of characters; "not these" never steps over the end of a level.
            negated = token[1] == "!"
            characters = re.escape(token[2:-1] if negated else token[1:-1]).replace(r"\-", "-")
            yield f"[^.{characters}]" if negated else f"[{characters}]"
        else:
            yield re.escape(token)


def refuse_number_ranges(pattern: str) -> None:
    """Refuse ``[0-11]``, in a glob a set of the characters 0 and 1.

    Raises:
        PathError: a set of characters that is a range of numbers, or runs backwards.
    """
    for negation, characters in re.findall(r"\[(!?)([^\]]+)\]", pattern):
        numbers = re.fullmatch(r"(\d+)-(\d+)", characters)
        if numbers is None:
            continue
        first, last = (int(number) for number in numbers.groups())
        if len(numbers[1]) > 1 or len(numbers[2]) > 1 or first > last:
            before = pattern.partition(f"[{negation}{characters}]")[0]
            nodes = f"sch['{before}*']"
            low, end = min(first, last), max(first, last) + 1
            others = [f"{nodes}[:{low}]"] * (low > 0) + [f"{nodes}[{end}:]"]
            raise PathError(
                f"'[{negation}{characters}]' in the pattern '{pattern}' is a set of single characters, "
                "not a range of numbers",
                path=pattern,
                hint=" and ".join(others) if negation else f"{nodes}[{low}:{end}]",
            )


def is_regular_expression(text: str) -> bool:
    """Return whether ``text`` has characters that only regular expressions have."""
    return any(character in text for character in "\\()|^$+")


def meant_as_regular_expression(text: str, paths: Iterable[str]) -> str | None:
    """Return a glob in place of a regular expression, for a hint; None for other text.

    Args:
        text: that matches nothing as a glob.
        paths: of the modules.
    """
    known = list(paths)
    try:
        selected = [path for path in known if re.fullmatch(text, path)]
    except re.error:
        selected = []
    for some in ("*", ".**.", ".**.*"):  # candidates for .*
        candidate = re.sub(r"\.{2,}", ".", "".join(_as_glob(text, some))).strip(".")
        if selected and is_glob(candidate) and matching(candidate, known) == selected:
            return f"sch['{candidate}']"
    if not is_regular_expression(text):
        return None
    if not selected:
        return "* is one level of a path, ** any number of levels, [01] one of these characters"
    shown = ", ".join(f"'{path}'" for path in selected[:4])
    return f"it would select {shown}{', ...' if len(selected) > 4 else ''}: name them one by one, or by several globs"


_TOKENS = re.compile(
    r"(?P<any>\.[*+]\??)|(?P<some>(?:\\[dw]|\[[^]]+\])[*+]\??)|\((?:\?:)?(?P<group>[^()]*)\)|"
    r"\\(?P<digit>d)|(?P<edge>[\^$])|\[\^(?P<negated>[^]]+)\]|\\?(?P<plain>\[[^]]+\]|.)"
)


def _as_glob(text: str, some: str) -> Iterator[str]:
    """Yield the tokens of a regular expression as a glob, as far as there is one."""
    for token in _TOKENS.finditer(text):
        kind = token.lastgroup
        if kind == "any":
            yield some
        elif kind == "group":
            choices = token["group"].split("|")
            yield f"[{''.join(choices)}]" if all(len(choice) == 1 for choice in choices) else "*"
        elif kind != "edge":
            made = {"some": "*", "digit": "[0-9]", "negated": f"[!{token['negated']}]", "plain": token["plain"]}
            yield made[str(kind)]


def close_paths(path: str, paths: Iterable[str], *, limit: int = 3) -> list[str]:
    """Return close matches of a mistyped ``path``, best first.

    The longest prefix that exists is kept, so that ``encoder.layer.0.atention`` is compared with the children of
    ``encoder.layer.0`` before the rest of the model.
    """
    known = list(paths)
    members = set(known)
    levels = path.split(".")
    for depth in range(len(levels) - 1, -1, -1):
        prefix = ".".join(levels[:depth])
        if prefix and prefix not in members:
            continue
        start = f"{prefix}." if prefix else ""
        siblings = sorted({start + p[len(start) :].split(".")[0] for p in known if p.startswith(start) and p != prefix})
        found = difflib.get_close_matches(".".join(levels[: depth + 1]), siblings, n=limit, cutoff=0.6)
        if found:
            rest = ".".join(levels[depth + 1 :])
            complete = [f"{hit}.{rest}" for hit in found if rest and f"{hit}.{rest}" in members]
            return complete or found
        break
    tails = [p for p in known if p and p.rpartition(".")[2] == levels[-1]]
    return tails[:limit] or difflib.get_close_matches(path, known, n=limit, cutoff=0.5)


def close_patterns(pattern: str, paths: Iterable[str]) -> str | None:
    """Suggest a correction of a glob without a match, or list the names at its first wrong level."""
    known, levels = list(paths), pattern.split(".")
    indexed = re.sub(r"\[(\d+)\]", r".\1", pattern)
    if indexed in known:
        return f"did you mean sch['{indexed}']?"
    for depth in range(len(levels) - 1, -1, -1):
        start = ".".join(levels[:depth])
        parents = matching(start, known) if start else [""]
        below = dict.fromkeys(path.rpartition(".")[2] for path in known if path and path.rpartition(".")[0] in parents)
        if not below:
            continue
        literal = levels[depth].replace("*", "")
        close = difflib.get_close_matches(literal, list(below), n=3, cutoff=0.6)
        corrected = [".".join([*levels[:depth], name]) for name in close]
        rest = "".join(f".{level}" for level in levels[depth + 1 :])
        meant = [f"{each}{rest}" for each in corrected if matching(f"{each}{rest}", known)] or corrected
        if meant:
            return "did you mean " + " or ".join(f"sch['{each}']" for each in meant) + "?"
        names = ", ".join(list(below)[:8]) + (", ..." if len(below) > 8 else "")
        return f"below '{start}' there are {names}" if start else f"the model has {names}"
    return None


class NodeGroup(NodePrimitives):
    """Nodes in the model's order; ``group.checkpoint()`` applies to each, all or none.

    Args:
        nodes: at least one.
        pattern: what selected them, e.g. ``"encoder.layer.*"``.
    """

    def __init__(self, nodes: tuple[Node, ...], pattern: str) -> None:
        self.nodes = nodes
        self.pattern = pattern

    def apply(self, primitive: Primitive) -> Self:
        """Apply ``primitive`` at every node; if one refuses, those before it are undone."""
        owner = self.nodes[0]._tree.owner
        return type(self)(tuple(owner.apply_each(self.nodes, primitive)), self.pattern)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @overload
    def __getitem__(self, key: int) -> Node: ...
    @overload
    def __getitem__(self, key: slice | str) -> NodeGroup: ...
    def __getitem__(self, key: int | slice | str) -> Node | NodeGroup:
        """Return a node by position, a sub-group by slice, or the nodes at a path below each."""
        if isinstance(key, int):
            return self.nodes[key]
        if isinstance(key, slice):
            selected = self.nodes[key]
            if not selected:
                raise PathError(f"{key} selects none of the {len(self)} nodes of '{self.pattern}'", path=self.pattern)
            return NodeGroup(selected, f"{self.pattern}[{key.start}:{key.stop}]")
        if is_glob(key):
            refuse_number_ranges(key)
        found: dict[str, Node] = {}  # a node that is below several of them counts once
        for node in self.nodes:
            try:
                below = node[key]
            except PathError:
                if is_glob(key):
                    continue  # as in one long glob, some place must match, not every one
                raise
            for each in below if isinstance(below, NodeGroup) else (below,):
                found.setdefault(each.path, each)
        if not found:
            below_first = [each.path.removeprefix(f"{self.nodes[0].path}.") for each in self.nodes[0].walk()][1:]
            glob = meant_as_regular_expression(key, below_first)
            is_expression = ": it is a regular expression, and paths take globs" if glob is not None else ""
            raise PathError(
                f"the pattern '{key}' matches no module below the {len(self)} nodes of '{self.pattern}'{is_expression}",
                path=f"{self.pattern}.{key}",
                hint=glob,
            )
        return NodeGroup(tuple(found.values()), f"{self.pattern}.{key}")

    if not TYPE_CHECKING:  # checkers see NodePrimitives

        def __getattr__(self, name: str) -> Callable[..., Any]:
            if name.startswith("_"):
                raise AttributeError(name)
            return self.nodes[0]._tree.owner.member_named(name, self, self.pattern)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.nodes[0]._tree.owner.member_names()]

    def __repr__(self) -> str:
        return f"<Group '{self.pattern}': {len(self)} nodes>"


if TYPE_CHECKING:

    class NodeOrGroup(Node, NodeGroup):
        """The type of ``sch[...]``: a node for a path, a group for a glob.

        A type checker cannot tell which, so this type has the members of both.
        """

        @overload  # type: ignore[override]
        def __getitem__(self, key: int) -> Node: ...
        @overload
        def __getitem__(self, key: slice) -> NodeGroup: ...
        @overload
        def __getitem__(self, key: str) -> NodeOrGroup: ...
        def __getitem__(self, key: Any) -> Any: ...
