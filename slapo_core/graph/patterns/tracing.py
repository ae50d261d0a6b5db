"""The function of a pattern, run on values that write down what is done with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_core.errors import ArgumentError
from slapo_core.graph.functions import autograd_functions
from slapo_core.graph.location import Location, model_location
from slapo_core.graph.patching import PATCHING
from slapo_core.graph.patterns.calls import Call, Items, Slice
from slapo_core.graph.patterns.data import Target, Wildcard
from slapo_core.graph.patterns.language import AnyConstant
from slapo_core.graph.patterns.modules import is_plain_module, module_call
from slapo_core.graph.patterns.operations import constant_kind, function_call, method_call, plain
from slapo_core.graph.patterns.proxies import Proxy
from slapo_core.graph.structure import PLAIN
from slapo_core.graph.targets import target_of

__all__ = ["SETTING", "Alternatives", "TracedCall", "Tracer", "active_tracer"]

SETTING = "_setting "
"""Begins the name of a constant that is captured although the pattern leaves it out."""

_DROPOUTS: tuple[Any, ...] = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_LEFT_OUT = float("0.5")  # the default p of these, as an object of its own
_ACTIVE: ContextVar[Tracer | None] = ContextVar("the tracer of the pattern that is being made", default=None)


def active_tracer() -> Any:
    """The tracer of the pattern whose function is running; None outside of one."""
    return _ACTIVE.get()


class TracedCall:
    """A call that the function of a pattern made.

    Args:
        target: which calls of a graph it stands for.
        arguments: with proxies in them.
        is_commutative: whether ``input`` and ``other`` may change places.
        location: line of the pattern.
    """

    def __init__(self, target: Target, arguments: dict[str, Any], is_commutative: bool, location: str) -> None:
        self.target, self.arguments = target, arguments
        self.is_commutative, self.location = is_commutative, location

    def __str__(self) -> str:
        return self.target.name or self.target.kind


class Alternatives:
    """A value that is one of several; the first is preferred."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def __str__(self) -> str:
        return "one of several"


