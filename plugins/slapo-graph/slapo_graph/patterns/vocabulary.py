"""The vocabulary of patterns, besides plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slapo_core.errors import ArgumentError
from slapo_graph.patterns.reader import AnyConstant, active_reader


@dataclass(frozen=True)
class AnyOf:
    """The result of :func:`any_of`."""

    alternatives: tuple[Any, ...]


@dataclass(frozen=True)
class Where:
    """The result of :func:`where`."""

    predicate: Callable[..., Any]


def any_constant() -> Any:
    """Match any constant in the graph: a number, text, dtype, None, ...

    An omitted argument matches its default value. As the default of a parameter it is captured under its name::

        ANY = any_constant()

        def pattern(x, p=ANY):
            return F.dropout(x, p)
    """
    reader = active_reader()
    return AnyConstant() if reader is None else reader.value(AnyConstant())


def any_op(*values: Any) -> Any:
    """Match any single call with these values in this order; its constants do not matter.

    Args:
        values: of the pattern: its parameters, and what was computed from them.

    Raises:
        ArgumentError: called outside of a pattern.
    """
    return _reader().any_op(values)


def capture(name: str, value: Any) -> Any:
    """Return ``value``, and report it as ``name`` with each match.

    Args:
        name: an identifier, other than the pattern's parameters.
        value: a value of the pattern, or :func:`any_constant`.

    Raises:
        ArgumentError: called outside of a pattern, or the name is taken.
    """
    return _reader().capture(name, value)


def call_module(glob: str, *args: Any, **kwargs: Any) -> Any:
    """Match the call of a module, hooked or not.

    Args:
        glob: over its path relative to the traced module, e.g. ``"*.query"``, and over the name of its class.
        args: all of its arguments, in the order of its forward's parameters; None for an omitted one.
        kwargs: further arguments by name.

    Raises:
        ArgumentError: called outside of a pattern.
    """
    return _reader().call_module(glob, args, kwargs)


def optional(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Match ``function(x, *args, **kwargs)``, or else ``x`` itself.

    Args:
        function: a torch function, a function of yours, or a module of torch.nn.
        x: its first argument.
        args: further arguments.
        kwargs: further arguments by name.

    Raises:
        ArgumentError: called outside of a pattern.
    """
    return _reader().any_of((function(x, *args, **kwargs), x))


def any_of(*alternatives: Any) -> Any:
    """Match the first alternative that is there.

    Args:
        alternatives: within a pattern, values; outside of one, patterns: anything that ``find`` takes.

    Raises:
        ArgumentError: there are none.
    """
    if not alternatives:
        raise ArgumentError("any_of needs alternatives (got none)", hint="any_of(pattern, other_pattern)")

    reader = active_reader()
    return AnyOf(alternatives) if reader is None else reader.any_of(alternatives)


def where(predicate: Callable[..., Any]) -> Any:
    """Match each node for which ``predicate(node)`` is true.

    Args:
        predicate: takes a :class:`torch.fx.Node`; to save the schedule, a function at the top level of a module.

    Raises:
        ArgumentError: it is not callable.
    """
    if not callable(predicate):
        raise ArgumentError(
            f"where needs a function of a node (got {predicate!r})", hint="where(lambda node: node.op == 'call_module')"
        )
    return Where(predicate)


def _reader() -> Any:
    reader = active_reader()
    if reader is None:
        raise ArgumentError(
            "any_op, capture, call_module and optional belong inside of a pattern's function",
            hint="find(lambda x: patterns.call_module('dense', x))",
        )
    return reader
