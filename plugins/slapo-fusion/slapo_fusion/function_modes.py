"""Run compiled code under torch-function modes, e.g. of ``verify``.

A torch-function mode sees calls of Python, and compiled code makes none; and after a graph break, torch.compile (2.13)
computes wrong values while a mode is active. So the modes are disabled while compiled code runs:

- a compiled graph with dropout also runs as captured, on copies, so that the modes see every draw. The compiled code
  computes the result, without its dropout if a mode disabled that.
- a function with graph breaks is treated likewise as one; where a mode disabled its dropout, it runs uncompiled.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from slapo_core import ApplyError
from slapo_core.internals import buffers_of
from slapo_core.layout import accelerator, fork_rng
from slapo_core.observers import dropout_is_off
from slapo_fusion.private import (
    DeviceContext,
    FakeTensorMode,
    compile_errors,
    dispatch_modes,
    function_modes,
    number_of_dispatch_modes,
    number_of_function_modes,
    pop_function_mode,
    push_function_mode,
    tree_map_only,
)

_DROPOUT = (
    "alpha_dropout",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
    "feature_dropout",
)
_ATTENTION = "scaled_dot_product_attention"
_ATTENTION_DROPOUT = 4  # scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, ...)


def is_watched() -> bool:
    """Return whether a torch-function mode other than the default device is active."""
    if not number_of_function_modes():
        return False
    return any(not isinstance(mode, DeviceContext) for mode in function_modes())


def is_fake() -> bool:
    """Return whether a fake-tensor mode is active."""
    if not number_of_dispatch_modes():
        return False
    return any(isinstance(mode, FakeTensorMode) for mode in dispatch_modes())


def sees_operations() -> bool:
    """Return whether a dispatch mode is active that must see each operation, also in compiled code."""
    return number_of_dispatch_modes() > 0 and not all(mode.ignore_compile_internals() for mode in dispatch_modes())


@contextlib.contextmanager
def modes_disabled(*, show: bool = True) -> Iterator[None]:
    """Disable the active torch-function modes while the block runs.

    Args:
        show: whether compiled graphs show them their draws.
    """
    modes = [pop_function_mode() for _ in range(number_of_function_modes())][::-1]
    before = _WATCHING.set(modes if show else ())
    try:
        yield
    finally:
        _WATCHING.reset(before)
        for mode in modes:
            push_function_mode(mode)


_WATCHING: ContextVar[Sequence[Any]] = ContextVar("the modes that compiled graphs show what they draw", default=())


def show_to_modes(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Run a function on copies, so that active modes see its calls."""
    modules = [below for each in args if isinstance(each, nn.Module) for below in each.modules()]
    buffers = [(buffers_of(module), dict(buffers_of(module))) for module in modules]
    try:
        for table, own in buffers:
            table.update({name: None if each is None else each.clone() for name, each in own.items()})
        with fork_rng(), torch.no_grad():
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
            function(*args, **kwargs)
    finally:
        for table, own in buffers:
            table.update(own)


@contextlib.contextmanager
def restored_on_error(args: Any) -> Iterator[None]:
    """Restore buffers and RNG states after a ``RuntimeError``, unless a device or peer failed."""
    buffers = [(each, each.clone()) for module in args if isinstance(module, nn.Module) for each in module.buffers()]
    device = accelerator()
    generators: list[Any] = [torch] if device is None else [torch, torch.get_device_module(device)]
    states = [each.get_rng_state() for each in generators]
    try:
        yield
    except RuntimeError as error:
        if device_error(error) is not None:
            raise
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for each, state in zip(generators, states, strict=True):
            each.set_rng_state(state)
        raise


_OF_DEVICES = tuple(
    getattr(module, name)
    for module, name in ((torch, "OutOfMemoryError"), (torch, "AcceleratorError"), (torch.distributed, "DistError"))
    if hasattr(module, name)
)


def device_error(error: BaseException) -> BaseException | None:
    """Return the memory, accelerator or communication error behind an error; None for others.

    Nothing may run again after it: memory is exhausted, the context is lost, or other ranks wait elsewhere.
    """
    cause = innermost(error)
    return cause if isinstance(cause, _OF_DEVICES) else None


def innermost(error: BaseException) -> BaseException:
    """Return the error that a compiler's error or an ``ApplyError`` wraps."""
    while isinstance(error, (ApplyError, compile_errors())):
        inner = error.__cause__ or getattr(error, "inner_exception", None)
        if inner is None:
            break
        error = inner
    return error


def drops(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether a function applies dropout."""
    detector = _DropoutDetector()
    with modes_disabled(show=False), detector:
        show_to_modes(function, args, kwargs)
    return detector.has_dropped


class Watchable:
    """Show active modes the dropout of a compiled graph.

    Args:
        captured: the graph, as torch calls.
        compiled: the graph compiled.
        compile_still: compiles the graph without its dropout; called at most once.
    """

    def __init__(
        self,
        captured: fx.GraphModule,
        compiled: Callable[..., Any],
        compile_without_dropout: Callable[[fx.GraphModule], Any],
    ) -> None:
        self._captured = captured
        self._compiled = compiled
        self._compile_without_dropout = compile_without_dropout
        self._without_dropout: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        modes = _WATCHING.get()
        if not modes:
            return self._compiled(*args)
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            show_to_modes(self._captured, args, {})
            is_off = dropout_is_off()
        if not is_off:
            return self._compiled(*args)
        if self._without_dropout is None:
            self._without_dropout = self._compile_without_dropout(without_dropout(self._captured))
        return self._without_dropout(*args)


class _DropoutDetector(TorchFunctionMode):
    """Detect calls of dropout."""

    has_dropped = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.has_dropped |= _drops(func, args, kwargs)
        return func(*args, **kwargs)


def draws(graph: fx.GraphModule) -> bool:
    """Return whether a graph applies dropout."""
    return any(_is_dropping(node) for part in _parts(graph) for node in part.graph.nodes)


def without_dropout(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph without its dropout."""
    copied = copy.deepcopy(graph)
    for part in _parts(copied):
        for node in list(part.graph.nodes):
            if not _is_dropping(node):
                continue
            if node.target.__name__ != _ATTENTION:
                node.replace_all_uses_with(node.args[0] if node.args else node.kwargs["input"])
                part.graph.erase_node(node)
            elif "dropout_p" in node.kwargs:
                node.update_kwarg("dropout_p", 0.0)
            else:
                node.update_arg(_ATTENTION_DROPOUT, 0.0)
        part.recompile()
    return copied


def _parts(graph: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the graph and the graphs in it, e.g. of checkpointed regions."""
    return [module for module in graph.modules() if isinstance(module, fx.GraphModule)]


def _is_dropping(node: fx.Node) -> bool:
    return node.op == "call_function" and _drops(node.target, node.args, node.kwargs)


def _drops(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(function, "__name__", "").rstrip("_")
    if name == _ATTENTION:
        position = _ATTENTION_DROPOUT
        return bool(args[position] if len(args) > position else kwargs.get("dropout_p", 0.0))
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return name in _DROPOUT and bool(p) and bool(training)
