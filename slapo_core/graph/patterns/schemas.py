"""The parameters of an operation: from torch's own schemas and from the signatures of ``torch.nn.functional``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn import functional

from slapo_core.graph.private import schemas_for_operator

_NO_DEFAULT = inspect.Parameter.empty
_RENAMED = {
    "axis": "dim",
    "axis0": "dim0",
    "axis1": "dim1",
    "indices": "input",
    "keepdims": "keepdim",
    "self": "input",
    "split_size_or_sections": "split_size",
    "split_sizes": "split_size",
    "tensor": "input",
    "train": "training",
}
_MEANINGLESS = ("_stacklevel", "cudnn_enable", "cudnn_enabled")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a schema.

    Args:
        name: canonical.
        kind: of values it takes, e.g. ``"Tensor"``, ``"int[]"``.
        default: ``inspect.Parameter.empty`` without one.
        is_keyword_only: whether it must be named.
        is_receiver: whether a method's tensor goes here.
    """

    name: str
    kind: str
    default: Any
    is_keyword_only: bool
    is_receiver: bool


def parameter_name(operation: str, name: str) -> str:
    """The canonical name of a parameter: ``input`` for what aten calls ``self``."""
    if (name == "indices" and operation != "embedding") or (name == "tensor" and operation != "split"):
        return name
    return _RENAMED.get(name, name)


@functools.cache
def _schemas(operation: str) -> tuple[tuple[Parameter, ...], ...]:
    found = []
    for schema in schemas_for_operator(operation if "::" in operation else f"aten::{operation}"):
        types = [str(argument.type) for argument in schema.arguments]
        if schema.overload_name.endswith("out") or any("Dimname" in each or each in ("t", "t[]") for each in types):
            continue
        if any(argument.name == "out" for argument in schema.arguments):
            continue
        names = [argument.name for argument in schema.arguments]
        receiver = names.index("self") if "self" in names else 0
        found.append(
            tuple(
                Parameter(
                    parameter_name(operation, argument.name),
                    str(argument.type).removeprefix("Optional[").removesuffix("]")
                    if str(argument.type).startswith("Optional[")
                    else str(argument.type),
                    _frozen(argument.default_value) if argument.has_default_value() else _NO_DEFAULT,
                    bool(argument.kwarg_only),
                    position == receiver,
                )
                for position, argument in enumerate(schema.arguments)
            )
        )
    return tuple(sorted(found, key=lambda each: not each or each[0].kind not in ("Tensor", "List[Tensor]")))


def _frozen(default: Any) -> Any:
    return tuple(default) if isinstance(default, list) else default


@functools.cache
def defaults_of(operation: str) -> dict[str, Any]:
    """What the arguments of an operation are where they are left out."""
    found: dict[str, Any] = {}
    unclear: set[str] = set()
    for schema in _schemas(operation):
        for each in schema:
            if each.default is _NO_DEFAULT:
                continue
            if each.name in found and not _is_same(found[each.name], each.default):
                unclear.add(each.name)
            found.setdefault(each.name, each.default)
    for name in unclear:
        del found[name]
    public = getattr(functional, operation, None)
    for name, parameter in _signature(public).items() if public is not None else ():
        if parameter.default is not _NO_DEFAULT:
            found[parameter_name(operation, name)] = parameter.default
    return found


def required_parameters(operation: str) -> tuple[str, ...]:
    """The names of the arguments without which an operation cannot be called; empty if it is not known."""
    needed = [
        tuple(each.name for each in schema if each.default is _NO_DEFAULT)
        for schema in _schemas(operation)
        if schema and schema[0].kind in ("Tensor", "List[Tensor]")
    ]
    return min(needed, key=len, default=())


def _is_same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


