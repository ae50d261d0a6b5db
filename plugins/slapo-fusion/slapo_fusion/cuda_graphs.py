"""`Captured`: the forward of a module as CUDA graphs, one for each combination of shapes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slapo_core import ApplyError
from slapo_core.spec.edit import Forward
from slapo_fusion.watching import is_fake, is_watched

__all__ = ["Captured"]


class Captured:
    """Called like a forward: with the module first.

    Args:
        forward: what is captured.
        path: of the module, for messages.
        warmup: runs before a capture.
        most_shapes: that many are captured.
    """

    def __init__(self, forward: Forward, *, path: str, warmup: int, most_shapes: int) -> None:
        functools.update_wrapper(self, forward)
        self.forward, self.path, self.warmup, self.most_shapes = forward, path, warmup, most_shapes
        self.graphs: dict[Any, _Graph] = {}

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_watched() or is_fake() or not torch.is_grad_enabled():
            return self.forward(module, *args, **kwargs)
        values = self._positional(module, args, kwargs)
        if not any(value.is_cuda for value in values):
            return self.forward(module, *args, **kwargs)
        key = (module.training, tuple((value.shape, value.dtype, value.requires_grad) for value in values))
        graph = self.graphs.get(key)
        if graph is None:
            graph = self.graphs[key] = self._capture(module, values)
        return graph(values)

    def _positional(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """The arguments as torch's capture takes them: tensors, by position."""
        call = inspect.signature(self.forward).bind(module, *args, **kwargs)
        values = tuple(value for value in (*call.args[1:], *call.kwargs.values()) if value is not None)
        others = [type(value).__name__ for value in values if not isinstance(value, Tensor)]
        if others or call.kwargs or len(values) != len(call.args) - 1:
            what = f"a {others[0]}" if others else "None or keyword-only arguments"
            raise ApplyError(
                f"cudagraphify at '{self.path}': the module is called with {what}, and only tensors can be captured",
                path=self.path,
                hint="capture a module inside of it that takes tensors only",
            )
        return values

    def _capture(self, module: nn.Module, values: tuple[Tensor, ...]) -> _Graph:
        if len(self.graphs) >= self.most_shapes:
            raise ApplyError(
                f"cudagraphify at '{self.path}': the module was called with more than {self.most_shapes} different "
                "shapes, each of which takes memory of its own",
                path=self.path,
                hint=f"pad the batches, or write cudagraphify(most_shapes={2 * self.most_shapes})",
            )
        sample = tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in values)
        graphed = torch.cuda.make_graphed_callables(
            _Held(module, self.forward), sample, num_warmup_iters=self.warmup, allow_unused_input=True
        )
        return _Graph(graphed, self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("forward", "path", "warmup", "most_shapes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state.pop("forward"), **state)  # type: ignore[misc]


class _Held(nn.Module):
    """What torch captures: it writes its own forward into what it is given, and finds the parameters in it."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module, self._run = module, forward
        self.training = module.training

    def forward(self, *args: Tensor) -> Any:
        return self._run(self.module, *args)


class _Graph:
    """One captured graph; its memory is in use from a call until the backward of that call."""

    def __init__(self, graphed: Callable[..., Any], path: str) -> None:
        self._graphed, self._path = graphed, path
        self._in_use = False

    def __call__(self, values: tuple[Tensor, ...]) -> Any:
        if self._in_use:
            raise ApplyError(
                f"cudagraphify at '{self._path}': the module is called again before the backward of the last call, "
                "whose activations a second one would overwrite",
                path=self._path,
                hint="call backward after each forward, or leave this module out",
            )
        output = self._graphed(*values)
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            if leaf.requires_grad and leaf.grad_fn is not None:
                self._in_use = True
                leaf.grad_fn.register_hook(self._ended)
        return output

    def _ended(self, *_: Any) -> None:
        self._in_use = False
