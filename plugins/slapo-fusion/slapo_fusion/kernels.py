"""Kernels that replace matches: found, built, checked and called."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slapo_core import ApplyError, ArgumentError
from slapo_core.internals import SafeFakeTensorMode
from slapo_core.observers import happened
from slapo_fusion.function_modes import is_fake
from slapo_fusion.private import (
    OPDEFS,
    OpOverload,
    OpOverloadPacket,
    has_kernel_for,
    has_registered_backward,
    tree_leaves,
    tree_map_only,
)

# Output shapes of a function, on fake tensors.

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


def without_values(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shapes | None:
    """Return shapes and dtypes of a function's output on fake tensors; None if it fails there."""
    try:
        return output_shapes(run_without_values(function, args, kwargs))
    except (RuntimeError, NotImplementedError):
        return None


def run_without_values(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a function's output on fake tensors."""
    with SafeFakeTensorMode(), torch.no_grad():
        args, kwargs = tree_map_only(Tensor, _fake_like, (args, dict(kwargs)))
        return function(*args, **kwargs)


def output_shapes(output: Any) -> Shapes:
    """Return shape and dtype of each tensor in an output."""
    return [(tuple(map(int, leaf.shape)), leaf.dtype) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def shape_difference(expected: Shapes | None, got: Shapes | None) -> str | None:
    """Return how two outputs differ; None if equal or unknown."""
    if expected is None or got is None or got == expected:
        return None
    return f"the kernel returns {_shown(got)}, the replaced code {_shown(expected)}"


def _fake_like(tensor: Tensor) -> Tensor:
    strides = tuple(map(int, tensor.stride()))
    return torch.empty_strided(tuple(map(int, tensor.shape)), strides, dtype=tensor.dtype, device=tensor.device)


def _shown(shapes: Shapes) -> str:
    return " and ".join(f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in shapes) or "no tensor"


# Kernels: loading, and their gradients.


class Unavailable(Exception):  # noqa: N818 - becomes a Violation, or a note of a fallback
    """Signal an unavailable kernel.

    Args:
        reason: the missing requirement.
        remedy: a hint.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def load_kernel(kernel: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel: an operator by its name ``"namespace::name"``, or a function.

    Raises:
        Unavailable: no such operator is registered, or it is Triton's and there is no GPU or no Triton.
    """
    if isinstance(kernel, str):
        namespace, _, name = kernel.partition("::")
        try:
            return getattr(getattr(torch.ops, namespace), name)  # type: ignore[no-any-return]
        except AttributeError:
            raise Unavailable(
                f"no operator '{kernel}' is registered", "import the package that registers it before the schedule runs"
            ) from None
    if type(kernel).__module__.partition(".")[0] == "triton":
        if not torch.cuda.is_available():
            raise Unavailable("a Triton kernel needs a GPU, and there is none", "run where there is one")
        raise Unavailable(
            "a bare Triton kernel has no launch grid",
            "pass the function that allocates the output and launches it: kernel[grid](...)",
        )
    if getattr(kernel, "needs_triton", False) and importlib.util.find_spec("triton") is None:
        raise Unavailable("Triton is not installed", "pip install triton")
    return kernel


def is_operator(kernel: Callable[..., Any]) -> bool:
    """Return whether a kernel is an operator registered with torch."""
    return isinstance(kernel, (OpOverload, OpOverloadPacket, torch.library.CustomOpDef))


def has_backward(kernel: Callable[..., Any]) -> bool | None:
    """Return whether an operator has a gradient; None for a function."""
    if not is_operator(kernel):
        return None
    if isinstance(kernel, torch.library.CustomOpDef):
        return has_registered_backward(kernel)
    if isinstance(kernel, OpOverloadPacket):
        return any(has_backward(getattr(kernel, overload)) for overload in kernel.overloads())
    name: str = kernel.name()  # type: ignore[attr-defined]
    if name in OPDEFS:  # always differentiable for the dispatcher, be it by raising
        return has_registered_backward(OPDEFS[name])
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    return any(has_kernel_for(name, key) for key in keys)


def missing_gradient(inputs: Any, output: Any) -> bool:
    """Return whether an output lost the gradient of its inputs."""
    if not torch.is_grad_enabled():
        return False
    if isinstance(output, Tensor) and output.requires_grad:
        return False
    got = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not got or any(leaf.requires_grad for leaf in got):
        return False
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(inputs))


class WithBackward:
    """A kernel with another one as its backward: ``backward(gradient of each output, *inputs)``.

    Args:
        forward: the kernel.
        backward: returns the gradient of each input, or None; a tensor alone for one input.
        where: for messages.
    """

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any], where: str) -> None:
        self.forward, self.backward, self.where = forward, backward, where

    def __call__(self, *inputs: Any) -> Any:
        return _Kernel.apply(self, *inputs)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: WithBackward, *inputs: Any) -> Any:
        ctx.pair = pair
        ctx.positions = [position for position, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(inputs[position] for position in ctx.positions))
        return pair.forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = list(ctx.others)
        for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            inputs[position] = tensor
        answer = ctx.pair.backward(*gradients, *inputs)
        found = list(answer) if isinstance(answer, (tuple, list)) else [answer]
        if len(found) != len(inputs):
            raise ApplyError(
                f"{ctx.pair.where}: backward returned {len(found)} gradients for {len(inputs)} inputs",
                hint="return one gradient for each input, or None",
            )
        for position, (gradient, value) in enumerate(zip(found, inputs, strict=True)):
            if isinstance(gradient, Tensor) and gradient.shape != value.shape:
                raise ApplyError(
                    f"{ctx.pair.where}: backward returned a gradient of shape {tuple(gradient.shape)} for input "
                    f"{position}, of shape {tuple(value.shape)}",
                    hint="return gradients of the inputs' shapes",
                )
        return None, *found


