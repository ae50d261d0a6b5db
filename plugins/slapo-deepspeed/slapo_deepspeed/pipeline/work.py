"""What one rank computes of each micro-batch: its stages, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.spec.drawing import has_drawn, start_stream
from slapo_deepspeed.pipeline.bare import touched
from slapo_deepspeed.pipeline.packing import Parcel, attached

if TYPE_CHECKING:
    from slapo_core.spec.pipeline import Partition, Stage
    from slapo_core.spec.request import StagedBatch, StagedModel

__all__ = ["Form", "Work"]


class Form:
    """The stages of this rank for one form of a micro-batch, and what it is sent and sends.

    Args:
        staged: of all ranks.
        stage_ranks: the rank along ``pp`` of each stage; neighbours share one.
        rank: this one.
        device: where stages compute.
        training: whether gradients go back.
        bare: the ranks along ``pp`` that train nothing.
    """

    def __init__(
        self,
        staged: StagedModel,
        stage_ranks: Sequence[int],
        rank: int,
        device: torch.device,
        *,
        training: bool,
        bare: Collection[int] = (),
    ) -> None:
        self.staged = staged  # kept, so that its identity is its own
        self.partition: Partition = staged.partition
        self.device = device
        self.stages: list[Stage] = [one for one in self.partition.stages if stage_ranks[one.index] == rank]
        loss = self.partition.values.get(self.partition.output.loss or "")
        self.loss_dtype = torch.float32 if loss is None else loss.dtype
        self.is_last = self.stages[-1].index == len(self.partition.stages) - 1
        parcels: list[Parcel] = []
        for index, other in enumerate(stage_ranks[:-1]):
            if stage_ranks[index + 1] != other:  # what goes to another rank
                values = [self.partition.values[name] for name in staged.liveness.sent(index)]
                backward = training and (other in bare or (bool(parcels) and parcels[-1].carries_gradient))
                parcels.append(Parcel(values, backward=backward))
        self.coming = parcels[rank - 1] if rank else None
        self.going = None if self.is_last else parcels[rank]
        self._received = self.coming.empty(device) if self.coming is not None else ()
        self._gradients = [one for one in self.going.empty(device) if one.is_floating_point()] if self.going else []

    @property
    def received(self) -> tuple[torch.Tensor, ...]:
        """Where the tuple is received that comes from the rank before."""
        return self._received

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Where the gradients are received that come back."""
        return self._gradients


class Work:
    """One step: the micro-batches of one batch through the stages of this rank.

    Args:
        form: of its micro-batches.
        batch: cut.
        at: is told what runs, for the message of an error.
        stand_in: what a rank trains where nothing else is trained.

    Attributes:
        seed: of the random numbers that stages draw; None leaves torch's streams as they are.
        drew: whether a stage drew some.
    """

    def __init__(
        self, form: Form, batch: StagedBatch, at: Callable[[str], None], stand_in: nn.Parameter | None = None
    ) -> None:
        self.form, self._batch, self._at, self._stand_in = form, batch, at, stand_in
        self.seed: int | None = None
        self.drew = False
        self._count = 0
        self._names: list[str] = []  # pieces of the output that the last rank has

    def next_number(self) -> int:
        """Of the micro-batch whose forward comes: they come in order on every rank."""
        self._count += 1
        return self._count - 1

    def forward(self, received: tuple[torch.Tensor, ...], number: int) -> tuple[torch.Tensor, ...]:
        """The passes of this rank's stages.

        Args:
            received: of the rank before; empty on the first one.
            number: of the micro-batch.

        Returns:
            what is sent to the next rank; on the last one what :meth:`loss` takes.
        """
        form = self.form
        there, link = form.coming.unpack(received) if form.coming is not None else ({}, None)
        if self._stand_in is not None and torch.is_grad_enabled():
            link = touched(link, self._stand_in)
        inputs = self._batch.inputs[number]
        for stage in form.stages:
            self._at(f"stage {stage.index} in the forward of micro-batch {number}")
            there.update(self._made(stage, inputs, there, number))
        if form.going is not None:
            last = f"stage {form.stages[-1].index}"
            return form.going.pack(
                there,
                link,
                sender=last,
                device=form.device,
                backward_begins=lambda: self._at(f"{last} in the backward of micro-batch {number}"),
            )
        self._names = [name for name in form.partition.output.pieces if name in there]
        pieces = tuple(there[name] for name in self._names)
        return pieces if link is None else (link, *pieces)

    def _made(
        self, stage: Stage, inputs: Mapping[str, Any], there: Mapping[str, torch.Tensor], number: int
    ) -> Mapping[str, torch.Tensor]:
        """What a stage makes, with a stream of random numbers of its own: the same one when it is computed again."""
        own = {name: inputs[name] for name in stage.inputs if name in inputs}
        values = {name: there[name] for name in stage.uses}
        stream = None if self.seed is None else start_stream(self.seed, stage.index, number, self.form.device)
        made: Mapping[str, torch.Tensor] = stage.module(own, values)
        if stream is not None and not self.drew:
            self.drew = has_drawn(stream, self.form.device)
        return made

    def loss(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Of the micro-batch that came last, from what :meth:`forward` gave on the last rank."""
        number = self._count - 1
        last = f"stage {self.form.stages[-1].index}"
        self._at(f"{last} in the loss of micro-batch {number}")
        link = outputs[0] if len(outputs) > len(self._names) else None
        pieces = outputs if link is None else outputs[1:]
        loss = attached(self._batch.loss(number, dict(zip(self._names, pieces, strict=True))), link)
        self._at(f"{last} in the backward of micro-batch {number}")
        return loss
