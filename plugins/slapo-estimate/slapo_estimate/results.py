"""What an estimate says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device at the moment of the step when most are held.

    They are those of tensors. A caching allocator rounds each up (CUDA's to 512 bytes) and keeps what is free;
    libraries have work space of their own (cuBLAS, NCCL), and so does the process: leave room for that.

    Args:
        parameters: of the model.
        buffers: of the model.
        gradients: of the parameters.
        optimizer: the optimizer's state.
        activations: kept by the forward pass for the backward pass, or still in use by it.
        temporaries: made by the backward pass, or within the optimizer's step.
        inputs: the batch.
        module: path of the module that ran; ``""`` for the model itself, ``"optimizer"`` for the optimizer's step.
        phase: ``"forward"``, ``"backward"``, ``"recomputation"`` (of what is checkpointed) or ``"optimizer"``.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporaries: int = 0
    inputs: int = 0
    module: str = ""
    phase: str = "forward"

    @property
    def total(self) -> int:
        """Their sum, in bytes."""
        return (
            self.parameters
            + self.buffers
            + self.gradients
            + self.optimizer
            + self.activations
            + self.temporaries
            + self.inputs
        )


@dataclass(frozen=True)
class Collective:
    """One communication of a step.

    Args:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"``, ``"send"``
        mesh_dim: the mesh dimension of its group; ``""`` for another group.
        ranks: the size of the group.
        bytes: of the tensor that this rank gives.
        module: path of the module within which it happens.
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        record: the step of the schedule that caused it, as in ``str(record)``; empty if the model did so itself.
    """

    kind: str
    mesh_dim: str
    ranks: int
    bytes: int
    module: str
    phase: str
    record: str = ""


@dataclass(frozen=True)
class RankEstimate:
    """The estimate of one kind of rank.

    Args:
        rank: the global rank that was simulated.
        ranks: all ranks of its kind.
        memory: at the peak.
        flops: floating-point operations of a step.
        collectives: of a step, in order.
        time: seconds of a step, by the roofline; None without a device.
        observed: the result of the request's observer.
    """

    rank: int
    ranks: tuple[int, ...]
    memory: Memory
    flops: int
    collectives: tuple[Collective, ...]
    time: float | None = None
    observed: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Estimate:
    """The result of :func:`slapo_core.estimate`.

    Args:
        mesh: the sizes of the mesh.
        kinds: one for each kind of rank.
        assumptions: as sentences.
    """

    mesh: Mapping[str, int]
    kinds: tuple[RankEstimate, ...]
    assumptions: tuple[str, ...] = field(default_factory=tuple)

    @property
    def memory(self) -> Memory:
        """Memory of the rank that needs most."""
        return max((kind.memory for kind in self.kinds), key=lambda memory: memory.total)

    @property
    def time(self) -> float | None:
        """Seconds of a step, of the slowest rank; None without a device."""
        times = [kind.time for kind in self.kinds if kind.time is not None]
        return max(times) if times else None
