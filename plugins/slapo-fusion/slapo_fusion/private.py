"""Names of torch that are not public and that this plugin needs: what a new version of torch may change is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch._C import (
    _dispatch_has_kernel_for_dispatch_key as has_kernel_for,
    _len_torch_dispatch_stack as number_of_dispatch_modes,
    _len_torch_function_stack as number_of_function_modes,
)
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensorMode
from torch.overrides import (
    _get_current_function_mode_stack as function_modes,
    _pop_mode as pop_function_mode,
    _push_mode as push_function_mode,
)
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

__all__ = [
    "OPDEFS",
    "DeviceContext",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "StopRecomputation",
    "dispatch_modes",
    "function_modes",
    "has_kernel_for",
    "number_of_dispatch_modes",
    "number_of_function_modes",
    "pop_function_mode",
    "push_function_mode",
    "top_saved_tensors_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

non_persistent_buffers_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")

assert_on_device: Callable[[torch.Tensor, str], None] = attrgetter("_assert_async")(torch)
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")


def tables_of(module: nn.Module, *, hooks: bool) -> list[dict[Any, Any]]:
    """Return the dicts of a module's attributes, tensors, children and forward hooks."""
    tables: list[dict[Any, Any]] = [vars(module), module._parameters, module._buffers, module._modules]
    return [*tables, module._forward_hooks, module._forward_pre_hooks] if hooks else tables


def clone_all(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copy tensors; on an accelerator, tensors of one dtype by one kernel."""
    return torch._foreach_mul(tensors, 1) if tensors else ()


# The compiler is imported when something is compiled: it takes seconds.


def compile_with_inductor(graph: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Compile a captured graph."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches=dict(settings))  # type: ignore[arg-type]


def inductor_modes(mode: str | None = None) -> dict[str, Any]:
    """Return the options of an inductor mode, or of all modes by name."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def inductor_options() -> Mapping[str, Any]:
    """Return the options of inductor, by name."""
    from torch._inductor import config

    return config.get_config_copy()


def backend_names() -> list[str]:
    """Return the names of the backends of ``torch.compile``."""
    return list(torch._dynamo.list_backends(exclude_tags=None))


def lookup_backend(name: str) -> Callable[..., Any]:
    """Return the backend of a name."""
    return torch._dynamo.lookup_backend(name)


def compile_errors() -> type[Exception]:
    """Return the error class of ``torch.compile``."""
    return torch._dynamo.exc.TorchDynamoException


def with_recompile_limit(limit: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function under a recompile limit of ``torch.compile``; ``config.patch`` takes half as long as a region."""
    config = torch._dynamo.config
    before, config.recompile_limit = config.recompile_limit, limit
    try:
        return function(*args, **kwargs)
    finally:
        config.recompile_limit = before


def has_registered_backward(operator: torch.library.CustomOpDef) -> bool:
    """Return whether ``register_autograd`` was called for a custom operator."""
    return operator._backward_fn is not None


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module has backward or backward-pre hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Return whether ``register_hook`` was called for a tensor."""
    return bool(tensor._backward_hooks)


def check_input_axes(module: Any, input: torch.Tensor) -> None:
    """Check the number of axes of a batch norm's input, as its forward does."""
    module._check_input_dim(input)
