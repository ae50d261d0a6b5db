"""Kernels: where they come from, and what calling one must keep to."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from slapo_core import ApplyError

__all__ = ["Unavailable", "WithBackward", "found", "has_backward", "is_operator", "missing_gradient"]


class Unavailable(Exception):  # noqa: N818 - the reason why a kernel is not there, told or fallen back from
    """The kernel cannot be had here.

    Args:
        reason: what is missing.
        remedy: what to do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def found(kernel: str | Callable[..., Any]) -> Callable[..., Any]:
    """The kernel itself: an operator by its name ``"namespace::name"``, or a function.

    Raises:
        Unavailable: no such operator is registered, or it is Triton's and there is no GPU or no Triton.
    """
    if isinstance(kernel, str):
        namespace, _, name = kernel.partition("::")
        try:
            return getattr(getattr(torch.ops, namespace), name)  # type: ignore[no-any-return]
        except AttributeError:
            raise Unavailable(
                f"no operator '{kernel}' is registered", "import the package that registers it before the schedule runs"
            ) from None
    if type(kernel).__module__.partition(".")[0] == "triton":
        if not torch.cuda.is_available():
            raise Unavailable("a Triton kernel needs a GPU, and there is none", "run where there is one")
        raise Unavailable(
            "a Triton kernel alone does not say how it is launched",
            "give the function that makes the output and launches it: kernel[grid](...)",
        )
    if getattr(kernel, "needs_triton", False) and importlib.util.find_spec("triton") is None:
        raise Unavailable("Triton is not installed", "pip install triton")
    return kernel


def is_operator(kernel: Callable[..., Any]) -> bool:
    """Whether a kernel is registered with torch, which then knows what it gives on tensors without values."""
    return isinstance(kernel, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch.library.CustomOpDef))


def has_backward(kernel: Callable[..., Any]) -> bool | None:
    """Whether a gradient is known for an operator; None for a function, of which only a call tells."""
    if not is_operator(kernel):
        return None
    from torch._library.custom_ops import OPDEFS

    if isinstance(kernel, torch.library.CustomOpDef):
        return kernel._backward_fn is not None
    if isinstance(kernel, torch._ops.OpOverloadPacket):
        return any(has_backward(getattr(kernel, overload)) for overload in kernel.overloads())
    name: str = kernel.name()  # type: ignore[attr-defined]
    if name in OPDEFS:  # always differentiable for the dispatcher, be it by raising
        return OPDEFS[name]._backward_fn is not None
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def missing_gradient(inputs: Any, output: Any) -> bool:
    """Whether an output lost the gradient that its inputs ask for."""
    if not torch.is_grad_enabled():
        return False
    wanted = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(inputs))
    got = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return wanted and bool(got) and not any(leaf.requires_grad for leaf in got)


class WithBackward:
    """A kernel with another one as its backward: ``backward(gradient of each output, *inputs)``.

    Args:
        forward: the kernel.
        backward: gives the gradient of each input, or None for it; a tensor alone where there is one input.
        where: for messages.
    """

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any], where: str) -> None:
        self.forward, self.backward, self.where = forward, backward, where

    def __call__(self, *inputs: Any) -> Any:
        return _Kernel.apply(self, *inputs)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: WithBackward, *inputs: Any) -> Any:
        ctx.pair = pair
        ctx.positions = [position for position, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(inputs[position] for position in ctx.positions))
        return pair.forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = list(ctx.others)
        for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            inputs[position] = tensor
        answer = ctx.pair.backward(*gradients, *inputs)
        found = list(answer) if isinstance(answer, (tuple, list)) else [answer]
        if len(found) != len(inputs):
            raise ApplyError(
                f"{ctx.pair.where}: its backward gave {len(found)} gradients for {len(inputs)} inputs",
                hint="return one for each input, None for what has none",
            )
        for position, (gradient, value) in enumerate(zip(found, inputs, strict=True)):
            if isinstance(gradient, Tensor) and gradient.shape != value.shape:
                raise ApplyError(
                    f"{ctx.pair.where}: its backward gave a gradient of shape {tuple(gradient.shape)} for input "
                    f"{position}, of shape {tuple(value.shape)}",
                    hint="a gradient has the shape of its input",
                )
        return None, *found
