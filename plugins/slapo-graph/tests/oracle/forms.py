"""The descriptions of cases as the code that a user would write: torch calls in one of their many forms."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from slapo_graph import patterns

from .cases import ANY, Call, Case, Choice, Wild

__all__ = ["as_graph", "as_pattern"]

_FORMS: dict[str, list[Callable[..., Any]]] = {
    "relu": [torch.relu, F.relu, lambda x: x.relu()],
    "tanh": [torch.tanh, lambda x: x.tanh()],
    "add": [torch.add, lambda x, y: x + y, lambda x, y: x.add(y), lambda x, y: torch.add(x, y, alpha=1)],
    "mul": [torch.mul, lambda x, y: x * y, lambda x, y: x.mul(y)],
    "sub": [torch.sub, lambda x, y: x - y, lambda x, y: x.sub(other=y)],
    "matmul": [torch.matmul, lambda x, y: x @ y, lambda x, y: x.matmul(y)],
    "softmax": [
        lambda x, axis: F.softmax(x, dim=axis),
        lambda x, axis: x.softmax(axis),
        lambda x, axis: torch.softmax(x, axis),
    ],
    "shift": [lambda x, number: x + number, lambda x, number: number + x, torch.add],
    "chunk": [lambda x: x.chunk(2, -1), lambda x: torch.chunk(x, 2, dim=-1)],
    "getitem": [lambda x, part: x[part]],
    "any": [patterns.any_op],
}


def as_graph(case: Case, rng: random.Random) -> fx.Graph:
    """The graph of a case; positions of nodes are those of the case."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    values: dict[int, Any] = {}
    for position in range(case.inputs):
        node = graph.placeholder(f"x{position}")
        values[position] = fx.Proxy(node, tracer)
    for position in sorted(case.calls):
        call = case.calls[position]
        operands = [values[operand] for operand in call.operands]
        if call.constant is not None:
            operands.append(call.constant)
        values[position] = rng.choice(_FORMS[call.operation])(*operands)
    for value in values.values():
        value.node.meta["example"] = ((4, 4), torch.float32)
    graph.output(tuple(values[position].node for position in case.results))
    return graph


def as_pattern(case: Case, rng: random.Random) -> Callable[..., Any]:
    """The pattern of a case, as a function."""

    def pattern(**wildcards: Any) -> Any:
        made: dict[int, Any] = {}

        def value(each: Any) -> Any:
            if isinstance(each, Wild):
                return wildcards[each.name]
            if id(each) not in made:
                made[id(each)] = _choice(each) if isinstance(each, Choice) else _call(each)
            return made[id(each)]

        def _call(call: Call) -> Any:
            operands = [value(each) for each in call.operands]
            if call.constant is not None:
                operands.append(patterns.any_constant() if call.constant == ANY else call.constant)
            return rng.choice(_FORMS[call.operation])(*operands)

        def _choice(choice: Choice) -> Any:
            if choice.is_optional:
                return patterns.optional(
                    rng.choice(_FORMS[choice.alternatives[0].operation]), value(choice.alternatives[1])
                )
            return patterns.any_of(*[value(each) for each in choice.alternatives])

        return tuple(value(each) for each in case.outputs)

    kind = inspect.Parameter.KEYWORD_ONLY
    pattern.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in case.wildcards])  # type: ignore[attr-defined]
    return pattern
