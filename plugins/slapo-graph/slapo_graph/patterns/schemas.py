"""The parameters of an operation: from torch's own schemas and from the signatures of ``torch.nn.functional``."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch.nn import functional

from slapo_graph.private import schemas_for_operator

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


def parameter_name(operation: str, name: str) -> str:
    """Return the canonical name of a parameter: ``input`` for aten's ``self``."""
    if (name == "indices" and operation != "embedding") or (name == "tensor" and operation != "split"):
        return name
    return _RENAMED.get(name, name)


@functools.cache
def _schemas(operation: str) -> tuple[inspect.Signature, ...]:
    """Return the schemas of an operation as signatures, annotated with ``"Tensor"``, ``"List[int]"``, ..."""
    found = []
    for schema in schemas_for_operator(operation if "::" in operation else f"aten::{operation}"):
        types = [str(argument.type) for argument in schema.arguments]
        if schema.overload_name.endswith("out") or any("Dimname" in each or each in ("t", "t[]") for each in types):
            continue
        if any(argument.name == "out" for argument in schema.arguments):
            continue
        parameters = [_parameter(operation, argument) for argument in schema.arguments]
        found.append(inspect.Signature(parameters, __validate_parameters__=False))
    return tuple(sorted(found, key=lambda each: bool(each.parameters) and not _takes_tensor_first(each)))


def _parameter(operation: str, argument: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = argument.default_value if argument.has_default_value() else _NO_DEFAULT
    return inspect.Parameter(
        parameter_name(operation, argument.name),
        kind,
        default=tuple(default) if isinstance(default, list) else default,
        annotation=re.sub(r"^Optional\[(.*)\]$", r"\1", str(argument.type)),
    )


def _takes_tensor_first(schema: inspect.Signature) -> bool:
    first = next(iter(schema.parameters.values()), None)
    return first is not None and first.annotation in ("Tensor", "List[Tensor]")


@functools.cache
def defaults_of(operation: str) -> dict[str, Any]:
    """Return the defaults of an operation's arguments."""
    found: dict[str, Any] = {}
    unclear: set[str] = set()
    for schema in _schemas(operation):
        for each in schema.parameters.values():
            if each.default is _NO_DEFAULT:
                continue
            if repr(found.get(each.name, each.default)) != repr(each.default):
                unclear.add(each.name)
            found.setdefault(each.name, each.default)
    for name in unclear:
        del found[name]
    public = getattr(functional, operation, None)
    for name, parameter in _signature(public).parameters.items() if public is not None else ():
        if parameter.default is not _NO_DEFAULT:
            found[parameter_name(operation, name)] = parameter.default
    return found


def required_parameters(operation: str) -> tuple[str, ...]:
    """Return the names of an operation's required arguments; empty if unknown."""
    needed = [
        tuple(each.name for each in schema.parameters.values() if each.default is _NO_DEFAULT)
        for schema in _schemas(operation)
        if _takes_tensor_first(schema)
    ]
    return min(needed, key=len, default=())


@functools.lru_cache(maxsize=1024)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # builtins have none
        return inspect.Signature()


def bind_function(
    operation: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a Python function's call by canonical name; None without a signature."""
    signature = _signature(function) if inspect.isfunction(function) else inspect.Signature()
    if not signature.parameters or list(signature.parameters) == ["args", "kwargs"]:  # what it takes, the schema says
        return None
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    given = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            rest = given[name]
            given[name] = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple) else rest
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(name))
    return {parameter_name(operation, name): value for name, value in given.items() if name not in _MEANINGLESS}


def bind_schema(
    operation: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind_of: Callable[[Any], str],
    *,
    is_method: bool,
) -> dict[str, Any] | None:
    """Return the arguments of a call by canonical name, by the first schema that accepts them; None if none does.

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
    schema: inspect.Signature, kinds: tuple[str, ...], named: tuple[tuple[str, str], ...], is_method: bool
) -> _Chosen | None:
    parameters = list(schema.parameters.values())
    if is_method:  # x.where(condition, other)
        parameters.sort(key=lambda each: each.name != "input")
    positional = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    packed = None
    at = next((i for i, each in enumerate(positional) if each.annotation == "List[int]"), None)
    if at is not None and len(positional) == at + 1 < len(kinds) + 1 and all(kind in _NUMBERS for kind in kinds[at:]):
        packed = at  # x.view(2, 3), x.permute(0, 2, 1); not x.mean(1, True)
        kinds = (*kinds[:at], "sequence")
    try:
        bound = inspect.Signature(parameters, __validate_parameters__=False).bind(*kinds, **dict(named)).arguments
    except TypeError:
        return None
    if not all(_takes(schema.parameters[name], kind) for name, kind in bound.items()):
        return None
    defaults = tuple((each.name, each.default) for each in parameters if each.name not in (*bound, *_MEANINGLESS))
    return tuple(each.name for each in positional[: len(kinds)]), packed, defaults


_NUMBERS = ("int", "value", "unknown", "constant")


_TAKEN = {
    "Tensor": ("tensor", "int", "float", "bool"),
    "List[Tensor]": ("sequence", "tensors"),
    **dict.fromkeys(("List[int]", "List[float]", "List[bool]"), ("sequence", "value", "int")),
    **dict.fromkeys(("number", "Scalar", "float"), ("int", "float", "bool", "value", "complex")),
    "bool": ("bool", "value"),
    "int": ("int", "bool", "value", "dtype", "layout", "memory_format"),
    "Device": ("device", "str", "value"),
    "str": ("str",),
}
"""The kinds of arguments that a parameter of a type takes."""


def _takes(parameter: inspect.Parameter, kind: str) -> bool:
    type_name = parameter.annotation
    if kind == "unknown":
        return True
    if kind == "constant":
        return type_name not in ("Tensor", "List[Tensor]")
    if kind == "none":
        return parameter.default is None or type_name in ("Tensor", "Generator", "int", "List[int]", "float")
    return kind in _TAKEN[type_name] if type_name in _TAKEN else kind not in ("tensor", "tensors")