@functools.lru_cache(maxsize=1024)
def _signature(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins have none
        return {}


def bind_function(
    operation: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a call of a Python function by canonical name; None if its signature is not known."""
    signature = _signature(function) if inspect.isfunction(function) else {}
    if not signature or list(signature) == ["args", "kwargs"]:  # what it takes, the schema says
        return None
    given: dict[str, Any] = {}
    position = 0
    for name, parameter in signature.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            rest = args[position:]
            position = len(args)
            if len(rest) == 1 and isinstance(rest[0], tuple):
                rest = rest[0]
            given[name] = tuple(rest)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update({key: value for key, value in kwargs.items() if key not in signature})
        elif position < len(args) and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            given[name] = args[position]
            position += 1
        elif name in kwargs:
            given[name] = kwargs[name]
        elif parameter.default is not _NO_DEFAULT:
            given[name] = parameter.default
        else:
            return None
    if position < len(args):
        return None
    return {parameter_name(operation, name): value for name, value in given.items() if name not in _MEANINGLESS}


def bind_schema(
    operation: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind_of: Callable[[Any], str],
    *,
    is_method: bool,
) -> dict[str, Any] | None:
    """The arguments of a call by canonical name, as the first schema that takes them has it; None if none does.

    Args:
        operation: canonical name.
        args: positional ones, with the receiver first.
        kwargs: by name.
        kind_of: ``"tensor"``, ``"value"`` (of the graph, but no tensor), ``"unknown"``, or the kind of a constant.
        is_method: whether the first of ``args`` is the receiver.
    """
    kinds = tuple(kind_of(value) for value in args)
    named = tuple((parameter_name(operation, name), kind_of(value)) for name, value in kwargs.items())
    chosen = _choose(operation, kinds, named, is_method)
    if chosen is None:
        return None
    order, packed, defaults = chosen
    given = dict(defaults)
    if packed is not None:
        first = args[packed:]
        args = (*args[:packed], tuple(first))
    given.update(zip(order, args, strict=True))
    given.update({parameter_name(operation, name): value for name, value in kwargs.items()})
    return given


_Chosen = tuple[tuple[str, ...], int | None, tuple[tuple[str, Any], ...]]


@functools.lru_cache(maxsize=4096)
def _choose(
    operation: str, kinds: tuple[str, ...], named: tuple[tuple[str, str], ...], is_method: bool
) -> _Chosen | None:
    for guess in ("tensor", "unknown"):
        given = tuple(guess if kind == "unknown" else kind for kind in kinds)
        given_names = tuple((name, guess if kind == "unknown" else kind) for name, kind in named)
        for schema in _schemas(operation):
            found = _fit(schema, given, given_names, is_method)
            if found is not None:
                return found
    return None


def _fit(
    schema: tuple[Parameter, ...], kinds: tuple[str, ...], named: tuple[tuple[str, str], ...], is_method: bool
) -> _Chosen | None:
    positional = [each for each in schema if not each.is_keyword_only]
    if is_method:
        positional.sort(key=lambda each: not each.is_receiver)
    packed = None
    at = next((i for i, each in enumerate(positional) if each.kind == "List[int]"), None)
    if at is not None and len(kinds) > at and kinds[at] in _NUMBERS:
        rest = kinds[at:]
        if len(positional) == at + 1 and all(kind in _NUMBERS for kind in rest):
            packed = at  # x.view(2, 3), x.permute(0, 2, 1); not x.mean(1, True)
            kinds = (*kinds[:at], "sequence")
    if len(kinds) > len(positional):
        return None
    order = tuple(each.name for each in positional[: len(kinds)])
    by_name = {each.name: each for each in schema}
    if any(name not in by_name or name in order for name, _ in named):
        return None
    pairs = [*zip(positional, kinds, strict=False), *((by_name[name], kind) for name, kind in named)]
    if not all(_takes(parameter, kind) for parameter, kind in pairs):
        return None
    given = {parameter.name for parameter, _ in pairs}
    if any(each.default is _NO_DEFAULT for each in schema if each.name not in given):
        return None
    defaults = tuple((each.name, each.default) for each in schema if each.name not in given)
    return order, packed, tuple((name, value) for name, value in defaults if name not in _MEANINGLESS)


_NUMBERS = ("int", "value", "unknown", "constant")


def _takes(parameter: Parameter, kind: str) -> bool:
    if kind == "unknown":
        return True
    if kind == "constant":
        return parameter.kind not in ("Tensor", "List[Tensor]")
    if kind == "none":
        return parameter.default is None or parameter.kind in ("Tensor", "Generator", "int", "List[int]", "float")
    if parameter.kind == "Tensor":
        return kind in ("tensor", "int", "float", "bool")
    if parameter.kind == "List[Tensor]":
        return kind in ("sequence", "tensors")
    if parameter.kind in ("List[int]", "List[float]", "List[bool]"):
        return kind in ("sequence", "value", "int")
    if parameter.kind in ("number", "Scalar", "float"):
        return kind in ("int", "float", "bool", "value", "complex")
    if parameter.kind == "bool":
        return kind in ("bool", "value")
    if parameter.kind == "int":
        return kind in ("int", "bool", "value", "dtype", "layout", "memory_format")
    if parameter.kind == "Device":
        return kind in ("device", "str", "value")
    if parameter.kind == "str":
        return kind == "str"
    return kind not in ("tensor", "tensors")
