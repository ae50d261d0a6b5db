"""`GraphPattern`: a pattern as plain data, and its matches in a graph."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from slapo_core.errors import ReplayError, SerializationError
from slapo_core.internals import describe
from slapo_graph.patterns.comparison import pairs_of
from slapo_graph.patterns.data import (
    Alternative,
    Attribute,
    Constant,
    Items,
    PatternStep,
    PatternTarget,
    PatternValue,
    Slice,
    Wildcard,
)
from slapo_graph.patterns.index import Indexed, indexed
from slapo_graph.patterns.matcher import embeddings, positions_of

# Patterns as JSON data, and back.

_CLASSES: dict[str, type[Any]] = {
    "Form": Alternative,
    "Items": Items,
    "Result": PatternValue,
    "Slice": Slice,
    "Step": PatternStep,
    "Target": PatternTarget,
    "Wildcard": Wildcard,
}
"""By their names in saved schedules."""
_NAMES = {cls: name for name, cls in _CLASSES.items()}


def _named(kind: type, name: str) -> Any:
    found = getattr(torch, name)
    if type(found) is not kind:
        raise ValueError(f"torch.{name} is not a {kind.__name__}")
    return found


_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_CONSTANTS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, float.hex, float.fromhex),
    "complex": (complex, repr, complex),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "ellipsis": (type(Ellipsis), bool, lambda _: Ellipsis),
    "device": (torch.device, str, torch.device),
    "set": (set, lambda value: _elements(value), lambda parts: set(map(_constant_from, parts))),
    "frozenset": (frozenset, lambda value: _elements(value), lambda parts: frozenset(map(_constant_from, parts))),
    **{
        name: (kind, lambda value: str(value).removeprefix("torch."), partial(_named, kind))
        for name, kind in _KINDS.items()
    },
}
"""Constants that JSON lacks: their class, and the conversions to text and back."""


def to_data(value: Any) -> Any:
    """Return an alternative, or a part of one, as JSON data.

    Raises:
        SerializationError: it holds an object without a name.
    """
    if isinstance(value, Constant):
        return {"constant": _constant(value.value)}
    if type(value) in _NAMES:
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, PatternTarget) and value.predicate is not None:
            parts["predicate"] = {"function": _function(value.predicate)}
            return {"Target": {name: part if name == "predicate" else to_data(part) for name, part in parts.items()}}
        return {_NAMES[type(value)]: {name: to_data(part) for name, part in parts.items()}}
    if isinstance(value, tuple):
        return [to_data(part) for part in value]
    if value is None or isinstance(value, str | int | bool):
        return value
    return {"constant": _constant(value)}  # keys of dictionaries


def _constant(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    for name, (kind, encode, _) in _CONSTANTS.items():
        if type(value) is kind:
            return {name: encode(value)}
    raise SerializationError(f"a pattern holds {value!r}, which JSON cannot carry", hint="use numbers, text and dtypes")


def _elements(value: Any) -> list[Any]:
    return [_constant(part) for part in sorted(value, key=repr)]


def _function(predicate: Callable[..., Any]) -> str:
    if isinstance(predicate, FunctionType):
        module = sys.modules.get(predicate.__module__)
        if module is not None and vars(module).get(predicate.__qualname__) is predicate:
            return f"{predicate.__module__}:{predicate.__qualname__}"
    raise SerializationError(
        f"where({predicate!r}) cannot be saved: only a function at the top level of a module can be named",
        hint="def is_wanted(node): ...  at the top level, and where(is_wanted)",
    )


def pattern_from_data(data: Any, find_function: Callable[[str], Any] | None) -> tuple[tuple[Alternative, ...], str]:
    """Return the alternatives and the text of a saved pattern.

    Raises:
        ReplayError: it is none.
    """
    try:
        alternatives = tuple(_from(alternative, find_function) for alternative in data["forms"])
        if not alternatives or not all(
            isinstance(alternative, Alternative) and alternative.steps for alternative in alternatives
        ):
            raise TypeError("no alternatives, or one without steps")
        return alternatives, str(data["text"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ReplayError(
            f"not a saved pattern ({error}): {data!r}", hint="save the schedule again with this version of slapo"
        ) from error


def _from(data: Any, find_function: Callable[[str], Any] | None) -> Any:
    if isinstance(data, list):
        return tuple(_from(part, find_function) for part in data)
    if not isinstance(data, dict):
        return data
    ((name, value),) = data.items()
    if name == "constant":
        made = _constant_from(value)
        return Constant(made)
    if name == "function":
        if find_function is None:
            raise TypeError(f"it needs the function {value}")
        return find_function(value)
    parts = {key: _from(part, find_function) for key, part in value.items()}
    if name == "Items":
        parts["keys"] = tuple(key.value if isinstance(key, Constant) else key for key in parts["keys"])
    return _CLASSES[name](**parts)


def _constant_from(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    return _CONSTANTS[name][2](inner)


@dataclass(frozen=True)
class MatchedNodes:
    """A match in one graph, by its nodes; a :class:`~slapo_graph.match.Match` has their names.

    Args:
        nodes: of the match, in the graph's order.
        inputs: the values that it reads, in the order of the pattern's arguments. A parameter or buffer that no
            earlier node of the graph reads (a module of torch.nn reads it) is an
            :class:`~slapo_graph.patterns.data.Attribute`.
        outputs: its nodes that are used outside of it, in the graph's order.
        captures: by name: a value as in ``inputs``, or a plain constant.
        captured_first: names of the captures at the place where the rewrite was first made; None there.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node | Attribute, ...]
    outputs: tuple[fx.Node, ...]
    captures: dict[str, Any]
    captured_first: frozenset[str] | None = None

    @property
    def captured(self) -> frozenset[str]:
        """Return the names of captures that the match does not compute itself."""
        inside = set(self.nodes)
        return frozenset(
            name for name, value in self.captures.items() if not (isinstance(value, fx.Node) and value in inside)
        )


