"""`Staged`: the stages of a model with what passes between them, and the run of one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import HookError
from slapo_core.pipeline.checking import check_liveness, check_partition
from slapo_core.spec.pipeline import Liveness, Partition

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Staged", "staged"]


@dataclass(frozen=True)
class Staged:
    """The stages of a model for one form of a batch and one mode, and what passes between them.

    Args:
        partition: the stages.
        liveness: what each of them sends to the next.
    """

    partition: Partition
    liveness: Liveness

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """The model's output, by running the stages in turn; each gets only what it is sent.

        A value that is said to carry no gradient carries none, and what a stage gets is its own: writing to it changes
        nothing elsewhere, as in processes that send each other tensors.

        Args:
            inputs: the arguments of the model's forward, by parameter.
        """
        pieces: dict[str, torch.Tensor] = {}
        received: dict[str, torch.Tensor] = {}
        for stage in self.partition.stages:
            own = {name: inputs[name] for name in stage.inputs if name in inputs}
            made = stage.module(own, {name: received[name] for name in stage.uses})
            pieces.update((name, made[name]) for name in self.partition.output.pieces if name in made)
            there = {**received, **made}
            received = {name: self._sent(name, there[name]) for name in self.liveness.sent(stage.index)}
        return self.partition.output.assemble(pieces)

    def _sent(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.clone(memory_format=torch.contiguous_format)
        return own if self.partition.values[name].requires_grad else own.detach()


def staged(
    schedule: Schedule,
    inputs: Mapping[str, Any],
    *,
    outputs: Sequence[str] | None = None,
    batch_axes: Mapping[str, int | None] | None = None,
) -> Staged | None:
    """Ask the plugins for the stages of a schedule; None if no plugin cuts it.

    Args:
        schedule: its model is in the mode that is asked for.
        inputs: the arguments of the model's forward, by parameter.
        outputs: pieces of the output that the last stage needs; None: all of them.
        batch_axes: as the hook `slapo_partition` says.

    Raises:
        TraceError: it cannot be cut there.
        HookError: an answer cannot be right, or there is one about the partition and none about liveness.
    """
    answer = schedule.hooks.single(
        "slapo_partition", schedule=schedule, inputs=inputs, batch_axes=dict(batch_axes or {})
    )
    if answer is None:
        return None
    plugin, partition = answer
    check_partition(partition, plugin)
    needed = tuple(partition.output.pieces if outputs is None else outputs)
    second = schedule.hooks.single("slapo_liveness", partition=partition, outputs=needed)
    if second is None:
        raise HookError(
            f"{plugin} cut the model into stages, and no active plugin says what passes between them (slapo_liveness)",
            plugin=plugin,
            hint='create_schedule(model, plugins=["slapo-pipeline"])',
        )
    check_liveness(second[1], partition, needed, second[0])
    return Staged(partition, second[1])
