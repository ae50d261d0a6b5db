"""One call of the model on a batch in any form, and the loss of what it gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from slapo_core.errors import BuildError

__all__ = ["LossCall", "trained"]


class LossCall:
    """Calls a model and finds the loss.

    Args:
        module: the scheduled model.
        loss: ``loss(output, batch)``; what a batch holds beyond the arguments of the forward is then left to it. None
            takes the loss that the output holds.
    """

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Any] | None) -> None:
        self._module, self._loss = module, loss
        self._takes = _Signature(module) if loss is not None else None

    def __call__(self, batch: Any, forward: Callable[..., Any] | None = None) -> tuple[torch.Tensor, Any]:
        """The loss, a scalar tensor, and the output of ``forward`` (None: the model) on a batch."""
        output = self._call(self._module if forward is None else forward, batch)
        return self.loss_of(output, batch), output

    def _call(self, forward: Callable[..., Any], batch: Any) -> Any:
        if self._takes is not None:
            batch = self._takes.of(batch)
        if isinstance(batch, Mapping):
            return forward(**batch)
        if isinstance(batch, (tuple, list)):
            return forward(*batch)
        return forward(batch)

    def loss_of(self, output: Any, batch: Any) -> torch.Tensor:
        """The loss of an output on a batch, a scalar tensor.

        Raises:
            BuildError: there is none in the output, or the user's function gives no scalar.
        """
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

    def _no_loss(self, output: Any, loss: Any) -> BuildError:
        if self._loss is not None:
            return BuildError(
                f"loss(output, batch) must return a scalar tensor (got {_described(loss)})",
                hint="reduce it, for instance with .mean()",
            )
        return BuildError(
            f"the output of {type(self._module).__name__} holds no loss: it is {_described(output)}",
            hint="build(sch, ..., loss=lambda output, batch: "
            'torch.nn.functional.cross_entropy(output, batch["labels"])), or give the labels to the model',
        )


def trained(loss: torch.Tensor) -> torch.Tensor:
    """The same loss, from which a training step goes back.

    Without a gradient, torch would raise in other words in the backward pass of a whole model; a runtime may leave that
    pass out, and one of stages gives what it was sent a gradient of zeros: both step, with zeros.

    Raises:
        BuildError: gradients are enabled, and it has none.
    """
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise BuildError(
            "the loss depends on nothing that is trained, so that there is no gradient",
            hint="unfreeze parameters before build; give loss= a function that does not detach the output",
        )
    return loss


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


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"
