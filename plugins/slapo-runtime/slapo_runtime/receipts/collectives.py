"""Collectives of a step: operations that communicate, their bytes and their process groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slapo_runtime.private import ranks_of_group, schema_of, tree_leaves

_OPERATIONS: dict[str, tuple[str, int | None]] = {
    # operator: kind, and the position of the tensor that this rank gives; None for none
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::isend": ("send", 0),
    "_c10d_functional::irecv": ("recv", 0),
    "_dtensor::shard_dim_alltoall": ("all_to_all", 0),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::allgather_coalesced_": ("all_gather", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::gather_": ("gather", 1),
    "c10d::gather_into_tensor_": ("gather", 1),
    "c10d::scatter_": ("scatter", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "c10d::recv_any_source_": ("recv", 0),
    "c10d::barrier": ("barrier", None),
    "c10d::monitored_barrier_": ("barrier", None),
}
_SEVERAL = "_c10d_functional::batch_p2p_ops"  # arguments: names of operations, peers, tags, tensors, group
_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors")
_GROUP_ARGUMENTS = ("group_name", "process_group")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective, send or receive of a step.

    Args:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"``,
            ``"send"``, ...
        mesh_dim: the mesh dimension of its group; ``""`` for another group.
        ranks: the size of the group.
        bytes: size of the tensor that this rank gives.
        module: path of the module that communicates.
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        record: the step of the schedule that added it, as in ``str(record)``; empty for the model's own.
        dtype: of the tensor, e.g. ``"float32"``; empty without one.
        in_passes: whether a module or a backward pass makes it; else a runtime, between them.
    """

    kind: str
    mesh_dim: str
    ranks: int
    bytes: int
    module: str
    phase: str
    record: str = ""
    dtype: str = ""
    in_passes: bool = True


class CollectiveReader:
    """Read the collectives of operations.

    Args:
        groups: the process groups of the mesh.
    """

    def __init__(self, groups: MeshGroups) -> None:
        self._groups, self._operations = groups, collective_operations()

    def communicates(self, func: Any) -> bool:
        """Return whether an operator of torch communicates."""
        return func in self._operations

    def read(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        place: tuple[str, str, str],
        *,
        in_passes: bool = True,
    ) -> Iterator[CollectiveCall]:
        """Yield the collectives of an operation that communicates.

        Args:
            func: the operator.
            args: of the operation.
            kwargs: of the operation.
            place: module, step and phase, as of :class:`CollectiveCall`.
            in_passes: likewise.
        """
        module, record, phase = place
        for kind, size, dtype, group in self._operations[func](args, kwargs):
            yield CollectiveCall(kind, *self._groups.find(group), size, module, phase, record, dtype, in_passes)


Read = Callable[[tuple[Any, ...], Mapping[str, Any]], Iterator[tuple[str, int, str, Any]]]
"""Arguments of an operation -> kind, bytes, type and group of each of its collectives."""


def collective_operations() -> dict[Any, Read]:
    """Return each communicating operation of torch, with a reader of its arguments."""
    found: dict[Any, Read] = {}
    for name in (*_OPERATIONS, _SEVERAL):
        for operation in _overloads(name):
            found[operation] = _reader(name, [argument.name for argument in schema_of(operation).arguments])
    return found


def wait_operations() -> frozenset[Any]:
    """Return the operations of torch that wait for a collective."""
    return frozenset(operation for name in _WAITS for operation in _overloads(name))


def _overloads(name: str) -> list[Any]:
    """Return the overloads of an operator; none if this version of torch lacks the operator."""
    namespace, _, own = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), own, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def _reader(name: str, arguments: list[str]) -> Read:
    group = next(position for position, own in enumerate(arguments) if own in _GROUP_ARGUMENTS)

    def value(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int) -> Any:
        return args[position] if position < len(args) else kwargs[arguments[position]]

    def one(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, int, str, Any]]:
        kind, given = _OPERATIONS[name]
        size, dtype = (0, "") if given is None else _size(value(args, kwargs, given))
        yield kind, size, dtype, value(args, kwargs, group)

    def several(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, int, str, Any]]:
        kinds, tensors = value(args, kwargs, 0), value(args, kwargs, arguments.index("tensors"))
        for kind, tensor in zip(kinds, tensors, strict=True):
            yield kind.removeprefix("i"), *_size(tensor), value(args, kwargs, group)

    return several if name == _SEVERAL else one


def _size(value: Any) -> tuple[int, str]:
    """Return the bytes and the type of tensors; of several types the first one's."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors), dtype


class MeshGroups:
    """Find the mesh dimension of a process group.

    Args:
        mesh: sizes, outermost first; ranks are numbered row-major.
        rank: the rank that belongs to the groups.
    """

    def __init__(self, mesh: Mapping[str, int], rank: int) -> None:
        self._by_ranks: dict[frozenset[int], str] = {}
        self._known: dict[Any, tuple[str, int]] = {}
        strides: dict[str, int] = {}
        stride = 1
        for mesh_dim, size in reversed(list(mesh.items())):
            strides[mesh_dim] = stride
            stride *= size
        larger = [mesh_dim for mesh_dim, size in mesh.items() if size > 1]
        for count in range(1, len(larger) + 1):
            for mesh_dims in itertools.combinations(larger, count):
                steps = [[step * strides[each] for step in range(mesh[each])] for each in mesh_dims]
                first = rank - sum(rank // strides[each] % mesh[each] * strides[each] for each in mesh_dims)
                ranks = frozenset(first + sum(offsets) for offsets in itertools.product(*steps))
                self._by_ranks.setdefault(ranks, "_".join(mesh_dims))

    def find(self, group: Any) -> tuple[str, int]:
        """Return the mesh dimension of a group, and its number of ranks.

        Args:
            group: as operations take it.

        Returns:
            the name of the dimension; ``"dp_cp"`` for flattened dimensions; ``""`` for any other group.
        """
        known = self._known.get(group) if isinstance(group, str) else None
        if known is None:
            ranks = ranks_of_group(group)
            known = (self._by_ranks.get(frozenset(ranks), ""), len(ranks))
            if isinstance(group, str):
                self._known[group] = known
        return known
