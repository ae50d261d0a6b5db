"""The configurations that belong to a model's weights, so that ``from_pretrained`` reads what was saved."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["write_configurations"]


def write_configurations(model: nn.Module, directory: Path) -> None:
    """Write ``config.json``, and ``generation_config.json`` for a model that generates, where a model has them.

    A model has one where its ``config`` can ``save_pretrained``, as those of transformers can. What cannot be written
    is left out with a warning: the weights are worth more.

    Args:
        model: the scheduled one.
        directory: it exists.
    """
    config = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    if hasattr(model, "peft_config"):  # its names are peft's: a plain model would take none of these weights
        warnings.warn(
            "the checkpoint has no config.json: transformers would load random weights with it, because the names of "
            "a peft model are its own; slapo_core.save_pretrained(sch, directory) of a live loop writes the adapter",
            stacklevel=6,
        )
        return
    written: list[tuple[str, Any]] = [("config", _with_class(config, model))]
    generation = getattr(model, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        written.append(("generation_config", generation))
    for name, value in written:
        try:
            value.save_pretrained(directory)
        except Exception as error:  # noqa: BLE001 - told: somebody else's validation must not cost a checkpoint
            warnings.warn(
                f"the checkpoint has no {name}.json, because {type(value).__name__}.save_pretrained() raised "
                f"{type(error).__name__}: {error}",
                stacklevel=6,
            )


def _with_class(config: Any, model: nn.Module) -> Any:
    """A copy that names the class and the element type, as ``model.save_pretrained`` writes it."""
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    dtype = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)
    config.dtype = str(dtype).removeprefix("torch.")
    return config
