"""``cudagraphify``: launch a module's kernels, forward and backward, as one CUDA graph each."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from slapo_core import ApplyError, Edit, Effect, Equivalence, Node, Primitive, Violation, effects
from slapo_core.layout import fork_rng
from slapo_core.observers import Forward, happened
from slapo_fusion.forwards import is_wrapped_by, missing_forward
from slapo_fusion.function_modes import is_watched, sees_operations
from slapo_fusion.private import (
    clone_all,
    has_backward_hooks,
    has_tensor_hooks,
    tables_of,
    top_saved_tensors_hooks,
    tree_flatten,
    tree_unflatten,
    version_of,
)

# The input signature of a call: its arguments without the values of their tensors, as a hashable key.

_TENSOR = "tensor"
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


class _NotCapturable(Exception):  # noqa: N818 - caught where the path is known
    """Signal a value that a graph cannot hold.

    Args:
        value: the value.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(type(value).__name__)


def _signature(value: Any, tensors: list[Tensor]) -> Any:
    """Return the hashable signature of a value, and append its tensors to a list."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        tensors.append(value)
        return _TENSOR
    if kind is tuple or kind is list:
        return (kind, *[_signature(each, tensors) for each in value])
    if kind is dict:
        return (kind, *[(name, _signature(each, tensors)) for name, each in value.items()])
    if kind in _CONSTANTS:
        return (kind, value)
    raise _NotCapturable(value)


def _value(signature: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the value of a signature, with these tensors in it."""
    if signature is _TENSOR:
        return next(tensors)
    kind, *parts = signature
    if kind is dict:
        return {name: _value(each, tensors) for name, each in parts}
    if kind is tuple or kind is list:
        return kind(_value(each, tensors) for each in parts)
    return parts[0]


# `_State`: the state of a module that a graph fixes.


class _State:
    """Attributes, children, hooks, tensors and addresses of a module, as they are now.

    Args:
        module: without its own hooks, which run around its forward.
    """

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_modules())
        self._tables = [
            (path, table, tuple(table), tuple(table.values()))
            for path, below in named.items()
            for table in tables_of(below, hooks=below is not module)
        ]
        self._all = tuple(table for _, table, _, _ in self._tables)
        self._sizes = tuple(map(len, self._all))
        self._filled = tuple((table, values) for _, table, _, values in self._tables if values)
        self._modules, self._parameters = tuple(named.values()), tuple(module.parameters())
        self._tensors = (*self._parameters, *module.buffers())
        self._addresses = tuple(map(Tensor.data_ptr, self._tensors))

    def flags(self) -> Any:
        """Return the flags that may alternate between calls: training modes, and trained parameters."""
        return tuple(map(_training, self._modules)), tuple(map(_requires_grad, self._parameters))

    def holds(self) -> bool:
        """Return whether nothing changed since."""
        if tuple(map(Tensor.data_ptr, self._tensors)) != self._addresses or tuple(map(len, self._all)) != self._sizes:
            return False
        return all(all(map(operator.is_, table.values(), values)) for table, values in self._filled)

    def change(self, *, modes: bool = True) -> str | None:
        """Return the first change in words; None if nothing changed.

        Args:
            modes: whether training and evaluation modes count.
        """
        for path, table, names, values in self._tables:
            was = dict(zip(names, values, strict=True))
            for name in [*table, *was]:
                if table.get(name) is not was.get(name) and (modes or name != "training"):
                    return f"'{name}' of '{path}'" if path else f"'{name}'"
        if tuple(map(Tensor.data_ptr, self._tensors)) != self._addresses:
            return "the address of a parameter or buffer"
        return None


_training = operator.attrgetter("training")
_requires_grad = operator.attrgetter("requires_grad")


