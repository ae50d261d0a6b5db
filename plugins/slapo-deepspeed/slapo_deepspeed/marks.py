"""What DeepSpeed reads on parameters to know which of them are pieces.

For the norm of all gradients, the first rank along ``tp`` counts everything that it holds, and the others only what is
marked. Without marks the norm leaves out their pieces, and nothing tells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from slapo_core.spec.request import BuildRequest

__all__ = ["PIECE", "mark", "marks_taken_back"]

PIECE = ("model_parallel", "tensor_model_parallel")
"""DeepSpeed takes either; other code around it one of them."""


@contextlib.contextmanager
def marks_taken_back(request: BuildRequest) -> Iterator[None]:
    """Where the block fails, parameters have the attributes and hooks again that they had before it.

    Args:
        request: of the build.
    """
    before = [
        (live.tensor, dict(vars(live.tensor)), dict(live.tensor._post_accumulate_grad_hooks or {}))
        for live in request.state.tensors()
        if live.is_parameter
    ]
    try:
        yield
    except BaseException:
        for tensor, attributes, hooks in before:
            vars(tensor).clear()
            vars(tensor).update(attributes)
            kept = tensor._post_accumulate_grad_hooks
            for key in [key for key in kept or () if key not in hooks]:
                del kept[key]
        raise


def mark(request: BuildRequest) -> list[torch.Tensor]:
    """Mark the parameters that are split over ``tp``, by their layouts; all others lose such marks.

    To be called when every tensor is in its place. In mixed precision without ZeRO, DeepSpeed looks for the marks on
    the gradients instead, so they get them too.

    Args:
        request: of the build.

    Returns:
        the marked parameters.
    """
    marked = []
    mesh = request.schedule.mesh
    for live in request.state.tensors():
        if not live.is_parameter:
            continue
        split_over = {mesh_dim for mesh_dim, _ in live.layout.shards() if mesh is not None and mesh.size(mesh_dim) > 1}
        is_piece = "tp" in split_over
        for name in PIECE:
            if is_piece or hasattr(live.tensor, name):
                setattr(live.tensor, name, is_piece)
        if is_piece:
            marked.append(live.tensor)
            if live.tensor.requires_grad:
                live.tensor.register_post_accumulate_grad_hook(_mark_gradient)
    return marked


def _mark_gradient(parameter: torch.Tensor) -> None:
    for name in PIECE:
        if parameter.grad is not None:
            setattr(parameter.grad, name, True)
