"""Reduce a linear layer's input gradient while its weight gradient is computed.

The hook of ``sync`` notes on the layer's input where it comes from; the layer's wrapped forward then starts the
collective itself, in its backward. Where a layer gets any other tensor, or runs another forward, the hook reduces, as
without overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import Parameter

from slapo_core import ArgumentError
from slapo_core.observers import Forward, Origin, happened, is_observed, run_from
from slapo_tp import collectives
from slapo_tp.collectives import RankGroup
from slapo_tp.private import has_gradient_hooks, version_of

OVERLAPPED = "overlapped reduction"
"""The event of a backward that computes the weight's gradient while the input's is reduced."""

_PLAIN = (Tensor, Parameter)


class InputSource(NamedTuple):
    """Describe the tensor and collective that a layer's input was made of.

    Args:
        tensor: this rank's tensor before the collective, whose gradient is the reduced one.
        axis: the axis that was gathered, and is scattered in the backward; None for an all-reduce.
        group: the ranks.
        version: of the input, which a change in place increments.
        hook: made the input.
    """

    tensor: Tensor
    axis: int | None
    group: RankGroup
    version: int
    hook: Callable[..., Any]


def with_source(given: Tensor, tensor: Tensor, axis: int | None, group: RankGroup, hook: Callable[..., Any]) -> Tensor:
    """Note on ``given``, a layer's input, that ``hook`` made it of ``tensor``."""
    version = 0 if is_compiling() else version_of(given)
    given._slapo_tp_source = InputSource(tensor, axis, group, version, hook)  # type: ignore[attr-defined]
    return given


def can_overlap(module: nn.Module) -> bool:
    """Return whether a module runs the forward of a linear layer."""
    return _is_linear(type(module).forward)


def under_weight_gradient(forward: Forward) -> Forward:
    """Wrap a linear layer's forward to overlap the gradient's reduction."""
    own = forward.__wrapped__ if getattr(forward, "slapo_own", None) is forward else forward  # type: ignore[attr-defined]
    if not _is_linear(own):
        return forward
    is_transposed = own is not nn.Linear.forward

    @functools.wraps(forward)
    def run(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        x: Any = args[0] if args else next(iter(kwargs.values()), None)
        source, weight, bias = getattr(x, "_slapo_tp_source", None), module.weight, module.bias
        if source is None or len(args) + len(kwargs) != 1 or not _leads_to(source, x) or not _is_trained(weight):
            if is_observed() and not is_compiling():
                _report(source, x, weight)
            return forward(module, *args, **kwargs)  # type: ignore[no-any-return]
        device = x.device.type
        if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        gathered = None if source.axis is None else x.detach()
        origin = None if is_compiling() else Origin("", source.hook)
        given = (source.tensor, gathered, weight, bias, is_transposed, source.axis, source.group)
        return run_from(origin, _Linear.apply, *given)  # type: ignore[no-any-return]

    return run


under_weight_gradient.slapo_goes_around = True  # type: ignore[attr-defined]


def _report(source: InputSource | None, x: Any, weight: Tensor) -> None:
    """Report that the hook reduces, if there is anything to overlap."""
    if not is_grad_enabled() or not isinstance(x, Tensor) or not x.requires_grad or not _is_trained(weight):
        return
    if source is None:
        happened("fallback", "the layer's input is another tensor than the one that its hook gave")
    elif source.group.name is not None:
        happened("fallback", "the layer's input was changed in place, or has hooks of its gradient")


def _is_linear(forward: Callable[..., Any]) -> bool:
    if forward is nn.Linear.forward:
        return True
    # transformers' own, recognized by name so that transformers is not needed
    name = (getattr(forward, "__module__", None), getattr(forward, "__qualname__", None))
    return name == ("transformers.pytorch_utils", "Conv1D.forward")


def _is_trained(weight: Tensor) -> bool:
    """Return whether a weight is a plain tensor with a gradient."""
    return weight.requires_grad and type(weight) in _PLAIN


def _leads_to(source: InputSource, x: Tensor) -> bool:
    """Return whether the layer may compute with the source instead of its input."""
    if source.group.name is None or not x.requires_grad or not is_grad_enabled() or type(x) not in _PLAIN:
        return False
    if is_compiling():
        return True
    return source.version == version_of(x) and not has_gradient_hooks(x)


class _Linear(Function):
    """Run a linear layer whose input gradient is reduced beside the weight's."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        x: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        is_transposed: bool,
        axis: int | None,
        group: RankGroup,
    ) -> Tensor:
        ctx.arguments = (x is not None, is_transposed, axis, group)
        x = source if x is None else x
        ctx.save_for_backward(x, weight)
        ctx.dtype = source.dtype
        return F.linear(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        is_gathered, is_transposed, axis, group = ctx.arguments
        needs_input, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if is_gathered and is_grad_enabled():
            raise ArgumentError(
                "sync with overlap=True and an all_gather of the input has no gradient of a gradient",
                hint='leave overlap=True out of sync("fwd_pre", "all_gather")',
            )
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = of_bias = None
        if needs_input:
            partial = (rows @ (weight.t() if is_transposed else weight)).view(x.shape).to(ctx.dtype)
            of_input = collectives.start_sum(partial, axis, group)
        if needs_weight:
            inputs = x.to(weight.dtype).reshape(-1, x.shape[-1])
            of_weight = inputs.t() @ rows if is_transposed else rows.t() @ inputs
            if of_input is not None and not is_grad_enabled() and not is_compiling():
                happened("call", OVERLAPPED)
        if needs_bias:
            of_bias = rows.sum(0)
        if of_input is not None:
            of_input = collectives.wait(of_input)
        return of_input, None, of_weight, of_bias, None, None, None
