"""Run target ``"megatron"``: steps, checkpoints and refusals of both engines, and the engine without a pipeline.

Imports Megatron: import it in functions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from torch import nn

from slapo_core import BuildError, Plan, StepResult
from slapo_megatron.config import transformer_config
from slapo_megatron.groups import acquire_groups, start
from slapo_megatron.marks import mark
from slapo_megatron.model import Chunk, assemble, release
from slapo_megatron.private import ignore_backward
from slapo_megatron.sharded import ShardedDirectory
from slapo_megatron.state import (
    MegatronExternalChanges,
    StoredOptimizer,
    inner_optimizers,
    optimizer_layout,
    read_extra_state,
    used_extra_state,
    write_extra_state,
)
from slapo_runtime.correspondence.flat_storage import FlatStorage, FlatTensors
from slapo_runtime.engine import StatefulEngine, UnusedParameters
from slapo_runtime.flat_shards import send_buffers
from slapo_runtime.planning import device_of

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Plan
    from slapo_megatron.marks import Marks
    from slapo_megatron.runtime import Megatron
    from slapo_runtime.context import BuildContext
    from slapo_runtime.weights.saving import PendingSave


class MegatronEngine(StatefulEngine):
    """State dicts and checkpoints of both engines, read from Megatron's storage.

    Args:
        plan: of the build.
        context: from ``build``.
        megatron: Megatron's objects, ready to train.

    Attributes:
        megatron: Megatron's objects.
    """

    _marks: Marks  # set by the engines, before they make Megatron's objects

    def __init__(self, plan: Plan, context: BuildContext, megatron: Megatron) -> None:
        self.plan, self.megatron = plan, megatron
        self._context, self._state = context, context.state
        mesh = context.schedule.mesh
        here = [live for live in context.state.tensors() if live.is_local]
        self._device = next((live.tensor.device for live in here), torch.device("cpu"))
        self._names = {id(live.tensor): live.reference_name for live in here}
        self._layout = optimizer_layout(megatron.optimizer, mesh)
        layout = self._layout
        self._storage = FlatStorage(layout.held, mesh, self._device, groups=layout.shared, order=layout.order)
        self._tensors = FlatTensors(self._storage)
        context.state.keep_in(self._tensors)
        self._external_changes = MegatronExternalChanges(context, layout, self._tensors)
        self._is_closed = False
        stepped = inner_optimizers(megatron.optimizer)
        self.lr_scheduler = context.make_lr_scheduler(stepped[0] if stepped else None)
        self._clips = plan.config["optimizer_config"]["clip_grad"] > 0.0
        self._replicas = mesh.group("dp") if mesh is not None and mesh.size("dp") > 1 else None
        self._unused = UnusedParameters(context, "Megatron", steps_with_zeros=megatron.optimizer is not None)
        self._stored: StoredOptimizer | None = None
        self._ignore_backward()
        self._release_groups = acquire_groups()

    @property
    def module(self) -> nn.Module:
        return self._context.schedule.model

    @property
    def optimizer(self) -> Any:  # type: ignore[override]
        """Megatron's optimizer; None if the engine only evaluates, or is closed."""
        return None if self._is_closed else self.megatron.optimizer

    def close(self) -> None:
        """Release Megatron's objects; the model and its state stay."""
        if self._is_closed:
            return
        self._is_closed = True
        self.lr_scheduler = None
        self._tensors.end()
        self._unused.stop()
        release(self.megatron, self._marks, gather=self._reason is None)
        self._release()
        self._release_groups()

    # -- for the engines ----------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Release the engine's own state, once, after Megatron's objects."""

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._closed(self._reason or "")

    def _require_trainable(self) -> None:
        """Refuse a training step of a closed or evaluating engine.

        Raises:
            BuildError: the engine is closed, or has no optimizer or no gradients.
        """
        self._require_open()
        if self.megatron.optimizer is None:
            raise self._without_optimizer()
        self._refuse_without_gradients()

    def _begin_step(self, module: nn.Module) -> None:
        """Zero all gradients, also of the user's backward passes, and broadcast buffers over the replicas.

        Args:
            module: whose buffers are broadcast.
        """
        self._unused.step_begins()
        send_buffers(module, self._replicas)
        for chunk in self.megatron.chunks:
            chunk.zero_grad_buffer()
        self.megatron.optimizer.zero_grad()

    def _update(self) -> torch.Tensor | None:
        """Step the optimizer and the scheduler.

        Returns:
            the norm of all gradients before clipping, if they are clipped; infinite in a step that Megatron skipped for
            an overflow.
        """
        is_stepped, norm, _ = self.megatron.optimizer.step()
        self.steps += 1
        self._ignore_backward()
        self._external_changes.note()
        if not is_stepped:
            return self._scalar(math.inf)
        if self.megatron.scheduler is not None:
            self.megatron.scheduler.step(1)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._unused.step_is_over()
        self._context.training_is_over()
        return self._scalar(norm) if self._clips and norm is not None else None

    def _scalar(self, number: Any) -> torch.Tensor:
        """Make a float32 tensor of a number by a fill, which unlike a copy does not wait for the device."""
        return torch.full((), number, dtype=torch.float32, device=self._device)

    def _ignore_backward(self) -> None:
        for chunk in self.megatron.chunks:
            ignore_backward(chunk)

    # -- state; documented in slapo_core/engine.py -------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
        self._settle()
        return super().state_dict(rank0_only=rank0_only, include_added=include_added)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._settle("load_state_dict")
        super().load_state_dict(state)

    def check_replicas(self, *, repair: bool = False) -> None:
        self._settle()
        super().check_replicas(repair=repair)

    def save(
        self, directory: str | os.PathLike[str], *, keep: int | None = None, asynchronous: bool = False
    ) -> PendingSave | None:
        self._settle("save")
        return super().save(directory, keep=keep, asynchronous=asynchronous)

    def load(self, directory: str | os.PathLike[str]) -> None:
        self._settle("load")
        super().load(directory)

    def save_sharded(self, directory: str | os.PathLike[str]) -> None:
        """Write a checkpoint in Megatron's format: each rank its shards, by ``megatron.core.dist_checkpointing``.

        A collective over all processes. The keys are the reference model's names (``optimizer.state.exp_avg.<name>``
        for the optimizer's state), the shapes are full: any schedule of the same model can load it, with other sizes of
        ``tp``, ``pp`` and ``dp``, with the distributed optimizer and without. Weights have the trained precision.
        Megatron starts a process for it: a script needs ``if __name__ == "__main__":``.

        Args:
            directory: new or empty, on a disk that all ranks share.

        Raises:
            RankMismatchError: replicas differ between ranks; nothing was written.
            BuildError: the optimizer has state that a checkpoint cannot express, or the directory is not empty.
        """
        self._settle("save_sharded")
        shards = self._state.shards(optimizer=self._kept_optimizer(), runtime=self._runtime_state())
        ShardedDirectory(Path(directory), self._context).write(shards)

    def load_sharded(self, directory: str | os.PathLike[str]) -> None:
        """Load a checkpoint of :meth:`save_sharded`: each rank its shards. A collective over all processes.

        Megatron and torch read the files, some of which are pickles: load only checkpoints that you trust.

        Args:
            directory: of :meth:`save_sharded`.

        Raises:
            WeightsError: no such checkpoint, or of another model; nothing was changed.
            BuildError: the optimizer's state does not fit this optimizer; nothing was changed.
        """
        self._settle("load_sharded")
        source, description = ShardedDirectory(Path(directory), self._context), {}
        with self._context.together(f"reading {source.label}"):
            description = source.describe()
        optimizer, uses = self._kept_optimizer(), self._loaded_names()
        self._load_runtime_state(self._state.load_shards(description, source, optimizer=optimizer, uses=uses))

    def _settle(self, call: str = "") -> None:
        """Gather the parameters of the last step, which Megatron would gather in the next forward.

        Args:
            call: a method that needs the optimizer's state by the reference model's names; ``""``: none.

        Raises:
            BuildError: the optimizer's state has no such names.
        """
        if self.optimizer is None:
            return
        if call and self._layout.limit:
            raise BuildError(
                f"engine.{call}() cannot express the state of Megatron's optimizer: {self._layout.limit}",
                hint="megatron.core.dist_checkpointing.save() with engine.megatron.optimizer.sharded_state_dict(...); "
                "engine.state_dict() gives the weights",
            )
        for chunk in self.megatron.chunks:
            if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _kept_optimizer(self) -> StoredOptimizer | None:
        """Return the optimizer by parameters: a collective over the replicas."""
        self._stored = None
        if not self._is_closed and not self._layout.limit and self._layout.groups:
            is_scheduled = self.megatron.scheduler is not None
            self._stored = StoredOptimizer(self._layout, self._storage, self._names, is_scheduled=is_scheduled)
            self._stored.gather_states()
        return self._stored

    def _runtime_state(self) -> Mapping[str, Any]:
        return {**read_extra_state(self.megatron), **super()._runtime_state()} if self.optimizer is not None else {}

    def _loaded_names(self) -> Collection[str]:
        return (*used_extra_state(self.megatron), *super()._loaded_names()) if self.optimizer is not None else ()

    def _load_runtime_state(self, runtime: Mapping[str, Any]) -> None:
        if self._stored is not None:
            write_extra_state(self.megatron, runtime, self._stored.loaded or ())
            super()._load_runtime_state(runtime)


