"""Functions, methods and operators as calls of one canonical operation."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slapo_core.internals import buffers_of, parameters_of
from slapo_graph.leaves import is_changed, is_predefined
from slapo_graph.patterns.data import Attribute, CanonicalCall, Items, Slice
from slapo_graph.patterns.functional import INPUT, Own, functional_call, input_of
from slapo_graph.patterns.schemas import bind_function, bind_schema, defaults_of
from slapo_graph.private import NN, VF, OpOverload, OpOverloadPacket, operator_name
from slapo_graph.structure import is_plain

_IN_TORCH = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pos": "positive",
    "invert": "bitwise_not",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
"""Torch's names of Python's operators, where they differ."""

_OPERATORS: dict[Any, str] = {
    getattr(operator, f"__{place}{name}__"): _IN_TORCH.get(name, name) + suffix
    for place, suffix in (("", ""), ("i", "_"))
    for name in ("add", "sub", "mul", "matmul", "pow", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", *_IN_TORCH)
    if hasattr(operator, f"__{place}{name}__")
}
_SYNONYMS = {
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "special_expit": "sigmoid",
    "special_softmax": "softmax",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "true_divide": "div",
}
_CASTS = {
    name: getattr(torch.empty(0), name)().dtype
    for name in ("bfloat16", "bool", "double", "float", "half", "int", "long")
}
_COMMUTATIVE = {
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "eq",
    "fmax",
    "fmin",
    "logaddexp",
    "logical_and",
    "logical_or",
    "logical_xor",
    "max",
    "maximum",
    "min",
    "minimum",
    "mul",
    "ne",
}
_NAMESPACES = (torch, functional, NN, torch.Tensor, torch.functional, VF)


def plain(value: Any) -> Any:
    """Return an argument with lists as tuples, and slices and dictionaries as data."""
    if isinstance(value, tuple | list):
        if hasattr(value, "_fields"):
            return tuple(plain(part) for part in value)
        return tuple(map(plain, value))
    if isinstance(value, slice):
        return Slice(plain(value.start), plain(value.stop), plain(value.step))
    if isinstance(value, dict):
        return Items(tuple(value), tuple(plain(part) for part in value.values()))
    return value


_KINDS = {
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
    str: "str",
    type(None): "none",
    tuple: "sequence",
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


def constant_kind(value: Any) -> str:
    """Return the kind of a constant, as schemas distinguish them."""
    return _KINDS.get(type(value), "other")


def operation_of(function: Callable[..., Any]) -> str:
    """Return the canonical name of a function: ``"gelu"`` for each of torch's spellings, or ``"module.name"``."""
    known = _OPERATORS.get(function)
    if known is not None:
        return known
    if isinstance(function, OpOverload | OpOverloadPacket):
        packet = function.overloadpacket if isinstance(function, OpOverload) else function
        operation = operator_name(packet).removeprefix("aten::")
        return _SYNONYMS.get(operation, operation)
    name = str(getattr(function, "__name__", type(function).__name__))
    module = str(getattr(function, "__module__", "") or "")
    if function is getattr or module in ("builtins", "_operator", "math"):
        return name
    if module.startswith("torch") or not module:
        return _name_in_torch(function, name, module)  # kept: torch's functions live as long as the process
    return f"{module}.{getattr(function, '__qualname__', name)}"


@functools.cache
def _name_in_torch(function: Callable[..., Any], name: str, module: str) -> str:
    owned = any(getattr(namespace, name, None) is function for namespace in _NAMESPACES)
    inner = inspect.unwrap(function)  # of what torch wraps: the function of x**2
    if owned or inspect.isbuiltin(inner) or inspect.ismethoddescriptor(inner):  # these have aten's names
        return _SYNONYMS.get(name, name)
    return f"{module}.{getattr(function, '__qualname__', name)}"


