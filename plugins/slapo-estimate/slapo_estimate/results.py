"""What an estimate says, and what it assumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

if TYPE_CHECKING:
    from slapo_estimate.device import DeviceSpec


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


Factory: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_ALWAYS = (
    "operations are those of torch on the CPU: on another device a kernel may keep more or less for the backward pass",
    "bytes are those of tensors, without the overhead of an allocator, cuBLAS or NCCL",
    "the output of a step is dropped before the next one",
    "compiled code is estimated as uncompiled: the compiler fuses, and keeps less",
)


class Assumptions:
    """Collects the assumptions while a rank is simulated."""

    def __init__(self) -> None:
        self._found = dict.fromkeys(_ALWAYS)

    def attention(self, device: DeviceSpec | None) -> None:
        """Record the kernel that attention runs in."""
        self._found[
            "attention runs in the memory-efficient kernel of CUDA, which keeps no matrix"
            if device is not None and device.type == "cuda"
            else "attention runs as on the CPU: with dropout, or a bias that needs a gradient, its matrix is kept; on "
            "a device of type 'cuda' it is not"
        ] = None

    def found(self) -> tuple[str, ...]:
        """List the assumptions, in order, each once."""
        return tuple(self._found)

    def integers_are_one(self) -> None:
        """Record that the batch has no values: it is on the meta device, or too large to be sent."""
        self._found["integers of the batch, which has no values here, are taken to be 1: masks mask nothing"] = None

    def seconds(self, device: DeviceSpec) -> None:
        """Record how time is predicted."""
        self._found[
            f"an operation takes as long as its products at the peak of {device.name}, or its bytes at its bandwidth, "
            "and a launch; a collective as long as a ring does, and nothing else is on its links"
        ] = None

    def target(self, name: str) -> None:
        """Record whose engine the step is of."""
        self._found[
            f"the step is that of target {name!r}, by its own engine as it runs on the CPU; what it keeps between "
            "steps beside the parameters counts as the optimizer's"
        ] = None
        self._found["numbers that the engine reads (norms, overflows) are taken to be 0"] = None

    def replicas(self) -> None:
        """Record how replicas exchange gradients."""
        self._found[
            "replicas exchange gradients as DistributedDataParallel does: in buckets of 25 MiB that stay, "
            "overlapping the backward pass"
        ] = None

    def pipeline(self, microbatches: int, mesh: Mapping[str, int], *, timed: bool) -> None:
        """Record how the pipeline runs."""
        self._found[f"a step of the pipeline has {microbatches} micro-batches (microbatches={microbatches})"] = None
        if mesh.get("dp", 1) > 1:
            self._found["replicas exchange gradients after the pipeline's schedule, in buckets"] = None
        if timed:
            self._found[
                "a pipeline rank waits for one stage pass of each other rank while the pipeline fills and drains; its "
                "messages are on their way while nothing else is computed"
            ] = None

    def without_gradients(self, names: Sequence[str]) -> None:
        """Record trained parameters that get no gradient."""
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._found[
                f"'{names[0]}'{others} gets no gradient: on replicas torch refuses the second step, unless build is "
                "given find_unused_parameters=True, which sends zeros in its place"
            ] = None

    def train(self, model: nn.Module) -> None:
        """Put a model that is entirely in evaluation mode into training mode, as a training step does."""
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            self._found["recurrent layers run step by step: fused kernels (MKL-DNN, cuDNN) keep other bytes"] = None
        if not any(module.training for module in model.modules()):
            model.train()
            self._found["the model, which is in evaluation mode as a whole, is put into training mode"] = None

    def told_of(self, factory: Factory | None) -> Factory | None:
        """Wrap the optimizer's factory to record how the optimizer runs."""
        if factory is None:
            return None

        def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = factory(parameters)
            groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
            if any("foreach" in each and each["foreach"] is None and not each.get("fused") for each in groups):
                self._found[
                    "the optimizer takes parameters one by one, as on the CPU; on a GPU its default takes all at once, "
                    "with temporaries of their size: optimizer=functools.partial(..., foreach=True) counts them"
                ] = None
            return optimizer

        return made

    def number(self) -> float:
        """Return 1.0 for a number that the optimizer reads without a known value (the norm of an update): a factor."""
        self._found["numbers that the optimizer reads are taken to be 1"] = None
        return 1.0
