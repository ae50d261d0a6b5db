"""The compilers that ``fuse`` knows by name; third parties publish theirs as ``slapo.v1.compilers`` entry points."""

from __future__ import annotations

import functools
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch import Tensor, fx

from slapo_core import ApplyError, ArgumentError
from slapo_core.errors import warn_user
from slapo_core.layout import fork_rng
from slapo_core.observers import dropout_is_off, happened, is_observed
from slapo_fusion.cudagraphify import own_gradients
from slapo_fusion.function_modes import (
    Watchable,
    device_error,
    draws,
    drops,
    innermost,
    is_fake,
    is_watched,
    modes_disabled,
    restored_on_error,
    show_to_modes,
)
from slapo_fusion.private import (
    backend_names,
    compile_errors,
    compile_with_inductor,
    inductor_modes,
    inductor_options,
    lookup_backend,
    top_saved_tensors_hooks,
    with_recompile_limit,
)
from slapo_graph.match import Region

# `Compiled`: a function that ``torch.compile`` compiles when it is first called.

_MOST_VARIANTS = 64
"""Of one function: by training mode, dtypes, gradients, and active modes of verify."""

_LIMIT: dict[str, Any] = (
    {"recompile_limit": _MOST_VARIANTS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
)


class Compiler(ABC):
    """Compile regions of a graph: ``fuse(match, compiler="inductor")``.

    Attributes:
        name: for ``fuse(compiler=...)``, e.g. ``"inductor"``.
        deprecated: the reason to choose another one, shown as a warning; None if there is none.
        fuses: whether elementwise operations of a region become one kernel, for estimates of time.
    """

    name: ClassVar[str]
    deprecated: ClassVar[str | None] = None
    fuses: ClassVar[bool] = False

    @abstractmethod
    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        """Return a function that computes the same as ``region``, gradients included.

        It is called with further sizes, in training and in evaluation.

        Args:
            region: takes tensors, numbers and modules, returns a tensor or a tuple of tensors.
            options: the user's options for the compiler.
        """


@dataclass(frozen=True)
class Backend:
    """A backend of ``torch.compile`` with its options; equal ones share compiled code.

    Args:
        backend: a name that torch knows, e.g. ``"inductor"``, or a function of a graph and example inputs.
        mode: of inductor: ``"reduce-overhead"``, ``"max-autotune"``, ``"max-autotune-no-cudagraphs"``.
        options: of inductor, as sorted pairs. Unless they say otherwise, random numbers come from torch's own
            generators (``fallback_random``), so that dropout drops what it would drop uncompiled.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if not draws(graph):
            return _counted(self._compile(graph, inputs))
        copied = fx.Graph()  # backends change what they are given
        copied.output(copied.graph_copy(graph.graph, {}))
        captured = fx.GraphModule(graph, copied)
        compiled = self._compile(graph, inputs)
        return _counted(Watchable(captured, compiled, functools.partial(torch.compile, backend=self)))

    def _compile(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if self.backend == "inductor":
            of_mode = inductor_modes(self.mode) if self.mode is not None else {}
            settings = {"fallback_random": True, **of_mode, **dict(self.options)}
            compiled = compile_with_inductor(graph, inputs, settings)
            return _with_own_gradients(compiled) if settings.get("triton.cudagraphs") else compiled  # type: ignore[no-any-return]
        if callable(self.backend) or self.backend == "eager":
            _refuse_second_derivatives(graph)
        if callable(self.backend):
            return self.backend(graph, inputs, **({"options": dict(self.options)} if self.options else {}))
        if self.backend == "eager":
            _keep_random_states(graph)
        return lookup_backend(self.backend)(graph, inputs, **dict(self.options))

    @property
    def is_random(self) -> bool:
        """Return whether compiled code uses another RNG stream."""
        return self.backend == "inductor" and dict(self.options).get("fallback_random") is False


@dataclass
class _Runs:
    """Runs of compiled graphs in one call.

    Args:
        count: their number.
        is_unseen: whether the call ran uncompiled only because it is watched.
    """

    count: int = 0
    is_unseen: bool = False


_RUNS: ContextVar[_Runs | None] = ContextVar("the compiled graphs that an observed call runs", default=None)


def _counted(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Count the runs of a compiled graph in observed calls; graphs within it are a part of it."""

    def run(*args: Any) -> Any:
        runs = _RUNS.get()
        if runs is None:
            return compiled(*args)
        runs.count += 1
        counting = _RUNS.set(None)
        try:
            return compiled(*args)
        finally:
            _RUNS.reset(counting)

    return run


def _with_own_gradients(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Copy gradients and losses out of the memory of CUDA graphs, which a replay overwrites.

    ``AccumulateGrad`` keeps a parameter's first gradient as its ``grad``, without a copy.
    """

    def run(*args: Any) -> Any:
        results = compiled(*args)
        nodes = [each.grad_fn for each in results if isinstance(each, Tensor) and each.grad_fn is not None]
        for node in {_behind_views(node): None for node in nodes}:
            node.register_hook(own_gradients)
        return type(results)(each.clone() if isinstance(each, Tensor) and not each.dim() else each for each in results)

    return run


def _behind_views(node: Any) -> Any:
    while node.name() != "CompiledFunctionBackward" and len(node.next_functions) == 1 and node.next_functions[0][0]:
        node = node.next_functions[0][0]
    return node


_WITH_BREAKS: WeakSet[CodeType] = WeakSet()
"""Code with graph breaks: determined once for many equal layers."""


class Compiled:
    """Compile a function at its first call; pickle it uncompiled.

    Args:
        function: to compile.
        backend: the compiler.
        where: for messages, e.g. ``"compile(...) at 'encoder.layer.0'"``.
        fullgraph: whether code that cannot be compiled is an error.
        dynamic: whether sizes are symbolic; None: sizes that change.
        part: of a forward, for observers; empty: the entire forward.
    """

    slapo_goes_around = True
    slapo_compiles = True

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Backend,
        *,
        where: str,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        part: str = "",
    ) -> None:
        functools.update_wrapper(self, function, updated=())  # without the attributes of an object
        self.function, self.backend, self.where = function, backend, where
        self.fullgraph, self.dynamic, self.part = fullgraph, dynamic, part
        self._compiled: dict[bool, Callable[..., Any]] = {}  # by whether a graph break is an error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_fake():
            return self.function(*args, **kwargs)
        return self._observed(args, kwargs) if is_observed() else self._called(args, kwargs)

    def _observed(self, args: Any, kwargs: Any) -> Any:
        """Call it, and report whether compiled code ran."""
        runs = _Runs()
        counting = _RUNS.set(runs)
        try:
            result = self._called(args, kwargs)
        finally:
            _RUNS.reset(counting)
        if runs.count:
            happened("compiled", self.part, graph_breaks=runs.count - 1)
        elif runs.is_unseen:
            happened("unseen", "it runs uncompiled while its dropout is switched off")
        else:
            happened("fallback", "torch.compile ran it as it is")
        return result

    def _called(self, args: Any, kwargs: Any) -> Any:
        try:
            return self._watched(args, kwargs) if is_watched() else self._run(self.fullgraph, args, kwargs)
        except compile_errors() as error:
            if (failed := device_error(error)) is not None:
                raise failed from None
            raise ApplyError(
                f"{self.where} failed: {reason(error)}",
                hint="undo that step, choose another backend, or compile a smaller part; the model is unchanged",
            ) from error

    def _run(self, fullgraph: bool, args: Any, kwargs: Any) -> Any:
        if fullgraph not in self._compiled:
            self._compiled[fullgraph] = torch.compile(
                self.function, backend=self.backend, fullgraph=fullgraph, dynamic=self.dynamic, **_LIMIT
            )
        compiled = self._compiled[fullgraph]
        if _LIMIT:
            return compiled(*args, **kwargs)
        return with_recompile_limit(_MOST_VARIANTS, compiled, *args, **kwargs)  # torch's own limit is 8

    def _watched(self, args: Any, kwargs: Any) -> Any:
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        if self.fullgraph or code not in _WITH_BREAKS:
            try:
                with modes_disabled(), restored_on_error(args):
                    return self._run(True, args, kwargs)
            except RuntimeError as error:  # a graph break; or nothing was compiled, and it ran as it is
                if self.fullgraph or device_error(error) is not None:
                    raise
                if code is not None:
                    _WITH_BREAKS.add(code)
        if drops(self.function, args, kwargs):
            if dropout_is_off():
                if (runs := _RUNS.get()) is not None:
                    runs.is_unseen = True
                return self.function(*args, **kwargs)
            show_to_modes(self.function, args, kwargs)
        with modes_disabled(show=False):
            return self._run(False, args, kwargs)

    def __reduce__(self) -> Any:
        options: dict[str, Any] = {"where": self.where, "fullgraph": self.fullgraph, "dynamic": self.dynamic}
        return functools.partial(Compiled, **options, part=self.part), (self.function, self.backend)


def backend_problem(backend: Backend) -> tuple[str, str] | None:
    """Return the problem of a backend's name, mode or options, and a hint; None if valid."""
    if not isinstance(backend.backend, str):
        if backend.mode is not None:
            return f"mode='{backend.mode}' is an inductor mode", "leave out mode="
        return None
    if backend.backend != "inductor":
        known = backend_names()
        if backend.backend not in known:
            return f"torch knows no backend '{backend.backend}'", f"it knows {', '.join(known)}"
        if backend.mode is not None:
            return f"mode='{backend.mode}' is an inductor mode", f"leave out mode= with backend='{backend.backend}'"
        return None
    modes = inductor_modes()
    if backend.mode is not None and backend.mode not in modes:
        return f"inductor has no mode '{backend.mode}'", f"it has {', '.join(modes)}"
    names = inductor_options()
    for name, _ in backend.options:
        if name not in names:
            return f"inductor has no option '{name}'", "torch._inductor.list_options() lists them"
    return None


def _keep_random_states(graph: fx.GraphModule) -> None:
    """Restore the RNG state in recomputed regions, as AOTAutograd would."""
    tagged = torch.ops.higher_order.tag_activation_checkpoint
    for below in graph.modules():
        if isinstance(below, fx.GraphModule):
            for node in below.graph.nodes:
                if node.target is tagged:
                    node.target = _checkpointed
            below.recompile()


def _refuse_second_derivatives(graph: fx.GraphModule) -> None:
    """Let captured backwards of autograd functions refuse gradients of gradients, as AOTAutograd does.

    ``torch.compile`` captures the operators of a backward without their derivatives.
    """
    applied = torch.ops.higher_order.autograd_function_apply
    for below in [each for each in graph.modules() if isinstance(each, fx.GraphModule)]:
        for node in below.graph.nodes:
            backward = getattr(node.args[1], "target", None) if node.target is applied else None
            if isinstance(backward, str):
                captured: Any = below.get_submodule(backward)
                inputs = [each for each in captured.graph.nodes if each.op == "placeholder"]
                output = captured.graph.output_node()
                with captured.graph.inserting_after(inputs[-1]):
                    is_taped = captured.graph.call_function(torch.is_grad_enabled)
                with captured.graph.inserting_before(output):
                    once = captured.graph.call_function(_once, (is_taped, tuple(inputs), output.args[0]))
                output.args = (once,)
                captured.recompile()


def _once(is_taped: bool, inputs: tuple[Any, ...], outputs: Any) -> Any:
    """Return the gradients of a captured backward, which refuse to be differentiated."""
    if not is_taped or not any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
        return outputs
    return type(outputs)(
        _Once.apply(each.detach().requires_grad_()) if isinstance(each, Tensor) else each for each in outputs
    )


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "torch.compile does not support double backward through an autograd function, e.g. a collective: do not "
            "compile modules that contain one"
        )


def _checkpointed(region: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tagged: Any = torch.ops.higher_order.tag_activation_checkpoint
    options, own = tagged.divide_kwargs(kwargs)
    options["use_reentrant"] = False
    return torch.utils.checkpoint.checkpoint(region, *args, **options, **own)


def reason(error: BaseException) -> str:
    """Return the innermost error in one line."""
    cause = innermost(error)
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0] if text else 'no message'}"


