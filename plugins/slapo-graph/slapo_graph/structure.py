"""Arguments and results as nested values: tensors, plain numbers and opaque objects."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from slapo_graph.sizes import hint_of, is_symbolic

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)
"""Values that are part of the code of a graph."""


class Opaque:
    """Hide an object that recorded code may pass on but not inspect.

    Args:
        value: the object; code that asks for its class gets that of ``value``.
    """

    __slots__ = ("_refuse", "_value")

    def __init__(self, value: Any, refuse: Callable[[str], Exception]) -> None:
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_refuse", refuse)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, "_value")
        if name == "__class__":
            return type(value)
        raise object.__getattribute__(self, "_refuse")(f"reads .{name} of a {type(value).__name__}")

    def __setattr__(self, name: str, new: Any) -> None:
        value = object.__getattribute__(self, "_value")
        raise object.__getattribute__(self, "_refuse")(f"sets .{name} of a {type(value).__name__}")

    def _used(self, *_: Any, **__: Any) -> Any:
        value = object.__getattribute__(self, "_value")
        raise object.__getattribute__(self, "_refuse")(f"looks into a {type(value).__name__}")

    __getitem__ = __setitem__ = __len__ = __iter__ = __contains__ = __call__ = __bool__ = __eq__ = _used  # type: ignore[assignment]
    __hash__ = object.__hash__


def is_plain(value: Any) -> bool:
    """Return whether ``value`` can be a constant in a graph's code."""
    if isinstance(value, PLAIN):
        return not is_symbolic(value)
    if type(value) in (tuple, list, set, frozenset):
        return all(is_plain(item) for item in value)
    if type(value) is slice:
        return is_plain((value.start, value.stop, value.step))
    return type(value) is dict and all(is_plain(key) and is_plain(item) for key, item in value.items())


def children(value: Any) -> Iterator[tuple[str, Any, Any]] | None:
    """Return a container's items as (``"item"`` or ``"attribute"``, key, part), or None."""
    if isinstance(value, tuple | list):
        return (("item", index, part) for index, part in enumerate(value))
    if isinstance(value, Mapping):  # transformers' ModelOutput too
        return (("item", key, part) for key, part in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (("attribute", field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, in containers too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif not is_plain(value):
        for _, _, part in children(value) or ():
            yield from tensors_in(part)


def rebuild(value: Any, parts: list[Any]) -> Any:
    """Rebuild a container with other parts, ordered as :func:`children` yields them."""
    if isinstance(value, torch.Size):
        return torch.Size(parts)
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) is list:
        return parts
    if isinstance(value, list):
        made = copy.copy(value)  # with its attributes
        list.__setitem__(made, slice(None), parts)
        return made
    if isinstance(value, Mapping):
        keyed = dict(zip(value, parts, strict=True))
        if type(value) is dict:
            return keyed
        if dataclasses.is_dataclass(value) or not isinstance(value, dict | UserDict):
            return type(value)(**keyed)
        like: Any = copy.copy(value)
        for key in keyed:
            like[key] = keyed[key]
        return like
    names = [field.name for field in dataclasses.fields(value)]
    return type(value)(**dict(zip(names, parts, strict=True)))


def concrete(value: Any) -> Any:
    """Replace symbolic numbers and opaque objects by plain ones."""
    if is_symbolic(value):
        return hint_of(value)
    if type(value) is Opaque:
        return object.__getattribute__(value, "_value")
    if isinstance(value, torch.Tensor) or is_plain(value):
        return value
    if type(value) is slice:
        return slice(concrete(value.start), concrete(value.stop), concrete(value.step))
    if type(value) in (tuple, list, dict, torch.Size):
        return rebuild(value, [concrete(part) for _, _, part in children(value) or ()])
    parts = children(value)
    if parts is None:
        return value
    old = [part for _, _, part in parts]
    new = [concrete(part) for part in old]
    return value if all(a is b for a, b in zip(old, new, strict=True)) else rebuild(value, new)
