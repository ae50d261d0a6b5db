"""The installed DeepSpeed: its import, process groups, and ``slapo doctor``."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from slapo_core import BuildError
from slapo_core.hookspecs import Fact, Problem
from slapo_core.layout import start_single_process_group
from slapo_runtime.installed import Runtime

if TYPE_CHECKING:
    from slapo_core.layout import Mesh

RUNTIME = Runtime("deepspeed", "slapo-deepspeed", "deepspeed", tested="0.19")


def import_deepspeed(device_type: str) -> Any:
    """Import DeepSpeed for the model's device.

    DeepSpeed chooses its accelerator at import: ``DS_ACCELERATOR``, or the one found. Without that variable it follows
    the model's device until it communicates.

    Args:
        device_type: e.g. ``"cpu"``.

    Returns:
        the module.

    Raises:
        BuildError: it is not installed, has another version, or runs on other devices.
    """
    RUNTIME.require()
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen is None and device_type == "cpu" and "deepspeed" not in sys.modules:
        os.environ["DS_ACCELERATOR"] = "cpu"
        try:
            import deepspeed
        finally:
            del os.environ["DS_ACCELERATOR"]
    else:
        import deepspeed
    from deepspeed.accelerator import get_accelerator

    if chosen is None:
        _follow(device_type)
    found = get_accelerator().device_name()
    if found != device_type:
        where = f"DS_ACCELERATOR={chosen}" if chosen is not None else "the one found when it was imported"
        raise BuildError(
            f"the model is on '{device_type}', but DeepSpeed runs on '{found}': {where}",
            hint=f"set DS_ACCELERATOR={device_type} before deepspeed is imported, or build(device='{found}')",
        )
    return deepspeed


def _follow(device_type: str) -> None:
    """Set DeepSpeed's accelerator to the model's device, unless DeepSpeed communicates already.

    So a plan does not decide for later builds.
    """
    import torch
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() == device_type or comm.comm.cdb is not None:
        return
    if device_type == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
    elif device_type == "cuda" and torch.cuda.is_available():
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        set_accelerator(CUDA_Accelerator())


def start(mesh: Mesh | None) -> None:
    """Let DeepSpeed communicate through the existing process groups, without compiling operators.

    Without a process group this process is alone: it gets a group of one, which stays until the process ends.

    Args:
        mesh: of the schedule; None for one process alone.

    Raises:
        BuildError: DeepSpeed is not installed, has another version, or runs on other devices than the mesh.
    """
    RUNTIME.require()
    if mesh is not None and mesh.device_mesh is not None:
        import_deepspeed(mesh.device_mesh.device_type)
    import deepspeed
    import deepspeed.comm
    import deepspeed.ops
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    device_type = get_accelerator().device_name()
    os.environ.setdefault("LOCAL_RANK", str(local_rank(device_type)))
    if not dist.is_initialized():
        backend = get_accelerator().communication_backend_name()
        start_single_process_group(device_type, None if device_type == "cpu" else backend)
    if deepspeed.comm.comm.cdb is None:
        # Without this, the first start on CPUs compiles an operator for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hide DeepSpeed's warnings in the block, which repeats work of DeepSpeed."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def local_rank(device_type: str) -> int:
    """Return DeepSpeed's device index: LOCAL_RANK; without a launcher, torch's current device."""
    import torch

    given = os.environ.get("LOCAL_RANK")
    if given is None:
        return 0 if device_type == "cpu" else int(torch.get_device_module(device_type).current_device())
    return int(given)


_ALONE: list[Any] = []  # the group of this process alone, for all engines; torch never frees it


class MeshUnit:
    """The process groups of a mesh, as DeepSpeed's ``mpu``: ``dp`` is data-parallel, ``tp`` model-parallel.

    DeepSpeed keeps the last ``mpu`` for the entire process, and uses it wherever an engine has none. So every engine
    gets one, also without tensor parallelism or a mesh.

    Args:
        mesh: of the schedule; None for a single process.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh

    def forget(self) -> None:
        """Unregister it from DeepSpeed if it was the last one: an engine made by the user may have none."""
        from deepspeed.utils import groups

        if groups.mpu is self:
            groups.mpu = None

    def _size(self, mesh_dim: str) -> int:
        return self._mesh.size(mesh_dim) if self._mesh is not None else 1

    def _rank(self, mesh_dim: str) -> int:
        return self._mesh.rank(mesh_dim) if self._mesh is not None else 0

    def _group(self, mesh_dim: str) -> Any:
        """Return the group of a mesh dimension; of one rank, a group of this process alone."""
        group = self._mesh.group(mesh_dim) if self._mesh is not None else None
        return group if group is not None else _alone()

    def _ranks(self, mesh_dim: str) -> list[int]:
        return dist.get_process_group_ranks(self._group(mesh_dim))

    get_data_parallel_group = partialmethod(_group, "dp")
    get_data_parallel_world_size = partialmethod(_size, "dp")
    get_data_parallel_rank = partialmethod(_rank, "dp")
    get_data_parallel_group_ranks = partialmethod(_ranks, "dp")

    get_model_parallel_group = get_tensor_model_parallel_group = partialmethod(_group, "tp")
    get_model_parallel_world_size = get_tensor_model_parallel_world_size = partialmethod(_size, "tp")
    get_model_parallel_rank = get_tensor_model_parallel_rank = partialmethod(_rank, "tp")

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Return the global rank of the group's first rank."""
        return self._ranks("tp")[0]

    get_pipeline_model_parallel_group = partialmethod(_group, "pp")  # of one rank: there is no pipeline here
    get_pipeline_model_parallel_world_size = partialmethod(_size, "pp")
    get_pipeline_model_parallel_rank = partialmethod(_rank, "pp")


def _alone() -> Any:
    """Return a process group of this process alone: for torch, None means all processes."""
    if dist.get_world_size() == 1:
        return dist.group.WORLD
    if not _ALONE or _ALONE[0][0] is not dist.group.WORLD:
        _ALONE[:] = [(dist.group.WORLD, dist.new_group([dist.get_rank()], use_local_synchronization=True))]
    return _ALONE[0][1]


# -- doctor


def examine() -> Iterator[Fact | Problem]:
    """Report versions, the accelerator that DeepSpeed will choose, and interrupted builds of its operators."""
    yield from RUNTIME.facts()
    device = _device()
    chosen = os.environ.get("DS_ACCELERATOR")
    yield Fact("accelerator", f"{chosen or device} ({'found' if chosen is None else f'DS_ACCELERATOR={chosen}'})")
    if chosen not in (None, "", "cpu", device):
        yield Problem(
            f"DS_ACCELERATOR={chosen}, but torch finds no such device (it finds {device})",
            f"unset DS_ACCELERATOR, or export DS_ACCELERATOR={device}",
        )
    yield from _broken_builds()


def _device() -> str:
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if kind is None else kind.type


def _broken_builds() -> Iterator[Problem]:
    """Yield lock files of killed builds, for which the next build would wait forever."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(given) if given else Path(os.path.expanduser("~/.cache/torch_extensions"))
    for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        yield Problem(
            f"{lock.parent.name} is being compiled, or was when its process was killed: the next one waits for "
            f"{lock} to vanish",
            f"rm {lock}  (if nothing compiles it now)",
        )
