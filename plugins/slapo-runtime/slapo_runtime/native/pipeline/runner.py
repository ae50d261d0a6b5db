"""Run this rank's stages under a schedule, for one input signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import BuildError
from slapo_runtime.native.pipeline.stage import RunningStage, Work
from slapo_runtime.native.pipeline.torch_pipelining import make_schedule, step

if TYPE_CHECKING:
    from slapo_runtime.native.pipeline.schedules import Schedule
    from slapo_runtime.partition import Liveness, Partition


class Runner:
    """Runs a step's forwards and backwards; every rank along ``pp`` has one, with the same arguments but ``rank``.

    Args:
        partition: for one input signature and one mode.
        liveness: what each stage sends to the next.
        schedule: by which they run.
        ranks: which rank along ``pp`` runs each stage.
        rank: this one.
        group: of the ranks along ``pp``.
        device: where the stages compute.
        count: of micro-batches.
    """

    def __init__(
        self,
        partition: Partition,
        liveness: Liveness,
        schedule: Schedule,
        ranks: Sequence[int],
        rank: int,
        *,
        group: Any,
        device: torch.device,
        count: int,
    ) -> None:
        self.partition = partition
        self._count, self._group = count, group
        self.stages = [
            RunningStage(
                partition,
                liveness,
                index,
                ranks,
                group=group,
                device=device,
                count=count,
                splits=schedule.splits_backward,
            )
            for index in range(len(partition.stages))
            if ranks[index] == rank
        ]
        stages: Any = self.stages[0] if schedule.is_single else self.stages
        try:
            self._schedule = make_schedule(schedule.class_name, stages, count, loss_fn=_as_it_is, scale_grads=False)
        except RuntimeError as error:  # of zero-bubble schedules, and modules in torch.compile's wrapper
            raise BuildError(
                f"pipeline_schedule='{schedule.name}' does not run these stages: {error}",
                hint='compile modules in place, module.compile(), or pipeline_schedule="1f1b"',
            ) from error

    def run(
        self,
        inputs: Sequence[Mapping[str, Any]],
        loss: Callable[[int, Mapping[str, torch.Tensor]], torch.Tensor],
        *,
        backward: bool,
        at: Callable[[str], None] = lambda what: None,
        seed: int | None = None,
        keep_outputs: bool = False,
    ) -> Work:
        """One step; gradients are added to those of the parameters.

        Args:
            inputs: the arguments of each micro-batch.
            loss: of a micro-batch, by its number and the output values.
            backward: whether gradients are computed: of the mean of the losses.
            at: is told what runs.
            seed: of the stages' RNG streams; None leaves torch's RNG as it is.
            keep_outputs: whether the output values of this rank's stages are kept.
        """
        work = Work(inputs, loss, at, seed, keep_outputs)
        for stage in self.stages:
            stage.work = work
        try:
            step(self._schedule, self._count, backward=backward)
        finally:
            for stage in self.stages:
                stage.clear_runtime_states()
                stage.work = Work((), loss, at)
        return work


def _as_it_is(loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The last stage's forward gives the loss already."""
    return loss
