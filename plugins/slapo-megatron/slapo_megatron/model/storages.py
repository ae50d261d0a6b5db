"""Parameters that are different objects over one memory: buffers of the distributed optimizer would part them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import BuildError

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.request import BuildRequest

__all__ = ["refuse_shared_memory"]


def refuse_shared_memory(request: BuildRequest) -> None:
    """To be called where parameters move into buffers; one object under several names is a tie, and stays one.

    Args:
        request: of the build; every tensor is in its place.

    Raises:
        BuildError: two parameters have elements in common.
    """
    here = {
        id(live.tensor): (live.name, live.tensor)
        for live in request.state.tensors()
        if live.is_parameter and live.is_local and live.tensor.numel() and not live.tensor.is_meta
    }
    last: tuple[str, torch.Tensor] | None = None
    for name, tensor in sorted(here.values(), key=lambda one: one[1].data_ptr()):
        if last is not None and _overlap(last[1], tensor):
            raise BuildError(
                f"'{last[0]}' and '{name}' are different parameters over one memory, which Megatron's distributed "
                "optimizer and its low precision part: each would train alone",
                hint="make them one parameter, under both names, before create_schedule",
            )
        last = name, tensor


def _overlap(one: torch.Tensor, later: torch.Tensor) -> bool:
    """Whether they have elements in common; ``later`` does not begin before ``one``."""
    if one.data_ptr() == later.data_ptr():
        return True
    end = one.data_ptr() + one.numel() * one.element_size()
    return one.is_contiguous() and later.is_contiguous() and later.data_ptr() < end
