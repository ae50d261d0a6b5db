"""Wrappers around a split model that take its pieces for replicas: DistributedDataParallel, FSDP, DataParallel.

Over the ranks that hold the same pieces (the mesh's ``dp``) they are right. Over more, the first one copies rank 0's
pieces over the others and averages gradients of different pieces, and the second one cuts new tensors of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.spec.mesh import Mesh

__all__ = ["Wrapper", "equal_ranks", "wrappers"]


@dataclass(frozen=True)
class Wrapper:
    """A wrapper that takes the tensors of the model for the same on all of its ranks.

    Args:
        kind: e.g. ``"DistributedDataParallel"``.
        path: of the module that it wraps, below the model; ``""`` for the model, or what contains it.
        ranks: the global ranks of its group; None if it cannot be said.
        ignored: names of tensors, below the model, that it leaves alone.
    """

    kind: str
    path: str
    ranks: frozenset[int] | None
    ignored: frozenset[str] = frozenset()


def equal_ranks(mesh: Mesh, dims: Collection[str]) -> frozenset[int]:
    """The global ranks that hold the same pieces as this one: those at its place along each of ``dims``."""
    device_mesh = mesh.device_mesh
    assert device_mesh is not None
    place = tuple(mesh.rank(name) if name in dims else slice(None) for name in mesh.sizes)
    return frozenset(device_mesh.mesh[place].flatten().tolist())


def wrappers(model: nn.Module) -> Iterator[Wrapper]:
    """Those that this call of ``model`` goes through, and those inside of it. To be called in its forward."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    active = DistributedDataParallel._active_ddp_module  # type: ignore[attr-defined]
    if active is not None and any(module is model for module in active.modules()):
        ignored = frozenset(active.parameters_to_ignore) if active.module is model else frozenset()
        yield Wrapper("DistributedDataParallel", "", _ranks_of(active.process_group), ignored)
    if getattr(model, "_is_fsdp_managed_module", False):
        outer = [item for item in _callers() if isinstance(item, FullyShardedDataParallel)]
        for wrapper in dict.fromkeys(outer):
            yield Wrapper("FullyShardedDataParallel", "", _ranks_of(wrapper.process_group))
    for path, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            yield Wrapper(type(module).__name__, path, _ranks_of(module.process_group))
        elif isinstance(module, FSDPModule):
            yield Wrapper("fully_shard", path, _ranks_sharded(module))


def _ranks_of(group: Any) -> frozenset[int] | None:
    return frozenset(dist.get_process_group_ranks(group)) if group is not None else None


def _ranks_sharded(module: Any) -> frozenset[int] | None:
    """The ranks over which ``fully_shard`` spread a module; None if this version of torch does not say."""
    from torch.distributed.tensor import DTensor

    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None and hasattr(state, "_fsdp_param_group"):  # older torch, where a module has one at most
        groups = [each for each in (state._fsdp_param_group,) if each is not None]
    if groups is None:
        return None
    ranks: set[int] = set()
    for group in groups:
        for held in group.fsdp_params:
            if isinstance(held.sharded_param, DTensor):
                ranks.update(held.sharded_param.device_mesh.mesh.flatten().tolist())
    return frozenset(ranks)


def _callers() -> Iterator[Any]:
    """What the methods on the stack are methods of: FullyShardedDataParallel leaves no other trace on its model."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back
