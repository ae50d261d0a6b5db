"""The engine of target ``"torch"``: a plain training step, and state in the untouched model's layout."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import BuildError
from slapo_core.native.checkpoint import load_checkpoint, save_checkpoint
from slapo_core.native.gradients import GradientClipper
from slapo_core.spec.engine import StepResult

if TYPE_CHECKING:
    from slapo_core.spec.dialect import Plan
    from slapo_core.weights.reference import Reference

__all__ = ["TorchEngine"]


class TorchEngine:
    """The implementation of :class:`slapo_core.spec.engine.Engine` in plain PyTorch.

    Args:
        module: the scheduled model.
        forward: what a training step calls: ``module``, or its DistributedDataParallel.
        optimizer: over the parameters of ``module``; None if the engine only evaluates.
        reference: the way to and from the untouched model's layout.
        loss: ``loss(output, batch)``; None takes the output's.
        max_grad_norm: as for ``build``.
        plan: what was built.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        reference: Reference,
        loss: Callable[[Any, Any], torch.Tensor] | None,
        max_grad_norm: float | None,
        plan: Plan,
    ) -> None:
        self._module = module
        self._forward: Callable[..., Any] | None = forward
        self._reference = reference
        self._loss = loss
        self._takes = _Signature(module) if loss is not None else None
        self._clipper = GradientClipper(reference, max_grad_norm) if max_grad_norm is not None else None
        self.optimizer = optimizer
        self.plan = plan

    @property
    def module(self) -> nn.Module:
        return self._module

    # -- steps; documented in spec/engine.py ------------------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        optimizer = self.optimizer
        if optimizer is None or self._forward is None:
            raise self._cannot_train()
        output = self._call(self._forward, batch)
        loss = self._loss_of(output, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = self._clipper.clip() if self._clipper is not None else None
        optimizer.step()
        return StepResult(loss.detach(), output, norm)

    @torch.no_grad()
    def eval_step(self, batch: Any) -> StepResult:
        if self._forward is None:
            raise _closed()
        modes = [(module, module.training) for module in self._module.modules()]
        self._module.eval()
        try:
            output = self._call(self._module, batch)
        finally:
            for module, training in modes:
                module.training = training
        return StepResult(self._loss_of(output, batch), output)

    def _call(self, forward: Callable[..., Any], batch: Any) -> Any:
        if self._takes is not None:
            batch = self._takes.of(batch)
        if isinstance(batch, Mapping):
            return forward(**batch)
        if isinstance(batch, (tuple, list)):
            return forward(*batch)
        return forward(batch)

    def _loss_of(self, output: Any, batch: Any) -> torch.Tensor:
        loss: Any
        if self._loss is not None:
            loss = self._loss(output, batch)
        elif isinstance(output, torch.Tensor):
            loss = output
        else:
            loss = getattr(output, "loss", None)
            if loss is None and isinstance(output, Mapping):
                loss = output.get("loss")
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise self._no_loss(output, loss)
        return loss

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
        """The untouched model's state dict; see :meth:`slapo_core.weights.reference.Reference.state_dict`."""
        return self._reference.state_dict(rank0_only=rank0_only, include_added=include_added)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._reference.load_state_dict(state)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a checkpoint; see :func:`slapo_core.native.checkpoint.save_checkpoint`."""
        save_checkpoint(directory, self._reference, self.optimizer)

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Read a checkpoint; see :func:`slapo_core.native.checkpoint.load_checkpoint`."""
        load_checkpoint(directory, self._reference, self.optimizer)

    def close(self) -> None:
        """Let go of the optimiser and of DistributedDataParallel; the model and its state stay."""
        self._forward = self.optimizer = None

    # -- errors -----------------------------------------------------------------------------------------------

    def _cannot_train(self) -> BuildError:
        if self._forward is None:
            return _closed()
        return BuildError(
            "this engine cannot train: it was built without an optimizer",
            hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))",
        )

    def _no_loss(self, output: Any, loss: Any) -> BuildError:
        if self._loss is not None:
            return BuildError(
                f"loss(output, batch) must return a scalar tensor (got {_kind(loss)})",
                hint="reduce it, for instance with .mean()",
            )
        return BuildError(
            f"the output of {type(self._module).__name__} holds no loss: it is {_kind(output)}",
            hint="build(sch, ..., loss=lambda output, batch: "
            'torch.nn.functional.cross_entropy(output, batch["labels"])), or give the labels to the model',
        )


class _Signature:
    """What a forward takes of a batch whose rest is for the loss."""

    def __init__(self, module: nn.Module) -> None:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        kinds = {parameter.kind for parameter in parameters}
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._count = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(positional)
        self._names = (
            None
            if inspect.Parameter.VAR_KEYWORD in kinds
            else frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        )

    def of(self, batch: Any) -> Any:
        if isinstance(batch, Mapping) and self._names is not None:
            return {name: value for name, value in batch.items() if name in self._names}
        if isinstance(batch, (tuple, list)) and self._count is not None:
            return batch[: self._count]
        return batch


def _closed() -> BuildError:
    return BuildError("the engine is closed", hint="schedule and build a fresh model, with weights=engine.state_dict()")


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"
