"""Pipeline stages as plain data: the answers of `slapo_partition` and `slapo_liveness`.

A model that is cut after ``n - 1`` of its modules has ``n`` stages, which compute its forward one after the other. A
stage reads some of the model's own arguments (from the batch, which every rank has), and some values of earlier stages.
Liveness lists the values sent from each stage to the next: a value for a later stage is relayed by the stages between.
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
    """A tensor that one stage makes for later ones, or for the model's output.

    Args:
        name: unique in the partition, e.g. ``"bert_encoder_layer_5"``.
        producer: the stage that makes it.
        consumers: the later stages that read it, in order, without stages that only relay it, and without the output.
        shape: for the batch of the partition.
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
        """Its size in bytes, for the batch of the partition."""
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize


class StageModule(nn.Module, ABC):
    """One stage, ready to run, with its modules at the reference paths.

    ``stage.get_submodule("bert.encoder.layer.3")`` is the scheduled model's module, the same object. Modules above a
    cut are not called any more: at their paths are containers of their submodules, and of their own parameters that
    the stage reads.
    """

    @abstractmethod
    def forward(self, inputs: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the stage's values.

        Args:
            inputs: the model's arguments in :attr:`Stage.inputs`; others are ignored.
            values: of earlier stages, in :attr:`Stage.uses`; others are ignored.

        Returns:
            the values in :attr:`Stage.makes`.

        Raises:
            GuardError: the stages were made for another input signature.
        """


@dataclass(frozen=True)
class Stage:
    """A part of the model.

    Args:
        index: from 0, in execution order.
        module: runs it.
        inputs: names of the model's arguments that it reads, e.g. ``("input_ids",)``.
        uses: names of values of earlier stages that it reads.
        makes: names of its own values.
        last: path of its last module, after which the model is cut; None for the last stage.
    """

    index: int
    module: StageModule = field(repr=False)
    inputs: tuple[str, ...]
    uses: tuple[str, ...]
    makes: tuple[str, ...]
    last: str | None = None


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages use, with the sum of their gradients.

    Args:
        name: its first name in the scheduled model, e.g. ``"bert.embeddings.word_embeddings.weight"``.
        stages: the users, in order.
    """

    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """The model's output, assembled from the stages' values.

    Args:
        names: of the values, each of :attr:`Partition.values`; several stages may make them.
        assemble: makes the output from its values by name: from tensors, or other objects instead. A missing value is
            None.
    """

    names: tuple[str, ...]
    assemble: Callable[[Mapping[str, Any]], Any] = field(repr=False)

    @property
    def loss(self) -> str | None:
        """The name of the model's own loss; None without one."""
        names = self.assemble({name: name for name in self.names})
        if isinstance(names, str):
            return names
        found = getattr(names, "loss", None)
        if found is None and isinstance(names, Mapping):
            found = names.get("loss")
        return found if isinstance(found, str) and found in self.names else None


@dataclass(frozen=True)
class Partition:
    """The stages for one input signature and mode: the answer of `slapo_partition`.

    Args:
        stages: in execution order.
        values: of stages for other stages and for the output, by name.
        ties: parameters that several stages use.
        output: of the model.
        bind: makes the same partition of copies of the model, one for each stage, by the names of modules and tensors;
            it returns None if the partition is valid for its own model only. Without ``bind``, the hook is called for
            every copy.
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
        boundaries: for each stage but the last: names of the values sent to the next one, in the same order on every
            rank, including relayed values.
    """

    boundaries: tuple[tuple[str, ...], ...]

    def received(self, stage: int) -> tuple[str, ...]:
        """Return the values that a stage receives."""
        return self.boundaries[stage - 1] if stage > 0 else ()

    def sent(self, stage: int) -> tuple[str, ...]:
        """Return the values that a stage sends."""
        return self.boundaries[stage] if stage < len(self.boundaries) else ()