@dataclass(frozen=True)
class GraphPattern:
    """A pattern as data: comparable, hashable, serializable; live objects are only the functions of ``where``.

    Args:
        alternatives: of two that begin at one node, the earlier one is taken.
        text: its name in messages.
        name: of a plugin's pattern; None for others.
    """

    alternatives: tuple[Alternative, ...]
    text: str = field(default="pattern", compare=False)
    name: str | None = field(default=None, compare=False)

    def matches(self, graph: fx.Graph, module: nn.Module) -> list[MatchedNodes]:
        """Return the matches in ``graph``; no node is in two of them.

        The first match begins at the earliest possible node, and is of the earliest alternative that matches there. The
        next begins at the earliest node that still leaves one, and so on.

        Args:
            graph: of a traced module.
            module: that module.
        """
        index = indexed(graph, module)
        known: list[MatchedNodes] | None = index.found.get(self)
        if known is None:
            found, _ = embeddings(self.alternatives, index)
            known = [_matched(self.alternatives[number], index, *embedding) for number, embedding in found]
            if self._is_of_graphs:
                index.found[self] = known
        return list(known)

    def nearest_miss(self, graph: fx.Graph, module: nn.Module) -> str | None:
        """Describe the closest candidate in ``graph``; None if nothing resembles the pattern."""
        from slapo_graph.patterns.misses import nearest_miss

        return nearest_miss(self.alternatives, indexed(graph, module))

    def to_data(self) -> Any:
        """Return the pattern as JSON data.

        Raises:
            SerializationError: it has a predicate that is not a function at the top level of a module.
        """
        return {"forms": [to_data(alternative) for alternative in self.alternatives], "text": self.text}

    @classmethod
    def from_data(cls, data: Any, find_function: Any = None) -> GraphPattern:
        """Return the pattern that :meth:`to_data` saved.

        Args:
            data: as read from JSON.
            find_function: returns a predicate by its name, ``"module:name"``; imports nothing.

        Raises:
            ReplayError: it is not a pattern.
        """
        alternatives, text = pattern_from_data(data, find_function)
        return cls(alternatives, text)

    @cached_property
    def slapo_described(self) -> str:
        """Return a digest by which ranks compare the pattern, which may have hundreds of alternatives."""
        digest = hashlib.sha256(describe(self.alternatives).encode()).hexdigest()
        return f"<{self.text}, sha256 {digest[:16]}>"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.alternatives)

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # a hash is of this process

    @cached_property
    def _is_of_graphs(self) -> bool:
        """Return whether the matches depend on the graph alone, so that layers that share it share them."""
        steps = [step for alternative in self.alternatives for step in alternative.steps]
        inner = [each for step in steps for _, operand in step.arguments for each, _ in pairs_of(operand, operand)]
        return all(step.target.kind != "where" for step in steps) and not any(
            isinstance(each, Wildcard) and each.shape is not None for each in inner
        )

    def __str__(self) -> str:
        return self.text


def _matched(
    alternative: Alternative, index: Indexed, steps: tuple[int, ...], bindings: dict[str, Any]
) -> MatchedNodes:
    positions = positions_of(alternative, steps, index)
    nodes = tuple(index.calls[position].node for position in positions)
    inside = set(nodes)

    def given(value: Any) -> Any:
        if isinstance(value, Attribute):
            read = index.reads.get(value)
            return read if read is not None and index.position[read] < positions[0] else value
        return value

    if alternative.steps[0].target.kind in ("glob", "regex", "where"):
        used = (value for position in positions if position in index.calls for value in index.calls[position].values)
        inputs = tuple(dict.fromkeys(given(value) for value in used if value not in inside))
    else:
        inputs = tuple(given(bindings[name]) for name in alternative.inputs)
    captures = {}
    for name, operand in alternative.captures:
        if isinstance(operand, Wildcard):
            captures[name] = given(bindings[operand.name])
        elif isinstance(operand, Constant):
            captures[name] = operand.value
        else:
            captures[name] = index.calls[steps[operand.step]].node
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    return MatchedNodes(nodes, inputs, outputs, captures)
