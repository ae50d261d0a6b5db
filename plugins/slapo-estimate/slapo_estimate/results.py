"""Estimates, and the assumptions behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from slapo_runtime.receipts.collectives import CollectiveCall as CollectiveCall
from slapo_runtime.receipts.memory import Memory as Memory

if TYPE_CHECKING:
    from slapo_estimate.comparison import Comparison
    from slapo_estimate.device import DeviceSpec
    from slapo_runtime.receipts.observation import Observation


@dataclass(frozen=True)
class RankEstimate:
    """The estimate of one kind of rank.

    Args:
        rank: the global rank that was simulated.
        ranks: all ranks of its kind.
        memory: memory at the peak.
        flops: floating-point operations of a step.
        collectives: collectives of a step, in order.
        time: seconds of a step, by the roofline; None without a device.
        observed: the result of the request's observer.
    """

    rank: int
    ranks: tuple[int, ...]
    memory: Memory
    flops: int
    collectives: tuple[CollectiveCall, ...]
    time: float | None = None
    observed: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Estimate:
    """The result of :func:`slapo_core.estimate`.

    Args:
        mesh: the sizes of the mesh.
        kinds: one estimate for each kind of rank.
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

    def beside(self, observation: Observation) -> Comparison:
        """Return this prediction beside what training steps did; see :meth:`slapo_core.Observation.compare`."""
        from slapo_estimate.comparison import beside

        return beside(self, observation)


Factory: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_ALWAYS = (
    "operations run as on the CPU: kernels of another device may keep more or less for the backward pass",
    "only tensors count: an allocator, cuBLAS and NCCL need more memory",
    "the output of a step is dropped before the next one",
    "compiled code is estimated as uncompiled code, which keeps more",
)


class Assumptions:
    """Collect assumptions while a rank is simulated."""

    def __init__(self) -> None:
        self._found = dict.fromkeys(_ALWAYS)

    def attention(self, device: DeviceSpec | None) -> None:
        """Record the kernel of attention."""
        self._found[
            "attention runs in CUDA's memory-efficient kernel, which keeps no matrix of scores"
            if device is not None and device.type == "cuda"
            else "attention runs as on the CPU: with dropout, or a bias that requires a gradient, the matrix of scores "
            "is kept, which a device of type 'cuda' does not keep"
        ] = None

    def found(self) -> tuple[str, ...]:
        """Return the assumptions in order, each once."""
        return tuple(self._found)

    def integers_are_one(self) -> None:
        """Record that the batch has no values: it is on the meta device or too large to send."""
        self._found["the batch has no values here: its integers are assumed to be 1, and masks to be all ones"] = None

    def seconds(self, device: DeviceSpec) -> None:
        """Record the model of time."""
        self._found[
            f"an operation takes max(FLOPs / peak, bytes / bandwidth) of {device.name}, and a launch; a collective "
            "takes the time of a ring without other traffic"
        ] = None
        if device.type == "cuda":
            self._found[
                "a region that fuse() compiles by inductor is one kernel, which reads its inputs and writes its "
                "results once; what compile() compiles takes the time of uncompiled code"
            ] = None

    def target(self, name: str) -> None:
        """Record the target whose engine takes the step."""
        self._found[
            f"the step is taken by the engine of target {name!r} as on the CPU; tensors that the engine keeps between "
            "steps count as the optimizer's state"
        ] = None

    def replicas(self) -> None:
        """Record the exchange of gradients between replicas."""
        self._found[
            "replicas exchange gradients as DistributedDataParallel does: in persistent buckets, overlapping the "
            "backward pass"
        ] = None

    def shards(self, *, offloads: bool) -> None:
        """Record the exchange of parameters and gradients between replicas that hold shards."""
        self._found[
            "units of fully_shard are gathered while the unit before them computes, and their gradients are reduced "
            "until the end of the backward pass"
        ] = None
        if offloads:
            self._found[
                "what offload=True keeps in the memory of the CPU counts, too, and copies to the device take no time"
            ] = None

    def pipeline(self, microbatches: int, mesh: Mapping[str, int], *, timed: bool, sharded: bool) -> None:
        """Record the micro-batches and waiting times of a pipeline."""
        self._found[f"a step of the pipeline has {microbatches} micro-batches (microbatches={microbatches})"] = None
        if sharded:
            self._found["a step gathers the parameters of stages once, and reduces their gradients once"] = None
        elif mesh.get("dp", 1) > 1:
            self._found["replicas exchange gradients after the pipeline's schedule, in buckets"] = None
        if timed:
            self._found[
                "a pipeline rank waits for one stage pass of each other rank while the pipeline fills and drains; "
                "messages do not overlap computation"
            ] = None

    def without_gradients(self, names: Sequence[str]) -> None:
        """Record trained parameters without a gradient."""
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._found[
                f"'{names[0]}'{others} gets no gradient: on replicas torch refuses the second step, unless "
                "build(find_unused_parameters=True) sends zeros instead"
            ] = None

    def train(self, model: nn.Module) -> None:
        """Put a model in evaluation mode into training mode, as a training step does."""
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            self._found["recurrent layers run step by step: fused kernels (MKL-DNN, cuDNN) keep other tensors"] = None
        if not any(module.training for module in model.modules()):
            model.train()
            self._found["the model is in evaluation mode, and is put into training mode"] = None

    def recording_factory(self, factory: Factory | None) -> Factory | None:
        """Wrap the optimizer's factory to record its default implementation."""
        if factory is None:
            return None

        def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = factory(parameters)
            groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
            if any("foreach" in each and each["foreach"] is None and not each.get("fused") for each in groups):
                self._found[
                    "the optimizer updates parameters one by one, as on the CPU; its default on a GPU updates all at "
                    "once, with temporaries of their size: optimizer=functools.partial(..., foreach=True) counts them"
                ] = None
            return optimizer

        return made

    def no_overflow(self) -> float:
        """Return 0.0 for an unknown number that the engine reads."""
        self._found["numbers that the engine reads (norms, overflows) are assumed to be 0"] = None
        return 0.0

    def number(self) -> float:
        """Return 1.0 for an unknown number that the optimizer reads (the norm of an update)."""
        self._found["numbers that the optimizer reads are assumed to be 1"] = None
        return 1.0