# `build_kernels`: operators of C++ or CUDA sources, built by torch.


def build_kernels(*sources: str | Path, flags: tuple[str, ...] = ("-O3",)) -> None:
    """Build C++ or CUDA sources once, and register their operators.

    The sources register them with ``TORCH_LIBRARY(namespace, m) { m.def("name", &function); }``, and
    ``bind("namespace::name")`` finds them. Call it in the program, before the schedule runs, and before it is replayed.

    Args:
        sources: files, ``.cpp`` or ``.cu``.
        flags: for the compiler.

    Raises:
        ArgumentError: a file is missing, or ninja is not installed.
        RuntimeError: the compiler refuses the sources; its messages are in the text.
    """
    from torch.utils.cpp_extension import is_ninja_available, load

    paths = [Path(source) for source in sources]
    for path in paths:
        if not path.is_file():
            raise ArgumentError(f"build_kernels: there is no file '{path}'", hint="build_kernels('kernels/gelu.cpp')")
    if not is_ninja_available():
        raise ArgumentError(
            "build_kernels: ninja is not installed, with which torch builds extensions",
            hint="pip install 'slapo-fusion[build]'",
        )
    content = b"\0".join([*(path.read_bytes() for path in paths), *(flag.encode() for flag in flags)])
    name = f"slapo_fusion_{hashlib.blake2b(content, digest_size=8).hexdigest()}"
    load(name, [str(path) for path in paths], extra_cflags=list(flags), is_python_module=False)


# `Bound`: a kernel in the place of a function, with the shapes and dtypes of its outputs.


@dataclass(frozen=True)
class Kernel:
    """Describe a kernel as data, for pickling.

    Args:
        kernel: an operator's name, or a function.
        backward: of :class:`~slapo_fusion.kernels.WithBackward`; None: autograd knows the gradient.
        where: for messages, e.g. ``"bind('acme::gelu') at 'act'"``.
    """

    kernel: str | Callable[..., Any]
    backward: str | Callable[..., Any] | None
    where: str

    @property
    def name(self) -> str:
        """The name of the kernel, for observers."""
        return self.kernel if isinstance(self.kernel, str) else getattr(self.kernel, "__qualname__", "a kernel")

    def load(self) -> Callable[..., Any]:
        """Return the function to call.

        Raises:
            Unavailable: the kernel or its backward is missing.
        """
        forward = load_kernel(self.kernel)
        return forward if self.backward is None else WithBackward(forward, load_kernel(self.backward), self.where)


