"""The words in which patterns are written, besides plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "AnyConstant",
    "AnyOf",
    "Where",
    "any_constant",
    "any_of",
    "any_op",
    "call_module",
    "capture",
    "optional",
    "where",
]


@dataclass(frozen=True)
class AnyConstant:
    """What :func:`any_constant` gives."""


@dataclass(frozen=True)
class AnyOf:
    """What :func:`any_of` gives."""

    alternatives: tuple[Any, ...]


@dataclass(frozen=True)
class Where:
    """What :func:`where` gives."""

    predicate: Callable[..., Any]


def any_constant() -> Any:
    """A number, text, dtype, None, ... that is written in the graph, whatever it is.

    What is left out counts as what it is then. As the default of a parameter it is captured under its name::

        ANY = any_constant()

        def pattern(x, p=ANY):
            return F.dropout(x, p)
    """
    from slapo_core.graph.patterns.tracing import active_tracer

    tracer = active_tracer()
    return AnyConstant() if tracer is None else tracer.value(AnyConstant())


def any_op(*values: Any) -> Any:
    """The result of any single call whose values are these, in this order; its constants do not matter.

    Args:
        values: of the pattern: its parameters, and what was computed from them.

    Raises:
        ArgumentError: called outside of a pattern.
    """
    return _tracer().any_op(values)


def capture(name: str, value: Any) -> Any:
    """``value``, which is reported under ``name`` with each match.

    Args:
        name: as parameters are; not that of a parameter of the pattern.
        value: a value of the pattern, or :func:`any_constant`.

    Raises:
        ArgumentError: called outside of a pattern, or the name is taken.
    """
    return _tracer().capture(name, value)


def call_module(glob: str, *args: Any, **kwargs: Any) -> Any:
    """The result of a call of a module, hooked or not.

    Args:
        glob: over its path relative to the traced module, e.g. ``"*.query"``, and over the name of its class.
        args: all values it is called with, in the order of its forward's parameters; None where one is left out.
        kwargs: such by name.

    Raises:
        ArgumentError: called outside of a pattern.
    """
    return _tracer().call_module(glob, args, kwargs)


def optional(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(x, *args, **kwargs)``, or ``x`` itself where that step is absent; the step is preferred.

    Args:
        function: a torch function, a function of the user's, or a module of torch.nn.
        x: what it is called with.
        args: the same.
        kwargs: the same.

    Raises:
        ArgumentError: called outside of a pattern.
    """
    return _tracer().any_of((function(x, *args, **kwargs), x))


def any_of(*alternatives: Any) -> Any:
    """The first of the alternatives that matches.

    Args:
        alternatives: values, within a pattern; patterns, outside of one: anything that ``find`` takes.

    Raises:
        ArgumentError: there are none.
    """
    from slapo_core.errors import ArgumentError

    if not alternatives:
        raise ArgumentError("any_of needs alternatives (got none)", hint="any_of(pattern, other_pattern)")
    from slapo_core.graph.patterns.tracing import active_tracer

    tracer = active_tracer()
    return AnyOf(alternatives) if tracer is None else tracer.any_of(alternatives)


def where(predicate: Callable[..., Any]) -> Any:
    """A pattern of one node: each for which ``predicate(node)`` is true.

    Args:
        predicate: takes a :class:`torch.fx.Node`. In a saved schedule only a function at the top level of a module can
            be named.

    Raises:
        ArgumentError: it is not callable.
    """
    from slapo_core.errors import ArgumentError

    if not callable(predicate):
        raise ArgumentError(
            f"where needs a function of a node (got {predicate!r})", hint="where(lambda node: node.op == 'call_module')"
        )
    return Where(predicate)


def _tracer() -> Any:
    from slapo_core.errors import ArgumentError
    from slapo_core.graph.patterns.tracing import active_tracer

    tracer = active_tracer()
    if tracer is None:
        raise ArgumentError(
            "any_op, capture, call_module and optional belong inside of a pattern's function",
            hint="find(lambda x: patterns.call_module('dense', x))",
        )
    return tracer
