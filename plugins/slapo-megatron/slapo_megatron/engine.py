"""Run training steps, checkpoints and refusals that both engines of target ``"megatron"`` share."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import Plan
from slapo_megatron.model.buckets import drop_started
from slapo_megatron.runtime import Megatron
from slapo_megatron.state.external_changes import BetweenMegatronSteps
from slapo_megatron.state.optimizer import StoredOptimizer
from slapo_megatron.state.tensors import MegatronTensors
from slapo_runtime.engine import StatefulEngine, UnusedParameters
from slapo_runtime.flat_shards import send_buffers

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Plan
    from slapo_megatron.groups.process_groups import Lease
    from slapo_megatron.runtime import Megatron
    from slapo_runtime.context import BuildContext


class Updates:
    """The steps of Megatron's optimizer and scheduler.

    Args:
        plan: of the build.
        context: from ``build``.
        megatron: its objects.
    """

    def __init__(self, plan: Plan, context: BuildContext, megatron: Megatron) -> None:
        mesh = context.schedule.mesh
        self._context, self._megatron = context, megatron
        self._clips = plan.config["optimizer_config"]["clip_grad"] > 0.0
        self._replicas = mesh.group("dp") if mesh is not None and mesh.size("dp") > 1 else None
        self._unused = UnusedParameters(context, "Megatron", steps_with_zeros=megatron.optimizer is not None)
        self._has_stepped = False

    def begin(self, module: nn.Module) -> None:
        """Before the passes.

        Gradients are accumulated from zero on, whatever an earlier step that failed, or a backward pass of the user's
        own, has left.

        Args:
            module: of whose buffers replicas hold the same.
        """
        self._unused.step_begins()
        send_buffers(module, self._replicas)
        drop_started(self._megatron.chunks)
        for chunk in self._megatron.chunks:
            chunk.zero_grad_buffer()
        self._megatron.optimizer.zero_grad()

    def seen(self, parameters: Iterable[nn.Parameter]) -> None:
        """Parameters that have a gradient, whether or not a pass on this rank gave them one."""
        for parameter in parameters:
            self._unused.seen(parameter)

    def step(self, device: torch.device) -> torch.Tensor | None:
        """Step the optimizer and the scheduler after the passes.

        Returns:
            the norm of all gradients before clipping, where they are clipped; infinite in a step that Megatron skipped
            for an overflow.
        """
        is_stepped, norm, _ = self._megatron.optimizer.step()
        if not is_stepped:
            return torch.tensor(math.inf, device=device)
        if self._megatron.scheduler is not None:
            self._megatron.scheduler.step(1)
        self._unused.step_is_over()
        if not self._has_stepped:
            self._has_stepped = True
            if self._context.optimizer is None:  # the user's tells core that the first step is over
                self._megatron.optimizer.zero_grad()
                self._context.clip_gradients()  # there are none any more
        return torch.tensor(norm, device=device) if self._clips and norm is not None else None

    def end(self) -> None:
        """Stop to watch parameters."""
        self._unused.stop()


class MegatronEngine(StatefulEngine):
    """State dicts and checkpoints by the context's state, read out of where Megatron keeps it.

    Args:
        plan: of the build.
        context: from ``build``.
        megatron: its objects, ready to train.

    Attributes:
        megatron: those.
    """

    _lease: Lease
    """Of Megatron's process groups; set by the engines, before they make anything of Megatron's."""

    def __init__(self, plan: Plan, context: BuildContext, megatron: Megatron) -> None:
        from slapo_megatron.state.flat_layout import places_of

        self.plan, self.megatron = plan, megatron
        self._context, self._state = context, context.state
        mesh = context.schedule.mesh
        here = [live for live in context.state.tensors() if live.is_local]
        self._device = next((live.tensor.device for live in here), torch.device("cpu"))
        self._names = {id(live.tensor): live.reference_name for live in here}
        self._places = places_of(megatron.optimizer, mesh)
        self._tensors = MegatronTensors(self._places, mesh, self._device)
        context.state.keep_in(self._tensors)
        self._between = BetweenMegatronSteps(context, self._places, self._tensors)
        self._is_closed = False
        self._stored()

    @property
    def module(self) -> nn.Module:
        return self._context.schedule.model

    @property
    def optimizer(self) -> Any:  # type: ignore[override]
        """Megatron's optimizer; None where the engine only evaluates, or is closed."""
        return None if self._is_closed else self.megatron.optimizer

    def close(self) -> None:
        """Let go of Megatron's objects; the model and its state stay."""
        if self._is_closed:
            return
        self._is_closed = True
        self._tensors.end()
        self._release()
        self._lease.close()

    # -- for the engines ----------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Release the engine's own state, apart from Megatron's objects; called once."""

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._closed()

    def _before_step(self) -> None:
        """At the beginning of a training step.

        Raises:
            BuildError: the engine is closed, or cannot train; or what Megatron trains was changed behind its back.
        """
        self._require_trainable()
        self._between.check()

    def _require_trainable(self) -> None:
        """
        Raises:
            BuildError: the engine is closed, or cannot train here.
        """
        self._require_open()
        if self.megatron.optimizer is None:
            raise self._without_optimizer()
        self._refuse_without_gradients()

    def _after_step(self) -> None:
        """At the end of a training step."""
        self._between.note()

    # -- state; documented in slapo_core/engine.py -------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
        self._settle()
        return super().state_dict(rank0_only=rank0_only, include_added=include_added)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._settle()
        super().load_state_dict(state)

    def check_replicas(self, *, repair: bool = False) -> None:
        self._settle()
        super().check_replicas(repair=repair)

    def save(self, directory: str | os.PathLike[str]) -> None:
        self._settle()
        super().save(directory)

    def load(self, directory: str | os.PathLike[str]) -> None:
        self._settle()
        optimizer = self._kept_optimizer()
        self._resumed(self._state.load(directory, optimizer=optimizer, uses=self._uses()), optimizer)

    def save_sharded(self, directory: str | os.PathLike[str]) -> None:
        """Write a checkpoint in Megatron's format: each rank its shards, by ``megatron.core.dist_checkpointing``.

        A collective over all processes. The keys are the reference model's names (``optimizer.state.exp_avg.<name>``
        for the optimizer's state), the shapes the whole ones: it can be loaded under any schedule of the same model,
        with other sizes of ``tp``, ``pp`` and ``dp``, with the distributed optimizer and without. Weights are in the
        precision that is trained. Megatron starts a process for it: a script needs ``if __name__ == "__main__":``.

        Args:
            directory: on a disk that all ranks share; made if it is not there. A sharded checkpoint in it is replaced.

        Raises:
            RankMismatchError: ranks hold different copies; nothing was written.
            BuildError: the optimizer holds something that has no place in a checkpoint; ``psutil`` is not installed;
                or the directory holds something else.
        """
        from slapo_megatron.state.sharded import ShardedDirectory

        self._settle()
        shards = self._state.shards(optimizer=self._kept_optimizer(), runtime=self._beside())
        ShardedDirectory(Path(directory), self._context).write(shards)

    def load_sharded(self, directory: str | os.PathLike[str]) -> None:
        """Load a checkpoint of :meth:`save_sharded`: each rank its shards. A collective over all processes.

        Its files are those of Megatron and of torch, some of which are pickles: load what you trust.

        Args:
            directory: that of :meth:`save_sharded`.

        Raises:
            WeightsError: no such checkpoint, or of another model; nothing was changed.
            BuildError: the optimizer's state does not fit this optimizer; nothing was changed.
        """
        from slapo_megatron.state.sharded import ShardedDirectory

        self._settle()
        source, description = ShardedDirectory(Path(directory), self._context), {}
        with self._context.together(f"reading {source.label}"):
            description = source.describe()
        optimizer, uses = self._kept_optimizer(), self._uses()
        self._resumed(self._state.load_shards(description, source, optimizer=optimizer, uses=uses), optimizer)

    def _settle(self) -> None:
        """Wait for what Megatron would send in the next forward: parameters that the last step changed."""
        if self._is_closed or self.megatron.optimizer is None:
            return
        for chunk in self.megatron.chunks:
            if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _stored(self) -> StoredOptimizer | None:
        if not self._places.groups:
            return None
        mesh, is_scheduled = self._context.schedule.mesh, self.megatron.scheduler is not None
        return StoredOptimizer(self._places, self._names, mesh, self._device, is_scheduled=is_scheduled)

    def _kept_optimizer(self) -> StoredOptimizer | None:
        """The optimizer by parameters: a collective over the replicas."""
        stored = None if self._is_closed else self._stored()
        return stored.meet() if stored is not None else None

    def _beside(self) -> Mapping[str, Any]:
        from slapo_megatron.state.extra_state import read_extra_state

        return read_extra_state(self.megatron) if self.optimizer is not None else {}

    def _uses(self) -> Collection[str]:
        from slapo_megatron.state.extra_state import used_extra_state

        return used_extra_state(self.megatron) if self.optimizer is not None else ()

    def _resumed(self, runtime: Mapping[str, Any], optimizer: StoredOptimizer | None) -> None:
        from slapo_megatron.state.extra_state import write_extra_state

        if optimizer is not None:
            write_extra_state(self.megatron, runtime, optimizer.loaded or ())
