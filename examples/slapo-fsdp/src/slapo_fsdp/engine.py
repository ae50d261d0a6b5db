"""The engine of target ``"fsdp"``: training steps on a model under ``fully_shard``."""

import contextlib

import torch

import slapo_core as slapo
from slapo_runtime.engine import StatefulEngine
from slapo_torch.fully_shard import FullyShard
from slapo_torch.sharded_data import ShardedData


class FSDPEngine(StatefulEngine):
    """Train with parameters, gradients and optimizer state in shards, one for each rank along ``dp``.

    After :meth:`close` the model stays under ``fully_shard``: ``state_dict()`` gives the full tensors, and the next
    engine is built of a fresh model.
    """

    def __init__(self, plan, context):
        mesh = context.schedule.mesh
        is_sharded = mesh is not None and mesh.size("dp") > 1
        self.plan, self._context, self.module = plan, context, context.schedule.model
        self.optimizer, self._shards = context.make_optimizer(partitioned=is_sharded), None
        if is_sharded:
            self._refuse_early_state()
            self._shard(mesh.device_mesh["dp"])
        self.lr_scheduler = context.make_lr_scheduler(self.optimizer)

    def _refuse_early_state(self):
        if self.optimizer is not None and self.optimizer.state:
            raise slapo.BuildError(
                f"{type(self.optimizer).__name__} has state before its first step: that of full parameters",
                hint="use an optimizer that makes its state in the first step (SGD, AdamW)",
            )

    def _shard(self, mesh):
        """Put the shards into the model and into the optimizer; what can fail came before it."""
        reshards = self.plan.config["reshard_after_forward"]
        units = {path: FullyShard(reshards) for path in self.plan.config["wrap"]}
        root = FullyShard(None if reshards else False)  # None: the root's default
        self._shards = ShardedData(self.module, units, mesh, root=root)
        self._shards.take_over(self.optimizer)
        self._context.state.tensors()  # shards take over the layouts of the parameters in whose place they are

    # -- steps; documented in slapo_core.dialect.Engine ---------------------------------------------------------

    def train_step(self, batch):
        if self._reason is not None:
            raise self._closed(self._reason)
        if self.optimizer is None:
            raise self._without_optimizer()
        self._refuse_without_gradients()
        batches, losses, output = self._context.micro_batches(batch), [], None
        with self._passes():
            if self._shards is not None:
                self._shards.forget_gradients()
            for number, inputs in enumerate(batches, start=1):
                with self._accumulating(is_last=number == len(batches)):
                    loss, output = self._context.compute_loss(inputs)
                    if number == 1:
                        self.optimizer.zero_grad(set_to_none=True)
                    (loss / len(batches)).backward()
                losses.append(loss.detach())
            if self._shards is not None:
                self._shards.refuse_unseen_backward()
        norm = self._context.clip_gradients()
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.steps += 1
        return slapo.StepResult(torch.stack(losses).mean(), output if len(batches) == 1 else None, norm)

    def eval_step(self, batch):
        if self._reason is not None:
            raise self._closed(self._reason)
        with self._passes():
            loss, output = self._context.evaluate(batch)
        return slapo.StepResult(loss, output)

    def close(self):
        """Let go of the optimizer; the model stays under ``fully_shard``."""
        self._reason, self.optimizer, self.lr_scheduler = self._reason or "", None, None

    def _accumulating(self, *, is_last):
        """Reduce gradients in the backward of the last micro-batch only."""
        return contextlib.nullcontext() if is_last or self._shards is None else self._shards.no_sync()

    @contextlib.contextmanager
    def _passes(self):
        """Free the full parameters of passes, also where one fails midway."""
        if self._shards is None:
            yield
            return
        try:
            with self._shards.passes():
                yield
        except BaseException as error:
            if not self._shards.recovers:  # torch before 2.13
                self._reason = f"a step failed: {type(error).__name__}: {error}"
                self.close()
            raise

    @property
    def _state(self):
        """The state for the methods of StatefulEngine; also right after a forward of the user's."""
        if self._shards is not None:
            self._shards.reshard()
        return self._context.state
