"""Schedules as text: the tree with folded layers, and each step's changes; values as text."""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import place
from slapo_core.layout import Layout
from slapo_core.private import children_of, parameters_of
from slapo_core.tree.index import full_name, shape_of

if TYPE_CHECKING:
    from slapo_core.primitive import Record
    from slapo_core.tree.tree import Tree


@dataclass
class _Drawn:
    label: str  # without the name
    children: list[tuple[str, _Drawn]]

    def key(self) -> tuple[object, ...]:
        return (self.label, tuple((name, child.key()) for name, child in self.children))


def render_tree(tree: Tree, records: Sequence[Record]) -> str:
    """Render the module tree; ``layer.0-11 x 12`` folds twelve equal children."""
    tree.structure_changed()  # changes outside of the schedule, too
    at: dict[str, list[str]] = {}
    for record in records:
        at.setdefault(record.path, []).append(str(record.primitive))
    drawn = _draw(tree, "", lambda path: at.get(path, []))
    return "\n".join([drawn.label, *_lines(drawn, "", "")])


def _draw(tree: Tree, path: str, applied: Callable[[str], list[str]]) -> _Drawn:
    module = tree.index.modules[path]
    parts = [type(module).__name__]
    for name, tensor in parameters_of(module).items():
        if tensor is not None:
            first = full_name(*tree.sites.of(tensor)[0])
            tied = f" tied to {first}" if first != full_name(path, name) else ""
            parts.append(_shape(name, tensor, tree.tensors.layout(tensor, full_name(path, name))) + tied)
    label = parts[0] + (f"  {', '.join(parts[1:])}" if len(parts) > 1 else "")
    steps = applied(path)
    if steps:
        label += "  <- " + ", ".join(steps)
    children: list[tuple[str, _Drawn]] = []
    for name, child in children_of(module).items():
        child_path = full_name(path, name)
        if child is None:
            continue
        if child_path in tree.index.modules:
            children.append((name, _draw(tree, child_path, applied)))
        else:
            children.append((name, _Drawn(f"same module as '{tree.index.aliases[child_path]}'", [])))
    return _Drawn(label, children)


def _shape(name: str, tensor: torch.Tensor, layout: Layout) -> str:
    local = shape_of(tensor)
    if not layout.placements:
        return f"{name} {local}"
    return f"{name} {local} of {layout.shape} [{layout}]"


def _lines(drawn: _Drawn, indent: str, own_name: str) -> list[str]:
    lines: list[str] = []
    folded = _fold(drawn.children, own_name)
    for position, (name, child) in enumerate(folded):
        last = position == len(folded) - 1
        lines.append(f"{indent}{'└─ ' if last else '├─ '}{name}: {child.label}")
        lines.extend(_lines(child, indent + ("   " if last else "│  "), name.partition(" ")[0]))
    return lines


def _fold(children: list[tuple[str, _Drawn]], own_name: str) -> list[tuple[str, _Drawn]]:
    folded: list[tuple[str, _Drawn]] = []
    start = 0
    while start < len(children):
        stop = start + 1
        if children[start][0].isdigit():
            key = children[start][1].key()
            while stop < len(children) and children[stop][0].isdigit() and children[stop][1].key() == key:
                stop += 1
        name, child = children[start]
        if stop - start > 1:
            numbers = fold_numbers([int(name) for name, _ in children[start:stop]])
            name = f"{own_name}.{numbers} x {stop - start}" if own_name else f"{numbers} x {stop - start}"
        folded.append((name, child))
        start = stop
    return folded


def fold_numbers(numbers: Sequence[int]) -> str:
    """Format ``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    parts: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        if number is not None:
            start = previous = number
    return ",".join(parts)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_DOTTED = re.compile(r"(?<=')(?:\w+\.)+\d+(?=')|(?<![\w.])(?:\w+\.)+[A-Za-z_]\w*")  # a full name, never a float


def explain_records(records: Sequence[Record]) -> str:
    """Describe each step: the call, its path, distribution and source line, and every effect.

    Steps that are the same call with the same edits in repeated layers are shown once:
    ``layer.{0-5}.output.dense (x 6)``.
    """
    if not records:
        return "no steps: the model runs as its author wrote it"
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        # Full names inside an effect carry the layer's number too (tied parameters): fold it there as well.
        effects = tuple(_DOTTED.sub(lambda name: _NUMBER.sub("*", name[0]), effect) for effect in record.edits)
        key = (record.primitive.name, str(record.primitive), _NUMBER.sub("*", record.path), record.location, effects)
        groups.setdefault(key, []).append(record)
    lines: list[str] = []
    for same in groups.values():
        first = same[0]
        numbers = fold_numbers([record.index for record in same])
        if numbers.count(",") > 7:
            numbers = f"{numbers.split(',')[0]},...,{numbers.split(',')[-1]}"
        times = f" (x {len(same)})" if len(same) > 1 else ""
        lines.append(
            f"#{numbers} {first.primitive} at {fold_paths([record.path for record in same])}{times}"
            f"  [{first.name}, {first.distribution} {first.version}]  {first.location}"
        )
        lines.extend(f"    {effect}" for effect in first.edits)
    return "\n".join(lines)


def fold_paths(paths: Sequence[str]) -> str:
    """Format paths of equal steps: ``"'layer.{0-5}.output'"``; each by itself where they are no such range."""
    if len(paths) == 1:
        return place(paths[0])
    levels = list(zip(*(path.split(".") for path in paths), strict=True))
    shown = []
    count = 1
    for level in levels:
        values = sorted(set(level), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
        if len(values) == 1:
            shown.append(values[0])
        elif all(value.isdigit() for value in values):
            shown.append("{" + fold_numbers([int(value) for value in values]) + "}")
        else:
            shown.append("{" + ",".join(values) + "}")
        count *= len(values)
    if count != len(paths):  # the braces would promise places that were not meant
        return ", ".join(f"'{path}'" for path in paths)
    return f"'{'.'.join(shown)}'"


def describe(value: Any) -> str:
    """Describe a value by a text that is the same in every process.

    Plain values, and containers and frozen dataclasses of them, are given in full; functions and classes by their
    name, devices by their type, and of anything else only the type: its repr may hold an address. What has a text of
    its own for this (``slapo_described``) is given by it.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, torch.device):
        return repr(value.type)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(describe, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(describe, value))) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{describe(key)}: {describe(item)}" for key, item in value.items())) + "}"
    if isinstance(value, functools.partial):
        arguments = [*map(describe, value.args), *(f"{key}={describe(item)}" for key, item in value.keywords.items())]
        return f"<functools.partial of {', '.join([describe(value.func), *arguments])}>"
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"<{'class' if inspect.isclass(value) else 'function'} {_dotted_name(value)}>"
    kind = type(value)
    if hasattr(kind, "slapo_described"):
        return str(value.slapo_described)
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        own = (f"{field.name}={describe(getattr(value, field.name))}" for field in fields(value) if field.compare)
        return f"{kind.__qualname__}({', '.join(own)})"
    return f"<{_dotted_name(kind)}>"


def _dotted_name(value: Any) -> str:
    """The dotted name of a class or a function."""
    function = getattr(value, "__func__", value)
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None) or type(value).__qualname__
    return f"{module}.{name}" if module else name
