"""A recorded graph as readable Python; torch.fx generates the code that runs."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.graph import inplace_methods, magic_methods
from torch.nn import functional

from slapo_graph.autocast_state import DEVICES, set_state
from slapo_graph.private import OpOverload
from slapo_graph.protocol import Guard, Recorded, check

_IN_PLACE = {getattr(operator, name): template.split()[1] for name, template in inplace_methods.items()}
_SIGNS = {
    getattr(operator, name): template.split()[1]
    for name, template in magic_methods.items()
    if hasattr(operator, name) and template.startswith("{} ")
}
_FUNCTIONAL = {id(value): f"F.{name}" for name, value in vars(functional).items() if callable(value)}
_TRIVIAL = (operator.ge, operator.gt, operator.ne)


def expression(value: Any) -> str:
    """Return a node or constant as one expression, e.g. ``"x.shape[1] > 4"``, down to a depth."""
    return _text(value, depth=6)


def printed(recorded: Recorded) -> str:
    """Return the graph as a function; reads of attributes, sizes and parts are inlined."""
    parameters = [str(node) for node in recorded.graph.nodes if node.op == "placeholder"]
    lines = [f"def forward({', '.join(['self', *parameters])}):"]
    for node in recorded.graph.nodes:
        line = _line(node, recorded.guards)
        if line:
            lines.append(f"    {line}")
    return "\n".join(lines)


def _line(node: fx.Node, guards: tuple[Guard, ...]) -> str | None:
    if node.op == "placeholder" or _is_read(node):
        return None
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    if node.target is check:
        return _guard(node, guards)
    if node.target is set_state:
        return _state(*node.args)
    if node.target is operator.setitem:
        place, key, value = node.args
        return f"{_text(place)}[{_key(key)}] = {_text(value)}"
    if node.target in _IN_PLACE and len(node.args) == 2:
        target, value = node.args
        return f"{node} = {_text(target)}; {node} {_IN_PLACE[node.target]} {_text(value)}"  # type: ignore[index]
    return f"{node} = {_call(node)}" if node.users else _call(node)


def _guard(node: fx.Node, guards: tuple[Guard, ...]) -> str | None:
    value, expected, index = node.args
    if isinstance(value, fx.Node) and value.target in _TRIVIAL and expected is True and value.args[1] in (0, -1):
        return None  # a size is at least nothing
    if _is_given(value) and (expected is None or isinstance(expected, bool | str)):
        return None  # another argument of this kind has another graph
    guard = guards[index]  # type: ignore[index]
    said = _text(value)
    if expected is None:
        condition = f"{said} is None"
    elif expected is True or expected is False:
        condition = said if expected else f"not ({said})"
    else:
        condition = f"{said} == {_text(expected)}"
    where = f"  # {Path(guard.location[0]).name}:{guard.location[1]}" if guard.location else ""
    return f"assert {condition}{where}"


def _is_given(value: Any) -> bool:
    """Return whether a node is an argument of the call, or a part of one."""
    while isinstance(value, fx.Node) and value.target is operator.getitem:
        value = value.args[0]
    return isinstance(value, fx.Node) and value.op == "placeholder"


def _state(grad: Any, autocast: Any, cache: Any) -> str:
    """Return a switch of gradients and autocast as a comment; it need not match a ``with`` block."""
    kinds = [f"{kind} {str(dtype)[6:]}" for kind, (on, dtype) in zip(DEVICES, autocast, strict=True) if on]
    return f"# from here: gradients {'on' if grad else 'off'}, autocast {', '.join(kinds) or 'off'}"


def _is_read(node: fx.Node) -> bool:
    """Return whether a node is printed at its uses, without a line of its own."""
    if node.op == "get_attr" or (node.op == "call_method" and node.target in ("size", "dim")):
        return True
    if node.op != "call_function":
        return False
    return (
        node.target in (getattr, len)
        or node.meta.get("is_size", False)
        or (
            node.target is operator.getitem and isinstance(node.args[1], int | str)  # not a slice out of a tensor
        )
    )


def _call(node: fx.Node, depth: int = 0) -> str:
    arguments = [_text(argument, depth) for argument in node.args]
    arguments += [f"{name}={_text(value, depth)}" for name, value in node.kwargs.items()]
    target: Any = node.target
    if node.op == "get_attr":
        return f"self.{target}"
    if node.op == "call_module":
        return f"self.{target}({', '.join(arguments)})"
    if node.op == "call_method":
        return f"{_operand(node.args[0], depth)}.{target}({', '.join(arguments[1:])})"
    if target is getattr:
        return f"{_operand(node.args[0], depth)}.{node.args[1]}"
    if target is operator.getitem:
        return f"{_operand(node.args[0], depth)}[{_key(node.args[1], depth)}]"
    sign = _SIGNS.get(target)
    if sign and len(node.args) == 2:
        return f"{_operand(node.args[0], depth)} {sign} {_operand(node.args[1], depth)}"
    if target is operator.neg:
        return f"-{_operand(node.args[0], depth)}"
    return f"{_function(target)}({', '.join(arguments)})"


def _function(target: Any) -> str:
    known = _FUNCTIONAL.get(id(target))
    name = getattr(target, "__name__", None) or str(target)
    if known is not None:
        return known
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    module = str(getattr(target, "__module__", "") or "")
    if getattr(torch, name, None) is target:
        return f"torch.{name}"
    if module.startswith("torch.") and "_" not in module:
        return f"{module}.{name}"
    return name


def _operand(value: Any, depth: int = 0) -> str:
    text = _text(value, depth)
    return f"({text})" if " " in text and not text.startswith(("(", "[", "'")) else text


def _key(value: Any, depth: int = 0) -> str:
    return (
        ", ".join(_key(part, depth) for part in value) if isinstance(value, tuple) and value else _slice(value, depth)
    )


def _slice(value: Any, depth: int) -> str:
    if not isinstance(value, slice):
        return _text(value, depth)
    parts = ["" if part is None else _text(part, depth) for part in (value.start, value.stop, value.step)]
    return ":".join(parts if parts[2] else parts[:2])


def _text(value: Any, depth: int = 0) -> str:
    """Return a value of a graph; calls are inlined down to ``depth``, reads everywhere."""
    if isinstance(value, fx.Node):
        is_inlined = depth > 0 and value.op in ("call_function", "call_method")
        return _call(value, depth - 1) if is_inlined or _is_read(value) else str(value)
    if isinstance(value, tuple):
        parts = ", ".join(_text(part, depth) for part in value)
        return f"({parts},)" if len(value) == 1 else f"({parts})"
    if isinstance(value, list):
        return f"[{', '.join(_text(part, depth) for part in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_text(item, depth)}' for key, item in value.items())}}}"
    return "..." if value is Ellipsis else repr(value)