@contextlib.contextmanager
def _buffers_restored(module: nn.Module) -> Iterator[None]:
    """Restore the buffers' values, at their addresses."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


# `Captured`: the forward of a module as CUDA graphs, one for each input signature.

_FEW_CALLS, _MOST_WASTED = 10, 2
"""A graph that is dropped after fewer calls is wasted; more such graphs in a row are refused."""

_CAPTURING: ContextVar[bool] = ContextVar("a module is captured, with all captured modules below it", default=False)


class Captured:
    """Called like a forward: with the module first.

    Args:
        forward: to capture.
        path: of the module, for messages.
        warmup: runs before a capture.
        most_shapes: the limit of captures.
    """

    slapo_goes_around = True
    slapo_compiles = True
    device_type: ClassVar[str] = "cuda"

    def __init__(self, forward: Forward, *, path: str, warmup: int, most_shapes: int) -> None:
        functools.update_wrapper(self, forward)
        self.forward, self.path, self.warmup, self.most_shapes = forward, path, warmup, most_shapes
        self.graphs: dict[Any, _CapturedGraph] = {}
        self._state: _State | None = None
        self._wasted = 0

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _CAPTURING.get():
            return self.forward(module, *args, **kwargs)
        if is_watched() or sees_operations():
            happened("unseen", "no graph is replayed under a mode that sees operations")
            return self.forward(module, *args, **kwargs)
        tensors: list[Tensor] = []
        try:
            signature = _signature((args, kwargs), tensors)
        except _NotCapturable as error:
            raise self._refusal(
                f"the module is called with a {error}, which a graph cannot hold",
                "call it with tensors, numbers, strings, None, and tuples, lists and dicts of these, or capture a "
                "module inside of it",
            ) from None
        on_device = [tensor.device.type == self.device_type for tensor in tensors]
        if not any(on_device):
            happened("fallback", f"no argument is on a {self.device_type} device")
            return self.forward(module, *args, **kwargs)
        if not all(on_device):
            other = tensors[on_device.index(False)].device
            raise self._refusal(
                f"the module is called with a tensor on {other} beside those on {self.device_type}",
                "move all tensors to one device: a graph keeps the values of other devices from its capture",
            )
        if top_saved_tensors_hooks(False) is not None:
            raise self._refusal(
                "the module runs under activation checkpointing or another saved_tensors_hooks, and a graph keeps its "
                "activations in memory of its own",
                "checkpoint modules outside of the captured one only",
            )
        if self._state is None:
            self._state = _State(module)
        graph = self.graphs.get(key := self._key(signature, tensors, self._state))
        if graph is not None and not graph.state.holds():
            self._count_dropped(graph)
            graph = None
        if graph is None:
            self.graphs = {key: kept for key, kept in self.graphs.items() if kept.state.change(modes=False) is None}
            self._state = _State(module)
            key = self._key(signature, tensors, self._state)
            graph = self.graphs[key] = self._capture(module, signature, tensors)
        result = graph(tensors)
        happened("replay")
        return result

    def _key(self, signature: Any, tensors: list[Tensor], state: _State) -> Any:
        about = tuple([(each.shape, each.dtype, each.requires_grad, each.device) for each in tensors])
        casts = torch.is_autocast_enabled(self.device_type) and torch.get_autocast_dtype(self.device_type)
        return signature, about, casts, state.flags()

    def _count_dropped(self, graph: _CapturedGraph) -> None:
        """Refuse to go on where captures are dropped as soon as they are made."""
        self._wasted = self._wasted + 1 if graph.calls < _FEW_CALLS else 0
        if self._wasted > _MOST_WASTED:
            raise self._refusal(
                f"{graph.state.change()} was replaced soon after each of the last captures, and a graph reads the old "
                "one",
                "leave this module out where a runtime moves or replaces its parameters at every step, or its "
                "attributes are set at every step",
            )

    def _capture(self, module: nn.Module, signature: Any, tensors: list[Tensor]) -> _CapturedGraph:
        if len(self.graphs) >= self.most_shapes:
            raise self._refusal(
                f"the module was called in more than {self.most_shapes} different combinations of shapes, types and "
                "constants, each of which takes memory of its own",
                f"pad the batches, or write cudagraphify(most_shapes={2 * self.most_shapes})",
            )
        hooked = [name for name, parameter in module.named_parameters() if has_tensor_hooks(parameter)]
        if hooked:
            raise self._refusal(
                f"parameter '{hooked[0]}' has a hook, which would run in the graph and behind it",
                "register it after the first training step, or register_post_accumulate_grad_hook instead",
            )
        samples = tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in tensors)
        versions = list(map(version_of, samples))
        captured, kind = _CapturedModule(module, self.forward, signature), self.device_type
        casts = torch.autocast(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )
        capturing = _CAPTURING.set(True)
        try:
            with fork_rng(), _buffers_restored(module), casts:
                graphed = torch.cuda.make_graphed_callables(
                    captured, samples, num_warmup_iters=self.warmup, allow_unused_input=True
                )
        except _NotCapturable as error:
            raise self._refusal(
                f"the module returns a {error}, which a graph cannot hold",
                "return tensors, None, and containers of these, or capture a module inside of it",
            ) from None
        finally:
            _CAPTURING.reset(capturing)
        if captured.change is not None:
            raise self._refusal(
                f"its forward sets {captured.change}, which a replay does not",
                "leave this module out, or capture modules inside",
            )
        if versions != list(map(version_of, samples)):
            raise self._refusal(
                "its forward writes to one of its arguments, which a replay does not",
                "capture a larger module, in which that argument is made",
            )
        return _CapturedGraph(graphed, captured, self._refusal)

    def _refusal(self, problem: str, hint: str) -> ApplyError:
        return ApplyError(f"cudagraphify at '{self.path}': {problem}", path=self.path, hint=hint)

    def __reduce__(self) -> Any:
        options: dict[str, Any] = {"path": self.path, "warmup": self.warmup, "most_shapes": self.most_shapes}
        return functools.partial(Captured, **options), (self.forward,)


class _CapturedModule(nn.Module):
    """The module for torch's capture, which sets its forward and reads its parameters.

    Args:
        module: whose forward.
        forward: takes the module first.
        signature: of the call, whose tensors the captured forward takes.
    """

    def __init__(self, module: nn.Module, forward: Forward, signature: Any) -> None:
        super().__init__()
        self.module, self._run, self._signature = module, forward, signature
        self.training = module.training
        self.state = _State(module)
        self.change: str | None = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = _value(self._signature, iter(tensors))
        before = _State(self.module)
        output = self._run(self.module, *args, **kwargs)
        self.change = before.change()  # of the last run, which is the captured one
        leaves, self.spec = tree_flatten(output)
        self.leaves = [_signature(leaf, []) for leaf in leaves]
        found = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        self.differentiable = [leaf.requires_grad for leaf in found]
        return found


class _CapturedGraph:
    """One captured graph, whose results and gradients are copied out of its memory.

    A replay overwrites the results of the one before. So results are cloned, and so are the gradients, by one kernel:
    ``AccumulateGrad`` keeps the first gradient of a parameter as its ``grad``, without a copy. Overwritten activations
    are an error of their backward.
    """

    def __init__(
        self, graphed: Callable[..., Any], captured: _CapturedModule, refusal: Callable[[str, str], ApplyError]
    ) -> None:
        self._graphed, self._held, self._refusal = graphed, captured, refusal
        self.state = _State(captured.module)
        self.calls = self._live = 0  # the number of calls, and of the call whose activations are in memory

    def __call__(self, tensors: list[Tensor]) -> Any:
        self.calls += 1
        found = self._graphed(*tensors)
        node = next((each.grad_fn for each in found if each.grad_fn is not None), None)
        if node is not None:
            self._live = self.calls
            node.register_prehook(functools.partial(self._begin, self.calls))
            node.register_hook(own_gradients)
        captured = self._held
        own = iter(
            [
                (each if kept else each.detach()).clone()
                for each, kept in zip(found, captured.differentiable, strict=True)
            ]
        )
        return tree_unflatten([_value(leaf, own) for leaf in captured.leaves], captured.spec)

    def _begin(self, call: int, _: Any) -> None:
        if self._live != call:
            raise self._refusal(
                "the activations of this backward were overwritten: the module was called again, or this backward ran "
                "already",
                "call backward once after each forward, or leave this module out",
            )
        self._live = 0


def own_gradients(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
    """Copy the gradients of an autograd node, as its hook, out of a CUDA graph's memory."""
    copies = iter(clone_all([each for each in gradients if each is not None]))
    return tuple(None if each is None else next(copies) for each in gradients)


