"""What Megatron hangs on a model, taken off again: the model can be trained by others then."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_megatron.marks import Marks
    from slapo_megatron.runtime import Megatron

__all__ = ["release"]


def release(megatron: Megatron, marks: Marks, *, gather: bool = True) -> None:
    """End the hooks of its wrappers and its random states, and take the marks back; the parameters keep their values.

    With ``overlap_param_gather`` it is a collective over the replicas: they get the values that are still to come.

    Args:
        megatron: of an engine; its wrappers reduce nothing any more.
        marks: of its parameters.
        gather: whether the replicas get those values; False after a step that failed, whose groups are broken.
    """
    for chunk in megatron.chunks:
        if chunk.use_forward_hook and chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=gather)
        chunk.param_to_bucket_group.clear()  # without it, the hooks of the backward pass leave a gradient alone
        for parameter in chunk.parameters():
            parameter.grad = None  # the buffer's memory, or nothing
    if megatron.following is not None:
        megatron.following.stop()
    marks.take_back()