class Bound:
    """Call a kernel in the place of a function.

    The first call compares the shapes and dtypes of both outputs, if the function runs on fake tensors. A lost gradient
    is an error at every call.

    Args:
        function: the replaced one: a forward that takes the module first, or a region.
        kernel: runs instead.
        arguments: of a forward: the names of its parameters, or of the module's own tensors and attributes, in the
            kernel's order. None passes on the arguments.
    """

    def __init__(self, function: Callable[..., Any], kernel: Kernel, arguments: tuple[str, ...] | None = None) -> None:
        functools.update_wrapper(self, function)
        self.function, self.kernel, self.arguments = function, kernel, arguments
        self._call = kernel.load()
        self._named = None if arguments is None else NamedInputs(function, arguments)
        self._is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._call(*self.inputs(*args, **kwargs))
        if is_fake():
            return self.function(*args, **kwargs)
        inputs = self.inputs(*args, **kwargs)
        output = self._call(*inputs)
        happened("call", self.kernel.name)
        if missing_gradient(inputs, output):
            raise ApplyError(
                f"{self.kernel.where}: an input requires a gradient, and the kernel's output has none",
                hint="register its gradient (torch.library.register_autograd), give bind(..., backward=...), freeze "
                "the parameters before it, or call the model under torch.no_grad()",
            )
        if not self._is_checked:
            self._check(args, kwargs, output)
            self._is_checked = True
        return output

    def inputs(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the arguments of the kernel."""
        if self._named is None:
            return (*args, *kwargs.values())
        return self._named(args[0], args[1:], kwargs)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        problem = shape_difference(without_values(self.function, args, kwargs), output_shapes(output))
        if problem is not None:
            raise ApplyError(
                f"{self.kernel.where}: {problem}",
                hint="return the shapes and dtypes of the replaced code, or undo this step",
            )

    def __reduce__(self) -> Any:
        return Bound, (self.function, self.kernel, self.arguments)


class NamedInputs:
    """Return values of forward parameters or module attributes, by name.

    Args:
        forward: takes the module first; its signature is bound once for each number of arguments and set of keywords.
        names: of its parameters, or of the module's attributes.
    """

    def __init__(self, forward: Callable[..., Any], names: tuple[str, ...]) -> None:
        self._forward, self._names = forward, names
        self._sources: dict[Any, list[_Source]] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        key = (len(args), *kwargs)
        if key not in self._sources:
            self._sources[key] = self._bind(len(args), kwargs)
        return tuple([source(module, args, kwargs) for source in self._sources[key]])

    def _bind(self, count: int, keywords: Iterable[str]) -> list[_Source]:
        places = [_Argument(lambda module, args, kwargs, at=at: args[at]) for at in range(count)]
        named = {name: _Argument(lambda module, args, kwargs, name=name: kwargs[name]) for name in keywords}
        call = inspect.signature(self._forward).bind(_Argument(lambda module, args, kwargs: module), *places, **named)
        call.apply_defaults()
        return [
            _source(call.arguments[name])
            if name in call.arguments
            else lambda module, args, kwargs, name=name: getattr(module, name)
            for name in self._names
        ]


_Source = Callable[..., Any]
"""Called with the module, the arguments and the keyword arguments; returns the value of one name."""


@dataclass(frozen=True)
class _Argument:
    source: _Source


def _source(value: Any) -> _Source:
    """Return the source of a bound value: an argument, the rest of the arguments, or a default."""
    if isinstance(value, _Argument):
        return value.source
    if isinstance(value, tuple) and any(isinstance(each, _Argument) for each in value):
        return lambda *call: tuple(each.source(*call) for each in value)
    if isinstance(value, dict) and any(isinstance(each, _Argument) for each in value.values()):
        return lambda *call: {name: each.source(*call) for name, each in value.items()}
    return lambda *call: value
