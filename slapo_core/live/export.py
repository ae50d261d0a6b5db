"""Writing a whole state dict into a directory that other tools read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_core.spec.sizes import parse_bytes
from slapo_core.weights.sources import INDEX_FILE, SINGLE_FILE

if TYPE_CHECKING:
    import torch

__all__ = ["export_plain", "export_with"]

_SHARDS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def export_with(
    model: Any, weights: Mapping[str, torch.Tensor], directory: str | os.PathLike[str], max_shard_size: int | str | None
) -> None:
    """Have a model with a ``save_pretrained`` of its own write ``weights``, and its configuration."""
    options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(directory, state_dict=dict(weights), **options)


def export_plain(
    weights: Mapping[str, torch.Tensor], directory: str | os.PathLike[str], max_shard_size: int | str | None
) -> None:
    """Write ``model.safetensors``, or, where a limit asks for it, several files and their index.

    Tied names become tensors of their own, so that a plain model finds all of its keys.

    Raises:
        ArgumentError: a limit that is no size.
    """
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    limit = None if max_shard_size is None else parse_bytes(max_shard_size, name="max_shard_size")
    shards = _shards(weights, limit)
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file({key: weights[key].clone() for key in shard}, path / name, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(_size(tensor) for tensor in weights.values())
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    else:
        (path / INDEX_FILE).unlink(missing_ok=True)  # of an earlier export, like what follows
    for file in path.iterdir():
        if file.name not in names and (_SHARDS.fullmatch(file.name) or file.name == SINGLE_FILE):
            file.unlink()


def _shards(weights: Mapping[str, torch.Tensor], limit: int | None) -> list[list[str]]:
    """The names in their order, cut so that no file exceeds the limit unless it holds a single tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.items():
        if limit is not None and shards[-1] and size + _size(tensor) > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _size(tensor)
    return shards


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
