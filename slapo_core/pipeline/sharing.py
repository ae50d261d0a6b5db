"""Tensors that several stages hold: in processes of their own each has another copy, so none may write to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from slapo_core.spec.pipeline import Stage

__all__ = ["SharedState", "held_by", "holders"]


def held_by(stage: Stage) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of a stage's module, under each of its names."""
    yield from stage.module.named_parameters(remove_duplicate=False)
    yield from stage.module.named_buffers(remove_duplicate=False)


def holders(stages: Sequence[Stage]) -> dict[int, tuple[str, torch.Tensor, tuple[int, ...]]]:
    """Tensors that more than one stage holds: id -> first name, tensor, and the stages."""
    found: dict[int, tuple[str, torch.Tensor, dict[int, None]]] = {}
    for stage in stages:
        for name, tensor in held_by(stage):
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
        self._before = [_mark(tensor) for _, tensor, _ in self._shared]

    def changed(self) -> list[str]:
        """What a stage has written to since, in words."""
        return [
            f"it changes '{name}', which the stages {', '.join(map(str, where))} hold: each has a copy of its own, and "
            "the others would not see it"
            for (name, tensor, where), before in zip(self._shared, self._before, strict=True)
            if not _is_as(tensor, before) or not self._stands(name, tensor, where[0])
        ]

    def _stands(self, name: str, tensor: torch.Tensor, index: int) -> bool:
        """Whether it is still the one that a stage has under its name."""
        path, _, own = name.rpartition(".")
        module = self._stages[index].module.get_submodule(path)
        return getattr(module, own, None) is tensor


def _mark(tensor: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """What shows whether it was written to: its version, and of a buffer the values, which norms write unseen."""
    return tensor._version, None if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def _is_as(tensor: torch.Tensor, before: tuple[int, torch.Tensor | None]) -> bool:
    version, values = before
    return tensor._version == version and (values is None or torch.equal(tensor, values))
