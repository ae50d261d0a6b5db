"""Compiled code while somebody watches torch calls, as ``verify`` does to switch dropout off and to see who draws.

A torch-function mode sees what Python calls, and compiled code calls nothing. ``torch.compile`` could trace through the
mode, and would make other code for each. So the watching mode is put aside while compiled code runs:

- what the compiler left to Python (behind a graph break) is handed on to the mode;
- a compiled graph that draws for dropout is run once more as it was captured, on copies and for the mode's eyes only:
  it sees every draw. Then the compiled code itself gives the numbers, without its dropout if the mode turned that off.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

from slapo_core.spec.accelerators import fork_rng
from slapo_core.spec.watching import dropout_is_off

__all__ = ["Watchable", "aside", "draws", "is_fake", "is_watched", "shown_or_aside"]

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
    """Whether a torch-function mode other than torch's own default device is active."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(not isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack())


def is_fake() -> bool:
    """Whether tensors have no values now: somebody asks for shapes, and compiled code would be made in vain."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    from torch._subclasses import FakeTensorMode

    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Put the active torch-function modes aside; what is not compiled is still shown to them."""
    with _without_modes() as modes, _HandedOn(modes):
        yield


@contextlib.contextmanager
def _without_modes() -> Iterator[list[Any]]:
    """Put the active torch-function modes aside, and give them."""
    modes = [torch.overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]
    try:
        yield modes
    finally:
        for mode in modes:
            torch.overrides._push_mode(mode)


class _HandedOn(TorchFunctionMode):
    """Hands every call that Python makes on to the modes that were put aside; compilers see none of them."""

    def __init__(self, modes: list[Any]) -> None:
        super().__init__()
        self.modes = [one for mode in modes for one in (mode.modes if isinstance(mode, _HandedOn) else [mode])]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return self.shown(func, *args, **(kwargs or {}))

    def shown(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` under the modes that were put aside."""
        with contextlib.ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            return function(*args, **kwargs)


class Watchable:
    """A compiled graph that tells a watching mode what it draws.

    Args:
        captured: the graph, as torch calls.
        compiled: what computes the same.
        compile_still: makes the same of the graph without its dropout; called once, if ever.
    """

    def __init__(
        self, captured: fx.GraphModule, compiled: Callable[..., Any], compile_still: Callable[[fx.GraphModule], Any]
    ) -> None:
        self._captured = captured
        self._compiled = compiled
        self._compile_still = compile_still
        self._still: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        watching = _watching()
        if watching is None:
            return self._compiled(*args)
        copies = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), args)
        with fork_rng(), torch.no_grad():
            is_off = watching.shown(self._look, copies)
        if not is_off:
            return self._compiled(*args)
        if self._still is None:
            self._still = self._compile_still(without_dropout(self._captured))
        return self._still(*args)

    def _look(self, args: tuple[Any, ...]) -> bool:
        self._captured(*args)
        return dropout_is_off()


def shown_or_aside(function: Callable[..., Any], compiled: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """For code of a compiler that knows nothing of this: uncompiled and watched where it drops anything; else compiled.

    Args:
        function: what was compiled; pure.
        compiled: of it.
        args: for this call.
    """
    looking = _Looking()
    copies = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), args)
    with _without_modes(), fork_rng(), torch.no_grad(), looking:
        function(*copies)
    if looking.has_dropped:
        return function(*args)
    with aside():
        return compiled(*args)


class _Looking(TorchFunctionMode):
    """Notices whether anything is dropped."""

    has_dropped = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.has_dropped |= _drops(func, args, kwargs) or _drops_attention(func, args, kwargs)
        return func(*args, **kwargs)


def draws(graph: fx.GraphModule) -> bool:
    """Whether it calls dropout that drops anything."""
    return any(_is_dropout(node) or _is_dropping_attention(node) for part in _parts(graph) for node in part.graph.nodes)


def without_dropout(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy in which dropout passes its input on."""
    still = copy.deepcopy(graph)
    for part in _parts(still):
        for node in list(part.graph.nodes):
            if _is_dropout(node):
                node.replace_all_uses_with(node.args[0] if node.args else node.kwargs["input"])
                part.graph.erase_node(node)
            elif _is_dropping_attention(node) and "dropout_p" in node.kwargs:
                node.update_kwarg("dropout_p", 0.0)
            elif _is_dropping_attention(node):
                node.update_arg(_ATTENTION_DROPOUT, 0.0)
        part.recompile()
    return still


def _parts(graph: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph and those inside of it: what is checkpointed is a graph of its own."""
    return [module for module in graph.modules() if isinstance(module, fx.GraphModule)]


def _watching() -> _HandedOn | None:
    modes = torch.overrides._get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    return next((mode for mode in modes if isinstance(mode, _HandedOn)), None)


def _is_dropout(node: fx.Node) -> bool:
    return node.op == "call_function" and _drops(node.target, node.args, node.kwargs)


def _is_dropping_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and _drops_attention(node.target, node.args, node.kwargs)


def _drops(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if getattr(function, "__name__", "").rstrip("_") not in _DROPOUT:
        return False
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return bool(p) and bool(training)


def _drops_attention(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if getattr(function, "__name__", "") != _ATTENTION:
        return False
    position = _ATTENTION_DROPOUT
    return bool(args[position] if len(args) > position else kwargs.get("dropout_p", 0.0))
