"""Describe a value by a text that is the same in every process."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch


def describe(value: Any) -> str:
    """A text that is the same in every process for the same value.

    Plain values, and containers and frozen dataclasses of them, are given in full; functions and classes by their
    name, devices by their type, and of anything else only the type: its repr may hold an address. What has a text of
    its own for this (``slapo_described``) is given by it.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, torch.device):
        return repr(value.type)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(describe, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(describe, value))) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{describe(key)}: {describe(item)}" for key, item in value.items())) + "}"
    if isinstance(value, functools.partial):
        arguments = [*map(describe, value.args), *(f"{key}={describe(item)}" for key, item in value.keywords.items())]
        return f"<functools.partial of {', '.join([describe(value.func), *arguments])}>"
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"<{'class' if inspect.isclass(value) else 'function'} {_name(value)}>"
    kind = type(value)
    if hasattr(kind, "slapo_described"):
        return str(value.slapo_described)
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        own = (f"{field.name}={describe(getattr(value, field.name))}" for field in fields(value) if field.compare)
        return f"{kind.__qualname__}({', '.join(own)})"
    return f"<{_name(kind)}>"


def _name(value: Any) -> str:
    """The dotted name of a class or a function."""
    function = getattr(value, "__func__", value)
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None) or type(value).__qualname__
    return f"{module}.{name}" if module else name
