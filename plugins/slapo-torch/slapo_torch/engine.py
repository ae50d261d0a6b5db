"""The engine of target ``"torch"``: a plain training step."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slapo_core import BuildError, StepResult
from slapo_runtime.engine import REBUILD
from slapo_torch.data_options import OWN_OPTIONS, data_ranks
from slapo_torch.fully_shard import FullyShard, units_of
from slapo_torch.precise_engine import PreciseEngine
from slapo_torch.precision import with_islands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slapo_core import Plan
    from slapo_runtime.context import BuildContext
    from slapo_runtime.state import ModelState
    from slapo_torch.precision import ModelPrecision
    from slapo_torch.sharded_data import ShardedData


class TorchRuntime:
    """The parts of a training step of target ``"torch"``.

    A manual step, with gradients accumulated over ``micro_batches``::

        for number, inputs in enumerate(micro_batches, start=1):
            with engine.torch.no_sync() if number < len(micro_batches) else contextlib.nullcontext():
                with engine.torch.lowered():
                    loss = engine.torch.module(**inputs).loss / len(micro_batches)
                loss.backward()
        engine.torch.clip_gradients()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    With ``precision="fp16-mixed"`` ``engine.scaler`` is used as torch's: ``engine.scaler.scale(loss).backward()``;
    before clipping ``engine.scaler.unscale_(engine.optimizer)``, a collective; then
    ``engine.scaler.step(engine.optimizer)`` and ``engine.scaler.update()``.

    Args:
        module: see below.
        context: from ``build``.
        precision: of the model.
        sharded: the model's shards under ``fully_shard``; None without.

    Attributes:
        module: the module to call in a training step: DistributedDataParallel around ``engine.module`` if the mesh has
            several replicas (``dp``), else ``engine.module`` itself, whose gradients are of this rank's samples alone.
    """

    def __init__(
        self,
        module: nn.Module,
        context: BuildContext,
        precision: ModelPrecision,
        sharded: ShardedData | None = None,
    ) -> None:
        self.module, self._precision = module, precision
        self._context, self._sharded = context, sharded
        self._handles: list[Any] = []
        self._is_averaged = False
        self._is_recorded = not getattr(module, "static_graph", False)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients without exchange: around every micro-batch but the last."""
        if not self._is_recorded:  # static_graph: torch fails without an exchange in the first backward pass
            self._is_recorded = True
            return contextlib.nullcontext()
        if self._sharded is not None:
            return self._sharded.no_sync()
        if isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()  # type: ignore[no-any-return]
        return contextlib.nullcontext()

    def lowered(self) -> contextlib.AbstractContextManager[Any]:
        """Compute forward and loss in the precision: torch.autocast, where the model does not cast itself."""
        return self._precision.forward()

    def clip_gradients(self) -> torch.Tensor | None:
        """Clip all gradients: a collective; return the norm before, or None."""
        if self._sharded is not None:
            self._sharded.reshard()  # a forward without a backward has left full parameters
        return self._context.clip_gradients()

    def watch(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Warn of an optimizer step on gradients that were not averaged over replicas."""
        if optimizer is None or not isinstance(self.module, DistributedDataParallel):
            return
        self._handles = [
            self.module.register_forward_pre_hook(self._forwarded),
            optimizer.register_step_pre_hook(self._stepping),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _forwarded(self, module: nn.Module, _: Any) -> None:
        self._is_averaged = self._is_averaged or bool(module.require_backward_grad_sync)

    def _stepping(self, *_: Any) -> None:
        if not self._is_averaged:
            warnings.warn(
                "the optimizer steps without a backward pass through engine.torch.module outside of no_sync() since "
                "its last step: unless you average the gradients yourself, replicas (dp) diverge; call "
                "engine.torch.module(...) instead of engine.module(...), or engine.train_step(batch)",
                stacklevel=4,
            )
        self._is_averaged = False


class TorchEngine(PreciseEngine):
    """The implementation of :class:`slapo_core.dialect.Engine` in plain PyTorch.

    Args:
        plan: the plan of the build; ``plan.config`` holds ``batch_axes`` and the options of data parallelism.
        context: from ``build``.
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        self.plan, self._context = plan, context
        self._module, self._reason = context.schedule.model, None
        self._sharded: ShardedData | None = None
        self._frozen: tuple[nn.Parameter, ...] = ()  # parameters that DistributedDataParallel never averages
        is_sharded = self._materialize(plan, context)
        replicas = data_ranks(context.schedule.mesh)
        self.optimizer = context.make_optimizer(partitioned=is_sharded and replicas > 1, gathers=True)
        if is_sharded:
            self._shard()
        else:
            self._precision.install()
        self.lr_scheduler = context.make_lr_scheduler(self.optimizer)
        module = self._module if is_sharded else self._replicated()
        self._runtime: TorchRuntime | None = TorchRuntime(module, context, self._precision, self._sharded)
        self._runtime.watch(self.optimizer)

    def _replicated(self) -> nn.Module:
        """Return the model, or DistributedDataParallel around it, for training steps."""
        model, mesh = self._module, self._context.schedule.mesh
        if mesh is None or mesh.size("dp") == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        self._frozen = tuple(parameter for parameter in model.parameters() if not parameter.requires_grad)
        options = {name: value for name, value in self.plan.config.items() if name not in OWN_OPTIONS}
        return DistributedDataParallel(model, process_group=mesh.group("dp"), **options)

    def _shard(self) -> None:
        """Put shards into the model and into the optimizer; everything that can fail came before."""
        from slapo_torch.sharded_data import ShardedData, mesh_of_shards

        if self.optimizer is not None and self.optimizer.state:
            raise BuildError(
                f"{type(self.optimizer).__name__} has state before its first step: that of full parameters",
                hint="use an optimizer that makes its state in the first step (SGD, AdamW)",
            )
        schedule, reshard = self._context.schedule, self.plan.config["reshard_after_forward"]
        units = with_islands(schedule, units_of(schedule, reshard_after_forward=reshard), self.plan.config)
        root = FullyShard(False if reshard is False else None)
        mesh, fill = mesh_of_shards(schedule.mesh, self._precision.device), self._context.fill_windows
        self._sharded = ShardedData(self._module, units, mesh, root=root, policy=self._precision.policy, fill=fill)
        self._precision.install(["", *(path for path in units if path and self._precision.gathers)])
        self._sharded.take_over(self.optimizer)
        self._context.state.tensors()  # shards take over the layouts of the parameters in whose place they are

    @property
    def torch(self) -> TorchRuntime:
        """The parts of a training step, for manual loops.

        Raises:
            BuildError: the engine is closed.
        """
        if self._runtime is None:
            raise self._closed(self._reason or "")
        return self._runtime

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def _state(self) -> ModelState:  # type: ignore[override]
        """The state for the methods of StatefulEngine; also right after a forward of the user's."""
        if self._sharded is not None:
            self._sharded.reshard()
        return self._context.state

    # -- steps; documented in slapo_core.dialect.Engine ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        optimizer, runtime = self.optimizer, self._runtime
        if runtime is None:
            raise self._closed(self._reason or "")
        if optimizer is None:
            raise self._without_optimizer()
        self._refuse_without_gradients()
        if any(parameter.requires_grad for parameter in self._frozen):
            raise self._unfrozen()
        batches = self._context.micro_batches(batch, axes=self.plan.config["batch_axes"])
        losses, output = [], None
        with self._passes(), self._watched():
            if self._sharded is not None:
                self._sharded.forget_gradients()
            for number, inputs in enumerate(batches, start=1):
                with runtime.no_sync() if number < len(batches) else contextlib.nullcontext():
                    with self._lowered():
                        loss, output = self._context.compute_loss(inputs, runtime.module)
                    if number == 1:
                        optimizer.zero_grad(set_to_none=True)
                    self._scaled(loss / len(batches) if len(batches) > 1 else loss).backward()
                losses.append(loss.detach())
            if self._sharded is not None:
                self._sharded.refuse_unseen_backward()
        norm = self._update()
        self.steps += 1
        if len(batches) > 1:
            return self._context.step_result(torch.stack(losses).mean(), None, norm)
        return self._context.step_result(losses[0], output, norm)

    def eval_step(self, batch: Any) -> StepResult:
        if self._runtime is None:
            raise self._closed(self._reason or "")
        with self._passes(), self._lowered():
            loss, output = self._context.evaluate(batch)
        return StepResult(loss, output)

    @contextlib.contextmanager
    def _passes(self) -> Iterator[None]:
        """Free what passes of the model gather; close the engine if one fails where torch cannot go on."""
        if self._sharded is None:
            yield
            return
        try:
            with self._sharded.passes():
                yield
        except BaseException as error:
            if not self._sharded.recovers:
                self._reason = f"a step failed: {type(error).__name__}: {error}"
                self.close()
            raise

    def _unfrozen(self) -> BuildError:
        frozen = {id(parameter) for parameter in self._frozen if parameter.requires_grad}
        name = next(name for name, parameter in self._module.named_parameters() if id(parameter) in frozen)
        return BuildError(
            f"'{name}' was unfrozen after build(): DistributedDataParallel would not average its gradient, and "
            "replicas would diverge",
            hint=REBUILD,
        )

    def close(self) -> None:
        """Release the optimizer and DistributedDataParallel; the model and its state stay.

        A model under ``fully_shard`` stays there: ``state_dict()`` gives its full tensors.
        """
        if self._runtime is not None:
            self._runtime.close()
        self._runtime = self.optimizer = self.lr_scheduler = None
