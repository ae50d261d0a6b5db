"""Live tensors, their placement, and their storage by a runtime."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from slapo_core.errors import BuildError
from slapo_core.internals import module_index
from slapo_core.layout import device_of
from slapo_runtime.private import local_window

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from slapo_core.layout import Layout, Mesh


@dataclass(frozen=True)
class Placement:
    """The placement of tensors on pipeline ranks.

    A rank without a tensor has a placeholder of the same shape on the meta device, so that the model keeps its
    structure and its names. A tensor-parallel tensor is sharded on each of its ranks along ``pp``.

    Args:
        reference: first name of each reference tensor -> the ranks along ``pp`` that hold its live tensor, ascending;
            several for a parameter that several stages use. E.g. ``{"wte.weight": (0, 1)}``.
        added: the same for live tensors without a single reference tensor, by name in the scheduled model.
        modules: the ranks that run each module with a ``get_extra_state`` of its own, by path.
    """

    reference: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    added: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    modules: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def holders(self, live: LiveTensor) -> tuple[int, ...]:
        """Return the pipeline ranks that hold a live tensor, added ones excepted."""
        if live.reference_names:
            return self.reference.get(live.reference_names[0], ())
        return self.added.get(live.name, ())


@dataclass(frozen=True)
class TensorShard:
    """A rectangle of a full tensor, in the reference model's layout.

    Args:
        kind: ``"weight"``; ``"added"`` for a tensor that a step added; ``"optimizer"`` for optimizer state.
        name: of the full tensor in the reference model; for optimizer state with its key, e.g.
            ``"fc.weight::exp_avg"``.
        shape: of the full tensor, in elements.
        offset: of the rectangle's first element, along each axis.
        value: its elements, contiguous, on the CPU, in the trained precision.
    """

    kind: Literal["weight", "added", "optimizer"]
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    value: torch.Tensor = field(repr=False)


def shard_ranges(ranges: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return ``(start in the shard, start in the full tensor, length)`` of each range of one axis."""
    lengths = [length for _, length in ranges]
    return [(sum(lengths[:number]), start, length) for number, (start, length) in enumerate(ranges)]


Block = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A rectangle: start in the shard, start in the full tensor, extent."""


class Window(NamedTuple):
    """This rank's rows of a DTensor: their shape, and their start in the full tensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Return a view of the full tensor."""
        return full[slices(self.offset, self.shape)]


