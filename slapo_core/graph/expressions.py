"""What a node of a graph computes, as the model's author might have written it; for messages."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

__all__ = ["SIGNS", "expression"]

SIGNS = {
    operator.add: "+",
    operator.and_: "and",
    operator.eq: "==",
    operator.floordiv: "//",
    operator.ge: ">=",
    operator.gt: ">",
    operator.le: "<=",
    operator.lt: "<",
    operator.mod: "%",
    operator.mul: "*",
    operator.ne: "!=",
    operator.or_: "or",
    operator.pow: "**",
    operator.sub: "-",
    operator.truediv: "/",
}


def expression(value: Any, *, depth: int = 6) -> str:
    """``value`` (a node or a constant) in Python, e.g. ``"x.shape[1] > 4"``; deeper parts by their names only."""
    if not isinstance(value, fx.Node):
        return repr(value)
    if depth == 0 or value.op in ("placeholder", "call_module", "output"):
        return str(value)
    if value.op == "get_attr":
        return f"self.{value.target}"
    parts = [expression(argument, depth=depth - 1) for argument in value.args]
    if value.op == "call_method":
        return f"{parts[0]}.{value.target}({', '.join(parts[1:])})"
    if value.target in SIGNS and len(parts) == 2:
        left, right = (f"({part})" if " " in part else part for part in parts)
        return f"{left} {SIGNS[value.target]} {right}"
    if value.target is operator.getitem:
        return f"{parts[0]}[{parts[1]}]"
    if value.target is getattr:
        return f"{parts[0]}.{value.args[1]}"
    return f"{getattr(value.target, '__name__', value.target)}({', '.join(parts)})"
