"""State dicts of a schedule that was not built, without the checks of a live one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slapo_core import Schedule
from slapo_runtime.state import ModelState


def reference_state_dict(
    schedule: Schedule, *, rank0_only: bool = False, include_added: bool = False
) -> dict[str, torch.Tensor]:
    return ModelState.of(schedule).state_dict(rank0_only=rank0_only, include_added=include_added)


def load_reference_state_dict(schedule: Schedule, state: Mapping[str, torch.Tensor]) -> None:
    ModelState.of(schedule).load_state_dict(state)