class Inductor(Compiler):
    """Compile the region by ``torch.compile`` as one graph; sizes that change become symbolic."""

    name = "inductor"
    fuses = True

    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        rest = dict(options)
        return _compiled(region, Backend("inductor", rest.pop("mode", None), tuple(sorted(rest.items()))))


class AotEager(Compiler):
    """Run the graph of ``inductor`` by single operations: tells faults of tracing from faults of kernels."""

    name = "aot_eager"

    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        return _compiled(region, Backend("aot_eager", options.get("mode"), tuple(sorted(options.items()))))


class Eager(Compiler):
    """Run the region as it is: one call in the graph, nothing compiled."""

    name = "eager"

    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        _refuse_options(self, options)
        return region


class TorchScript(Compiler):
    """Trace the region by ``torch.jit.trace``, as in the paper; again for other types, not for other sizes.

    Under activation checkpointing the region runs uncompiled, with a warning: TorchScript swallows the exception that
    ends the second run, and saves other tensors in it.
    """

    name = "torchscript"
    deprecated = "PyTorch deprecates TorchScript: take 'inductor'"

    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        _refuse_options(self, options)
        return _Scripted(region)


def _refuse_options(compiler: Compiler, options: Mapping[str, Any]) -> None:
    for name in options:
        raise ArgumentError(f"compiler '{compiler.name}' has no option '{name}'", hint="leave out options=")