def function_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kind_of: Callable[[Any], str]
) -> CanonicalCall:
    """Return the call of a function in canonical notation."""
    operation = operation_of(function)
    names = (operation, *_printed(function))
    args, kwargs = plain(args), {name: plain(value) for name, value in kwargs.items()}
    if operation == "getitem" or function is getattr:
        return CanonicalCall(operation, {"input": args[0], "index": args[1]}, names=names)
    if function in _OPERATORS:
        second = "exponent" if operation.startswith("pow") else "other"
        return finished(operation, dict(zip(("input", second), args, strict=False)), names)
    bound = bind_function(operation, function, args, kwargs)
    if kwargs.get("return_indices") is False:  # which schemas tell by the operation's name
        del kwargs["return_indices"]
    if bound is None:
        bound = bind_schema(operation, args, kwargs, kind_of, is_method=False)
    return finished(operation, _by_position(args, kwargs) if bound is None else bound, names)


def method_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], kind_of: Callable[[Any], str]
) -> CanonicalCall:
    """Return the call of a tensor's method in canonical notation."""
    args, kwargs = plain(args), {key: plain(value) for key, value in kwargs.items()}
    names = (_SYNONYMS.get(name, name), name)
    if name in _CASTS and len(args) == 1 and not kwargs:
        return finished("to", {"input": args[0], "dtype": _CASTS[name]}, ("to", name))
    operation = names[0]
    bound = bind_schema(operation, args, kwargs, kind_of, is_method=True)
    if bound is None and isinstance(getattr(torch.Tensor, name, None), type(plain)):
        bound = bind_function(operation, getattr(torch.Tensor, name), args, kwargs)
    return finished(operation, _by_position(args, kwargs) if bound is None else bound, names)


def finished(operation: str, arguments: dict[str, Any], names: tuple[str, ...]) -> CanonicalCall:
    """Return a call whose arguments have canonical names, in canonical notation."""
    if operation in ("rsub", "__rsub__"):
        operation, arguments = "sub", {**arguments, "input": arguments["other"], "other": arguments["input"]}
    if operation == "transpose" and type(arguments.get("dim0")) is type(arguments.get("dim1")) is int:
        dims = sorted((arguments["dim0"], arguments["dim1"]), key=lambda dim: (dim < 0, dim))
        arguments = {**arguments, "dim0": dims[0], "dim1": dims[1]}
    if operation == "hardtanh" and (arguments.get("min_val"), arguments.get("max_val")) == (0.0, 6.0):
        operation, arguments = "relu6", {name: arguments[name] for name in ("input", "inplace") if name in arguments}
    defaults = defaults_of(operation)
    if arguments.get("inplace") is True and not operation.endswith("_"):
        arguments = {name: value for name, value in arguments.items() if name != "inplace"}
        operation += "_"
    if "pool" in operation:
        arguments = _window(arguments)
    kept = {name: value for name, value in arguments.items() if not _is_default(defaults, name, value)}
    commutes = (
        operation in _COMMUTATIVE
        and kept.keys() == {"input", "other"}
        and not any(isinstance(value, tuple | str) for value in kept.values())
    )
    return CanonicalCall(operation, kept, commutes, names if names[0] == operation else (operation, *names))


def _is_default(defaults: dict[str, Any], name: str, value: Any) -> bool:
    if name not in defaults:
        return name == "inplace" and value is False
    default = defaults[name]
    if default is None or value is None:
        return default is value
    if type(default) in (int, float) and type(value) in (int, float):
        return bool(default == value)
    if isinstance(default, tuple) or (type(default) is int and isinstance(value, tuple)):
        return same_on_every_axis(default, value)
    return type(default) is type(value) and bool(default == value)


