"""``cudagraphify``: launch a module's kernels, forward and backward, as one CUDA graph each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo_core import ApplyError, Edit, Equivalence, Node, Primitive, Violation
from slapo_core.observers import Forward
from slapo_fusion.function_modes import is_fake, is_watched
from slapo_fusion.private import has_backward_hooks, tree_leaves

# `Captured`: the forward of a module as CUDA graphs, one for each combination of shapes.


class Captured:
    """Called like a forward: with the module first.

    Args:
        forward: what is captured.
        path: of the module, for messages.
        warmup: runs before a capture.
        most_shapes: that many are captured.
    """

    slapo_goes_around = True

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
        """Return the arguments as positional tensors, for the capture."""
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

    def __reduce__(self) -> Any:
        options: dict[str, Any] = {"path": self.path, "warmup": self.warmup, "most_shapes": self.most_shapes}
        return functools.partial(Captured, **options), (self.forward,)


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
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            if leaf.requires_grad and leaf.grad_fn is not None:
                self._in_use = True
                leaf.grad_fn.register_hook(self._ended)
        return output

    def _ended(self, *_: Any) -> None:
        self._in_use = False


@dataclass(frozen=True)
class Cudagraphify(Primitive):
    """Capture the module's forward and backward into CUDA graphs: for modules whose kernels are shorter than a launch.

    Captured by ``torch.cuda.make_graphed_callables`` at the first training call with each combination of shapes and
    types; the arguments must be tensors. Without gradients, on a CPU tensor, and while ``verify`` watches dropout, the
    forward runs as it is. Where there is no CUDA device when the step is applied, it does nothing, and says so.

    Captured memory is used again at each call: the output of a call holds until the next one, so that a module which is
    called several times before its backward (shared weights, pipeline micro-batches, gradient accumulation over one
    backward) must not be captured. That cannot be seen beforehand, and is refused at the call.

    Of what is written here, only what runs without a GPU is tested: the CUDA path has not been run by the authors.

    Args:
        warmup: runs before the capture, in which libraries choose their kernels; 11 under DistributedDataParallel.
        most_shapes: after that many combinations of shapes, another one is refused.

    Raises:
        PreconditionError: the module is captured already, is hooked below, or has no forward of its own.
        ApplyError: at a call: arguments that are no tensors, too many shapes, a second call before the backward.

    rewrite:
        ``y = forward(module, x)`` -> ``y = graph.replay()`` with ``x`` copied into the graph's input

    Source: ``torch/cuda/graphs.py``.
    """

    name = "fusion.cudagraphify"
    equivalence = Equivalence.REORDERED

    warmup: int = 3
    most_shapes: int = 4

    def preconditions(self, node: Node) -> Iterator[Violation]:
        if self.warmup < 1 or self.most_shapes < 1:
            yield Violation("warmup and most_shapes must be at least 1", "cudagraphify(warmup=3, most_shapes=4)")
        if type(node.module).forward is nn.Module.forward and "forward" not in node.module.__dict__:
            yield Violation(
                f"{type(node.module).__name__} has no forward of its own: it is never called",
                f"capture its children: sch['{node.path}.*'].cudagraphify()",
            )
        if any(_is_captured(wrapper) for wrapper in node.wrappers):
            yield Violation("the module is captured already", "remove this second call")
        for below in node.walk():
            if below.path != node.path and has_backward_hooks(below.module):
                yield Violation(
                    f"'{below.path}' has backward hooks, which a captured graph does not call", "remove them before"
                )

    def apply(self, node: Node, edit: Edit) -> None:
        active = torch.cuda.is_available()
        if not active:
            edit.note("there is no CUDA device: the forward runs as it is")
        wrapper = functools.partial(Captured, path=node.path, warmup=self.warmup, most_shapes=self.most_shapes)
        edit.wrap_forward(node, wrapper, active=active)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if not any(_is_captured(wrapper) for wrapper in node.wrappers):
            yield Violation("the module's forward is not captured")


def _is_captured(wrapper: Callable[..., object]) -> bool:
    return isinstance(wrapper, functools.partial) and wrapper.func is Captured
