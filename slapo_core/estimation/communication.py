"""Every collective of a step: what it sends, to whom, from where, and by which step of the schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from slapo_core.estimation.place import Place
from slapo_core.estimation.results import Collective
from slapo_core.private import ranks_of_group

__all__ = ["CollectiveTracker", "MeshGroups", "collective_operations", "wait_operations"]

_OPERATIONS: dict[str, tuple[str, int | None]] = {
    # operator: kind, and which argument this rank gives; None where it gives none
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
_SEVERAL = "_c10d_functional::batch_p2p_ops"  # names of the operations, peers, tags, tensors, group
_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors")
_GROUP_ARGUMENTS = ("group_name", "process_group")


class CollectiveTracker:
    """Lists the collectives of a step; an observer.

    Args:
        place: of the step.
        groups: of the mesh.

    Attributes:
        last: those of the operation that ran last.
    """

    def __init__(self, place: Place, groups: MeshGroups) -> None:
        self._place, self._groups = place, groups
        self.last: Sequence[Collective] = ()
        self._found: list[Collective] = []
        self._operations = collective_operations()

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Of the step that began last, in the order in which they were started."""
        return tuple(self._found)

    def begin(self) -> None:
        """Of a training step."""
        self._found.clear()

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation ran."""
        read = self._operations.get(func)
        if read is None:
            self.last = ()
            return
        at, module, record = self._place, self._place.module, self._place.record
        self.last = [
            Collective(kind, *self._groups.find(group), size, module, at.step, record)
            for kind, size, group in read(args, kwargs)
        ]
        self._found.extend(self.last)


Read = Callable[[tuple[Any, ...], Mapping[str, Any]], Iterator[tuple[str, int, Any]]]
"""The arguments of an operation -> kind, bytes and group of each collective that it is."""


def collective_operations() -> dict[Any, Read]:
    """Every operation of torch that communicates."""
    found: dict[Any, Read] = {}
    for name in (*_OPERATIONS, _SEVERAL):
        for operation in _overloads(name):
            found[operation] = _reader(name, [argument.name for argument in operation._schema.arguments])
    return found


def wait_operations() -> frozenset[Any]:
    """Give every operation of torch that waits for a collective, and returns what it was given."""
    return frozenset(operation for name in _WAITS for operation in _overloads(name))


def _overloads(name: str) -> list[Any]:
    """The overloads of an operator; none in a version of torch without it."""
    namespace, _, own = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), own, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def _reader(name: str, arguments: list[str]) -> Read:
    group = next(place for place, own in enumerate(arguments) if own in _GROUP_ARGUMENTS)

    def value(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int) -> Any:
        return args[place] if place < len(args) else kwargs[arguments[place]]

    def one(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
        kind, given = _OPERATIONS[name]
        size = 0 if given is None else _bytes(value(args, kwargs, given))
        yield kind, size, value(args, kwargs, group)

    def several(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
        kinds, tensors = value(args, kwargs, 0), value(args, kwargs, arguments.index("tensors"))
        for kind, tensor in zip(kinds, tensors, strict=True):
            yield kind.removeprefix("i"), _bytes(tensor), value(args, kwargs, group)

    return several if name == _SEVERAL else one


def _bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class MeshGroups:
    """Which dimension of a mesh a process group is along.

    Args:
        mesh: sizes, outermost first; ranks are numbered row-major.
        rank: whose groups these are.
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
        """The mesh dimension, and the number of ranks.

        Args:
            group: as operations are given it.

        Returns:
            the name of the dimension; of several that are flattened into one, ``"dp_cp"``; ``""`` for other ranks.
        """
        known = self._known.get(group) if isinstance(group, str) else None
        if known is None:
            ranks = ranks_of_group(group)
            known = (self._by_ranks.get(frozenset(ranks), ""), len(ranks))
            if isinstance(group, str):
                self._known[group] = known
        return known
