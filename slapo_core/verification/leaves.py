"""What a model returned, as leaves with names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["output_leaves"]


def output_leaves(output: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Every leaf of an output: ``output``, ``output[0]``, ``output.logits``, ``output['mask']``.

    Mappings, sequences, dataclasses and whatever is registered as a pytree are entered; anything else is a leaf.
    """
    if output is None or isinstance(output, (torch.Tensor, bool, int, float, complex, str)):
        yield name, output
    elif isinstance(output, Mapping):
        attributes = type(output) is not dict
        for key, value in output.items():
            shown = (
                f"{name}.{key}" if attributes and isinstance(key, str) and key.isidentifier() else f"{name}[{key!r}]"
            )
            yield from output_leaves(value, shown)
    elif isinstance(output, (list, tuple)):
        fields = getattr(output, "_fields", None)
        for position, value in enumerate(output):
            yield from output_leaves(value, f"{name}.{fields[position]}" if fields else f"{name}[{position}]")
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from output_leaves(getattr(output, field.name), f"{name}.{field.name}")
    elif type(output) in pytree.SUPPORTED_NODES:
        children, _ = pytree.SUPPORTED_NODES[type(output)].flatten_fn(output)
        for position, value in enumerate(children):
            yield from output_leaves(value, f"{name}[{position}]")
    else:
        yield name, output
