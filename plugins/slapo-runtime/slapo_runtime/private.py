"""Wrap private names of torch and transformers; tests check the installed versions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from slapo_core.observers import PATCHING

__all__ = [
    "FakeTensor",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
    "pytree",
    "tree_leaves",
    "tree_map_only",
]


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether functorch wraps a tensor (vmap, grad), so that its values cannot be read."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    return bool(functorch.is_functorch_wrapped_tensor(tensor))


def default_store() -> Any:
    """Return the store of the default process group."""
    return distributed_c10d._get_default_store()


def new_group_among(original: Any, store: Any, name: str, timeout: timedelta) -> Any:
    """Make a process group like another one, called by its members only.

    All processes must call ``torch.distributed.new_group``, or it derives the group's name from the number of groups of
    each process. Such a name returns with a later group, which then finds the addresses of the closed one.
    """
    ranks = dist.get_process_group_ranks(original)
    group, _ = distributed_c10d._new_process_group_helper(  # type: ignore[attr-defined]
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        distributed_c10d._world.pg_map[original][0],
        store,
        name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives."""
    distributed_c10d._set_pg_timeout(timeout, group)  # type: ignore[attr-defined]


def non_persistent_buffers_of(module: nn.Module) -> set[str]:
    """Return the live table of a module's non-persistent buffer names."""
    return module._non_persistent_buffers_set


HOOK_TABLES = {
    "forward_pre": ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    "forward": ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "full_backward_pre": ("_backward_pre_hooks",),
    "full_backward": ("_backward_hooks",),
    "state_dict_pre": ("_state_dict_pre_hooks",),
    "load_state_dict_pre": ("_load_state_dict_pre_hooks",),
}
"""Kind of hook -> the tables of a module for its registration, the table of functions first."""


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Convert a module's parameters and buffers in place, as ``module.to`` does."""
    return module._apply(function)


def active_ddp() -> Any:
    """Return the DistributedDataParallel with the running forward; None outside."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module  # type: ignore[attr-defined]


def write_count(tensor: torch.Tensor) -> int:
    """Return a number that changes with every in-place write to a tensor or its views."""
    return tensor._version


def write_counts(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return :func:`write_count` of several tensors."""
    return [tensor._version for tensor in tensors]


def storage_id(holder: torch.Tensor | torch.UntypedStorage) -> int:
    """Return the identity of a storage, or of a tensor without strides."""
    if isinstance(holder, torch.Tensor):
        return holder.untyped_storage()._cdata if holder.layout is torch.strided else id(holder)
    return holder._cdata


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def file_view(file: Any, at: int, length: int) -> Any:
    """Return a range of an open file as a file of its own."""
    from torch.distributed.checkpoint.utils import _create_file_view

    return _create_file_view(file, at, length)


def storage_info(file: str, at: int, length: int) -> Any:
    """Return the place of a tensor in a checkpoint, as readers of ``torch.distributed.checkpoint`` expect it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, at, length)


def local_window(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the offset of this rank's shard of a DTensor, without communication."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


_OUTPUTS = "transformers.utils.output_capturing"
"""The module that adds ``hidden_states`` and ``attentions`` to outputs, by hooks from the first such call on."""


def without_output_hooks(model: nn.Module) -> None:
    """Remove transformers' hooks for further outputs, which pickle refuses; the next call adds them again."""
    for module in model.modules() if _OUTPUTS in sys.modules else ():
        module.__dict__.pop("_output_capturing_hooks_installed", None)
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", None) == _OUTPUTS]:
            for table in HOOK_TABLES["forward"]:
                getattr(module, table).pop(key, None)


def register_outputs(model: nn.Module) -> None:
    """Register further outputs as transformers' constructors do, for an unpickled model."""
    registry: Any = getattr(sys.modules.get(_OUTPUTS), "_CAN_RECORD_REGISTRY", None)
    for module in model.modules() if isinstance(registry, dict) else ():
        if hasattr(module, "_can_record_outputs"):
            dict.__setitem__(registry, str(type(module)), module._can_record_outputs)


@contextmanager
def backwards_through(call: Callable[..., Any]) -> Iterator[None]:
    """Route ``torch.autograd.backward`` and ``tensor.backward`` through ``call(run, *args, **kwargs)``."""
    with PATCHING:
        run = torch.autograd.backward
        torch.autograd.backward = partial(call, run)
        try:
            yield
        finally:
            torch.autograd.backward = run


@contextmanager
def resizes_through(call: Callable[..., Any]) -> Iterator[None]:
    """Route ``storage.resize_``, which is not an operation, through ``call(run, storage, size)``."""
    with PATCHING:
        run = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: call(run, storage, size)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = run  # type: ignore[method-assign]


def current_autograd_node() -> Any:
    """Return the node whose backward runs; None outside of backward passes."""
    return torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None


def next_sequence_number() -> int:
    """Return the number of this thread's next autograd node."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def sequence_number(node: Any) -> int:
    """Return the position of an autograd node in its thread's order of creation; ``2**64 - 1`` for leaves."""
    number: int = node._sequence_nr()
    return number


def ranks_of_group(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, in its order.

    Args:
        group: as operations take it: a name, a group, or a group boxed for an operator.
    """
    if isinstance(group, str):
        group = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator overload; None for another callable."""
    return getattr(operator, "_schema", None)
