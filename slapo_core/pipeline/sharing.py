"""Tensors that several stages hold: in processes of their own each has another copy, so none may write to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from slapo_core.graph.leaves import walk
from slapo_core.spec.pipeline import Stage

__all__ = ["SharedState", "StateMark", "held_by", "holders"]


def held_by(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of a model, or of a stage's module, under each of its names."""
    for path, module in walk(model):
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            yield from ((f"{prefix}{name}", tensor) for name, tensor in table.items() if tensor is not None)


def holders(stages: Sequence[Stage]) -> dict[int, tuple[str, torch.Tensor, tuple[int, ...]]]:
    """Tensors that more than one stage holds: id -> first name, tensor, and the stages."""
    found: dict[int, tuple[str, torch.Tensor, dict[int, None]]] = {}
    for stage in stages:
        for name, tensor in held_by(stage.module):
            found.setdefault(id(tensor), (name, tensor, {}))[2][stage.index] = None
    return {key: (name, tensor, tuple(where)) for key, (name, tensor, where) in found.items() if len(where) > 1}


class SharedState:
    """Notices when one stage changes what others hold too; made before the first one runs.

    Args:
        stages: of the model.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._shared = list(holders(stages).values())
        self._stages = stages
        self._before = [StateMark(tensor) for _, tensor, _ in self._shared]

    def changed(self) -> list[str]:
        """What a stage has written to since, in words."""
        return [
            f"it changes '{name}', which the stages {', '.join(map(str, where))} hold: each has a copy of its own, and "
            "the others would not see it"
            for (name, _, where), before in zip(self._shared, self._before, strict=True)
            if not before.holds(self._at(name, where[0]))
        ]

    def _at(self, name: str, index: int) -> torch.Tensor | None:
        """What a stage has under a name now."""
        path, _, own = name.rpartition(".")
        return getattr(self._stages[index].module.get_submodule(path), own, None)


class StateMark:
    """What shows whether a tensor was written to: the version of a parameter; of a buffer its values, if it has any.

    Norms write to buffers without telling, and whoever records a forward puts values back.

    Args:
        tensor: as it is now.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        has_values = not isinstance(tensor, nn.Parameter) and not tensor.is_meta
        self._tensor, self._version = tensor, tensor._version
        self._values = tensor.detach().clone() if has_values else None

    def holds(self, tensor: torch.Tensor | None) -> bool:
        """Whether ``tensor`` is the same object, with the same values."""
        if tensor is not self._tensor:
            return False
        if self._values is None:
            is_empty = tensor.is_meta and not isinstance(tensor, nn.Parameter)  # a buffer of another stage
            return is_empty or tensor._version == self._version
        return torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(self._values))
