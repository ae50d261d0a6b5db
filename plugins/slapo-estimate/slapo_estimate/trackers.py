"""Observers of the operations of a step: bytes held, collectives, floating-point operations."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from slapo_core.errors import EstimateError
from slapo_estimate.private import (
    ADDED_PRODUCT,
    ATTENTION,
    ATTENTION_BACKWARD,
    MATRIX_PRODUCTS,
    FakeTensor,
    TorchDispatchMode,
    flop_formulas,
    is_traceable_wrapper_subclass,
    ranks_of_group,
    resizes_through,
    schema_of,
    storage_id,
    tree_leaves,
)
from slapo_estimate.results import Collective, Memory

if TYPE_CHECKING:
    from slapo_estimate.attribution import Place
    from slapo_estimate.values import Values

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
        """Begin a training step."""
        self._found.clear()

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """See an operation that ran."""
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
    """Return every operation of torch that communicates, with a reader of its arguments."""
    found: dict[Any, Read] = {}
    for name in (*_OPERATIONS, _SEVERAL):
        for operation in _overloads(name):
            found[operation] = _reader(name, [argument.name for argument in schema_of(operation).arguments])
    return found


def wait_operations() -> frozenset[Any]:
    """Return every operation of torch that waits for a collective and returns its argument."""
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
    """Finds the mesh dimension of a process group.

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
        """Return the mesh dimension of a group, and its number of ranks.

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


Formula = Callable[..., int]
"""The arguments of an operation, and its result as ``out_val`` -> how many; multiplying and adding is two."""

aten = torch.ops.aten


class FlopTracker:
    """Counts what products of a step do, recomputation included; an observer.

    Only products count, as for torch's ``FlopCounterMode``: whatever is done element by element takes its time from
    memory.

    Attributes:
        total: of the step that began last.
        last: of the operation that ran last.
    """

    def __init__(self) -> None:
        self.total = self.last = 0
        self._formulas: dict[Any, Formula | None] = {}
        self._packets: dict[Any, Formula] = {**flop_formulas(), **_LEFT_OUT}

    def begin(self) -> None:
        """Begin a training step."""
        self.total = 0

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """See an operation that ran."""
        try:
            formula = self._formulas[func]
        except KeyError:
            formula = self._formulas[func] = self._packets.get(getattr(func, "overloadpacket", func))
        if formula is None:
            self.last = 0
        else:
            self.last = formula(*args, **kwargs, out_val=result)
            self.total += self.last


def _product(a: Sequence[int], b: Sequence[int]) -> int:
    """Of matrices, or batches of them; one that is cut in groups counts as the whole.

    Args:
        a: shape ``(..., m, k)``.
        b: shape ``(..., k, n)``.
    """
    batch = a[0] if len(a) == 3 and len(b) == 3 else 1
    return 2 * batch * a[-2] * a[-1] * b[-1]


def _matrix(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    return _product(a.shape, b.shape)


def _added_matrix(_: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *__: Any, **___: Any) -> int:
    return _product(a.shape, b.shape)


def _vector(a: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _added_vector(_: torch.Tensor, a: torch.Tensor, *__: Any, **___: Any) -> int:
    return 2 * a.numel()


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Scores, and the sum of values; nothing is left out where attention is causal, as torch's formulas do."""
    batch, heads, length, size = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (size + value.shape[-1])


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Scores again; gradients of the scores and the values; those of queries and keys."""
    batch, heads, length, size = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (3 * size + 2 * value.shape[-1])


def _convolution_backward(
    gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """As often as the forward as there are gradients; torch's formula counts groups as if there were none."""
    places = (input if transposed else gradient).shape[2:]
    forward = 2 * gradient.shape[0] * math.prod(places) * weight.numel()
    return forward * (int(output_mask[0]) + int(output_mask[1]))


_LEFT_OUT: dict[Any, Formula] = {
    **dict.fromkeys(ATTENTION, _attention),
    **dict.fromkeys(ATTENTION_BACKWARD, _attention_backward),
    **dict.fromkeys(MATRIX_PRODUCTS, _matrix),
    ADDED_PRODUCT: _added_matrix,
    aten.addbmm: _added_matrix,
    aten.mv: _vector,
    aten.addmv: _added_vector,
    aten.dot: _vector,
    aten.vdot: _vector,
    aten.addr: lambda _, a, b, *__, **___: 2 * a.numel() * b.numel(),
    aten.convolution_backward: _convolution_backward,
}


_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_KINDS = {
    "forward": "activations",
    "recomputation": "activations",
    "backward": "temporaries",
    "optimizer": "temporaries",
}


class _Held:
    """One storage: its bytes, their kind, and a weak reference that tells when it is freed."""

    __slots__ = ("kind", "reference", "size")

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self.reference: Any = None


