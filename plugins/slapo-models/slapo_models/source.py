"""Print a schedule as Python: groups, loops over repeated blocks and chains, which give the same records when run."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import keyword
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import slapo_core as slapo
from slapo_core.errors import SerializationError
from slapo_core.internals import Internals, matching
from slapo_core.primitive import Primitive, Record, Selection

_WIDTH = 110
"""Columns after which a chain is broken."""


def _quoted(text: str) -> str:
    """Return a string literal in double quotes where that needs no more escapes."""
    return repr(text) if '"' in text or "'" in text or "\\" in repr(text) else f'"{text}"'


class _Step(NamedTuple):
    """A record as code: ``sch[path].call``."""

    path: str
    call: str


def python_source(sch: slapo.Schedule, name: str = "schedule") -> str:
    """Return the source of a function that applies the schedule's steps, in their order.

    Equal steps in repeated blocks become groups, slices and loops, and steps at one place a chain. Run on a schedule of
    another instance of the model on the same mesh, the function gives equal records.

    Args:
        sch: the schedule; only read.
        name: of the function.

    Returns:
        an import of what the steps need, and the function.

    Raises:
        SerializationError: an argument of a step has no source: a live module, a lambda, a pattern without a name, or
            some of the matches of a pattern.
    """
    imports: set[str] = set()
    steps = [_Step(record.path, _call(sch, record, imports)) for record in sch.records]
    with sch.reference() as model:
        known = [[path for path, _ in model.named_modules()]]
    known.append([path for path, _ in sch.model.named_modules()])
    writer = _Writer(steps, _Places(known))
    lines = list(writer.lines())
    body = [f"{variable} = sch[{_quoted(pattern)}]" for pattern, variable in writer.variables.items()]
    head = ["import slapo_core as slapo", *sorted(imports), "", "", f"def {name}(sch: slapo.Schedule) -> None:"]
    return (
        "\n".join(
            [
                *head,
                *(
                    f"    {line}"
                    for line in [*body, *lines] or ["pass  # no step: nothing is split, cut or recomputed"]
                ),
            ]
        )
        + "\n"
    )


# -- calls ------------------------------------------------------------------------------------------------------------


def _call(sch: slapo.Schedule, record: Record, imports: set[str]) -> str:
    """Return the call of a record, e.g. ``shard('weight', axis=0)``, without defaults."""
    primitive, registry = record.primitive, Internals(sch).registry
    bare = primitive.name.rpartition(".")[2]
    method = bare if bare in registry.bare_names("primitives") else primitive.name
    if registry.resolve("primitives", method).name != primitive.name:
        method = primitive.name
    pattern: str | None = None
    texts: dict[str, str] = {}
    for field in dataclasses.fields(primitive):  # type: ignore[arg-type]
        value = getattr(primitive, field.name)
        if _is_default(value, field):
            continue
        if isinstance(value, Selection):
            pattern = _pattern(sch, record, value)
            texts[field.name] = _quoted(pattern)
        else:
            texts[field.name] = _value(value, record, field.name, imports)
    first = next(iter(_public(primitive)), None)
    if pattern is not None and first is not None and texts.get(first) == _quoted(pattern) and len(texts) > 1:
        others = [name for name, text in texts.items() if name != first and text == _quoted(pattern)]
        if others:  # `replace` takes the kernel of the pattern by itself
            del texts[first]
    parts, public, is_positional = [], list(_public(primitive)), True
    for position, (name, text) in enumerate(texts.items()):
        is_positional &= public[position : position + 1] == [name] and (position == 0 or text.startswith('"'))
        parts.append(text if is_positional else f"{name.removesuffix('_')}={text}")
    return f"{method}({', '.join(parts)})"


def _public(primitive: Primitive) -> Iterator[str]:
    """Yield the names of arguments that may be positional."""
    for field in dataclasses.fields(primitive):  # type: ignore[arg-type]
        if field.kw_only:
            return
        yield field.name


def _is_default(value: Any, field: Any) -> bool:
    default = field.default if field.default is not dataclasses.MISSING else None
    if field.default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif field.default is dataclasses.MISSING:
        return False
    return type(value) is type(default) and bool(value == default)


def _pattern(sch: slapo.Schedule, record: Record, selection: Selection) -> str:
    """Return the name of a pattern whose matches a step takes.

    Raises:
        SerializationError: it takes some of them, or matches of several patterns, or the pattern has no name.
    """
    matches: Sequence[Any] = selection if isinstance(selection, Sequence) else ()
    names = {getattr(getattr(match, "pattern", None), "name", None) for match in matches}
    by_path: dict[str, list[Any]] = {}
    for match in matches:
        by_path.setdefault(match.path, []).append(match)
    is_all = all(len(own) == own[0].total for own in by_path.values())
    if len(names) != 1 or None in names or not is_all:
        raise SerializationError(
            f"{record} takes {selection}, which has no source: only all matches of one pattern with a name have",
            hint="sch.to_json(), which saves every match",
        )
    return str(names.pop())


def _value(value: Any, record: Record, name: str, imports: set[str]) -> str:
    """Return the source of a plain value, a type of torch, or a function or class with a name.

    Raises:
        SerializationError: any other value.
    """

    def of(each: Any) -> str:
        if type(each) is str:
            return _quoted(each)
        if each is None or each is Ellipsis or type(each) in (bool, int, bytes):
            return repr(each)
        if type(each) is float:
            return repr(each) if math.isfinite(each) else f"float({str(each)!r})"
        if type(each) is tuple:
            return f"({', '.join(map(of, each))}{',' * (len(each) == 1)})"
        if type(each) in (list, set, frozenset) and (each or type(each) is list):
            items = ", ".join(map(of, each))
            return f"[{items}]" if type(each) is list else f"{type(each).__name__}({{{items}}})"
        if isinstance(each, dict | Mapping):
            return f"{{{', '.join(f'{of(key)}: {of(one)}' for key, one in each.items())}}}"
        if isinstance(each, torch.dtype):
            imports.add("import torch")
            return repr(each)
        if (inspect.isfunction(each) or inspect.isbuiltin(each) or inspect.isclass(each)) and _is_importable(each):
            imports.add(f"from {each.__module__} import {each.__qualname__}")
            return str(each.__qualname__)
        raise SerializationError(
            f"argument '{name}' of {record} has no source (got {type(each).__name__})",
            hint="a function at the top level of a module, or plain values; sch.to_json() saves what codecs know",
        )

    return of(value)


def _is_importable(value: Any) -> bool:
    name, module = value.__qualname__, value.__module__
    return bool(name.isidentifier() and module != "__main__" and getattr(inspect.getmodule(value), name, None) is value)


# -- places -----------------------------------------------------------------------------------------------------------


class _Places:
    """Expressions that select modules.

    Args:
        known: paths of the modules, of the reference model and of the scheduled one: a glob must mean the same in both.
    """

    def __init__(self, known: Sequence[Sequence[str]]) -> None:
        self._known = known
        self.containers: dict[str, tuple[str, ...]] = {}
        for path in known[0]:
            container, _, last = path.rpartition(".")
            if last.isdigit():
                self.containers[container] = (*self.containers.get(container, ()), last)
        self._globs: dict[tuple[str, ...], str | None] = {}

    def block_of(self, path: str) -> tuple[str, int, str] | None:
        """Return the outermost container with a numbered child on a path, the child's place, and the path below."""
        levels = path.split(".")
        for depth, level in enumerate(levels):
            container = ".".join(levels[:depth])
            if level.isdigit() and level in self.containers.get(container, ()):
                return container, self.containers[container].index(level), ".".join(levels[depth + 1 :])
        return None

    def glob(self, paths: Sequence[str]) -> str | None:
        """Return a glob that selects exactly these modules in this order; None if there is none."""
        key = tuple(paths)
        if key not in self._globs:
            self._globs[key] = next((one for one in _globs(key) if self.selects(one, key)), None)
        return self._globs[key]

    def selects(self, glob: str, paths: Sequence[str]) -> bool:
        """Return whether a glob selects exactly these modules in this order."""
        return all(matching(glob, known) == list(paths) for known in self._known)


