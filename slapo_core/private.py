"""Wrap the private names of torch; tests/core/test_private.py checks them against the installed version."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode


def active_function_modes() -> list[Any]:
    """Return the active torch-function modes, the outermost first."""
    if not torch._C._len_torch_function_stack():
        return []
    return torch.overrides._get_current_function_mode_stack()  # type: ignore[no-any-return]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the live table of a module's own parameters by name; None for unset ones."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the live table of a module's own buffers by name; None for unset ones."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the live table of a module's children by name; None for unset ones."""
    return module._modules


def tables_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the live tables of parameters, buffers and children."""
    return module._parameters, module._buffers, module._modules


def call_hooks_of(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], ...]:
    """Return the live tables of a module's forward and backward hooks."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def non_persistent_buffers_of(module: nn.Module) -> set[str]:
    """Return the live table of a module's non-persistent buffer names."""
    return module._non_persistent_buffers_set


MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes of every module: tensors, children, hooks, flags."""

TENSOR_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
"""The tables of a module's parameters, buffers and children, and of the buffers left out of its state dict."""

HOOK_TABLES: dict[str, tuple[str, ...]] = {
    "forward_pre": ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    "forward": ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "full_backward_pre": ("_backward_pre_hooks",),
    "full_backward": ("_backward_hooks",),
}
"""Kind of hook -> the tables that its registration writes to, the functions' first."""

STATE_DICT_HOOK_TABLES = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""The tables of a module's hooks that run when its state is saved or loaded."""

TENSOR_HOOK_TABLES = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
"""Table of a tensor's hooks -> the method that registers one."""


def hooks_of(module: nn.Module) -> dict[Any, dict[int, Callable[..., Any]]]:
    """Return the live hook tables of a module by kind."""
    return {kind: getattr(module, tables[0]) for kind, tables in HOOK_TABLES.items()}


def function_of_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the registered function of a hook that torch wrapped to pass its module."""
    return getattr(hook, "hook", hook)


def pass_module(hook: Callable[..., Any], old: nn.Module, new: nn.Module) -> None:
    """Let a hook that torch wrapped to pass ``old`` pass ``new``."""
    passed = getattr(hook, "module", None) if getattr(hook, "with_module", False) else None
    if passed is not None and passed() is old:
        hook.module = weakref.ref(new)  # type: ignore[attr-defined]


def full_backward_flag(module: nn.Module) -> bool | None:
    """Return False for deprecated backward hooks; None if none was ever registered."""
    return module._is_full_backward_hook


def set_full_backward_flag(module: nn.Module, flag: bool | None) -> None:
    """Set the kind of a module's backward hooks."""
    module.__dict__["_is_full_backward_hook"] = flag  # past a __setattr__ of the module's class


@contextmanager
def module_calls_through(call: Callable[..., Any], root: nn.Module | None = None) -> Iterator[None]:
    """Let ``call(run, module, *args, **kwargs)`` make this thread's calls of modules while the block runs.

    The methods are replaced for the process: hold ``observers.PATCHING``.

    Args:
        call: makes a call; ``run`` is the method that was called.
        root: where the class of a module at or below it overrides ``__call__``, ``run`` is the override, once; None
            for ``nn.Module.__call__`` alone.
    """
    thread = threading.get_ident()
    overriding: set[int] = set()  # ids of modules whose override runs, and has not come to nn.Module.__call__

    def through(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or threading.get_ident() != thread or not isinstance(module, nn.Module):
                return run(module, *args, **kwargs)
            is_override, key = run is not plain, id(module)
            if key not in overriding:
                if not is_override:
                    return call(run, module, *args, **kwargs)
                overriding.add(key)
                try:
                    return call(run, module, *args, **kwargs)
                finally:
                    overriding.discard(key)
            if is_override:
                return run(module, *args, **kwargs)
            overriding.discard(key)
            try:
                return run(module, *args, **kwargs)
            finally:
                overriding.add(key)

        return called

    plain: Callable[..., Any] = nn.Module.__call__
    classes = {cls for module in ([] if root is None else root.modules()) for cls in overrides_of_call(type(module))}
    before = [(cls, vars(cls)["__call__"]) for cls in (*classes, nn.Module)]
    for cls, own in before:
        cls.__call__ = through(own)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for cls, own in before:
            cls.__call__ = own  # type: ignore[method-assign]


@contextmanager
def plain_calls_within(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let blocks of :func:`module_calls_through` entered later end at the given modules: calls below are torch's own.

    Compiled code must not contain a method of such a block.

    Args:
        modules: whose forward is compiled.
    """
    plain, compiled = nn.Module.__call__, {id(module) for module in modules}

    def call(run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in compiled:
            return run(module, *args, **kwargs)
        through, nn.Module.__call__ = nn.Module.__call__, plain  # type: ignore[method-assign]
        try:
            return run(module, *args, **kwargs)
        finally:
            nn.Module.__call__ = through  # type: ignore[method-assign]

    with module_calls_through(call):
        yield


def overrides_of_call(cls: type) -> Iterator[type]:
    """Yield the classes above ``nn.Module`` in the order of lookup that define ``__call__``."""
    for each in cls.__mro__:
        if each is nn.Module:
            return
        if isinstance(vars(each).get("__call__"), FunctionType):
            yield each


def write_count(tensor: torch.Tensor) -> int | None:
    """Return a tensor's count of in-place writes, its views' included; None in inference mode."""
    return None if tensor.is_inference() else tensor._version


class SafeFakeTensorMode(FakeTensorMode):
    """Compute shapes and dtypes only; reading the data pointer of a fake tensor raises.

    By default torch gives the address 0, on which a raw CUDA kernel would be launched: that ends the process's context.

    Args:
        allow_non_fake_inputs: whether real tensors among the arguments of an operator are taken as if they were fake.
    """

    def __init__(self, *, allow_non_fake_inputs: bool = True) -> None:
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        self._allow_unsafe_data_ptr_access = False


def is_data_pointer_error(error: BaseException) -> bool:
    """Return whether an error comes from reading the data pointer of a fake tensor."""
    return isinstance(error, RuntimeError) and "Cannot access data pointer" in str(error)