class SingleStageEngine(MegatronEngine):
    """Train a model without stages, by Megatron's schedule without a pipeline.

    A step that fails after its first backward pass began closes the engine.

    Args:
        plan: of the build.
        context: from ``build``.
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        mesh = context.schedule.mesh
        device_type = device_of(context.schedule, plan.config["arguments"]["device"])
        start(mesh, device_type=device_type, instances=instances_of(plan))
        config = transformer_config(plan.config, mesh)
        self._marks = mark(context)
        with self._marks.taken_back_if_it_fails():
            super().__init__(plan, context, assemble(plan, context, [Chunk(context.schedule.model, config)], config))
        self._count: int = plan.config["microbatches"]
        self._has_begun = False  # the backward pass of a step

    # -- steps; documented in slapo_core/engine.py ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._require_trainable()
        self._external_changes.check()
        count = None if self._count == self._context.accumulate else self._count  # as the user gave it
        micro_batches = self._context.micro_batches(batch, count, axes=self.plan.config["batch_axes"] or None)
        self._has_begun = False
        try:
            self._begin_step(self.module)
            done: list[dict[str, Any]] = forward_backward_no_pipelining(
                forward_step_func=self._forward_step,
                data_iterator=iter(micro_batches),
                model=self.megatron.chunks,
                num_microbatches=len(micro_batches),
                seq_length=1,  # of what stages would send
                micro_batch_size=1,
            )
            norm = self._update()
        except BaseException as error:
            if self._has_begun:
                self._reason = f"a step failed: {type(error).__name__}: {error}"
                self.close()
            raise
        loss = done[0]["loss"] if len(done) == 1 else torch.stack([one["loss"] for one in done]).mean()
        output = done[0]["output"] if len(done) == 1 else None
        return self._context.step_result(loss, output, norm)

    def eval_step(self, batch: Any) -> StepResult:
        self._require_open()
        with self._context.evaluating(batch):
            loss, output = self._context.compute_loss(batch, self.megatron.chunks[0])
        return StepResult(loss, output)

    def _forward_step(self, micro_batches: Iterator[Any], chunk: Any) -> tuple[torch.Tensor, Any]:
        """Run one micro-batch, called by Megatron."""
        loss, output = self._context.compute_loss(next(micro_batches), chunk)

        def of_backward(loss: torch.Tensor) -> Reduced:
            self._has_begun = True
            return reduced(loss, output=output)

        return loss, of_backward


Reduced = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


def reduced(loss: torch.Tensor, **values: Any) -> Reduced:
    """Return a loss for Megatron's schedules: a copy, which they divide in place, a count, and values.

    The count is one micro-batch, of which the loss is the mean: without a count Megatron sums losses as partial.
    """
    one = torch.ones((), dtype=torch.int, device=loss.device)
    return loss.clone(), one, {"loss": loss.detach().clone(), **values}


def instances_of(plan: Plan) -> int:
    """Return the number of instances of the distributed optimizer."""
    return int(plan.config["ddp_config"].get("num_distributed_optimizer_instances", 1))