class Tracer:
    """Writes down what the function of one pattern does.

    Args:
        where: the pattern, for messages.
        home: where its function begins.
    """

    def __init__(self, where: str, home: Location | None = None) -> None:
        self.where, self.home = where, home
        self.is_paused = False
        self.calls: list[TracedCall] = []
        self.captures: list[tuple[str, Proxy]] = []
        self.parameters: dict[str, Proxy] = {}
        self._tensors: dict[int, Proxy] = {}
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []

    # -- values -----------------------------------------------------------------------------------------------

    def wildcard(self, name: str, kind: str = "value", shape: tuple[int, ...] | None = None) -> Proxy:
        """A value of its own."""
        return Proxy(self, Wildcard(name, kind, shape))

    def setting(self, name: str) -> Proxy:
        """Any constant, captured in each form under ``name``, or the first of ``name_2``, ... that is free there."""
        return self.wildcard(f"{SETTING}{name} {id(self.fresh())}", "constant")

    def know(self, root: nn.Module) -> None:
        """From now on the parameters and buffers of ``root`` are wildcards by their names."""
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            self._names.setdefault(id(tensor), name)
            self._alive.append(tensor)

    def _tensor(self, tensor: torch.Tensor) -> Proxy:
        found = self._tensors.get(id(tensor))
        if found is None:
            self._alive.append(tensor)
            name = self._names.get(id(tensor))
            if name is None:
                if not isinstance(tensor, nn.Parameter):
                    raise self.refusal("uses a tensor of its own", "make it a parameter of the function")
                name = f"parameter_{len(self._tensors)}"
            found = self._tensors[id(tensor)] = self.wildcard(name, "parameter", tuple(tensor.shape))
            self.parameters[name] = found
        return found

    def value(self, value: Any) -> Any:
        """An operand: proxies, constants, and containers of such."""
        if isinstance(value, Proxy):
            return value
        if isinstance(value, AnyConstant):
            return self.wildcard(f"_constant_{id(self.fresh())}", "constant")
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple | list):
            return tuple(self.value(part) for part in value)
        if isinstance(value, slice):
            return slice(self.value(value.start), self.value(value.stop), self.value(value.step))
        if isinstance(value, dict):
            return {key: self.value(part) for key, part in value.items()}
        if isinstance(value, PLAIN):
            return value
        raise self.refusal(f"passes on a {type(value).__name__}", "constants and values of the pattern only")

    def fresh(self) -> object:
        """An object whose id nothing else has while the pattern is traced."""
        made = object()
        self._alive.append(made)
        return made

    # -- calls ------------------------------------------------------------------------------------------------

    def torch_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function was called."""
        kind, target, order = target_of(func, self)  # type: ignore[arg-type]
        if order is not None:
            args = tuple(args[position] for position in order)
        if kind == "attribute":
            return self.call(getattr, (args[0], target), {})
        if kind == "method":
            return self.method(target, args, kwargs)
        return self.call(target, args, kwargs)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """A function was called."""
        given, named = self.value(tuple(args)), self.value(kwargs)
        call = function_call(function, given, named, _kind)
        if any(value is _LEFT_OUT for value in (*args, *kwargs.values())):
            for name in ("p", "training"):
                if call.arguments.get(name, _LEFT_OUT) is _LEFT_OUT:
                    call.arguments[name] = self.setting(name)
        return self._written(call)

    def record_call(self, run: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """A custom autograd function was called; nothing is run."""
        return self.call(function, args, kwargs)

    def method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """A method of a value was called."""
        if name in ("item", "tolist", "numpy", "dim", "ndimension", "__len__"):
            raise self.refusal(f"reads .{name}() of a value", "patterns.any_constant() stands for a number")
        given, named = self.value(tuple(args)), self.value(kwargs)
        return self._written(method_call(name, given, named, _kind))

    def module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """A module of torch.nn was called."""
        given, named = self.value(tuple(args)), self.value(kwargs)
        tensors = dict(
            (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        )
        call, _, _ = module_call(module, "", given, named, held=lambda name: self._tensor(tensors[name]))
        assert call is not None  # is_plain_module was asked
        for name in call.arguments.keys() & {"training", "self.training"}:  # a module follows the mode of its model
            call.arguments[name] = self.wildcard(f"_training_{id(self.fresh())}", "constant")
        if call.operation.startswith("dropout") and "training" not in call.arguments:
            call.arguments["training"] = self.wildcard(f"_training_{id(self.fresh())}", "constant")
        return self._written(call)

    def _written(self, call: Call) -> Proxy:
        length = None
        if call.operation == "chunk" and type(call.arguments.get("chunks")) is int:
            length = call.arguments["chunks"]
        elif call.operation in ("split", "split_with_sizes"):
            sizes = call.arguments.get("split_size_or_sections", call.arguments.get("split_size"))
            length = len(sizes) if isinstance(sizes, tuple) else None
        return self._add(Target("call", call.operation), call.arguments, call.is_commutative, length)

    def _add(
        self, target: Target, arguments: dict[str, Any], is_commutative: bool = False, length: int | None = None
    ) -> Proxy:
        file, line = model_location()
        made = TracedCall(target, arguments, is_commutative, f"{file}:{line}" if line else "")
        self.calls.append(made)
        return Proxy(self, made, length=length)

    # -- the words of the language ----------------------------------------------------------------------------

    def any_op(self, values: tuple[Any, ...]) -> Proxy:
        return self._add(Target("any"), {str(i): self.value(value) for i, value in enumerate(values)})

    def call_module(self, glob: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        given = {str(i): plain(self.value(value)) for i, value in enumerate(args)}
        given.update({name: plain(self.value(value)) for name, value in kwargs.items()})
        return self._add(Target("module", glob), given)

    def any_of(self, values: tuple[Any, ...]) -> Proxy:
        return Proxy(self, Alternatives(tuple(self.value(value) for value in values)))

    def capture(self, name: str, value: Any) -> Proxy:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise ArgumentError(f"a capture needs a name (got {name!r})", hint="capture('scores', x @ y)")
        if name in dict(self.captures):
            raise ArgumentError(f"{self.where} captures '{name}' twice", hint="another name for the second")
        found = self.value(value)
        if not isinstance(found, Proxy):
            raise ArgumentError(
                f"capture needs a value of the pattern (got {value!r})", hint=f"capture({name!r}, any_constant())"
            )
        self.captures.append((name, found))
        return found

    # -- running ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While this lasts, torch calls and calls of torch.nn modules are written down."""
        tracer = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if active_tracer() is not tracer:  # another thread's
                return original(module, *args, **kwargs)
            if is_plain_module(module):
                return tracer.module(module, args, kwargs)
            tracer.know(module)
            return original(module, *args, **kwargs)

        with PATCHING:
            token, original = _ACTIVE.set(self), nn.Module.__call__
            defaults = [function.__defaults__ for function in _DROPOUTS]
            nn.Module.__call__ = call  # type: ignore[method-assign]
            try:
                for function in _DROPOUTS:  # they pass their defaults on as if these were given
                    function.__defaults__ = (_LEFT_OUT, *function.__defaults__[1:])
                with autograd_functions(cast(Any, self)), _Mode(self):
                    yield
            finally:
                for function, own in zip(_DROPOUTS, defaults, strict=True):
                    function.__defaults__ = own
                nn.Module.__call__ = original  # type: ignore[method-assign]
                _ACTIVE.reset(token)

    def refusal(self, problem: str, hint: str | None = None, location: Location | None = None) -> ArgumentError:
        """The error for what a pattern cannot say; while its function runs, with the line."""
        location = location or (model_location() if active_tracer() is self else self.home)
        if location is None:
            return ArgumentError(f"{self.where} {problem}", hint=hint)
        file, line = location
        return ArgumentError(f"{self.where} {problem} ({file}:{line})", hint=hint)


class _Mode(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _has_proxy((args, kwargs)) and getattr(func, "__name__", "") in ("__get__", "__repr__", "__format__"):
            return func(*args, **(kwargs or {}))
        return self.tracer.torch_call(func, args, kwargs or {})


def _has_proxy(value: Any) -> bool:
    if isinstance(value, Proxy):
        return True
    if isinstance(value, tuple | list):
        return any(map(_has_proxy, value))
    return isinstance(value, dict) and any(map(_has_proxy, value.values()))


def _kind(value: Any) -> str:
    if isinstance(value, Proxy):
        source = value._source
        if isinstance(source, Wildcard) and source.kind != "value":
            return "tensor" if source.kind == "parameter" else "constant"
        return "unknown"
    return "sequence" if isinstance(value, tuple | Slice | Items) else constant_kind(value)
