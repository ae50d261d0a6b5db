"""``decompose``: show the pieces of a module's arithmetic to patterns, such as the bias of a Linear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo_core import Edit, Effect, Equivalence, Node, Primitive, Violation
from slapo_core.effects import Calls
from slapo_core.internals import buffers_of, parameters_of
from slapo_fusion.forwards import is_wrapped_by
from slapo_fusion.kernels import Bound
from slapo_fusion.private import check_input_axes, non_persistent_buffers_of

# Modules of torch.nn with their arithmetic in pieces: the same parameters, more than one operation.
#
# They are not modules of torch.nn, so that ``trace(flatten=True)`` looks into them, and patterns see the pieces.
# ``slapo_same_as`` says which class of torch.nn a forward computes the same as: steps treat the module as one of that.


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
    """Return a decomposed module with the same tensors and attributes, without hooks."""
    new: Any = KINDS[type(module)].__new__(KINDS[type(module)])
    nn.Module.__init__(new)
    own = {name: value for name, value in vars(module).items() if name not in vars(new) and name != "forward"}
    vars(new).update(own, training=module.training)
    parameters_of(new).update(parameters_of(module))
    buffers_of(new).update(buffers_of(module))
    non_persistent_buffers_of(new).update(non_persistent_buffers_of(module))
    return new  # type: ignore[no-any-return]


def _as(parameter: Tensor, output: Tensor) -> Tensor:
    """Cast a parameter to the output's dtype, as autocast needs."""
    return parameter if parameter.dtype == output.dtype else parameter.to(output.dtype)


def _normalized(module: Any, input: Tensor) -> Tensor:
    check_input_axes(module, input)
    share = 0.0 if module.momentum is None else module.momentum
    if module.training and module.track_running_stats and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:  # the average over all batches
            share = 1.0 / float(module.num_batches_tracked)
    keeps = module.track_running_stats or not module.training
    mean, variance = (module.running_mean, module.running_var) if keeps else (None, None)
    of_batch = module.training or (module.running_mean is None and module.running_var is None)
    return F.batch_norm(input, mean, variance, None, None, of_batch, share, module.eps)


@dataclass(frozen=True)
class Decompose(Primitive):
    """Split a module's arithmetic into operations that patterns can match.

    For ``nn.Linear``, ``nn.LayerNorm`` and ``nn.BatchNorm1d`` to ``3d``. Parameters and the state dict stay the same.
    Hooks and wrappers of steps stay, and later steps treat the module as one of its former class: of a row-split Linear
    the bias comes after the all-reduce, whether it is split before or after this step.

    Raises:
        PreconditionError: the module has another class, is traced, bound to a kernel or the root of the model, or
            its forward was set outside of the schedule.

    rewrite:
        ``y = linear(x)`` -> ``y = matmul(x, weight.t()) + bias``

        row-split and synchronized: ``y = linear(x)`` -> ``y = all_reduce(matmul(x, weight.t())) + bias``

        ``y = norm(x)`` -> ``y = normalized(x) * weight + bias``

    Source: paper appendix A, ``.decompose()``.
    """

    name = "fusion.decompose"
    equivalence = Equivalence.REORDERED

    def preconditions(self, node: Node) -> Iterator[Violation]:
        module = node.module
        if not node.path:
            yield Violation("the root of the model cannot be replaced", "decompose its children")
            return
        if type(module) in KINDS.values():
            yield Violation("the module is decomposed already", "remove this second call")
            return
        if type(module) not in KINDS:
            known = ", ".join(f"nn.{kind.__name__}" for kind in KINDS)
            yield Violation(f"{type(module).__name__} cannot be decomposed", f"decompose {known}")
            return
        if node.forward_is_replaced:
            yield Violation("the module is traced, and its graph would be lost", "decompose before trace()")
        elif getattr(forward := module.__dict__.get("forward"), "has_own", forward is not None):
            yield Violation(
                "the module's forward was set outside of the schedule, and would be lost", "set it in a class instead"
            )
        if is_wrapped_by(node, Bound):
            yield Violation("a kernel bound by bind() runs in the place of the forward", "leave out one of the two")

    def apply(self, node: Node, edit: Edit) -> None:
        edit.replace_module(node, decomposed(node.module), is_same=True)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if type(node.module) not in KINDS.values():
            yield Violation("the module is not decomposed")

    def effects(self, node: Node) -> Iterator[Effect]:
        yield Calls(node.path)
