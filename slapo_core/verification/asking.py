"""What verification asks of the plugins that are active in a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import SlapoError
from slapo_core.verification.correspondence import Translate

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["output_adapter", "translator"]


def output_adapter(schedule: Schedule) -> Any:
    """Ask the plugins whether this rank's output has to be gathered first."""

    def adapt(output: Any) -> Any:
        answer = schedule.hooks.single("slapo_gather_output", node=schedule.root, output=output)
        return output if answer is None else answer[1]

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
        answer = schedule.hooks.single("slapo_to_reference", node=node, name=own, tensor=full)
        return None if answer is None else answer[1]  # type: ignore[no-any-return]

    return translate
