"""Pipeline stages as plain data: what `slapo_partition` and `slapo_liveness` answer, and dialects and ``verify`` read.

A model that is cut after ``n - 1`` of its modules has ``n`` stages, which compute what its forward computes when they
run one after the other. A stage reads some of the model's own arguments (from the batch, which every rank has), and
some values that earlier stages made. Which of these stand on the way from one stage to the next is liveness: a value
that a stage far behind uses is relayed by those between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Liveness", "Output", "Partition", "Stage", "StageModule", "Tie", "Value"]


@dataclass(frozen=True)
class Value:
    """A tensor that one stage makes, and later ones, or the model's output, use.

    Args:
        name: as the stages have it, e.g. ``"bert_encoder_layer_5"``.
        producer: the stage that makes it.
        consumers: the stages that read it, in order; all of them come later. Without those that only relay it, and
            without the output.
        shape: for the batch that the stages were made for.
        dtype: of its elements.
        requires_grad: whether a gradient flows back through it.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Its size in bytes, for the batch that the stages were made for."""
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize


class StageModule(nn.Module, ABC):
    """One stage, ready to run: it holds its part of the model at the reference paths.

    ``stage.get_submodule("bert.encoder.layer.3")`` is the module of the scheduled model, the same object, with what
    steps did to it. Modules that lie above a cut are no calls any more: what stands at their paths only holds what is
    below, and the parameters of its own that the stage reads.
    """

    @abstractmethod
    def forward(self, inputs: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute what the stage makes.

        Args:
            inputs: the model's arguments that :attr:`Stage.inputs` names; others are ignored.
            values: what :attr:`Stage.uses` names; others are ignored.

        Returns:
            what :attr:`Stage.makes` names.

        Raises:
            GuardError: the stages were not made for such a call.
        """


@dataclass(frozen=True)
class Stage:
    """A part of the model.

    Args:
        index: from 0, in the order in which the stages run.
        module: runs it.
        inputs: parameters of the model's forward whose arguments it reads, e.g. ``("input_ids",)``.
        uses: names of values of earlier stages that it reads.
        makes: names of values that it makes.
        last: path of the module after which it was cut; None for the last stage.
    """

    index: int
    module: StageModule = field(repr=False)
    inputs: tuple[str, ...]
    uses: tuple[str, ...]
    makes: tuple[str, ...]
    last: str | None = None


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages use: equal at the start, its gradient is the sum of theirs.

    Args:
        name: its first name in the scheduled model, e.g. ``"bert.embeddings.word_embeddings.weight"``.
        stages: that use it, in order.
    """

    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """The model's output, assembled from the stages' values.

    Args:
        names: of the values, each of :attr:`Partition.values`; several stages may make them.
        assemble: makes the output of its values by name: of tensors, or of anything in their place. A missing value is
            None there.
    """

    names: tuple[str, ...]
    assemble: Callable[[Mapping[str, Any]], Any] = field(repr=False)

    @property
    def loss(self) -> str | None:
        """The name of the value that is the model's own loss: the output itself, or its ``loss``; None without one."""
        names = self.assemble({name: name for name in self.names})
        if isinstance(names, str):
            return names
        found = getattr(names, "loss", None)
        if found is None and isinstance(names, Mapping):
            found = names.get("loss")
        return found if isinstance(found, str) and found in self.names else None


@dataclass(frozen=True)
class Partition:
    """The stages of a model, for one input signature and one mode: the answer of `slapo_partition`.

    Args:
        stages: in the order in which they run.
        values: everything that stages read of each other, and the values of the output, by name.
        ties: parameters that several stages use.
        output: of the model.
        bind: makes the same partition of copies of the model, one for each stage, whose modules and tensors it finds
            by name; it gives None where this one holds for its own model only. Without ``bind``, the hook is called
            for every copy.
    """

    stages: tuple[Stage, ...]
    values: Mapping[str, Value]
    ties: tuple[Tie, ...]
    output: Output
    bind: Callable[[Sequence[nn.Module]], Partition | None] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Liveness:
    """The values sent from each stage to the next: the answer of `slapo_liveness`.

    Args:
        boundaries: for each stage but the last: names of the values that it sends to the next one, in an order that is
            the same on every rank. Those that it only relays are among them.
    """

    boundaries: tuple[tuple[str, ...], ...]

    def received(self, stage: int) -> tuple[str, ...]:
        """Return the values that a stage receives."""
        return self.boundaries[stage - 1] if stage > 0 else ()

    def sent(self, stage: int) -> tuple[str, ...]:
        """Return the values that a stage sends."""
        return self.boundaries[stage] if stage < len(self.boundaries) else ()
