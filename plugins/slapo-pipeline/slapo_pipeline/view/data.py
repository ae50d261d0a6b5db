"""The stages of a schedule as they are shown."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from slapo_core.spec.pipeline import Liveness, Partition

__all__ = ["Crossing", "StageView", "Stages"]


@dataclass(frozen=True)
class Crossing:
    """A value on its way from one stage to the next.

    Args:
        name: of the value.
        shape: the number of samples left open where that is known, e.g. ``("batch", "128", "768")``.
        dtype: e.g. ``"float32"``.
        nbytes: for the batch that the stages were made for.
        requires_grad: whether a gradient comes back.
        producer: the stage that makes it; where it is not the one that sends it here, the sender relays it.
        consumers: the stages that read it, of those still to come.
        is_relayed: whether the sender only passes it on.
    """

    name: str
    shape: tuple[str, ...]
    dtype: str
    nbytes: int
    requires_grad: bool
    producer: int
    consumers: tuple[int, ...]
    is_relayed: bool


@dataclass(frozen=True)
class StageView:
    """One stage.

    Args:
        index: from 0.
        first: path of the first module in it.
        last: path of the last one; for all stages but the last one the module after which it is cut.
        parameters: number of elements of the parameters that it uses, of their untouched sizes; ties count in each
            stage that has them.
        tied: names of the parameters among them that other stages use too.
        flops: operations of the forward of this rank, for the batch: two for each multiplication and addition of
            matrix products, convolutions and attention. None where they could not be counted.
        inputs: arguments of the model that it reads from the batch.
        received: what it gets from the stage before.
        sent: what it gives to the next one.
    """

    index: int
    first: str
    last: str
    parameters: int
    tied: tuple[str, ...]
    flops: int | None
    inputs: tuple[str, ...]
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]


@dataclass(frozen=True)
class Stages:
    """The stages of a schedule; ``print`` it.

    Args:
        partition: what the stages are, as dialects see them.
        liveness: what passes between them.
        model: the name of its class.
        batch: what the stages were made for, e.g. ``{"input_ids": "(8, 128) int64"}``.
        stages: in the order in which they run.
        ties: the stages that use it, by the name of a parameter.
        outputs: the stage that makes it, by the name of a piece of the model's output, e.g. ``"loss"``.
        notes: what could not be found out, and why.
    """

    partition: Partition = field(repr=False)
    liveness: Liveness = field(repr=False)
    model: str
    batch: dict[str, str]
    stages: tuple[StageView, ...]
    ties: dict[str, tuple[int, ...]]
    outputs: dict[str, int]
    notes: tuple[str, ...] = ()

    def bytes_sent(self, stage: int) -> int:
        """From a stage to the next one, forward, for the batch that the stages were made for."""
        return sum(crossing.nbytes for crossing in self.stages[stage].sent)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, without the partition's modules."""
        shown = [field.name for field in dataclasses.fields(self) if field.name not in ("partition", "liveness")]
        return {name: _plain(getattr(self, name)) for name in shown}

    def __str__(self) -> str:
        from slapo_pipeline.view.text import text_of

        return text_of(self)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
