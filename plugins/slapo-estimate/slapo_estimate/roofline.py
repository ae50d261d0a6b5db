"""Predict the seconds of a step by the roofline model."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import ArgumentError
from slapo_estimate.private import schema_of, sparse_parts, storage_id, tree_leaves
from slapo_estimate.trackers import FlopTracker
from slapo_runtime.receipts.collectives import wait_operations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from slapo_estimate.device import DeviceSpec, Link
    from slapo_estimate.results import CollectiveCall
    from slapo_estimate.trackers import CollectiveTracker
    from slapo_runtime.receipts.attribution import PositionTracker


_FREE = frozenset(
    {
        "aten::_unsafe_view",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::lift_fresh",
        "aten::set_",
        "aten::resize_",
    }
)
"""Operations that touch no elements, as views do."""

_UNPACKED = "fsdp::split_with_sizes_copy"
"""Copies gathered parameters out of their message."""

_PICKING = frozenset({"aten::embedding", "aten::gather", "aten::index", "aten::index_select", "aten::take"})
"""Operations that read as much of their first argument as they return."""


class TimeTracker:
    """Keep clocks of the device and its links; an observer, called after others.

    An operation takes ``max(flops / peak, bytes / bandwidth) + launch``. A collective begins when its link is free, and
    its wait operation ends when it is done. A collective without a wait operation (DistributedDataParallel) overlaps
    the following operations until the end of the pass; so do the reductions of ``fully_shard``, whose gathers begin as
    soon as the unit before them has its parameters, and end before their own unit computes. Operations of one kernel
    take the time of one, on a device of type "cuda".

    Args:
        device: specification of the device.
        position: module, step and phase of the running operation.
        flops: counts the FLOPs of the operation.
        communication: lists the collectives of the operation.
    """

    def __init__(
        self, device: DeviceSpec, position: PositionTracker, flops: FlopTracker, communication: CollectiveTracker
    ) -> None:
        self._device, self._position, self._flops, self._communication = device, position, flops, communication
        self._clock = 0.0
        self._free_at: dict[str, float] = {}
        self._step = ""
        self._costs: dict[Any, Callable[[Any, Any, Any], float] | None] = {}
        self._waits = wait_operations()
        self._fuses, self._kernel = device.type == "cuda", _Kernel(0)
        self._is_of_unit = False  # whether fully_shard starts the next collective
        self._ready = self._gathered = (
            0.0  # when the last unit could compute, and when the next one's parameters are there
        )

    @property
    def seconds(self) -> float:
        """Return the seconds of the current step."""
        self._end_kernel()
        return max([self._clock, *self._free_at.values()])

    @property
    def clock(self) -> float:
        """Return the seconds until now, without a kernel that has not ended and messages on their way."""
        return self._clock

    def begin(self) -> None:
        """Begin a training step."""
        self._clock = self._ready = self._gathered = 0.0
        self._free_at.clear()

    def on_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Advance the clocks by an operation."""
        kernel = self._position.kernel if self._fuses else 0
        if kernel != self._kernel.number or self._flops.last:
            self._end_kernel()
            self._kernel = _Kernel(kernel)
        if self._position.step != self._step:
            self._step = self._position.step
            self._clock = self._ready = self.seconds
            self._is_of_unit = False
        if func.namespace == "fsdp":
            self._is_of_unit = schema_of(func).name != _UNPACKED
            if not self._is_of_unit:
                self._clock = self._ready = max(self._clock, self._gathered)
        if func in self._waits:
            self._clock = self.seconds
            return
        started = self._communication.last
        if started:
            for collective in started:
                self._communicate(collective)
            if not self._is_of_unit and not _is_asynchronous(func, args, kwargs):
                self._clock = self.seconds
            return
        try:
            bytes_of = self._costs[func]
        except KeyError:
            bytes_of = self._costs[func] = _cost(func)
        if bytes_of is not None and kernel and not self._flops.last:
            self._kernel.add((args, kwargs), result)
        elif bytes_of is not None:
            moving = bytes_of(args, kwargs, result) / self._device.bandwidth
            computing = self._flops.last / self._peak(args) if self._flops.last else 0.0
            self._clock += max(moving, computing) + self._device.launch

    def _end_kernel(self) -> None:
        moved = self._kernel.moved()
        if moved is not None:
            self._clock += moved / self._device.bandwidth + self._device.launch
            self._kernel = _Kernel(0)

    def _communicate(self, collective: CollectiveCall) -> None:
        if collective.ranks > 1:
            name, link = link_of(self._device, collective.mesh_dim)
            is_gather = self._is_of_unit and collective.kind == "all_gather"
            begin = max(self._ready if is_gather else self._clock, self._free_at.get(name, 0.0))
            end = begin + collective_seconds(collective.kind, collective.bytes, collective.ranks, link)
            self._free_at[name] = end
            self._gathered = end if is_gather else self._gathered
        self._clock += self._device.launch

    def _peak(self, args: tuple[Any, ...]) -> float:
        first = (leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        dtype = min(itertools.islice(first, 2), key=lambda dtype: dtype.itemsize)  # a larger one is that of sums
        name = str(dtype).removeprefix("torch.")
        peak = self._device.flops.get(name)
        if peak is None:
            known = ", ".join(sorted(self._device.flops)) or "none"
            raise ArgumentError(
                f"device '{self._device.name}' has no flops for {name}, the dtype of a product at "
                f"'{self._position.module}'; it has {known}",
                hint=f'DeviceSpec(..., flops={{..., "{name}": 1e12}})',
            )
        return peak


class _Kernel:
    """Count the bytes of operations that one kernel computes: of their inputs, and of results that are kept.

    Args:
        number: of the kernel; 0 for none.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._read: dict[int, tuple[int, dict[Any, int]]] = {}  # by storage: bytes, and its parts
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, given: Any, result: Any) -> None:
        """Add an operation after it ran."""
        inputs = _strided(given)
        for tensor in inputs:
            key, storage = storage_id(tensor), tensor.untyped_storage()
            if key not in self._made or self._made[key]() is not storage:
                _, parts = self._read.setdefault(key, (storage.nbytes(), {}))
                parts[tensor.storage_offset(), tensor.numel()] = _size(tensor)
        for tensor in _strided(result):
            if storage_id(tensor) not in map(storage_id, inputs):
                self._made[storage_id(tensor)] = weakref.ref(tensor.untyped_storage())

    def moved(self) -> int | None:
        """Return the bytes moved; None without operations."""
        if not self._read and not self._made:
            return None
        read = sum(min(size, sum(parts.values())) for size, parts in self._read.values())
        return read + sum(kept.nbytes() for each in self._made.values() if (kept := each()) is not None)


def link_of(device: DeviceSpec, mesh_dim: str) -> tuple[str, Link]:
    """Return the link of a mesh dimension and its name; the slowest one for flattened dimensions.

    Raises:
        ArgumentError: the device has no such link.
    """
    names = [mesh_dim] if mesh_dim in device.links else mesh_dim.split("_")
    found = [(name if name in device.links else "*", device.links.get(name) or device.links.get("*")) for name in names]
    links = [(name, link) for name, link in found if link is not None]
    if len(links) < len(names):
        raise ArgumentError(
            f"device '{device.name}' has no link for mesh_dim '{mesh_dim}'; it has "
            + (", ".join(f"'{name}'" for name in device.links) or "none"),
            hint=f'DeviceSpec(..., links={{"{mesh_dim or "*"}": Link(bandwidth=1e10, latency=1e-5)}})',
        )
    return min(links, key=lambda each: each[1].bandwidth)


def collective_seconds(kind: str, size: int, ranks: int, link: Link) -> float:
    """Return the seconds of a collective in a ring.

    Args:
        kind: see :class:`CollectiveCall`.
        size: bytes that each rank gives.
        ranks: size of the group.
        link: between neighbors.

    Source: Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH (2005), section 4.
    """
    others = ranks - 1
    if others == 0:
        return 0.0
    messages, volume = {
        "all_reduce": (2 * others, 2 * others / ranks * size),
        "all_gather": (others, others * size),
        "reduce_scatter": (others, others / ranks * size),
        "all_to_all": (others, others / ranks * size),
        "gather": (others, others * size),
        "scatter": (others, others / ranks * size),
        "broadcast": (others, size),
        "reduce": (others, size),
        "barrier": (2 * others, 0),
        "send": (1, size),
        "recv": (1, size),
    }[kind]
    return messages * link.latency + volume / link.bandwidth


def _is_asynchronous(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the caller continues meanwhile; functional collectives have a wait operation."""
    if func.namespace != "c10d":
        return True
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "async_op":
            return bool(args[position] if position < len(args) else kwargs.get("async_op", True))
    return schema_of(func).name in ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")


def _cost(func: Any) -> Callable[[Any, Any, Any], float] | None:
    """Return a function that counts the bytes moved; None if the operation touches no elements."""
    schema = schema_of(func)
    if schema is None:
        return _moved
    is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    if is_view or schema.name in _FREE or schema.name.startswith(("prim::", "profiler::", "aten::sym_")):
        return None
    return _picked if schema.name in _PICKING else _moved


def _moved(args: Any, kwargs: Any, result: Any) -> float:
    return _bytes(args) + _bytes({**kwargs, "out": None}) + _bytes(result)  # the result is written to `out`


def _picked(args: Any, kwargs: Any, result: Any) -> float:
    return _bytes(args[1:]) + _bytes(kwargs) + 2 * _bytes(result)


def _bytes(value: Any) -> int:
    """Sum the bytes of all tensors; an expanded tensor counts as its storage."""
    if isinstance(value, torch.Tensor):
        return _size(value)
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    return sum(map(_bytes, value.values())) if isinstance(value, dict) else 0


def _strided(value: Any) -> list[torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if leaf.layout is torch.strided]


def _size(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return sum(map(_size, sparse_parts(tensor)))
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
