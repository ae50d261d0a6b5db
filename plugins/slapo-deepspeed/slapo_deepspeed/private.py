"""Access undocumented names of DeepSpeed and torch: only here, under a contract test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.torch_version import TorchVersion
from torch.utils._device import DeviceContext


def prepare(engine: Any, received: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Give DeepSpeed the tensor shapes and dtypes of this step, so that ranks exchange none.

    It would keep its buffers by place and size, and take one of another type for the same.

    Args:
        engine: DeepSpeed's.
        received: of the sizes and types of what comes from the rank before.
        gradients: likewise, what comes back from the next one.
    """
    engine.first_output_send = False
    engine.pipe_recv_buf = tuple(received)
    engine.grad_layer = list(gradients)


def losses_of(engine: Any) -> list[torch.Tensor]:
    """The losses of the micro-batches of the last step; on the last rank along ``pipe``."""
    return list(engine.fwd_outputs)


def forget(module: Any) -> None:
    """Let DeepSpeed forget a ``PipelineModule``'s groups, if they are the last ones that it was given.

    It asks those wherever a later engine has none of its own.
    """
    from deepspeed.utils import groups

    if groups.mpu is module.mpu():
        groups.mpu = None


def forward_hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the live tables of a module's forward-pre and forward hooks."""
    return module._forward_pre_hooks, module._forward_hooks


def gradient_hooks_of(tensor: Any) -> dict[int, Any]:
    """Return the live table of hooks called after a gradient was accumulated; an empty one if there is none."""
    return tensor._post_accumulate_grad_hooks or {}


def link_optimizer_state(wrapper: Any, optimizer: Any) -> None:
    """Let a ZeRO wrapper find a state that its optimizer was given from outside."""
    if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):
        wrapper._hp_optimizer_states_linked = False
        if optimizer is not None and optimizer.state:
            wrapper._lazy_init_hp_params_optimizer_state()


@contextlib.contextmanager
def all_dtypes_supported() -> Iterator[None]:
    """Let DeepSpeed's accelerator support fp16 and bf16 in the block: nothing is computed there."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    answers: dict[str, Any] = {
        "is_fp16_supported": lambda: True,
        "is_bf16_supported": lambda: True,
        "supported_dtypes": lambda: [torch.float, torch.float16, torch.bfloat16],
    }
    before = dict(vars(accelerator))
    vars(accelerator).update(answers)
    try:
        yield
    finally:
        vars(accelerator).clear()
        vars(accelerator).update(before)


def partition_rank(wrapper: Any, parameter: Any) -> int:
    """Return this rank's position in the group over which ZeRO stage 3 shards a parameter."""
    return int(wrapper._get_param_partition_rank(parameter))


def functions_are_watched() -> bool:
    """Whether calls of torch's functions are recorded or replaced now; a default device is not that."""
    return any(not isinstance(mode, DeviceContext) for mode in function_modes())


_IS_COMPILED_RIGHT = TorchVersion(torch.__version__) >= "2.13"
"""Older dynamo (2.11 at least) loses the weights' gradients in DeepSpeed's function; torch's own keeps them there, and
the gathered weights from forward to backward."""


@contextlib.contextmanager
def linear_restored() -> Iterator[None]:
    """Restore ``torch.nn.functional.linear`` after the block, which may set another one."""
    before = functional.linear
    try:
        yield
    finally:
        functional.linear = before


@contextlib.contextmanager
def linear_through(function: Callable[..., torch.Tensor], *, where: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Let ``function`` compute linear layers whose weight is marked, in all threads: backward passes have their own.

    Args:
        function: takes input, weight and bias.
        where: whether a weight is marked.
    """
    before = functional.linear

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        is_compiling = torch.compiler.is_compiling()
        is_own = _IS_COMPILED_RIGHT if is_compiling else not functions_are_watched()  # a recording sees torch's own
        if where(weight) and is_own:
            return function(input, weight, bias)
        return before(input, weight, bias)

    with linear_restored():
        functional.linear = linear
        yield
