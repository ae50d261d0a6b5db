"""The engine of target ``"torch"``: a plain training step."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slapo_core import BuildError, StepResult
from slapo_runtime.engine import StatefulEngine

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_runtime.context import BuildContext


class TorchRuntime:
    """The runtime of target ``"torch"``.

    A manual step, with gradients accumulated over ``micro_batches``::

        for number, inputs in enumerate(micro_batches, start=1):
            with engine.torch.no_sync() if number < len(micro_batches) else contextlib.nullcontext():
                (engine.torch.module(**inputs).loss / len(micro_batches)).backward()
        engine.torch.clip_gradients()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    Attributes:
        module: what a training step calls: DistributedDataParallel around ``engine.module`` where the mesh has several
            replicas (``dp``), else ``engine.module`` itself. Gradients of a backward pass through ``engine.module``
            are those of this rank's own samples.
        clip_gradients: scales all gradients to ``max_grad_norm``, a collective; gives the norm, or None without one.
    """

    def __init__(self, module: nn.Module, clip_gradients: Callable[[], torch.Tensor | None]) -> None:
        self.module = module
        self.clip_gradients = clip_gradients
        self._handles: list[Any] = []
        self._is_averaged = False
        self._is_recorded = not getattr(module, "static_graph", False)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients without exchange: around every micro-batch but the last."""
        if not self._is_recorded:  # static_graph: torch fails without an exchange in the first backward pass
            self._is_recorded = True
            return contextlib.nullcontext()
        if isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()  # type: ignore[no-any-return]
        return contextlib.nullcontext()

    def watch(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Warn of an optimizer step on gradients that replicas have not exchanged."""
        if optimizer is None or not isinstance(self.module, DistributedDataParallel):
            return
        self._handles = [
            self.module.register_forward_pre_hook(self._forwarded),
            optimizer.register_step_pre_hook(self._stepping),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _forwarded(self, module: nn.Module, _: Any) -> None:
        self._is_averaged = self._is_averaged or bool(module.require_backward_grad_sync)

    def _stepping(self, *_: Any) -> None:
        if not self._is_averaged:
            warnings.warn(
                "the optimizer steps, and no backward pass since its last step went through engine.torch.module "
                "outside of no_sync(): unless you average the gradients yourself, replicas (dp) diverge; call "
                "engine.torch.module(...) instead of engine.module(...), or engine.train_step(batch)",
                stacklevel=4,
            )
        self._is_averaged = False


class TorchEngine(StatefulEngine):
    """The implementation of :class:`slapo_core.dialect.Engine` in plain PyTorch.

    Args:
        plan: the plan of the build; ``plan.config`` holds ``batch_axes`` and the options of DistributedDataParallel.
        context: from ``build``.
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        self.plan = plan
        self.optimizer = context.make_optimizer()
        self.lr_scheduler = context.make_lr_scheduler(self.optimizer)
        self._module = context.schedule.model
        self._state = context.state
        self._compute_loss, self._evaluate = context.compute_loss, context.evaluate
        self._micro_batches = functools.partial(context.micro_batches, axes=plan.config["batch_axes"])
        self._frozen: tuple[nn.Parameter, ...] = ()  # what DistributedDataParallel would leave alone for ever
        self._runtime: TorchRuntime | None = TorchRuntime(self._replicated(context), context.clip_gradients)
        self._runtime.watch(self.optimizer)

    def _replicated(self, context: BuildContext) -> nn.Module:
        """Return the model, or its DistributedDataParallel, for training steps."""
        model, mesh = self._module, context.schedule.mesh
        if mesh is None or mesh.size("dp") == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        self._frozen = tuple(parameter for parameter in model.parameters() if not parameter.requires_grad)
        options = {name: value for name, value in self.plan.config.items() if name != "batch_axes"}
        return DistributedDataParallel(model, process_group=mesh.group("dp"), **options)

    @property
    def torch(self) -> TorchRuntime:
        """The parts of a training step, for manual loops.

        Raises:
            BuildError: the engine is closed.
        """
        if self._runtime is None:
            raise self._closed()
        return self._runtime

    @property
    def module(self) -> nn.Module:
        return self._module

    # -- steps; documented in slapo_core.dialect.Engine ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        optimizer, runtime = self.optimizer, self._runtime
        if runtime is None:
            raise self._closed()
        if optimizer is None:
            raise self._without_optimizer()
        self._refuse_without_gradients()
        if any(parameter.requires_grad for parameter in self._frozen):
            raise self._unfrozen()
        batches = self._micro_batches(batch)
        losses, output = [], None
        for number, inputs in enumerate(batches, start=1):
            with runtime.no_sync() if number < len(batches) else contextlib.nullcontext():
                loss, output = self._compute_loss(inputs, runtime.module)
                if number == 1:
                    optimizer.zero_grad(set_to_none=True)
                (loss / len(batches) if len(batches) > 1 else loss).backward()
            losses.append(loss.detach())
        norm = runtime.clip_gradients()
        optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        if len(batches) > 1:
            return StepResult(torch.stack(losses).mean(), None, norm)
        return StepResult(losses[0], output, norm)

    def eval_step(self, batch: Any) -> StepResult:
        if self._runtime is None:
            raise self._closed()
        loss, output = self._evaluate(batch)
        return StepResult(loss, output)

    def _unfrozen(self) -> BuildError:
        frozen = {id(parameter) for parameter in self._frozen if parameter.requires_grad}
        name = next(name for name, parameter in self._module.named_parameters() if id(parameter) in frozen)
        return BuildError(
            f"'{name}' was unfrozen after the build: DistributedDataParallel would not average its gradient, and every "
            "replica would train another value",
            hint="engine.save(directory); build a fresh engine of the model as it is to be, and engine.load(directory)",
        )

    def close(self) -> None:
        """Let go of the optimizer and of DistributedDataParallel; the model and its state stay."""
        if self._runtime is not None:
            self._runtime.close()
        self._runtime = self.optimizer = self.lr_scheduler = None
