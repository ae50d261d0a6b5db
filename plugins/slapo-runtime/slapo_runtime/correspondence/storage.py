"""Tensors and optimizer state of a scheduled model: where they are, and where a runtime keeps them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch

from slapo_core.errors import BuildError
from slapo_core.layout import device_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from slapo_core.layout import Layout


@dataclass(frozen=True)
class Placement:
    """The placement of tensors on pipeline ranks.

    A rank that does not hold a tensor has a placeholder of the same shape in its place, on the meta device, so that the
    model keeps its structure and its names. A tensor of which ranks along ``tp`` hold pieces does so in each place
    along ``pp`` that is named here.

    Args:
        reference: first name of each tensor of the reference model -> the ranks along ``pp`` that hold what stands for
            it, ascending; several for a parameter that several stages use. E.g. ``{"wte.weight": (0, 1)}``.
        added: the same of what steps made that no single reference tensor explains, by its name in the scheduled model.
        modules: the ranks that run each module with a ``get_extra_state`` of its own, by path.
    """

    reference: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    added: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    modules: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def holders(self, live: LiveTensor) -> tuple[int, ...]:
        """Return the pipeline ranks that hold a live tensor; none for one added after the build."""
        if live.reference_names:
            return self.reference.get(live.reference_names[0], ())
        return self.added.get(live.name, ())


@dataclass(frozen=True)
class TensorShard:
    """A rectangle of a whole tensor, in the reference model's layout: no padding, no order of packed matrices.

    Args:
        kind: ``"weight"``; ``"added"`` for what a step added; ``"optimizer"`` for its state.
        name: of the whole tensor: a name of the reference model; for the optimizer's state with its key, e.g.
            ``"fc.weight::exp_avg"``.
        shape: of the whole tensor, in elements.
        offset: of the rectangle's first element, along each axis.
        value: its elements, contiguous, on the CPU, in the precision that is trained.
    """

    kind: Literal["weight", "added", "optimizer"]
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    value: torch.Tensor = field(repr=False)


@dataclass(frozen=True)
class ShardedState:
    """The shards of a checkpoint that one rank writes.

    Args:
        description: everything but the tensors, as JSON; the same on every rank.
        own: every element of every tensor is in a piece of exactly one rank.
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
        """A tensor of its shape and type on the meta device: no collective.

        Raises:
            KeyError: there is none.
        """
        ...

    def read(self, wanted: Sequence[TensorShard]) -> None:
        """Read the values of shards of any shape: a collective of all ranks."""
        ...


class TensorStorage(Protocol):
    """The parameters and buffers of a runtime.

    It is asked about tensors of which ``live.is_local``, in the same order on all ranks that share one. A tensor with
    which the runtime did nothing is ``live.tensor``, in every answer.
    """

    def partitioned(self, live: LiveTensor) -> tuple[str, ...]:
        """The mesh dimensions along which ranks hold parts of what the schedule has whole, e.g. ``("dp",)``."""
        ...

    def dtype(self, live: LiveTensor) -> torch.dtype:
        """In which :meth:`read` gives it: the precision that is trained."""
        ...

    def read(self, live: LiveTensor) -> torch.Tensor:
        """This rank's shard, of ``live.layout``'s local shape, in the precision that is trained.

        A collective over the dimensions that partition it. The caller neither changes nor keeps it.
        """
        ...

    def loading(self, live: LiveTensor, value: torch.Tensor) -> Callable[[], None]:
        """Prepare to load a local tensor: no collective, and no change yet.

        Args:
            live: the tensor.
            value: in any precision; its own memory, which may be kept.

        Returns:
            what puts it into its place, in every precision that the runtime keeps. It holds no more of ``value`` than
            this rank keeps of the tensor.
        """
        ...

    def working(self, live: LiveTensor) -> torch.Tensor | None:
        """Return the forward's own copy of a parameter with a separate main copy.

        None where it is the same one, or is assembled for each use.
        """
        ...

    def is_current(self, live: LiveTensor) -> bool:
        """Return whether the forward's copy matches the main copy, as far as this rank can see.

        A write into ``engine.module`` breaks this; the next step overwrites it.
        """
        ...


