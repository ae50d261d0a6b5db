"""Make Megatron's process groups in the order of the mesh, or reuse the script's.

Megatron has one set of them for the process, so the record about it is one for the process too: who made them, and
which engines use them. They stay for the next engine of the same mesh."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slapo_core import BuildError
from slapo_core.layout import Mesh, start_single_process_group
from slapo_megatron.groups.order import order_of
from slapo_megatron.runtime import MEGATRON


@dataclass
class _Made:
    """A set of groups that was made here.

    Args:
        mesh: whose they are, in words.
        groups: those that this rank is in.
    """

    mesh: str
    groups: list[Any]


@dataclass(eq=False)
class Lease:
    """Hold Megatron's process groups for an engine, until it is closed or collected.

    Args:
        groups: every group of Megatron's that this rank is in.
    """

    groups: list[Any]
    _made: _Made | None = field(default=None, repr=False)

    @property
    def is_ours(self) -> bool:
        """Whether they were made here, not by the user's script."""
        return self._made is not None

    def close(self) -> None:
        """The engine does not use them any more; twice is as once."""
        _leases.discard(self)
        self.groups = []


_made: _Made | None = None
_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


def start(mesh: Mesh | None, *, device_type: str | None = None, virtual: int | None = None) -> Lease:
    """Let Megatron have process groups over the ranks of the mesh: a collective over all of them.

    Groups that the user's script has made are taken if they are those of the mesh, rank by rank. Those that were made
    here are reused for the same mesh, and made again for another one.

    Where torch has no process group, this process is alone: it gets a group of one, which stays until it ends.

    Args:
        mesh: of the schedule; None for one process alone.
        device_type: of the model, which decides the backend of a process alone; None: that of the mesh, or the CPU.
        virtual: stages on each rank along ``pp``, where there are several.

    Raises:
        BuildError: Megatron-core is not installed, the groups of the user's script are others, or an open engine uses
            groups of another mesh.
    """
    MEGATRON.require()
    import torch.distributed as dist
    from megatron.core import parallel_state

    from slapo_megatron.groups.order import compare, compare_virtual, differences
    from slapo_megatron.private import groups_of_megatron, is_alive

    if not dist.is_initialized():
        start_single_process_group(device_type or "cpu")
    mesh = Mesh({}) if mesh is None else mesh
    _check_world(mesh)
    made = _still_there()
    if made is not None and any(differences(mesh)):
        _refuse_in_use(made, mesh)
        _let_go(made)
        made = None
    if made is None and not parallel_state.model_parallel_is_initialized():
        made = _make(mesh)
    elif made is None and not all(map(is_alive, groups_of_megatron())):
        raise BuildError(
            "Megatron's process groups are of a torch.distributed that was ended since",
            hint="megatron.core.parallel_state.destroy_model_parallel() before destroy_process_group()",
        )
    compare(mesh)
    compare_virtual(virtual)
    lease = Lease(groups_of_megatron(), made)
    _leases.add(lease)
    return lease


@contextlib.contextmanager
def given_back() -> Iterator[None]:
    """Close the lease if making the engine fails."""
    before = weakref.WeakSet(_leases)  # unreferenced engines may be collected meanwhile
    try:
        yield
    except BaseException:
        for lease in set(_leases) - set(before):
            lease.close()
        raise


def _check_world(mesh: Mesh) -> None:
    import torch.distributed as dist

    if mesh.world_size != dist.get_world_size():
        raise BuildError(
            f"the mesh {mesh} has {mesh.world_size} ranks, and torch.distributed runs {dist.get_world_size()} "
            "processes, over which all of Megatron's groups lie",
            hint="a mesh of all of them",
        )


def _still_there() -> _Made | None:
    """Return the groups made here, if Megatron still has them; else forget them."""
    global _made
    from megatron.core import parallel_state

    from slapo_megatron.private import groups_of_megatron, is_alive

    if _made is None:
        return None
    there = groups_of_megatron()
    is_megatrons = len(there) == len(_made.groups) and all(map(_is, there, _made.groups))
    if is_megatrons and all(map(is_alive, there)):
        return _made
    if is_megatrons:  # torch.distributed was ended, and perhaps begun again
        parallel_state.destroy_model_parallel()
    _made = None
    return None


def _is(one: Any, other: Any) -> bool:
    return one is other


def _make(mesh: Mesh) -> _Made:
    global _made
    from megatron.core import parallel_state

    from slapo_megatron.private import groups_of_megatron, timeout_minutes

    order = order_of(mesh)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh.size("tp"),
            pipeline_model_parallel_size=mesh.size("pp"),
            distributed_timeout_minutes=timeout_minutes(),
            order=order,
        )
    except BaseException:
        _let_go(_Made("", groups_of_megatron()))
        raise
    _made = _Made(str(mesh), groups_of_megatron())
    return _made


def _used(made: _Made) -> bool:
    return any(lease._made is made for lease in _leases)


def _anywhere(is_so: bool, mesh: Mesh) -> bool:
    """Whether it is so on any rank: unreferenced engines are collected at different times on the ranks.

    A collective over all ranks, so that none of them goes on alone to make groups.

    Args:
        is_so: on this one.
        mesh: of the schedule.
    """
    import torch
    import torch.distributed as dist

    device_type = mesh.device_mesh.device_type if mesh.device_mesh is not None else "cpu"
    if "nccl" in str(dist.get_backend()) and device_type == "cpu" and torch.cuda.is_available():
        device_type = "cuda"
    found = torch.tensor([float(is_so)], device=device_type)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def _refuse_in_use(made: _Made, mesh: Mesh) -> None:
    if _used(made):
        gc.collect()  # an unreferenced engine
    if _anywhere(_used(made), mesh):
        raise BuildError(
            f"an open engine uses Megatron's process groups of the mesh {made.mesh}, and this one is for "
            f"{mesh}: Megatron has one set of them in a process",
            hint="engine.close() of the other one first",
        )


def _let_go(made: _Made) -> None:
    """Destroy the groups, in the same order on every rank, and Megatron's state with them."""
    global _made
    import torch.distributed as dist
    from megatron.core import parallel_state

    from slapo_megatron.private import is_alive

    parallel_state.destroy_model_parallel()
    for group in made.groups:
        if is_alive(group):
            dist.destroy_process_group(group)
    _made = None