def _globs(paths: Sequence[str]) -> Iterator[str]:
    """Yield globs that may select paths of equal depth, the most specific ones first."""
    levels = [path.split(".") for path in paths]
    if len({len(each) for each in levels}) != 1 or "" in paths:
        return
    candidates = [list(_level_globs(dict.fromkeys(names))) for names in zip(*levels, strict=True)]
    if math.prod(map(len, candidates)) <= 81:
        yield from (".".join(each) for each in itertools.product(*candidates))


def _level_globs(names: Iterable[str]) -> Iterator[str]:
    """Yield globs for the names of one level."""
    names = list(names)
    if len(names) == 1:
        yield names[0]
        return
    if not all(name.isdigit() for name in names):
        start, end = _common(names), _common([name[::-1] for name in names])[::-1]
        middles = [name[len(start) : len(name) - len(end)] for name in names]
        if all(len(middle) == 1 for middle in middles):
            yield f"{start}[{''.join(middles)}]{end}"
        if start or end:
            yield f"{start}*{end}"
    yield "*"


def _common(names: Sequence[str]) -> str:
    """Return the longest common start."""
    return os.path.commonprefix(list(names))  # noqa: RUF071 - of characters


# -- lines ------------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes steps as lines.

    Args:
        steps: the steps.
        places: expressions of modules.
    """

    def __init__(self, steps: Sequence[_Step], places: _Places) -> None:
        self._steps, self._places = steps, places
        self.variables: dict[str, str] = {}  # glob -> name of its variable

    def lines(self) -> Iterator[str]:
        """Yield the lines of the function's body, without the variables."""
        at, chain = 0, _Chain()
        while at < len(self._steps):
            group, length = self._group(at)
            loop, covered = self._loop(at)
            if length >= max(covered, 1) and group is not None:
                yield from chain.add(group, self._steps[at].call)
                at += length
                continue
            yield from chain.end()
            yield from loop
            at += covered
        yield from chain.end()

    def _group(self, at: int) -> tuple[str | None, int]:
        """Return an expression for the most steps from ``at`` on that are one call, and their number."""
        call = self._steps[at].call
        paths: list[str] = []
        for step in self._steps[at:]:
            if step.call != call or step.path in paths:
                break
            paths.append(step.path)
        for length in range(len(paths), 1, -1):
            expression = self._several(paths[:length])
            if expression is not None:
                return expression, length
        return self._one(paths[0]), 1

    def _several(self, paths: Sequence[str]) -> str | None:
        glob = self._places.glob(paths)
        if glob is not None:
            head, tail = _cut(glob)
            if head is None:
                return f"sch[{_quoted(glob)}]"
            return self._variable(head) + (f"[{_quoted(tail)}]" if tail else "")
        blocks = self._blocks(paths)
        if blocks is None:
            return None
        container, numbers, below = blocks
        if numbers != list(range(numbers[0], numbers[-1] + 1)) or not below:
            return None
        members = [f"{container}.{number}" if container else number for number in self._places.containers[container]]
        everything = f"{container}.*" if container else "*"
        if not self._places.selects(everything, members):
            return None
        if below != [""]:
            inner = self._places.glob([f"{members[numbers[0]]}.{each}" for each in below])
            if inner is None:
                return None
            end = f"[{_quoted(inner.removeprefix(members[numbers[0]] + '.'))}]"
        else:
            end = ""
        return f"{self._variable(everything)}{_slice(numbers[0], numbers[-1] + 1, len(members))}{end}"

    def _blocks(self, paths: Sequence[str]) -> tuple[str, list[int], list[str]] | None:
        """Return the container, the blocks, and the paths below, the same ones in each block; None if they differ."""
        found = [self._places.block_of(path) for path in paths]
        by_block: dict[int, list[str]] = {}
        for each in found:
            if each is None or each[0] != found[0][0]:  # type: ignore[index]
                return None
            by_block.setdefault(each[1], []).append(each[2])
        belows = list(by_block.values())
        in_order = [below for each in belows for below in each] == [each[2] for each in found if each is not None]
        if any(below != belows[0] for below in belows) or list(by_block) != sorted(by_block) or not in_order:
            return None
        return found[0][0], list(by_block), belows[0]  # type: ignore[index]

    def _one(self, path: str) -> str:
        if not path:
            return "sch.root"
        block = self._places.block_of(path)
        if block is not None and (group := self._group_of(block[0])) in self.variables:
            below = f"[{_quoted(block[2])}]" if block[2] else ""
            return f"{self.variables[group]}[{block[1]}]{below}"
        return f"sch[{_quoted(path)}]"

    def _group_of(self, container: str) -> str:
        """Return the glob of all blocks of a container; empty if there is none."""
        glob = f"{container}.*" if container else "*"
        members = [f"{container}.{name}" if container else name for name in self._places.containers[container]]
        return glob if self._places.selects(glob, members) else ""

    def _loop(self, at: int) -> tuple[list[str], int]:
        """Return a loop over blocks for the most steps from ``at`` on, and their number; 0 without one."""
        first = self._places.block_of(self._steps[at].path)
        if first is None:
            return [], 0
        container = first[0]
        own: list[_Step] = []
        best: tuple[int, list[int]] = (0, [])
        for size in itertools.count(1):
            here = self._block_step(at + size - 1, container)
            if here is None or here[0] != first[1]:
                break
            own.append(here[1])
            numbers = [first[1]]
            while self._repeats(at + size * len(numbers), own, container, numbers[-1]):
                number = self._block_step(at + size * len(numbers), container)
                assert number is not None
                numbers.append(number[0])
            if len(numbers) > 1 and size * len(numbers) > best[0] * len(best[1]):
                best = (size, numbers)
        size, numbers = best
        if not size:
            return [], 0
        members = self._places.containers[container]
        everything = f"{container}.*" if container else "*"
        paths = [f"{container}.{name}" if container else name for name in members]
        steps = [self._block_step(at + offset, container) for offset in range(size)]
        inner = [step for _, step in (one for one in steps if one is not None)]
        variable = _singular(container)
        if self._places.selects(everything, paths) and numbers == list(range(numbers[0], numbers[-1] + 1)):
            group = f"{self._variable(everything)}{_slice(numbers[0], numbers[-1] + 1, len(members))}"
            head = f"for {variable} in {group}:"
        elif self._places.selects(everything, paths):
            head = f"for {variable} in [{self._variable(everything)}[number] for number in {tuple(numbers)}]:"
        else:
            head = f"for {variable} in [sch[path] for path in {tuple(paths[number] for number in numbers)}]:"
        lines, chain = [head], _Chain("    ")
        for below, call in self._joined(inner, [paths[number] for number in numbers]):
            lines += chain.add(f"{variable}[{_quoted(below)}]" if below else variable, call)
        return [*lines, *chain.end()], size * len(numbers)

    def _joined(self, steps: Sequence[_Step], blocks: Sequence[str]) -> Iterator[_Step]:
        """Join equal calls one after another at paths below blocks, where one glob selects them in each block."""
        at = 0
        while at < len(steps):
            run = list(itertools.takewhile(lambda step, call=steps[at].call: step.call == call, steps[at:]))  # type: ignore[misc]
            lengths = (n for n in range(len(run), 1, -1) if self._below([step.path for step in run[:n]], blocks))
            length = next(lengths, 1)
            path = self._below([step.path for step in run[:length]], blocks) if length > 1 else run[0].path
            yield _Step(str(path), run[0].call)
            at += length

    def _below(self, paths: Sequence[str], blocks: Sequence[str]) -> str | None:
        """Return a glob for several paths below each block; None if there is none."""
        if "" in paths or len(set(paths)) < len(paths):
            return None
        globs = {
            None if glob is None else glob.removeprefix(f"{block}.")
            for block in blocks
            for glob in [self._places.glob([f"{block}.{path}" for path in paths])]
        }
        return globs.pop() if len(globs) == 1 else None

    def _block_step(self, at: int, container: str) -> tuple[int, _Step] | None:
        if at >= len(self._steps):
            return None
        found = self._places.block_of(self._steps[at].path)
        if found is None or found[0] != container:
            return None
        return found[1], _Step(found[2], self._steps[at].call)

    def _repeats(self, at: int, own: Sequence[_Step], container: str, after: int) -> bool:
        """Return whether the steps from ``at`` on are ``own``, in one block after ``after``."""
        first = self._block_step(at, container)
        if first is None or first[0] <= after:
            return False
        return all(self._block_step(at + offset, container) == (first[0], step) for offset, step in enumerate(own))

    def _variable(self, pattern: str) -> str:
        """Return the variable of a group of blocks."""
        if pattern not in self.variables:
            name = _plural(pattern.removesuffix("*").removesuffix("."))
            taken = set(self.variables.values()) | {"sch"}
            numbered = (f"{name}_{number}" for number in itertools.count(2))
            self.variables[pattern] = name if name not in taken else next(n for n in numbered if n not in taken)
        return self.variables[pattern]


