"""Modules of torch.nn with their arithmetic in pieces: the same parameters, more than one operation.

They are no modules of torch.nn, so that ``trace(flatten=True)`` looks into them, and patterns see the pieces.
``slapo_same_as`` says which class of torch.nn a forward computes the same as: steps treat the module as one of that.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["KINDS", "DecomposedLayerNorm", "DecomposedLinear", "decomposed"]


class DecomposedLinear(nn.Linear):
    """A matrix product, then the bias."""

    slapo_same_as: ClassVar[type[nn.Module]] = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        output = torch.matmul(input, self.weight.t())
        return output if self.bias is None else output + _as(self.bias, output)


class DecomposedLayerNorm(nn.LayerNorm):
    """The normalization, then the scale, then the shift."""

    def forward(self, input: Tensor) -> Tensor:
        output = F.layer_norm(input, self.normalized_shape, None, None, self.eps)
        if self.weight is not None:
            output = output * _as(self.weight, output)
        return output if self.bias is None else output + _as(self.bias, output)


class _DecomposedBatchNorm:
    """The normalization with its running statistics, then scale and shift of each channel."""

    def forward(self: Any, input: Tensor) -> Tensor:
        output = _normalized(self, input)
        if self.weight is None:
            return output
        channels = (1, -1, *[1] * (output.dim() - 2))
        return output * _as(self.weight, output).view(channels) + _as(self.bias, output).view(channels)


class DecomposedBatchNorm1d(_DecomposedBatchNorm, nn.BatchNorm1d):  # type: ignore[misc]
    slapo_same_as = nn.BatchNorm1d


class DecomposedBatchNorm2d(_DecomposedBatchNorm, nn.BatchNorm2d):  # type: ignore[misc]
    slapo_same_as = nn.BatchNorm2d


class DecomposedBatchNorm3d(_DecomposedBatchNorm, nn.BatchNorm3d):  # type: ignore[misc]
    slapo_same_as = nn.BatchNorm3d


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: DecomposedLinear,
    nn.LayerNorm: DecomposedLayerNorm,
    nn.BatchNorm1d: DecomposedBatchNorm1d,
    nn.BatchNorm2d: DecomposedBatchNorm2d,
    nn.BatchNorm3d: DecomposedBatchNorm3d,
}


def decomposed(module: nn.Module) -> nn.Module:
    """The same module in pieces: with the same parameter and buffer objects and attributes, and without its hooks."""
    new: Any = KINDS[type(module)].__new__(KINDS[type(module)])
    nn.Module.__init__(new)
    own = {name: value for name, value in vars(module).items() if name not in vars(new) and name != "forward"}
    vars(new).update(own, training=module.training)
    new._parameters.update(module._parameters)
    new._buffers.update(module._buffers)
    new._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    return new  # type: ignore[no-any-return]


def _as(parameter: Tensor, output: Tensor) -> Tensor:
    """In the output's type: under autocast the product is rounded, and the bias must not undo that."""
    return parameter if parameter.dtype == output.dtype else parameter.to(output.dtype)


def _normalized(module: Any, input: Tensor) -> Tensor:
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
