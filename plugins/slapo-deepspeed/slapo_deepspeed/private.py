"""Access undocumented names of DeepSpeed and torch: only here, under a contract test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.torch_version import TorchVersion
from torch.utils._device import DeviceContext


def prepare(engine: Any, received: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Give DeepSpeed the receive buffers of this step, so that ranks exchange no shapes.

    DeepSpeed caches buffers by index and size, and would reuse one of another dtype.

    Args:
        engine: DeepSpeed's.
        received: buffers for messages of the previous rank.
        gradients: buffers for gradients of the next rank.
    """
    engine.first_output_send = False
    engine.pipe_recv_buf = tuple(received)
    engine.grad_layer = list(gradients)


def losses_of(engine: Any) -> list[torch.Tensor]:
    """Return the micro-batches' losses of the last step, on the last rank along ``pipe``."""
    return list(engine.fwd_outputs)


def forget(module: Any) -> None:
    """Unregister a ``PipelineModule``'s groups from DeepSpeed, if they were the last ones.

    DeepSpeed would use them wherever a later engine has none.
    """
    from deepspeed.utils import groups

    if groups.mpu is module.mpu():
        groups.mpu = None


def gradient_hooks_of(tensor: Any) -> dict[int, Any]:
    """Return the live table of a tensor's post-accumulate-grad hooks, or an empty one."""
    return tensor._post_accumulate_grad_hooks or {}


def link_optimizer_state(wrapper: Any, optimizer: Any) -> None:
    """Link optimizer state that was loaded from outside to a ZeRO wrapper."""
    if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):
        wrapper._hp_optimizer_states_linked = False
        if optimizer is not None and optimizer.state:
            wrapper._lazy_init_hp_params_optimizer_state()


@contextlib.contextmanager
def all_dtypes_supported() -> Iterator[None]:
    """Let DeepSpeed's accelerator claim fp16 and bf16 in the block, where nothing is computed."""
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
    """Return whether a function mode is active, a default device excepted."""
    return any(not isinstance(mode, DeviceContext) for mode in function_modes())


_IS_COMPILED_RIGHT = TorchVersion(torch.__version__) >= "2.13"
"""Older dynamo (2.11 at least) loses the weights' gradients in DeepSpeed's function. Torch's own does not; it keeps
gathered weights from forward to backward."""


@contextlib.contextmanager
def linear_restored() -> Iterator[None]:
    """Restore ``torch.nn.functional.linear`` after the block, which may replace it."""
    before = functional.linear
    try:
        yield
    finally:
        functional.linear = before


@contextlib.contextmanager
def linear_through(function: Callable[..., torch.Tensor], *, where: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Let ``function`` compute linear layers of some weights, in all threads: backward runs in others.

    Args:
        function: takes input, weight and bias.
        where: returns whether it computes the layer of a weight.
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