class _Chain:
    """Joins calls at one place to one line.

    Args:
        indent: of the lines.
    """

    def __init__(self, indent: str = "") -> None:
        self._indent, self._place, self._calls = indent, "", list[str]()

    def add(self, place: str, call: str) -> list[str]:
        """Add a call; return the lines that end before it."""
        ended = self.end() if place != self._place or len(self._line([*self._calls, call])) > _WIDTH else []
        self._place = place
        self._calls.append(call)
        return ended

    def end(self) -> list[str]:
        """Return the line of the calls so far."""
        line, self._calls = [self._line(self._calls)] if self._calls else [], []
        return line

    def _line(self, calls: Sequence[str]) -> str:
        return f"{self._indent}{self._place}.{'.'.join(calls)}"


def _cut(glob: str) -> tuple[str | None, str]:
    """Cut a glob after its first level ``*``, which selects blocks."""
    levels = glob.split(".")
    if "*" not in levels:
        return None, ""
    end = levels.index("*") + 1
    return ".".join(levels[:end]), ".".join(levels[end:])


def _slice(begin: int, end: int, count: int) -> str:
    if (begin, end) == (0, count):
        return ""
    return f"[{begin or ''}:{end if end < count else ''}]"


def _identifier(container: str) -> str:
    name = re.sub(r"\W|^(?=\d)", "", container.rpartition(".")[2].replace("*", ""))
    return name if len(name) > 2 and not keyword.iskeyword(name) else "block"


def _plural(container: str) -> str:
    name = _identifier(container)
    return name if name.endswith("s") else f"{name}s"


def _singular(container: str) -> str:
    name = _identifier(container)
    return name[:-1] if name.endswith("s") and len(name) > 3 else name