@dataclass(frozen=True)
class Cudagraphify(Primitive):
    """Capture the module's forward and backward into CUDA graphs, for kernels shorter than a launch.

    ``torch.cuda.make_graphed_callables`` captures at the first training call with each combination of shapes, types,
    constants, autocast, modes and trained parameters. Arguments are tensors, numbers, strings, None, and tuples, lists
    and dicts of these. Without gradients, on a CPU tensor, and while ``verify`` observes dropout, the forward runs as
    it is. Without a CUDA device the step does nothing, with a note in its record.

    Modules captured inside of it become a part of its graph. Collectives are captured with it where their backend can
    be (NCCL): every rank must capture at the same call.

    Warm-up and capture leave buffers and RNG states as they were. Where parameters, buffers, attributes, children or
    hooks of the module were replaced or moved since, its graphs are dropped and captured again. A replay runs no Python
    of the forward: other values that it reads stay as they were at the capture.

    Results and gradients are copied out of the graph's memory (one kernel for each result, one for all gradients), so
    that gradients may be accumulated and results kept. Activations are not: do not capture a module that is called
    several times before its backward (shared weights, pipeline micro-batches, checkpointing around it). The backward
    whose activations were overwritten refuses it.

    Captures of layers with replaced attention and fused regions failed on an H200 with torch 2.11; plain and compiled
    layers are captured.

    Args:
        warmup: runs before the capture, in which libraries choose their kernels; 11 under DistributedDataParallel.
        most_shapes: the limit of combinations of shapes, types and constants.

    Raises:
        PreconditionError: the module is captured already, is hooked below, or has no forward of its own.
        ApplyError: at a call: arguments or results that a graph cannot hold, too many combinations, a forward that
            writes to its arguments or sets attributes, parameters that move at every step, activation checkpointing
            around it; at a backward: lost activations.

    rewrite:
        ``y = forward(module, x)`` -> ``y = graph.replay().clone()`` with ``x`` copied into the graph's input

    Source: ``torch/cuda/graphs.py``.
    """

    name = "fusion.cudagraphify"
    equivalence = Equivalence.REORDERED

    warmup: int = 3
    most_shapes: int = 4

    def preconditions(self, node: Node) -> Iterator[Violation]:
        if self.warmup < 1 or self.most_shapes < 1:
            yield Violation("warmup and most_shapes must be at least 1", "cudagraphify(warmup=3, most_shapes=4)")
        yield from missing_forward(node, "capture", "cudagraphify")
        if is_wrapped_by(node, Captured):
            yield Violation("the module is captured already", "remove this second call")
        for below in node.walk():
            if below.path != node.path and has_backward_hooks(below.module):
                yield Violation(
                    f"'{below.path}' has backward hooks, which a captured graph does not call", "remove the hooks first"
                )

    def apply(self, node: Node, edit: Edit) -> None:
        active = torch.cuda.is_available()
        if not active:
            edit.note("there is no CUDA device: the forward runs as it is")
        wrapper = functools.partial(Captured, path=node.path, warmup=self.warmup, most_shapes=self.most_shapes)
        edit.wrap_forward(node, wrapper, active=active)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if not is_wrapped_by(node, Captured):
            yield Violation("the module's forward is not captured")

    def effects(self, node: Node) -> Iterator[Effect]:
        if any(parameter.device.type == Captured.device_type for parameter in node.module.parameters()):
            yield effects.Replays()
