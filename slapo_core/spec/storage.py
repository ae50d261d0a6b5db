"""Where a runtime keeps values that the model's own tensors, and a torch optimizer, do not hold.

ZeRO partitions parameters and the optimizer's state over replicas; mixed precision trains masters of a higher one.
State dicts, checkpoints and the comparison of replicas then ask the runtime, by these two protocols, for what this
rank's place in the schedule would hold without it: the piece that the layout says, whole along ``dp``.

``request.state.keep_in(storage)`` says where the tensors are, and ``save``, ``load`` and ``check_replicas`` of the
state take an :class:`OptimizerStorage` wherever they take an optimizer of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.state import LiveTensor

__all__ = ["OptimizerStorage", "TensorStorage"]


class TensorStorage(Protocol):
    """The parameters and buffers of a runtime.

    It is asked about tensors of which ``live.is_here``, in the same order on all ranks that share one. A tensor with
    which the runtime did nothing is ``live.tensor``, in every answer.
    """

    def partitioned(self, live: LiveTensor) -> tuple[str, ...]:
        """The mesh dimensions along which ranks hold parts of what the schedule has whole, e.g. ``("dp",)``."""
        ...

    def dtype(self, live: LiveTensor) -> torch.dtype:
        """In which :meth:`read` gives it: the precision that is trained."""
        ...

    def read(self, live: LiveTensor) -> torch.Tensor:
        """This rank's piece, of ``live.layout``'s local shape, in the precision that is trained.

        A collective over the dimensions that partition it. The caller neither changes nor keeps it.
        """
        ...

    def loading(self, live: LiveTensor, value: torch.Tensor) -> Callable[[], None]:
        """Make ready to take a piece of that shape, given on every rank: no collective, and nothing changes yet.

        Args:
            live: the tensor.
            value: in any precision; its own memory, which may be kept.

        Returns:
            what puts it into its place, in every precision that the runtime keeps. It holds no more of ``value`` than
            this rank keeps of the tensor.
        """
        ...

    def working(self, live: LiveTensor) -> torch.Tensor | None:
        """What the forward computes with, whole on this rank, where it is another tensor than what is trained.

        None where it is the same one, or is put together anew for each use.
        """
        ...

    def is_current(self, live: LiveTensor) -> bool:
        """Whether what the forward computes with is what is trained, as far as this rank alone can see.

        It is not where somebody wrote into ``engine.module``: the next step takes that back.
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
        """The settings that the runtime sets anew before each step whatever is loaded, e.g. ``("lr",)``.

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
            states: of the parameters that shall have one, whole pieces in the memory of the CPU; the others shall have
                none. Each is read when it is asked for: take one, keep this rank's part, and go on.

        Returns:
            what puts it into its place, and does not fail.

        Raises:
            BuildError: this optimizer cannot hold it.
        """
        ...