def _window(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a pooling without a stride equal to the default."""
    stride, left_out = arguments.get("stride"), set()
    if stride is None or stride == () or same_on_every_axis(stride, arguments.get("kernel_size")):
        left_out.add("stride")
    if arguments.get("return_indices") is False:
        left_out.add("return_indices")
    return {name: value for name, value in arguments.items() if name not in left_out}


def same_on_every_axis(one: Any, other: Any) -> bool:
    """Return whether two window settings are equal, where one number applies to all axes."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one == other
    many, single = (one, other) if isinstance(one, tuple) else (other, one)
    if not isinstance(many, tuple):
        return type(one) is type(other) is int and one == other
    return bool(many) and type(single) is int and all(type(each) is int and each == single for each in many)


def _by_position(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**{str(position): value for position, value in enumerate(args)}, **kwargs}


def _printed(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the printed name, ``F.gelu``, and the full one, ``torch._C._nn.gelu``."""
    if isinstance(function, OpOverload | OpOverloadPacket):
        return (f"torch.ops.{function}",)
    name = str(getattr(function, "__qualname__", None) or getattr(function, "__name__", type(function).__name__))
    short = (f"F.{name}",) if getattr(functional, name, None) is function else ()
    if getattr(torch, name, None) is function:
        return (*short, f"torch.{name}")
    if getattr(NN, name, None) is function:
        return (*short, f"torch._C._nn.{name}")
    module = str(getattr(function, "__module__", "") or "torch").replace("_operator", "operator")
    return (*short, f"{module}.{name}")


# Calls of modules: torch.nn's own as the functions that they stand for.


def is_plain_module(module: nn.Module) -> bool:
    """Return whether a module is torch.nn's own, without hooks and with its class's forward."""
    return is_predefined(module) and not is_changed(module)


def settings(module: nn.Module) -> Any:
    """Return the settings that :func:`module_call` depends on: class, hooks, attributes, present tensors."""
    own = [(name, value) for name, value in vars(module).items() if isinstance(value, _COMPARED)]
    tensors = [*parameters_of(module).items(), *buffers_of(module).items()]
    return type(module), is_changed(module), own, [name for name, tensor in tensors if tensor is not None]


_COMPARED = (bool, int, float, str, tuple, list, type(None))


@functools.cache
def _forward(forward: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(forward).parameters.values())[1:]


def forward_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return a forward's parameters, and a call's arguments by name without defaults."""
    parameters = _forward(type(module).forward)
    names = tuple(each.name for each in parameters)
    given: dict[str, Any] = {}
    for position, value in enumerate(args):
        if position < len(parameters) and parameters[position].kind in _POSITIONAL:
            given[names[position]] = value
        else:
            given[str(position)] = value
    given.update(kwargs)
    for each in parameters:
        if each.name in given and type(given[each.name]) is type(each.default) and given[each.name] == each.default:
            del given[each.name]
    return names, given


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def module_call(
    module: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensor_of: Callable[[str], Any] | None = None,
) -> tuple[CanonicalCall | None, tuple[str, ...], dict[str, Any]]:
    """Return the computation of a call of a module below a graph's.

    Args:
        module: the called one.
        path: of it, relative to the traced module.
        args: of the call.
        kwargs: of the call.
        tensor_of: returns the operand for a parameter or buffer of the module, by its name.

    Returns:
        the call as an operation, for a plain module of torch.nn, else None; the parameters of its forward; the
        arguments by name.
    """
    names, given = forward_arguments(module, plain(args), {name: plain(value) for name, value in kwargs.items()})
    if not is_plain_module(module):
        return None, names, given
    tensor_of = tensor_of or (lambda name: Attribute(f"{path}.{name}"))
    cls = type(module)
    targets = (cls.__name__, path) if path else (cls.__name__,)
    single_call, given_input = functional_call(module), input_of(module, args, kwargs)
    if single_call is not None and given_input:
        operands = [_operand(value, given_input[0], tensor_of) for value in single_call.args]
        named = {name: _operand(value, given_input[0], tensor_of) for name, value in single_call.kwargs.items()}
        call = function_call(single_call.function, tuple(operands), named, _kind)
        return replace(call, names=(call.operation, *targets)), names, given
    own = {f"self.{name}": tensor_of(name) for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for name, value in vars(module).items():
        if not name.startswith("_") and is_plain(value):
            own[f"self.{name}"] = plain(value)
    operation = f"{cls.__module__}.{cls.__qualname__}"
    return CanonicalCall(operation, {**given, **own}, names=(operation, *targets)), names, given


def _operand(value: Any, given: Any, tensor_of: Callable[[str], Any]) -> Any:
    if value is INPUT:
        return given
    return tensor_of(value.name) if isinstance(value, Own) else value


def _kind(value: Any) -> str:
    kind = constant_kind(value)
    return "tensor" if kind == "other" else kind
