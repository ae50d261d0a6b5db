"""A model's state in the reference layout: live tensors, runtime storages, sharded checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from slapo_core.layout import Layout

__all__ = [
    "LiveTensor",
    "ModelState",
    "OptimizerStorage",
    "Placement",
    "ShardSource",
    "ShardedState",
    "TensorShard",
    "TensorStorage",
]


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
    """

    reference: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    added: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

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
        tensor: the local tensor. Where the runtime keeps values elsewhere (:mod:`slapo_runtime.state`) it may be
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


class ModelState(Protocol):
    """The state of a scheduled model, by the reference model's names, shapes and layout.

    All methods are collectives where the mesh has several ranks: every rank calls them, in the same order.
    """

    def tensors(self) -> tuple[LiveTensor, ...]:
        """Return every live parameter and buffer once, in registration order."""
        ...

    def keep_in(self, storage: TensorStorage) -> None:
        """Use a runtime's storage of tensors from now on; called by a dialect during the build.

        Tensors that it partitions over replicas are not compared along ``dp``, only along the other dimensions.
        """
        ...

    def check_replicas(
        self, *, optimizer: torch.optim.Optimizer | OptimizerStorage | None = None, repair: bool = False
    ) -> None:
        """Compare replicas bit for bit: a collective over the mesh.

        Parameters, and buffers but for the running statistics of replicas; the state and the settings of an optimizer;
        and, where training steps use the RNG, torch's random state over ``tp``. Of a runtime that trains other
        tensors than the forward computes with, both.

        Args:
            optimizer: over the model's parameters.
            repair: give every rank the values of the first one that holds a copy, with a warning that says what
                differed, instead of an error.

        Raises:
            RankMismatchError: on every rank; it names the tensors, the ranks and what each of them holds. Also where
                the forward computes with something else than what is trained.
        """
        ...

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
        """Return the reference model's state dict: copies on the CPU, in its keys' order and types.

        Args:
            rank0_only: other ranks take part but return an empty dictionary.
            include_added: also give what a step added, under its own name; without, a warning names it once.

        Raises:
            RankMismatchError: replicas differ between ranks of a tensor. It is compared where putting tensors together
                takes all ranks anyway, and with ``rank0_only``.
        """
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """The reverse: every rank copies its own shards into the live tensors.

        Raises:
            WeightsError: missing or unexpected names, or other shapes; nothing was changed.
        """
        ...

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        runtime: Mapping[str, Any] | None = None,
    ) -> None:
        """Save weights and optimizer state, for any schedule and target of the same model.

        Args:
            directory: made if it is not there; a checkpoint in it is replaced as a whole.
            optimizer: over the model's parameters.
            runtime: what else the runtime needs to go on, as JSON, by name: ``{"lr_scheduler": {...}}``. Under
                ``"counters"`` comes what nothing depends on, such as how many steps there were.

        Raises:
            ReplicaError: as :meth:`check_replicas` says; what was written is whole, with the first rank's values.
            BuildError: the optimizer, or ``runtime``, holds something that has no place in a checkpoint, or writing
                failed.
        """
        ...

    def load(
        self,
        directory: str | os.PathLike[str],
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        uses: Collection[str] = (),
    ) -> dict[str, Any]:
        """Read what :meth:`save` wrote.

        Args:
            directory: that of :meth:`save`.
            optimizer: over the model's parameters.
            uses: the names in ``runtime`` that the caller makes use of; a warning names the others of the checkpoint,
                but for ``"counters"``.

        Returns:
            the ``runtime`` of the checkpoint, ``{}`` without one.

        Raises:
            WeightsError: no complete checkpoint, or of another model; nothing was changed.
            BuildError: the optimizer's state does not fit this optimizer; nothing was changed.
        """
        ...

    def shards(
        self,
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        runtime: Mapping[str, Any] | None = None,
    ) -> ShardedState:
        """Return this rank's shards of a checkpoint, for a runtime with its own files.

        Args:
            optimizer: over the model's parameters.
            runtime: as for :meth:`save`.

        Raises:
            RankMismatchError: as :meth:`check_replicas` says.
            BuildError: the optimizer, or ``runtime``, holds something that has no place in a checkpoint.
        """
        ...

    def load_shards(
        self,
        description: Mapping[str, Any],
        source: ShardSource,
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        uses: Collection[str] = (),
    ) -> dict[str, Any]:
        """The reverse of :meth:`shards`, which gave the description.

        ``source`` is asked once, for all that this rank wants. Arguments, result and errors are those of :meth:`load`.
        """
        ...
