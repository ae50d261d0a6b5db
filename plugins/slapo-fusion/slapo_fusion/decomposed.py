"""Modules of torch.nn with their arithmetic in pieces: the same parameters, more than one operation.

They are no modules of torch.nn, so that ``trace(flatten=True)`` looks into them, and patterns see the pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["KINDS", "DecomposedLayerNorm", "DecomposedLinear", "decomposed"]

Around = tuple[Callable[..., Any], ...]


class DecomposedLinear(nn.Linear):
    """A matrix product, what steps put behind it (an all-reduce), then the bias.

    Attributes:
        before: forward pre-hooks of steps, called as torch does.
        after: forward hooks of steps, likewise.
        adds_bias: False where ``after`` adds the bias already, as the sync of a row-split layer does.
    """

    before: Around
    after: Around
    adds_bias: bool

    def forward(self, input: Tensor) -> Tensor:
        args, kwargs = _enter(self, self.before, input)
        output = _leave(self, self.after, args, kwargs, torch.matmul(args[0], self.weight.t()))
        return output if self.bias is None or not self.adds_bias else output + _as(self.bias, output)


class DecomposedLayerNorm(nn.LayerNorm):
    """The normalisation, then the scale, then the shift."""

    before: Around
    after: Around

    def forward(self, input: Tensor) -> Tensor:
        args, kwargs = _enter(self, self.before, input)
        output = F.layer_norm(args[0], self.normalized_shape, None, None, self.eps)
        if self.weight is not None:
            output = output * _as(self.weight, output)
        if self.bias is not None:
            output = output + _as(self.bias, output)
        return _leave(self, self.after, args, kwargs, output)


class _DecomposedBatchNorm:
    """The normalisation with its running statistics, then scale and shift of each channel."""

    def forward(self: Any, input: Tensor) -> Tensor:
        args, kwargs = _enter(self, self.before, input)
        output = _normalised(self, args[0])
        if self.weight is not None:
            channels = (1, -1, *[1] * (output.dim() - 2))
            output = output * _as(self.weight, output).view(channels) + _as(self.bias, output).view(channels)
        return _leave(self, self.after, args, kwargs, output)


class DecomposedBatchNorm1d(_DecomposedBatchNorm, nn.BatchNorm1d):  # type: ignore[misc]
    pass


class DecomposedBatchNorm2d(_DecomposedBatchNorm, nn.BatchNorm2d):  # type: ignore[misc]
    pass


class DecomposedBatchNorm3d(_DecomposedBatchNorm, nn.BatchNorm3d):  # type: ignore[misc]
    pass


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: DecomposedLinear,
    nn.LayerNorm: DecomposedLayerNorm,
    nn.BatchNorm1d: DecomposedBatchNorm1d,
    nn.BatchNorm2d: DecomposedBatchNorm2d,
    nn.BatchNorm3d: DecomposedBatchNorm3d,
}


def decomposed(module: nn.Module, *, before: Around = (), after: Around = (), adds_bias: bool = True) -> nn.Module:
    """The same module in pieces: with the same parameter and buffer objects and attributes, and without its hooks."""
    new: Any = KINDS[type(module)].__new__(KINDS[type(module)])
    nn.Module.__init__(new)
    own = {name: value for name, value in vars(module).items() if name not in vars(new) and name != "forward"}
    vars(new).update(own, training=module.training, before=before, after=after, adds_bias=adds_bias)
    new._parameters.update(module._parameters)
    new._buffers.update(module._buffers)
    new._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    return new  # type: ignore[no-any-return]


def _enter(module: nn.Module, hooks: Around, input: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: tuple[Any, ...] = (input,)
    kwargs: dict[str, Any] = {}
    for hook in hooks:
        answer = hook(module, args, kwargs)
        if answer is not None:
            args, kwargs = answer
    return args, kwargs


def _leave(module: nn.Module, hooks: Around, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    for hook in hooks:
        answer = hook(module, args, kwargs, output)
        if answer is not None:
            output = answer
    return output


def _as(parameter: Tensor, output: Tensor) -> Tensor:
    """In the output's type: under autocast the product is rounded, and the bias must not undo that."""
    return parameter if parameter.dtype == output.dtype else parameter.to(output.dtype)


def _normalised(module: Any, input: Tensor) -> Tensor:
    module._check_input_dim(input)
    share = 0.0 if module.momentum is None else module.momentum
    if module.training and module.track_running_stats and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:  # the average over all batches
            share = 1.0 / float(module.num_batches_tracked)
    keeps = module.track_running_stats or not module.training
    mean, variance = (module.running_mean, module.running_var) if keeps else (None, None)
    of_batch = module.training or (module.running_mean is None and module.running_var is None)
    return F.batch_norm(input, mean, variance, None, None, of_batch, share, module.eps)
