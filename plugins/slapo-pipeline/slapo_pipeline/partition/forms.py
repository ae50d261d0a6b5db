"""The form of an argument: what stages take for granted of a batch."""

from __future__ import annotations

from typing import Any

import torch

from slapo_core.tracing import children

__all__ = ["difference", "form"]


def form(value: Any) -> Any:
    """What of ``value`` stages are made for: shapes, types, texts, what is true, false or None; not numbers."""
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, tuple(value.shape), value.dtype)
    cls = type(value)
    if cls in (int, float):
        return (cls,)
    if value is None or cls in (bool, str):
        return (cls, value)
    parts = children(value)
    return (cls,) if parts is None else (cls, tuple((key, form(part)) for _, key, part in parts))


def difference(value: Any, expected: Any) -> str | None:
    """What another form ``value`` should have, for a message; None if it has it."""
    if isinstance(value, torch.Tensor) and expected[0] is torch.Tensor:
        if value.shape == expected[1] and value.dtype == expected[2]:
            return None
        here = f"{tuple(value.shape)} and {value.dtype}"
        return f"a tensor of shape {expected[1]} and {expected[2]}, and this one has {here}"
    found = form(value)
    if found == expected:
        return None
    return f"{_described(expected)}, and in this one it is {_described(found)}"


def _described(value: Any) -> str:
    if value[0] is torch.Tensor:
        return f"a tensor of shape {value[1]}"
    return f"a {value[0].__name__}" if len(value) == 1 or isinstance(value[1], tuple) else repr(value[1])
