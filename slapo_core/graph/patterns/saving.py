"""Patterns as what JSON can hold, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from types import FunctionType
from typing import Any

import torch

from slapo_core.errors import ReplayError, SerializationError
from slapo_core.graph.patterns.calls import Items, Slice
from slapo_core.graph.patterns.comparing import pairs_of
from slapo_core.graph.patterns.data import Constant, Form, Result, Step, Target, Wildcard

__all__ = ["pattern_from_data", "to_data"]

_CLASSES: dict[str, type[Any]] = {cls.__name__: cls for cls in (Form, Items, Result, Slice, Step, Target, Wildcard)}
_NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def to_data(value: Any) -> Any:
    """Dictionaries, lists, text and numbers for a form, or for a part of one.

    Raises:
        SerializationError: it holds what cannot be named.
    """
    if isinstance(value, Constant):
        return {"constant": _constant(value.value)}
    if type(value).__name__ in _CLASSES and type(value) is _CLASSES[type(value).__name__]:
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Target) and value.predicate is not None:
            parts["predicate"] = {"function": _function(value.predicate)}
            return {"Target": {name: part if name == "predicate" else to_data(part) for name, part in parts.items()}}
        return {type(value).__name__: {name: to_data(part) for name, part in parts.items()}}
    if isinstance(value, tuple):
        return [to_data(part) for part in value]
    if value is None or isinstance(value, str | int | bool):
        return value
    return {"constant": _constant(value)}  # keys of dictionaries


def _constant(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) in (float, complex, bytes):
        return {type(value).__name__: value.hex() if isinstance(value, float | bytes) else repr(value)}
    if value is Ellipsis:
        return {"ellipsis": True}
    if type(value) in _NAMED:
        return {_NAMED[type(value)]: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in (set, frozenset):
        return {type(value).__name__: [_constant(part) for part in sorted(value, key=repr)]}
    raise SerializationError(f"a pattern holds {value!r}, which JSON cannot carry", hint="use numbers, text and dtypes")


def _function(predicate: Callable[..., Any]) -> str:
    if isinstance(predicate, FunctionType):
        module = sys.modules.get(predicate.__module__)
        if module is not None and vars(module).get(predicate.__qualname__) is predicate:
            return f"{predicate.__module__}:{predicate.__qualname__}"
    raise SerializationError(
        f"where({predicate!r}) cannot be saved: only a function at the top level of a module can be named",
        hint="def is_wanted(node): ...  at the top level, and where(is_wanted)",
    )


def pattern_from_data(data: Any, find_function: Callable[[str], Any] | None) -> tuple[tuple[Form, ...], str]:
    """Forms and text of a saved pattern.

    Raises:
        ReplayError: it is none.
    """
    try:
        forms = tuple(_from(form, find_function) for form in data["forms"])
        if not forms:
            raise TypeError("it has no forms")
        for form in forms:
            _check(form)
        return forms, str(data["text"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ReplayError(
            f"this is no saved pattern ({error}): {data!r}", hint="save the schedule again with this version of slapo"
        ) from error


def _check(form: Any) -> None:
    """Whether a form holds together, whoever wrote it."""
    if not isinstance(form, Form) or not form.steps or not all(isinstance(step, Step) for step in form.steps):
        raise TypeError("a form without steps")
    if not all(0 <= output < len(form.steps) for output in form.outputs):
        raise ValueError("an output that no step gives")
    names: set[str] = set()
    for number, step in enumerate(form.steps):
        for _, argument in step.arguments:
            for operand, _ in pairs_of(argument, argument):
                if isinstance(operand, Result) and not 0 <= operand.step < number:
                    raise ValueError("a step that uses a later one")
                if isinstance(operand, Wildcard):
                    names.add(operand.name)
    used = {each.name for _, each in form.captures if isinstance(each, Wildcard)}
    if not names >= used | set(form.inputs):
        raise ValueError("a wildcard that no step has")


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
    if name == "float":
        return float.fromhex(inner)
    if name == "bytes":
        return bytes.fromhex(inner)
    if name == "complex":
        return complex(inner)
    if name == "ellipsis":
        return Ellipsis
    if name == "device":
        return torch.device(inner)
    if name in ("set", "frozenset"):
        return (set if name == "set" else frozenset)(_constant_from(part) for part in inner)
    if name in _NAMED.values():
        found = getattr(torch, inner)
        if type(found) in _NAMED:
            return found
    raise ValueError(f"an unknown constant {value!r}")