class MemoryTracker:
    """Counts the bytes of storages by kind, and keeps the counts at the peak; an observer.

    Args:
        place: of the step.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._storages: dict[int, _Held] = {}
        self._held: dict[str, int] = {}
        self._total = self._most = 0
        self._peak = self._earlier = Memory()

    @property
    def peak(self) -> Memory:
        """The counts when most bytes were held, in any step; the last such moment of several steps."""
        return self._earlier if self._earlier.total > self._peak.total else self._peak

    @property
    def total(self) -> int:
        """Bytes held now."""
        return self._total

    def begin(self) -> None:
        """Begin a training step, with a peak of its own; the first one does not know the optimizer's state."""
        self._earlier, self._peak, self._most = self.peak, Memory(), 0

    def hold(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Count the storages of ``tensors`` as ``kind``, in place of their former kind."""
        for tensor in tensors:
            if tensor is not None:
                for storage in _storages(tensor):
                    held = self._storages.get(storage_id(storage))
                    if held is None:
                        self._add(storage, kind)
                    elif held.kind != kind:
                        self._held[held.kind] -= held.size
                        held.kind = kind
                        self._held[kind] = self._held.get(kind, 0) + held.size
        self._look()

    def forget_peak(self) -> None:
        """Leave out of the peak what has run so far: a runtime's construction."""
        self._earlier, self._peak, self._most = Memory(), Memory(), 0

    def settle(self) -> None:
        """Count what is held of activations and temporaries as optimizer state: a runtime keeps it between steps."""
        for held in self._storages.values():
            if held.kind in ("activations", "temporaries"):
                self._held[held.kind] -= held.size
                held.kind = "optimizer"
                self._held[held.kind] = self._held.get(held.kind, 0) + held.size

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count storages that an operation made or resized."""
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                for storage in _storages(leaf):
                    held = self._storages.get(storage_id(storage))
                    if held is None:
                        self._add(storage, _KINDS[self._place.phase])
                    elif held.size != storage.nbytes():
                        self._change(held, storage.nbytes())
        self._look()

    def watching(self) -> AbstractContextManager[None]:
        """Notice storages that are resized by their own method, which is not an operation."""

        def noticed(run: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
            result = run(storage, size)
            held = self._storages.get(storage_id(storage))
            if held is not None:
                self._change(held, storage.nbytes())
                self._look()
            return result

        return resizes_through(noticed)

    def _look(self) -> None:
        if self._total > self._most:
            self._most = self._total
            self._peak = Memory(**self._held, module=self._place.module, phase=self._place.phase)

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, held = storage_id(storage), _Held(kind, storage.nbytes())
        held.reference = weakref.ref(storage, lambda _: self._gone(key, held))
        self._storages[key] = held
        self._held[kind] = self._held.get(kind, 0) + held.size
        self._total += held.size

    def _change(self, held: _Held, size: int) -> None:
        self._held[held.kind] += size - held.size
        self._total += size - held.size
        held.size = size

    def _gone(self, key: int, held: _Held) -> None:
        if self._storages.get(key) is held:  # its address may be another's already
            del self._storages[key]
        self._change(held, 0)


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor, and of a wrapper subclass's inner tensors."""
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, torch.Tensor):  # a DTensor also has its mesh there
                yield from _storages(part)
    elif tensor.layout is torch.strided:
        if not tensor.is_meta:  # a shape that a runtime keeps
            yield tensor.untyped_storage()
    else:
        raise EstimateError(
            f"a tensor of layout {tensor.layout} has no known size before it has values",
            hint="nn.Embedding(..., sparse=False), or whatever makes it dense",
        )


class Observer(Protocol):
    """Observes the operations of a step."""

    def begin(self) -> None:
        """Begin a training step."""

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """See an operation that ran."""


class Watch(TorchDispatchMode):
    """Runs each operation and calls the observers.

    Args:
        observers: called in this order.
        values: runs the operations.
    """

    def __init__(self, observers: Sequence[Observer], values: Values) -> None:
        super().__init__()
        self._run, self._mode = values.run, values.mode
        self._saw = tuple(observer.saw for observer in observers)
        self._device = torch.ops.prim.device.default
        self._waits = wait_operations()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._device:  # a question, the most frequent one
            return func(*args)
        if DTensor in types:
            return NotImplemented  # its operations on local tensors are dispatched again
        kwargs = kwargs or {}
        # Waiting gives back the tensors that are waited for; without memory torch would make new ones.
        result = args[0] if func in self._waits else self._run(func, args, kwargs)
        if not self._is_recorded(result):
            for saw in self._saw:
                saw(func, args, kwargs, result)
        return result

    def _is_recorded(self, result: Any) -> bool:
        """Whether it is of a graph that is recorded in the step, on tensors of a fake mode of its own."""
        leaves = tree_leaves(result) if isinstance(result, (tuple, list)) else (result,)
        return self._mode is not None and any(
            isinstance(leaf, FakeTensor) and leaf.fake_mode is not self._mode for leaf in leaves
        )
