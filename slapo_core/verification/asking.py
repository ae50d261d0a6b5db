"""What verification asks of the plugins that are active in a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import HookError, SlapoError
from slapo_core.verification.correspondence import Translate

if TYPE_CHECKING:
    from slapo_core.schedule import Schedule

__all__ = ["output_adapter", "translator"]


def output_adapter(schedule: Schedule) -> Any:
    """Ask the plugins whether this rank's output has to be gathered first."""

    def adapt(output: Any) -> Any:
        answers = schedule.hooks.call("slapo_gather_output", node=schedule.root, output=output)
        if len(answers) > 1:
            raise HookError("hook slapo_gather_output was answered by several plugins for the same output")
        return answers[0] if answers else output

    return adapt


def translator(schedule: Schedule) -> Translate:
    """Ask the plugins what a tensor stands for that no layout explains."""

    def translate(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor] | None:
        path, _, own = name.rpartition(".")
        layout = schedule.tree.layouts.get(name)
        try:
            node = schedule.tree.node(path)
        except SlapoError:
            return None  # a module under an alias: asked about under its canonical name
        full = layout.full(tensor, schedule.mesh) if layout is not None and layout.is_sharded else tensor
        answers = schedule.hooks.call("slapo_to_reference", node=node, name=own, tensor=full)
        return {key: value for answer in answers for key, value in answer.items()}

    return translate
