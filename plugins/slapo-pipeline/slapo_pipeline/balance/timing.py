"""How long the parts of a model take, forward and backward, each by itself on what it is called with."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from slapo_core.spec.accelerators import accelerator, fork_rng
from slapo_core.tracing import copied_model
from slapo_pipeline.balance.sections import Call

__all__ = ["seconds_of"]

ROUNDS = 7


def seconds_of(parts: Sequence[tuple[nn.Module, Callable[[], Call]]], *, rounds: int = ROUNDS) -> list[float]:
    """The median time of a forward and backward of each part, in seconds.

    They run in turn, round by round, so that what else the machine does falls on all of them. Parts that look alike
    (the same modules with the same shapes, on the same shapes) get one median of all their times: they differ by
    chance only. Nothing happens to the parts: copies run, gradients are thrown away, and torch's random state is kept.

    Args:
        parts: modules with values, each with what makes the arguments of a call; the values of its tensors are made up.
        rounds: how often each of them runs, after a first time that does not count.
    """
    copies = [copied_model(module, {}) for module, _ in parts]
    kinds = [_kind(module, make()) for module, make in parts]
    times: dict[Any, list[float]] = {}
    with fork_rng():
        for turn in range(rounds + 1):
            for module, (_, make), kind in zip(copies, parts, kinds, strict=True):
                seconds = _seconds(module, _with_values(make()))
                if turn:
                    times.setdefault(kind, []).append(seconds)
    return [statistics.median(times[kind]) for kind in kinds]


def _seconds(module: nn.Module, call: Call) -> float:
    leaves = [each for each in pytree.tree_leaves(call) if isinstance(each, torch.Tensor) and each.requires_grad]
    wanted = [*leaves, *(each for each in module.parameters() if each.requires_grad)]
    with torch.enable_grad():
        _wait()
        start = time.perf_counter()
        out = module(*call[0], **call[1])
        results = [
            each for each in pytree.tree_leaves(_plain(out)) if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        if results and wanted:
            torch.autograd.grad(results, wanted, [torch.ones_like(each) for each in results], allow_unused=True)
        _wait()
    return time.perf_counter() - start


def _plain(out: Any) -> Any:
    """An output object as its fields: pytree knows mappings, and not every class of outputs."""
    return dict(out) if isinstance(out, dict) else out


def _wait() -> None:
    if accelerator() is not None:
        torch.accelerator.synchronize()


def _kind(module: nn.Module, call: Call) -> Any:
    state = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in module.state_dict().items())
    shapes = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else str(type(leaf))
        for leaf in pytree.tree_leaves(call)
    )
    return repr(module), state, shapes


class _Values(TorchFunctionMode):
    """Made-up values for tensors without any, wherever they are copied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = _made_up(tensor)
        return memo[id(tensor)]


def _with_values(call: Call) -> Call:
    with _Values():
        return copy.deepcopy(call)


def _made_up(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros for integers, which are valid as ids; True for masks."""
    shape, device, dtype = tuple(tensor.shape), tensor.device, tensor.dtype
    if dtype is torch.bool:
        return torch.ones(shape, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()
