"""The reader of patterns: it runs their functions on values that record their operations."""

from __future__ import annotations

import contextlib
import dis
import operator
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.fx.graph import inplace_methods, reflectable_magic_methods
from torch.overrides import TorchFunctionMode

from slapo_core.errors import ArgumentError
from slapo_core.internals import module_calls_through
from slapo_core.observers import PATCHING
from slapo_graph.patterns.data import CanonicalCall, Items, PatternTarget, Slice, Wildcard
from slapo_graph.patterns.operations import (
    constant_kind,
    function_call,
    is_plain_module,
    method_call,
    module_call,
    plain,
)
from slapo_graph.private import dropout_default
from slapo_graph.structure import PLAIN
from slapo_graph.tracing.diagnostics import Location, model_location
from slapo_graph.tracing.recorder import autograd_functions
from slapo_graph.tracing.targets import target_of

# The arguments of a pattern's function.


@dataclass(frozen=True)
class AnyConstant:
    """The result of :func:`any_constant`."""


class Proxy:
    """A value of a pattern, which records the operations on it.

    Args:
        reader: that records them.
        source: of the value: a wildcard, a traced call, or alternatives.
        length: of its parts, if it is known.
    """

    def __init__(self, reader: PatternReader, source: Any, *, length: int | None = None) -> None:
        self._reader, self._source, self._length = reader, source, length

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return active_reader().torch_call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Member(self, name)

    def __getitem__(self, index: Any) -> Any:
        return self._reader.call(operator.getitem, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self._reader.refusal("writes to a part of a value", "write it with a function that gives the result")

    def __iter__(self) -> Iterator[Any]:
        count = self._length if self._length is not None else _unpacked_into(sys._getframe(1))
        if count is None:
            raise self._reader.refusal(
                "loops over a value, whose length a pattern does not know", "take parts by number: x[0], x[1]"
            )
        return iter([self[index] for index in range(count)])

    def __bool__(self) -> bool:
        raise self._reader.refusal(
            "branches on a value", "find(any_of(one_pattern, other_pattern)), or patterns.optional(function, x)"
        )

    def _number(self, *_: Any) -> Any:
        raise self._reader.refusal(
            "needs a plain number where a value stands", "patterns.any_constant() as the default of the parameter"
        )

    __int__ = __float__ = __index__ = __len__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = _number
    __contains__ = _number
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<value of a pattern: {self._source}>"


class _Member(Proxy):
    """``x.name``: a method, if it is called next, or else an attribute."""

    def __init__(self, owner: Proxy, name: str) -> None:
        self._owner, self._name = owner, name
        self._reader, self._length = owner._reader, None
        self._made: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._reader.method(self._name, (self._owner, *args), kwargs)

    @property
    def _source(self) -> Any:  # type: ignore[override]
        if self._made is None:
            self._made = self._reader.call(getattr, (self._owner, self._name), {})
        return self._made._source


def _binary(function: Callable[..., Any], *, reflected: bool = False) -> Callable[[Proxy, Any], Any]:
    def compute(self: Proxy, other: Any) -> Any:
        return self._reader.call(function, (other, self) if reflected else (self, other), {})

    return compute


def _unary(function: Callable[..., Any]) -> Callable[[Proxy], Any]:
    return lambda self: self._reader.call(function, (self,), {})


for _name in reflectable_magic_methods:
    _function, _dunder = getattr(operator, _name, operator.truediv), _name.strip("_")
    if _name != "getitem":
        setattr(Proxy, f"__{_dunder}__", _binary(_function))
        setattr(Proxy, f"__r{_dunder}__", _binary(_function, reflected=True))
for _name in inplace_methods.keys() - {"setitem"}:
    setattr(Proxy, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Proxy, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Proxy, f"__{_name}__", _unary(getattr(operator, _name)))


def _unpacked_into(frame: Any) -> int | None:
    """Return the number of names that the code of ``frame`` unpacks the next iterable into."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return instruction.argval if instruction.opname == "UNPACK_SEQUENCE" else None
    return None


# The reader, which runs a pattern's function on values that record their operations.

SETTING = "_setting "
"""Prefix of the names of captured constants that the pattern omits."""

_LEFT_OUT = float("0.5")  # the default p of dropouts, as an object of its own
_ACTIVE: ContextVar[PatternReader | None] = ContextVar("the reader of the pattern that is being made", default=None)


def active_reader() -> Any:
    """Return the reader of the pattern whose function is running; None outside of one."""
    return _ACTIVE.get()


class TracedCall:
    """A call that the function of a pattern made.

    Args:
        target: the calls of a graph that it matches.
        arguments: with proxies in them.
        is_commutative: whether ``input`` and ``other`` may change places.
        location: line of the pattern.
    """

    def __init__(self, target: PatternTarget, arguments: dict[str, Any], is_commutative: bool, location: str) -> None:
        self.target, self.arguments = target, arguments
        self.is_commutative, self.location = is_commutative, location

    def __str__(self) -> str:
        return self.target.name or self.target.kind


class OneOf:
    """A value that is one of several; the first is preferred."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def __str__(self) -> str:
        return "one of several"


class PatternReader:
    """Record the operations of one pattern's function.

    Args:
        where: the pattern, for messages.
        location: of its function.
    """

    def __init__(self, where: str, location: Location | None = None) -> None:
        self.where, self.location = where, location
        self.is_paused = False
        self.calls: list[TracedCall] = []
        self.captures: list[tuple[str, Proxy]] = []
        self.parameters: dict[str, Proxy] = {}
        self._tensors: dict[int, Proxy] = {}
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []

    # -- values -----------------------------------------------------------------------------------------------

    def wildcard(self, name: str, kind: str = "value", shape: tuple[int, ...] | None = None) -> Proxy:
        """Return a new wildcard."""
        return Proxy(self, Wildcard(name, kind, shape))

    def setting(self, name: str) -> Proxy:
        """Return a constant that each alternative captures as ``name``, or as ``name_2``, ... if that is taken."""
        return self.wildcard(f"{SETTING}{name} {id(self.fresh())}", "constant")

    def note_module(self, root: nn.Module) -> None:
        """Let the parameters and buffers of ``root`` be wildcards by their names."""
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
        """Convert an operand to proxies, constants, and containers of these."""
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
        raise self.refusal(f"passes on a {type(value).__name__}", "pass constants and values of the pattern only")

    def fresh(self) -> object:
        """Return an object whose id is unique while the pattern is traced."""
        made = object()
        self._alive.append(made)
        return made

    # -- calls ------------------------------------------------------------------------------------------------

    def torch_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call of a torch function."""
        kind, target, order = target_of(func, self.refusal)
        if order is not None:
            args = tuple(args[position] for position in order)
        if kind == "attribute":
            return self.call(getattr, (args[0], target), {})
        if kind == "method":
            return self.method(target, args, kwargs)
        return self.call(target, args, kwargs)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """Record the call of a function."""
        given, named = self.value(tuple(args)), self.value(kwargs)
        call = function_call(function, given, named, _kind)
        if any(value is _LEFT_OUT for value in (*args, *kwargs.values())):
            for name in ("p", "training"):
                if call.arguments.get(name, _LEFT_OUT) is _LEFT_OUT:
                    call.arguments[name] = self.setting(name)
        return self._written(call)

    def record_call(self, run: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """Record the call of a custom autograd function, without running it."""
        return self.call(function, args, kwargs)

    def method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """Record the call of a method of a value."""
        if name in ("item", "tolist", "numpy", "dim", "ndimension", "__len__"):
            raise self.refusal(f"reads .{name}() of a value", "patterns.any_constant() stands for a number")
        given, named = self.value(tuple(args)), self.value(kwargs)
        return self._written(method_call(name, given, named, _kind))

    def module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """Record the call of a module of torch.nn."""
        given, named = self.value(tuple(args)), self.value(kwargs)
        tensors = dict(
            (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        )
        call, _, _ = module_call(module, "", given, named, tensor_of=lambda name: self._tensor(tensors[name]))
        assert call is not None  # is_plain_module was asked
        for name in call.arguments.keys() & {"training", "self.training"}:  # a module follows the mode of its model
            call.arguments[name] = self.wildcard(f"_training_{id(self.fresh())}", "constant")
        if call.operation.startswith("dropout") and "training" not in call.arguments:
            call.arguments["training"] = self.wildcard(f"_training_{id(self.fresh())}", "constant")
        return self._written(call)

    def _written(self, call: CanonicalCall) -> Proxy:
        length = None
        if call.operation == "chunk" and type(call.arguments.get("chunks")) is int:
            length = call.arguments["chunks"]
        elif call.operation in ("split", "split_with_sizes"):
            sizes = call.arguments.get("split_size_or_sections", call.arguments.get("split_size"))
            length = len(sizes) if isinstance(sizes, tuple) else None
        return self._add(PatternTarget("call", call.operation), call.arguments, call.is_commutative, length)

    def _add(
        self, target: PatternTarget, arguments: dict[str, Any], is_commutative: bool = False, length: int | None = None
    ) -> Proxy:
        file, line = model_location()
        made = TracedCall(target, arguments, is_commutative, f"{file}:{line}" if line else "")
        self.calls.append(made)
        return Proxy(self, made, length=length)

    # -- the vocabulary ----------------------------------------------------------------------------------------

    def any_op(self, values: tuple[Any, ...]) -> Proxy:
        return self._add(PatternTarget("any"), {str(i): self.value(value) for i, value in enumerate(values)})

    def call_module(self, glob: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        given = {str(i): plain(self.value(value)) for i, value in enumerate(args)}
        given.update({name: plain(self.value(value)) for name, value in kwargs.items()})
        return self._add(PatternTarget("module", glob), given)

    def any_of(self, values: tuple[Any, ...]) -> Proxy:
        return Proxy(self, OneOf(tuple(self.value(value) for value in values)))

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
        """Record torch calls and calls of torch.nn modules while the block runs."""

        def call(run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_plain_module(module):
                return self.module(module, args, kwargs)
            self.note_module(module)
            return run(module, *args, **kwargs)

        with (
            PATCHING,
            module_calls_through(call),
            dropout_default(_LEFT_OUT),
            autograd_functions(cast(Any, self)),
            _Mode(self),
        ):
            token = _ACTIVE.set(self)
            try:
                yield
            finally:
                _ACTIVE.reset(token)

    def refusal(self, problem: str, hint: str | None = None, location: Location | None = None) -> ArgumentError:
        """Return the error for a pattern, with the line while its function runs."""
        location = location or (model_location() if active_reader() is self else self.location)
        if location is None:
            return ArgumentError(f"{self.where} {problem}", hint=hint)
        file, line = location
        return ArgumentError(f"{self.where} {problem} ({file}:{line})", hint=hint)


class _Mode(TorchFunctionMode):
    def __init__(self, reader: PatternReader) -> None:
        super().__init__()
        self.reader = reader

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _has_proxy((args, kwargs)) and getattr(func, "__name__", "") in ("__get__", "__repr__", "__format__"):
            return func(*args, **(kwargs or {}))
        return self.reader.torch_call(func, args, kwargs or {})


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
