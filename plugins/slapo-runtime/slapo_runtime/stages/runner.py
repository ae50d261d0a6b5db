"""Run the stages of a pipeline rank, micro-batch by micro-batch."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from slapo_runtime.stages.p2p_packing import P2PMessage, attached, common_dtype

if TYPE_CHECKING:
    from slapo_runtime.context import BuildContext, StagedBatch
    from slapo_runtime.stages import StagedModel
    from slapo_runtime.stages.partition import Partition, Stage


@dataclass(frozen=True)
class ModelChunk:
    """Adjacent stages of one rank, between a received and a sent message.

    Args:
        stages: in execution order.
        coming: the message from the previous rank; None on the first chunk.
        going: the message to the next rank; None on the last chunk.
    """

    stages: tuple[Stage, ...]
    coming: P2PMessage | None
    going: P2PMessage | None

    @property
    def is_last(self) -> bool:
        """Whether the chunk computes the loss."""
        return self.going is None


class SignatureFacts:
    """Facts of the first step about an input signature, the same on all ranks.

    Attributes:
        loss_dtype: of the loss; None before the first step.
        uses_rng: whether a stage uses the RNG; None before the first step.
    """

    loss_dtype: torch.dtype | None = None
    uses_rng: bool | None = None


class RankStages(SignatureFacts):
    """The stages and messages of this rank for one input signature.

    Args:
        staged: the stages of all ranks.
        stage_ranks: the rank along ``pp`` of each stage.
        rank: this rank.
        device: of the stages.
        training: whether gradients are sent back.
        joined: whether all values of a boundary are packed into one floating tensor, of one type on all boundaries, and
            with a gradient for each message.

    Attributes:
        staged: the stages of all ranks.
        partition: of the model.
        chunks: of this rank, in the order of the stages.
        messages: by the stage before each boundary between ranks; the same on all ranks.
    """

    def __init__(
        self,
        staged: StagedModel,
        stage_ranks: Sequence[int],
        rank: int,
        device: torch.device,
        *,
        training: bool,
        joined: bool = False,
    ) -> None:
        self.staged = staged
        self.partition: Partition = staged.partition
        self.device = device
        sent = {
            index: [self.partition.values[name] for name in staged.liveness.sent(index)]
            for index, other in enumerate(stage_ranks[:-1])
            if stage_ranks[index + 1] != other
        }
        dtype = common_dtype(value for values in sent.values() for value in values) if joined else None
        self.messages: dict[int, P2PMessage] = {}
        back = False
        for index, values in sent.items():
            message = P2PMessage(values, backward=training and back, joined=joined, dtype=dtype)
            back, self.messages[index] = message.carries_gradient, message
        self.chunks = list(self._chunks(stage_ranks, rank))

    def _chunks(self, stage_ranks: Sequence[int], rank: int) -> list[ModelChunk]:
        found: list[ModelChunk] = []
        stages: list[Stage] = []
        for stage in self.partition.stages:
            if stage_ranks[stage.index] == rank:
                stages.append(stage)
            if stages and (stage.index in self.messages or stage.index == len(stage_ranks) - 1):
                coming, going = self.messages.get(stages[0].index - 1), self.messages.get(stages[-1].index)
                found.append(ModelChunk(tuple(stages), coming, going))
                stages = []
        return found


class SeededWork:
    """One step of stages, with an RNG stream per stage and micro-batch.

    Attributes:
        seed: of the streams; None uses torch's default generator.
        drew: whether a stage used its stream.
    """

    seed: int | None
    drew: bool

    def run(
        self,
        stage: Stage,
        inputs: Mapping[str, Any],
        there: Mapping[str, torch.Tensor],
        number: int,
        device: torch.device,
    ) -> Mapping[str, torch.Tensor]:
        """Run a stage with its own RNG stream, the same when recomputed.

        Args:
            stage: of the partition.
            inputs: the model's arguments of the micro-batch.
            there: values of earlier stages.
            number: of the micro-batch.
            device: of the stage.
        """
        own = {name: inputs[name] for name in stage.inputs if name in inputs}
        values = {name: there[name] for name in stage.uses}
        stream = None
        if self.seed is not None:
            stream = start_stream(self.seed, stage.index, number, device, watched=not self.drew)
        made: Mapping[str, torch.Tensor] = stage.module(own, values)
        if stream is not None:
            self.drew = was_used(stream, device)
        return made


class Work(SeededWork):
    """One step of a model chunk: the micro-batches of one batch.

    Args:
        stages: of this rank, for the micro-batches.
        chunk: one of the stages' chunks.
        batch: cut into micro-batches.
        at: called with the present work, for the message of an error.

    Attributes:
        stages: of this rank, for the micro-batches.
        chunk: one of the stages' chunks.
        seed: of the stages' RNG streams; None uses torch's default generator.
        drew: whether a stage used its stream.
    """

    def __init__(
        self,
        stages: RankStages,
        chunk: ModelChunk,
        batch: StagedBatch,
        at: Callable[[str], None],
    ) -> None:
        self.stages, self.chunk, self._batch, self._at = stages, chunk, batch, at
        self.seed: int | None = None
        self.drew = bool(stages.uses_rng)
        self._names: list[str] = []  # values of the output on the last rank

    def forward(self, received: tuple[torch.Tensor, ...], number: int) -> tuple[torch.Tensor, ...]:
        """Run the forwards of the chunk's stages.

        Args:
            received: the message of the previous rank; empty on the first chunk.
            number: of the micro-batch.

        Returns:
            the message to the next rank; on the last chunk the argument of :meth:`loss`.
        """
        chunk = self.chunk
        there, link = chunk.coming.unpack(received) if chunk.coming is not None else ({}, None)
        inputs = self._batch.inputs[number]
        for stage in chunk.stages:
            self._at(f"stage {stage.index} in the forward of micro-batch {number}")
            there.update(self.run(stage, inputs, there, number, self.stages.device))
        if chunk.going is not None:
            last = f"stage {chunk.stages[-1].index}"
            return chunk.going.pack(
                there,
                link,
                sender=last,
                device=self.stages.device,
                backward_begins=lambda: self._at(f"{last} in the backward of micro-batch {number}"),
            )
        self._names = [name for name in self.stages.partition.output.names if name in there]
        values = tuple(there[name] for name in self._names)
        return values if link is None else (link, *values)

    def loss(self, outputs: tuple[torch.Tensor, ...], number: int) -> torch.Tensor:
        """Compute the loss of a micro-batch, right after its forward.

        Args:
            outputs: of :meth:`forward` on the last chunk.
            number: of the micro-batch.
        """
        last = f"stage {self.chunk.stages[-1].index}"
        self._at(f"{last} in the loss of micro-batch {number}")
        link = outputs[0] if len(outputs) > len(self._names) else None
        values = outputs if link is None else outputs[1:]
        loss = attached(self._batch.loss(number, dict(zip(self._names, values, strict=True))), link)
        self._at(f"{last} in the backward of micro-batch {number}")
        return loss


_KEPT = 16

F = TypeVar("F")


class StageCache(Generic[F]):
    """Cut batches, and cache the stages for the most recent input signatures.

    Args:
        context: from ``build``.
        count: of micro-batches.
        axes: of the batch; see the hook `slapo_partition`.
        option: of the runtime for the count, for messages.
        make: makes a rank's stages, for training or not.
        prepare: as for :meth:`slapo_runtime.context.BuildContext.staged`.
    """

    def __init__(
        self,
        context: BuildContext,
        count: int,
        axes: Mapping[str, int | None] | None,
        option: str,
        make: Callable[[StagedModel, bool], F],
        prepare: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        self._context, self._count, self._axes, self._option, self._make = context, count, axes, option, make
        self._prepare = prepare
        self._kept: OrderedDict[tuple[int, bool], tuple[StagedModel, F]] = (
            OrderedDict()
        )  # the staged model keeps its id

    def of(self, batch: Any, *, training: bool) -> tuple[StagedBatch, F]:
        """Cut a batch into micro-batches, and return them with their stages.

        Raises:
            BuildError: it cannot be cut into micro-batches; its number of stages differs; or there is no loss.
            TraceError: the model cannot be cut for it.
        """
        cut = self._context.staged(
            batch, self._count, training=training, axes=self._axes, option=self._option, prepare=self._prepare
        )
        key = (id(cut.staged), training)
        if key not in self._kept:
            self._kept[key] = cut.staged, self._make(cut.staged, training)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return cut, self._kept[key][1]

    def close(self) -> None:
        """Release everything."""
        self._kept.clear()


@contextlib.contextmanager
def step_seed(device: torch.device) -> Iterator[int]:
    """Give the seed of a step; restore the default generators afterwards.

    Args:
        device: of the stages; the CPU's generator is restored, too.
    """
    looking_ahead = torch.Generator()
    looking_ahead.set_state(torch.default_generator.get_state())
    seed = int(torch.randint(1 << 62, (), generator=looking_ahead, device="cpu"))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if device.type == "cpu" else device.type):
        yield seed


def advance() -> None:
    """Advance the default generator past the number that seeded this step."""
    torch.randint(1 << 62, (), device="cpu")


def start_stream(
    seed: int, stage: int, number: int, device: torch.device, *, watched: bool
) -> list[torch.Tensor] | None:
    """Seed the stream of a stage and a micro-batch, independently of the schedule.

    Args:
        seed: of the step.
        stage: its index.
        number: of the micro-batch.
        device: of the stage; the CPU's generator is seeded, too.
        watched: whether to return the argument of :func:`was_used`.

    Returns:
        the state of the stream; None if not watched.
    """
    own = hash((seed, stage, number)) & ((1 << 63) - 1)
    torch.default_generator.manual_seed(own)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        with module.device(device):  # the current device is seeded
            module.manual_seed(own)
    return _states(device) if watched else None


def was_used(since: list[torch.Tensor], device: torch.device) -> bool:
    """Return whether the stream was used since it began."""
    return not all(map(torch.equal, since, _states(device)))


def _states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states