def _compiled(region: Region, backend: Backend) -> Compiled:
    problem = backend_problem(backend)
    if problem is not None:
        raise ArgumentError(problem[0], hint=problem[1])
    return Compiled(region, backend, where=f"{backend.backend} of a region", fullgraph=True, part="a region")


class _Scripted:
    """One TorchScript function for each combination of dtypes, devices, axes, constants and modes."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._traced: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        if top_saved_tensors_hooks(False) is not None:
            happened("fallback", "TorchScript cannot run under activation checkpointing")
            warn_user(
                "a region fused by TorchScript runs uncompiled under activation checkpointing: use compiler='inductor'",
            )
            return self._region(*args)
        places = [position for position, value in enumerate(args) if isinstance(value, Tensor)]
        tensors = tuple(args[position] for position in places)
        key = (
            tuple((value.dtype, value.device, value.dim(), value.requires_grad) for value in tensors),
            tuple(None if isinstance(value, Tensor) else (type(value), value) for value in args),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(tensors[0].device.type) if tensors else False,
        )
        traced = self._traced.get(key)
        if traced is None:
            traced = self._traced[key] = self._trace(args, places, tensors)
        return traced(*tensors)

    def _trace(self, args: tuple[Any, ...], places: list[int], tensors: tuple[Tensor, ...]) -> Callable[..., Any]:
        def on_tensors(*given: Tensor) -> Any:
            values = list(args)
            for position, tensor in zip(places, given, strict=True):
                values[position] = tensor
            return self._region(*values)

        with warnings.catch_warnings(), fork_rng():
            warnings.simplefilter("ignore", DeprecationWarning)  # see `deprecated`
            made: Callable[..., Any] = torch.jit.trace(on_tensors, tensors, check_trace=False)
        return made
