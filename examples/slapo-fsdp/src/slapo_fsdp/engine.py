"""The engine of target ``"fsdp"``: training steps on a model under ``fully_shard``."""

import contextlib

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

import slapo_core as slapo
from slapo_runtime.engine import StatefulEngine
from slapo_runtime.storage import sharded_over


class FSDPEngine(StatefulEngine):
    """Train with parameters, gradients and optimizer state in shards, one for each rank along ``dp``.

    After :meth:`close` the model stays under ``fully_shard``: ``state_dict()`` gives the full tensors, and the next
    engine is built of a fresh model.
    """

    def __init__(self, plan, context):
        mesh = context.schedule.mesh
        is_sharded = mesh is not None and mesh.size("dp") > 1
        self.plan, self._context, self.module = plan, context, context.schedule.model
        self._name, self._has_failed = type(self.module).__name__, False
        self.optimizer, self._groups = context.make_optimizer(partitioned=is_sharded), []
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
        model, reshards = self.module, self.plan.config["reshard_after_forward"]
        full = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
        for path in sorted(self.plan.config["wrap"], key=lambda path: -path.count(".")):  # inner ones first
            fully_shard(model.get_submodule(path), mesh=mesh, reshard_after_forward=reshards)
        fully_shard(model, mesh=mesh, reshard_after_forward=None if reshards else False)  # None: the root's default
        self._groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for group in self._groups:
            group.set_force_sum_reduction_for_comms(True)  # gloo of some torch sums where it is to average
        shards = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
        shard_of = {id(parameter): shard for parameter, shard in zip(full, shards, strict=True)}
        for settings in self.optimizer.param_groups if self.optimizer is not None else ():
            settings["params"] = [shard_of[id(parameter)] for parameter in settings["params"]]
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
            self._forget_gradients()
            for number, inputs in enumerate(batches, start=1):
                if self._groups:
                    self.module.set_requires_gradient_sync(number == len(batches))
                loss, output = self._context.compute_loss(inputs)
                if number == 1:
                    self.optimizer.zero_grad(set_to_none=True)
                (loss / len(batches)).backward()
                losses.append(loss.detach())
            self._refuse_unseen_backward()
        norm = self._context.clip_gradients()
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
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

    # -- full parameters, for a while ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _passes(self):
        """Release what passes of the model gathered, also where one fails midway."""
        try:
            yield
        except BaseException as error:
            if self._groups and not hasattr(self.module, "reset_iter_state"):  # torch before 2.13
                self._reason = f"a step failed: {type(error).__name__}: {error}"
                self.close()
            elif self._groups:
                self.module.reset_iter_state()
                self._has_failed = True
            raise
        self._reshard()

    def _forget_gradients(self):
        """Drop what the micro-batches of a step that failed left in full gradients: a collective after such a step."""
        for group in self._groups if self._has_failed else ():
            group.unshard()
            for parameter in group.parameters():
                if not sharded_over(parameter):
                    parameter.grad = None
            group.reshard()
        self._has_failed = False

    def _reshard(self):
        for group in self._groups:
            group.reshard()

    @property
    def _state(self):
        """The state for the methods of StatefulEngine; also right after a forward of the user's."""
        self._reshard()
        return self._context.state

    def _refuse_unseen_backward(self):
        """Refuse to step where ``fully_shard`` did not see the backward, and reduced no gradients."""
        if self._groups and not all(map(sharded_over, self.module.parameters())):
            raise slapo.BuildError(
                f"fully_shard did not see the backward: it found no tensors in the output of {self._name}",
                hint="return tensors, or tuples, dictionaries or dataclasses of them; or register the output's class: "
                "torch.utils._pytree.register_pytree_node",
            )
