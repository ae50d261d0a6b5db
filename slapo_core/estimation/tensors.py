"""A scheduled model, and a batch, in tensors that have a device and no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from slapo_core.estimation.assumptions import Assumptions
from slapo_core.estimation.values import Values, is_followed
from slapo_core.private import FakeTensor, FakeTensorMode
from slapo_core.tree.edit import TreeEdit
from slapo_core.weights.correspondence import Correspondence

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["fake_batch", "without_memory"]

_HOME = torch.device("cpu")


def without_memory(schedule: Schedule, mode: FakeTensorMode, values: Values) -> None:
    """Give every tensor of the scheduled model a fake one in its place; ties and layouts stay."""
    correspondence, _ = Correspondence.of(schedule)
    schedule.tree.tensors.keep_shapes(True)
    edit = TreeEdit(schedule.tree)
    for live in correspondence.live():
        node = schedule.tree.node(live.path)
        install = edit.set_parameter if live.is_parameter else edit.set_buffer
        install(node, live.own_name, _fake(live.tensor, mode, values))
    for module in schedule.model.modules():
        for name, buffer in module._buffers.items():  # those that no state dict has
            if buffer is not None and not isinstance(buffer, FakeTensor):
                module._buffers[name] = _fake(buffer, mode, values)


def fake_batch(batch: Any, mode: FakeTensorMode, values: Values, assumptions: Assumptions) -> Any:
    """``batch`` with fake tensors; integers that have no values get some."""

    def made(tensor: torch.Tensor) -> torch.Tensor:
        fake = _fake(tensor, mode, values)
        if tensor.is_meta and not tensor.is_floating_point() and not tensor.is_complex():
            assumptions.integers_are_one()
            one = torch.ones((), dtype=tensor.dtype)
            values.give(
                fake, torch.ones_like(tensor, device="cpu") if is_followed(tensor) else one.expand(tensor.shape)
            )
        return fake

    return tree_map_only(torch.Tensor, made, batch)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, values: Values) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.is_meta:
        fake: torch.Tensor = FakeTensor(mode, tensor.detach(), _HOME)
    else:
        fake = mode.from_tensor(tensor.detach(), static_shapes=True)
    if is_followed(tensor):
        values.carry(tensor, fake)
    return fake