@runtime_checkable
class OptimizerStorage(Protocol):
    """An optimizer of a runtime, by the model's parameters.

    Attributes:
        kind: the class of the optimizer that computes, e.g. ``"AdamW"``: checkpoints of one load into another of it.
    """

    kind: str

    @property
    def scheduled(self) -> Collection[str]:
        """The settings that the runtime sets again before each step whatever is loaded, e.g. ``("lr",)``.

        It then says what becomes of those of a checkpoint.
        """
        ...

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """As of ``torch.optim.Optimizer``, with the model's own parameters under ``"params"``; not to be changed.

        The groups are those of the user's factory on every rank, also where a rank along ``pp`` has no parameters of
        one: its settings do not count there.
        """
        ...

    def partitioned(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """The mesh dimensions along which ranks hold parts of its state, e.g. ``("dp",)``."""
        ...

    def state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Its state by key: numbers and scalar tensors as they are; for a tensor of the parameter's shape one of that
        shape, which may be without values, on the meta device: :meth:`read` gives them.

        The same keys on every rank that shares the parameter; empty before the first step.
        """
        ...

    def read(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """One tensor of its state, of the parameter's local shape: a collective over what partitions it."""
        ...

    def write(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        """The reverse, for one that is there already; given on every rank, no collective."""
        ...

    def loading(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Callable[[], None]:
        """Make ready to take settings and states: no collective, and nothing changes yet.

        Args:
            groups: settings, in the order of :attr:`param_groups`, without ``"params"``.
            states: of the parameters that shall have one, full local tensors on the CPU; the others shall have
                none. Each is read when it is asked for: take one, keep this rank's part, and go on.

        Returns:
            what puts it into its place, and does not fail.

        Raises:
            BuildError: this optimizer cannot hold it.
        """
        ...


@dataclass(frozen=True)
class LiveTensor:
    """One parameter or buffer of the scheduled model.

    Args:
        path: of the module that holds it, e.g. ``"encoder.layer.0.output.dense"``; the first place of a tied one.
        own_name: its name there, e.g. ``"weight"``.
        tensor: the local tensor. Where the runtime keeps values elsewhere (:class:`TensorStorage`) it may be
            without its values and its shape; ``layout.local_shape(mesh)`` always says that.
        layout: how it lies in the reference tensor; ``layout.origin`` is ``""`` where no single one explains it.
        is_parameter: False for a buffer.
        is_persistent: whether it belongs into a state dict.
        reference_names: first names of its reference tensors: one by a layout, several by a plugin that merged them,
            none for a tensor that a step added.
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
        return f"{self.path}.{self.own_name}" if self.path else self.own_name

    @property
    def reference_name(self) -> str:
        """The reference model's name where there is one; else the tensor's own."""
        return self.layout.origin or self.name


class InPlace:
    """The implementation of :class:`TensorStorage` where the model holds its own tensors.

    DTensors, as torch's ``fully_shard`` makes them, are full over their own mesh for who reads them.
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
    """The implementation of :class:`OptimizerStorage` by an optimizer of the model's tensors.

    The state of a DTensor is of DTensors, as the parameter itself.

    Args:
        optimizer: its parameters are the model's.
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
                f"{self.kind} keeps state of {len(foreign)} tensors that are in none of its groups of parameters",
                hint="give it every parameter whose state it keeps",
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
        return {key: _without_values(value) if is_distributed(value) else value for key, value in state.items()}

    def read(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        return unsharded(self._optimizer.state[parameter][key])

    def write(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        held = self._optimizer.state[parameter][key]
        held.copy_(sharded_like(held, value))

    def put(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        """Replace a tensor of the state by one in its own type, which ``load_state_dict`` does not keep."""
        self._optimizer.state[parameter][key] = self._own(parameter, value.to(parameter.device))

    def loading(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Callable[[], None]:
        """Prepare ``torch.optim.Optimizer.load_state_dict``, with parameters numbered by groups.

        What is returned may fail, because an optimizer may refuse what was read; :meth:`take_back` is for that.
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
        """Give the optimizer the state that it had when this was made."""
        self._optimizer.__setstate__(self._before)

    @staticmethod
    def _own(parameter: torch.Tensor, value: Any) -> Any:
        """Keep this rank's shard of a state tensor of the parameter's shape; anything else as a whole."""
        is_of_its_shape = isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
        return sharded_like(parameter, value) if is_of_its_shape else value


def is_distributed(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor: of torch's ``fully_shard``, or the user's own."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "device_mesh")


def sharded_over(tensor: torch.Tensor) -> tuple[str, ...]:
    """The mesh dimensions that partition a DTensor, by name in its own mesh, else by number; none of a plain one."""
    if not is_distributed(tensor):
        return ()
    own: Any = tensor
    names = own.device_mesh.mesh_dim_names or tuple(map(str, range(own.device_mesh.ndim)))
    return tuple(name for name, one in zip(names, own.placements, strict=True) if not one.is_replicate())


def sharding_groups(tensor: torch.Tensor) -> list[tuple[ProcessGroup, torch.device]]:
    """The process groups over which a DTensor is split, and the devices that they send from; none of a plain one."""
    if not is_distributed(tensor):
        return []
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    split = [number for number, one in enumerate(tensor.placements) if not one.is_replicate() and not one.is_partial()]  # type: ignore[attr-defined]
    return [(mesh.get_group(number), device_of(mesh.device_type)) for number in split if mesh.size(number) > 1]


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full plain tensor of a DTensor: a collective; a plain one is returned as it is."""
    own: Any = tensor
    return own.detach().full_tensor() if is_distributed(own) else own  # type: ignore[no-any-return]


def sharded_like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Shard a full value as a DTensor is sharded: this rank's part alone is kept, without communication.

    Args:
        tensor: of the same shape; a plain one leaves the value as it is.
        value: the same on every rank that shares the tensor.
    """
    if not is_distributed(tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    like: Any = tensor
    own = value.detach().to(like.device)
    return distribute_tensor(own, like.device_mesh, like.placements, src_data_rank=None).clone()


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def optimizer_storage(optimizer: torch.optim.Optimizer | OptimizerStorage | None) -> OptimizerStorage | None:
    """An optimizer in whatever form the state is given it."""
    return TorchOptimizer(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
