"""This rank's stages under a schedule, for one form of a micro-batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import BuildError
from slapo_core.native.pipeline.stage import RunningStage, Work
from slapo_core.native.pipeline.torch_pipelining import make_schedule, step

if TYPE_CHECKING:
    from slapo_core.native.pipeline.schedules import Schedule
    from slapo_core.spec.pipeline import Liveness, Partition
    from slapo_core.spec.request import BuildRequest, StagedBatch, StagedModel


class Runner:
    """Runs a step's forwards and backwards; every rank along ``pp`` has one, with the same arguments but ``rank``.

    Args:
        partition: for one form of a micro-batch and one mode.
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
            loss: of a micro-batch, by its number and the pieces of the output.
            backward: whether gradients are computed: of the mean of the losses.
            at: is told what runs.
            seed: of the random numbers that stages draw; None leaves torch's streams as they are.
            keep_outputs: whether the pieces of the output that this rank's stages make are kept.
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


_KEPT = 16


@dataclass(frozen=True)
class Form:
    """What runs micro-batches of one form.

    Args:
        staged: the stages for it.
        runner: of this rank's.
    """

    staged: StagedModel
    runner: Runner

    def run(
        self,
        batch: StagedBatch,
        *,
        backward: bool,
        at: Callable[[str], None],
        seed: int | None = None,
        keep_outputs: bool = False,
    ) -> Work:
        """The passes of all micro-batches; see :meth:`Runner.run`."""
        return self.runner.run(batch.inputs, batch.loss, backward=backward, at=at, seed=seed, keep_outputs=keep_outputs)


class Forms:
    """Cuts batches, and keeps what runs their micro-batches for the forms that came last.

    Args:
        request: from ``build``.
        schedule: by which stages run.
        group: of the ranks along ``pp``.
        device: where stages compute.
        config: the options of the pipeline.
    """

    def __init__(
        self, request: BuildRequest, schedule: Schedule, group: Any, device: torch.device, config: Mapping[str, Any]
    ) -> None:
        mesh = request.schedule.mesh
        assert mesh is not None
        self._request, self._schedule, self._group, self._device = request, schedule, group, device
        self._count, self._axes, self._rank = config["microbatches"], config["batch_axes"], mesh.rank("pp")
        self._kept: OrderedDict[int, Form] = OrderedDict()
        self._sent: dict[int, tuple[int, int]] = {}  # by those that are not kept any more

    def of(self, batch: Any, *, training: bool) -> tuple[StagedBatch, Form]:
        """The micro-batches of a batch, and what runs them.

        Raises:
            BuildError: it cannot be cut into micro-batches; the model has other stages for it; or there is no loss.
            TraceError: the model cannot be cut for it.
        """
        found = self._request.staged(batch, self._count, training=training, axes=self._axes)
        staged = found.staged
        if id(staged) not in self._kept:
            self._kept[id(staged)] = Form(staged, self._runner(staged))
            while len(self._kept) > _KEPT:
                _, old = self._kept.popitem(last=False)
                self._sent = _added(self._sent, old)
        self._kept.move_to_end(id(staged))
        return found, self._kept[id(staged)]

    def whole(self, batch: Any, form: Form) -> Partition:
        """The stages for a batch that is not cut, which nobody runs: they say what shapes the whole output has.

        Raises:
            BuildError: they have another output than a micro-batch's.
            TraceError: the model cannot be cut for it.
        """
        partition = self._request.staged(batch, 1, training=False, axes=self._axes).staged.partition
        if partition.output.pieces != form.staged.partition.output.pieces:
            raise BuildError(
                "the output for the whole batch has other pieces than that for a micro-batch, so it cannot be put "
                "together of those",
                hint="eval_step(batch) without gather_outputs",
            )
        return partition

    def any_partition(self) -> Partition:
        """The stages for some form, that of the example inputs where no batch has come."""
        for form in self._kept.values():
            return form.staged.partition
        return self._request.staged_example(self._count, axes=self._axes).staged.partition

    def sent_bytes(self) -> dict[int, tuple[int, int]]:
        """By stage: what it has sent to the rank of the next one, and of the one before it."""
        total = dict(self._sent)
        for form in self._kept.values():
            total = _added(total, form)
        return total

    def close(self) -> None:
        """Let go of everything."""
        self._sent = self.sent_bytes()
        self._kept.clear()

    def _runner(self, staged: StagedModel) -> Runner:
        return Runner(
            staged.partition,
            staged.liveness,
            self._schedule,
            self._request.stage_ranks,
            self._rank,
            group=self._group,
            device=self._device,
            count=self._count,
        )


def _added(total: Mapping[int, tuple[int, int]], form: Form) -> dict[int, tuple[int, int]]:
    sums = dict(total)
    for stage in form.runner.stages:
        forward, back = sums.get(stage.stage_index, (0, 0))
        sums[stage.stage_index] = forward + stage.sent_bytes[0], back + stage.sent_bytes[1]
    return sums