def slices(offset: Sequence[int], extent: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a rectangle."""
    return tuple(slice(begin, begin + length) for begin, length in zip(offset, extent, strict=True))


def window_of(tensor: torch.Tensor, mesh: Mesh | None) -> Window | None:
    """Return this rank's window of a DTensor, without communication.

    None for a plain tensor, and for a DTensor that is split over other dimensions than ``mesh`` has.
    """
    if mesh is None or not is_distributed(tensor) or not set(sharded_over(tensor)) <= set(mesh.sizes):
        return None
    return Window(*local_window(tensor))


def blocks(layout: Layout, mesh: Mesh | None, window: Window | None = None) -> Iterator[Block]:
    """Yield the rectangles of a shard; padding is left out.

    Args:
        layout: of the shard.
        mesh: of the ranks.
        window: of it; starts are in the window then.
    """
    for ranges in itertools.product(*(shard_ranges(axis) for axis in layout.segments(mesh))):
        at, offset = tuple(one[0] for one in ranges), tuple(one[1] for one in ranges)
        extent = tuple(
            max(0, min(start + length, size) - start)
            for (_, start, length), size in zip(ranges, layout.shape, strict=True)
        )
        if window is not None:
            begins = tuple(map(max, at, window.offset))
            ends = (a + e for a, e in zip(at, extent, strict=True))
            stops = map(min, ends, map(operator.add, window.offset, window.shape))
            extent = tuple(max(0, stop - begin) for begin, stop in zip(begins, stops, strict=True))
            offset = tuple(o + begin - a for o, begin, a in zip(offset, begins, at, strict=True))
            at = tuple(map(operator.sub, begins, window.offset))
        if math.prod(extent):
            yield at, offset, extent


@dataclass(frozen=True)
class ShardedState:
    """The shards of a checkpoint that one rank writes.

    Args:
        description: everything but the tensors, as JSON; the same on every rank.
        own: this rank's shards; every element of every tensor is in one shard of exactly one rank.
    """

    description: Mapping[str, Any]
    own: Sequence[TensorShard]


class ShardSource(Protocol):
    """A source of shards."""

    @property
    def label(self) -> str:
        """The name for messages, e.g. ``"the sharded checkpoint 'runs/1'"``."""
        ...

    def like(self, kind: str, name: str) -> torch.Tensor:
        """Return a meta tensor of a full tensor's shape and type: no collective.

        Raises:
            KeyError: there is no such tensor.
        """
        ...

    def read(self, wanted: Sequence[TensorShard]) -> None:
        """Fill in the values of shards of any shape: a collective of all ranks."""
        ...


class TensorStorage(Protocol):
    """The parameters and buffers of a runtime.

    Its methods are called for local tensors (``live.is_local``), in the same order on all ranks that share one. For a
    tensor that the runtime did not change, they use ``live.tensor``.
    """

    def partitioned(self, live: LiveTensor) -> tuple[str, ...]:
        """Return the mesh dimensions over which the runtime partitions a tensor, e.g. ``("dp",)``."""
        ...

    def dtype(self, live: LiveTensor) -> torch.dtype:
        """Return the trained precision, which is that of :meth:`read`."""
        ...

    def read(self, live: LiveTensor) -> torch.Tensor:
        """Return this rank's shard, of ``live.layout``'s local shape, in the trained precision.

        A collective over the dimensions that partition it. The caller neither changes nor keeps it.
        """
        ...

    def loading(self, live: LiveTensor, value: torch.Tensor) -> Callable[[], None]:
        """Prepare to load a local tensor: no collective, and no change yet.

        Args:
            live: the tensor.
            value: in any precision; the storage may keep its memory.

        Returns:
            a function that assigns it, in every precision of the runtime. It holds no more of ``value`` than this
            rank's shard.
        """
        ...

    def working(self, live: LiveTensor) -> torch.Tensor | None:
        """Return the forward's copy of a parameter with a separate main copy.

        None if the forward uses the main copy, or gathers it for each use.
        """
        ...

    def is_current(self, live: LiveTensor) -> bool:
        """Return whether the forward's copy matches the main copy on this rank.

        After a write into ``engine.module`` it does not, and the next step overwrites it.
        """
        ...


@runtime_checkable
class OptimizerStorage(Protocol):
    """An optimizer of a runtime, by the model's parameters.

    Attributes:
        kind: the class of the optimizer, e.g. ``"AdamW"``: checkpoints load into optimizers of the same class.
    """

    kind: str

    @property
    def scheduled(self) -> Collection[str]:
        """The settings that the runtime sets before each step, also after loading, e.g. ``("lr",)``.

        The runtime handles their values in a checkpoint.
        """
        ...

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """The groups as of ``torch.optim.Optimizer``, with the model's parameters; not to be changed.

        Every rank has all groups of the user's factory; the settings of a group without parameters of this pipeline
        rank are ignored.
        """
        ...

    def partitioned(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Return the mesh dimensions over which the state is partitioned, e.g. ``("dp",)``."""
        ...

    def state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the state by key: numbers, scalar tensors, and tensors of the parameter's shape.

        The latter may be on the meta device: :meth:`read` gives their values. The keys are the same on every rank that
        shares the parameter; there are none before the first step.
        """
        ...

    def read(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """Return a state tensor of the parameter's local shape: a collective over its partition."""
        ...

    def write(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        """Write an existing state tensor, with the same value on every rank: no collective."""
        ...

    def loading(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Callable[[], None]:
        """Prepare to load settings and states: no collective, and no change yet.

        Args:
            groups: settings, in the order of :attr:`param_groups`, without ``"params"``.
            states: new states by parameter, with full local tensors on the CPU; parameters without one lose theirs.
                Values are read at each access: keep this rank's shard only.

        Returns:
            a function that loads them, and does not fail.

        Raises:
            BuildError: this optimizer cannot hold such a state.
        """
        ...


@dataclass(frozen=True)
class LiveTensor:
    """One parameter or buffer of the scheduled model.

    Args:
        path: of its module, e.g. ``"encoder.layer.0.output.dense"``; of a tied tensor the first one.
        own_name: its name there, e.g. ``"weight"``.
        tensor: the local tensor. If the runtime keeps values elsewhere (:class:`TensorStorage`), it may lack values and
            shape; ``layout.local_shape(mesh)`` always is the shape.
        layout: in the reference tensor; ``layout.origin`` is ``""`` without a single reference tensor.
        is_parameter: False for a buffer.
        is_persistent: whether it belongs into a state dict.
        reference_names: first names of its reference tensors: one by a layout, several by a translation, none for a
            tensor that a step added.
        is_local: False if only other ranks along ``pp`` hold it; ``tensor`` is a placeholder on the meta device then.
    """

    path: str
    own_name: str
    tensor: torch.Tensor = field(repr=False)
    layout: Layout
    is_parameter: bool
    is_persistent: bool
    reference_names: tuple[str, ...] = ()
    is_local: bool = True

    @property
    def name(self) -> str:
        """The full name in the scheduled model, e.g. ``"encoder.layer.0.output.dense.weight"``."""
        return module_index.full_name(self.path, self.own_name)

    @property
    def reference_name(self) -> str:
        """The reference model's name of the tensor, if it has one, else its own."""
        return self.layout.origin or self.name


class InPlace:
    """The implementation of :class:`TensorStorage` for the model's own tensors.

    DTensors, as of torch's ``fully_shard``, are read in full over their own mesh.
    """

    def partitioned(self, live: LiveTensor) -> tuple[str, ...]:
        return sharded_over(live.tensor)

    def dtype(self, live: LiveTensor) -> torch.dtype:
        return live.tensor.dtype

    def read(self, live: LiveTensor) -> torch.Tensor:
        return unsharded(live.tensor)

    def loading(self, live: LiveTensor, value: torch.Tensor) -> Callable[[], None]:
        own = sharded_like(live.tensor, value)

        def assign() -> None:
            with torch.no_grad():
                live.tensor.copy_(own)

        return assign

    def working(self, live: LiveTensor) -> torch.Tensor | None:
        return None

    def is_current(self, live: LiveTensor) -> bool:
        return True


class TorchOptimizer:
    """The implementation of :class:`OptimizerStorage` for a torch optimizer of the model's tensors.

    The state of a DTensor consists of DTensors.

    Args:
        optimizer: of the model's parameters.
    """

    scheduled: tuple[str, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.kind = type(optimizer).__name__
        self._optimizer = optimizer
        self._before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        foreign = [key for key in optimizer.state if id(key) not in own]
        if foreign:
            raise BuildError(
                f"{self.kind} has state of {len(foreign)} tensors that are not in its parameter groups",
                hint="give it all parameters with state",
            )

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        return self._optimizer.param_groups

    def partitioned(self, parameter: torch.Tensor) -> tuple[str, ...]:
        return sharded_over(parameter)

    def state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
        if not is_distributed(parameter):
            return state
        return {
            key: torch.empty(value.shape, dtype=value.dtype, device="meta") if is_distributed(value) else value
            for key, value in state.items()
        }

    def read(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        return unsharded(self._optimizer.state[parameter][key])

    def held(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """Return a state tensor itself, which may be a DTensor."""
        found: torch.Tensor = self._optimizer.state[parameter][key]
        return found

    def write(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        held = self._optimizer.state[parameter][key]
        held.copy_(sharded_like(held, value))

    def owns_full(self, parameter: torch.Tensor) -> bool | None:
        """Return whether this rank has the state of the full parameter; None for the state of a shard."""
        return None

    def put(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        """Replace a state tensor by one of another type, which ``load_state_dict`` would cast."""
        self._optimizer.state[parameter][key] = self._own(parameter, value.to(parameter.device))

    def loading(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Callable[[], None]:
        """Prepare ``torch.optim.Optimizer.load_state_dict``, with parameters numbered by groups.

        The returned function may fail if the optimizer refuses the state; then call :meth:`take_back`.
        """
        packed: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        values = {one: {key: self._own(one, state[key]) for key in state} for one, state in states.items()}
        number = 0
        for present, settings in zip(self._optimizer.param_groups, groups, strict=True):
            numbers = list(range(number, number + len(present["params"])))
            number += len(numbers)
            packed.append({**settings, "params": numbers})
            for index, parameter in zip(numbers, present["params"], strict=True):
                if parameter in values:
                    state[index] = values[parameter]
        return lambda: self._optimizer.load_state_dict({"state": state, "param_groups": packed})

    def take_back(self) -> None:
        """Restore the optimizer's state from the construction of this object."""
        self._optimizer.__setstate__(self._before)

    @staticmethod
    def _own(parameter: torch.Tensor, value: Any) -> Any:
        """Shard a state tensor of the parameter's shape; return other values."""
        is_of_its_shape = isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
        return sharded_like(parameter, value) if is_of_its_shape else value


def is_distributed(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, e.g. of torch's ``fully_shard``."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "device_mesh")


def sharded_over(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the dimensions of its own mesh that partition a DTensor, by name or number."""
    if not is_distributed(tensor):
        return ()
    own: Any = tensor
    names = own.device_mesh.mesh_dim_names or tuple(map(str, range(own.device_mesh.ndim)))
    return tuple(name for name, one in zip(names, own.placements, strict=True) if not one.is_replicate())


def sharding_groups(tensor: torch.Tensor) -> list[tuple[ProcessGroup, torch.device]]:
    """Return the process groups over which a DTensor is split, with their devices."""
    if not is_distributed(tensor):
        return []
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    split = [number for number, one in enumerate(tensor.placements) if not one.is_replicate() and not one.is_partial()]  # type: ignore[attr-defined]
    return [(mesh.get_group(number), device_of(mesh.device_type)) for number in split if mesh.size(number) > 1]


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full plain tensor of a DTensor: a collective."""
    own: Any = tensor
    return own.detach().full_tensor() if is_distributed(own) else own  # type: ignore[no-any-return]


def sharded_like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Shard a full value as a DTensor, without communication; keep this rank's shard alone.

    Args:
        tensor: of the same shape; if it is plain, or the value is sharded already, the value is returned unchanged.
        value: the same on every rank that shares the tensor.
    """
    if not is_distributed(tensor) or is_distributed(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    like: Any = tensor
    own = value.detach().to(like.device)
    return distribute_tensor(own, like.device_mesh, like.placements, src_data_rank=None).clone()


def from_window(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a DTensor like ``tensor`` with this rank's window as its value."""
    from torch.distributed.tensor import DTensor

    like: Any = tensor
    own = value.to(like.device)
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def optimizer_storage(optimizer: torch.optim.Optimizer | OptimizerStorage | None) -> OptimizerStorage | None:
    """Return the storage of an optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    own: Callable[[], OptimizerStorage] | None = vars(optimizer).get(OWN_STORAGE)
    return TorchOptimizer(optimizer) if own is None else own()


OWN_STORAGE = "_slapo_storage"
"""The attribute of a torch optimizer that makes its storage, where its state is not that of its parameters."""
