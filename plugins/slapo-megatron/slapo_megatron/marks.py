"""What Megatron reads on parameters: which of them are pieces, for the norm of all gradients and for checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_core.spec.request import BuildRequest

__all__ = ["mark"]


def mark(request: BuildRequest) -> None:
    """Mark every parameter by its layout.

    Args:
        request: of the build; every tensor is in its place.
    """
    mesh = request.schedule.mesh
    for live in request.state.tensors():
        if not live.is_parameter:
            continue
        split = [axis for mesh_dim, axis in live.layout.shards() if mesh_dim == "tp"]
        is_piece = bool(split) and mesh is not None and mesh.size("tp") > 1
        live.tensor.tensor_model_parallel = is_piece  # type: ignore[attr-defined]
        live.tensor.partition_dim = split[0] if is_piece else -1  # type: ignore[attr-defined]
        live.tensor.partition_stride = 1  # type: ignore[attr-defined]
        holders = request.placement.holders(live) if request.placement is not None else ()
        if mesh is not None and len(holders) > 1:
            live.tensor.shared = mesh.rank("pp") != holders[0]  # type: ignore[attr-defined]  # counted once in norms
            # A bucket of its own: the distributed optimizer has the same piece of every copy on a replica then.
            live.tensor.shared_embedding = True  # type: ignore[attr-defined]
