"""Parameters that several stages use."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from slapo_core.spec.pipeline import Stage, Tie

__all__ = ["ties_of"]


def ties_of(stages: Sequence[Stage], root: nn.Module) -> tuple[Tie, ...]:
    """The parameters that more than one of the stages holds, in the model's order.

    Args:
        stages: all of them.
        root: the scheduled model.
    """
    users: dict[int, list[int]] = {}
    for stage in stages:
        for parameter in stage.module.parameters():
            users.setdefault(id(parameter), []).append(stage.index)
    return tuple(
        Tie(name, tuple(users[id(parameter)]))
        for name, parameter in root.named_parameters()
        if len(users.get(id(parameter), ())) > 1
    )
