"""Start DeepSpeed in this process, once, the way the mesh wants it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh

__all__ = ["start"]


def start(mesh: Mesh | None) -> None:
    """Import DeepSpeed, and let its communication use the process group that is there.

    Args:
        mesh: of the schedule; None for one process alone.
    """
    import deepspeed
    import deepspeed.comm
    import deepspeed.ops

    os.environ.setdefault("LOCAL_RANK", "0")
    if not deepspeed.comm.is_initialized():
        # Without this, the first start on CPUs compiles an operator for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo")
