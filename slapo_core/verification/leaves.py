"""What a model returned, as leaves with names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["output_leaves"]


def output_leaves(output: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Every leaf of an output: ``output``, ``output[0]``, ``output.logits``, ``output['mask']``.

    What is registered as a pytree is entered, and so are other mappings, sequences and dataclasses.
    """
    children = _children(output)
    if children is None:
        yield name, output
        return
    for key, child in children:
        yield from output_leaves(child, name + pytree.keystr((key,)))


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """One level, with pytree's own keys; None for a leaf."""
    if isinstance(value, Mapping):
        attributes = type(value) is not dict  # transformers' ModelOutput and its like
        return [(_attribute(key) if attributes else pytree.MappingKey(key), child) for key, child in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(_attribute(field.name), getattr(value, field.name)) for field in dataclasses.fields(value)]
    if value is None or pytree.tree_is_leaf(value):
        return list(_numbered(value)) if isinstance(value, (list, tuple)) else None
    try:
        level, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda child: child is not value)
    except ValueError:  # registered without keys
        children, _ = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        return list(_numbered(children))
    return [(path[0], child) for path, child in level]


def _numbered(children: Any) -> Iterator[tuple[Any, Any]]:
    return ((pytree.SequenceKey(position), child) for position, child in enumerate(children))


def _attribute(key: Any) -> Any:
    return pytree.GetAttrKey(key) if isinstance(key, str) and key.isidentifier() else pytree.MappingKey(key)
