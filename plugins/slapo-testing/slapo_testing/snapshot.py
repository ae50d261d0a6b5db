"""`ModelSnapshot`: the observable state of a model, to compare bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from slapo_runtime.guards import Guards
from slapo_testing.private import TENSOR_HOOK_TABLES, TENSOR_TABLES

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OPAQUE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial, Guards)
_CLASS_BOOKKEEPING = frozenset(
    {"__abstractmethods__", "__annotate__", "__annotations__", "__annotations_cache__", "__slotnames__"}
)
"""Attributes that the interpreter adds to classes; the last one by copying an instance."""
_ABSENT: Any = object()
_SHOWN = 20  # differences in one message


class ModelSnapshot:
    """The state of a model, down to identities and bits.

    For each module and path it records identity, type and ``__dict__`` in order; parameters and buffers with identity,
    type, dtype, shape, strides, device, bits, gradient, hooks and Python attributes; module hooks; plain attributes,
    also in containers and objects, with their identity and type; and attributes of the modules' classes. It keeps
    objects alive, so that identities stay unique.

    Example::

        before = ModelSnapshot(model)
        ...
        assert before.differences(model) == []

    Args:
        model: the model, which is only read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._facts: dict[str, Any] = {}
        self._visited: dict[int, Any] = {}
        classes: dict[type, None] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            place = path or "(root)"
            self._facts[place] = _Object(module)
            if id(module) in self._visited:
                continue
            self._visited[id(module)] = module
            self._facts[f"{place} (type)"] = _Object(type(module))
            classes.update(dict.fromkeys(cls for cls in type(module).__mro__ if issubclass(cls, nn.Module)))
            self._mapping(place, vars(module), dotted=True)
        for cls in classes:
            for name, value in vars(cls).items():
                if name not in _CLASS_BOOKKEEPING:
                    self._facts[f"class {cls.__qualname__}.{name}"] = _Object(value)

    def differences(self, later: ModelSnapshot | nn.Module) -> list[str]:
        """List the differences of ``later``, one line each, e.g. ``"fc.weight: 3 of 16 elements differ, ..."``.

        Args:
            later: the same model now, or its later snapshot.
        """
        after = later if isinstance(later, ModelSnapshot) else ModelSnapshot(later)
        lines = []
        for place, fact in self._facts.items():
            other = after._facts.get(place, _ABSENT)
            if other is _ABSENT:
                lines.append(f"{place}: removed (was {fact})")
            elif type(fact) is not type(other):
                lines.append(f"{place}: {fact} became {other}")
            else:
                lines.extend(f"{place}: {text}" for text in fact.compare(other))
        lines.extend(f"{place}: added ({fact})" for place, fact in after._facts.items() if place not in self._facts)
        return lines

    # -- collecting -------------------------------------------------------------------------------------------

    def _mapping(self, place: str, mapping: Mapping[Any, Any], *, dotted: bool, shown: str | None = None) -> None:
        """Record the items of a mapping, under ``shown`` or ``place``."""
        self._facts[f"{place} (names)"] = _Order(tuple(mapping))
        shown = shown or place
        for key, value in mapping.items():
            if dotted and key in TENSOR_TABLES and isinstance(value, dict):
                # Parameters are shown by their state-dict names; the dictionaries must also stay the same objects.
                self._facts[f"{place}.{key}"] = _Object(value)
                below = place if key == TENSOR_TABLES[0] else None
                self._mapping(f"{place}.{key}", value, dotted=True, shown=below)
            elif dotted and isinstance(key, str):
                self._value(f"{shown}.{key}", value)
            else:
                self._value(f"{shown}[{key!r}]", value)

    def _value(self, place: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(place, value)
        elif isinstance(value, _PLAIN):
            self._facts[place] = _Plain(value)
        else:
            self._facts[place] = _Object(value)
            if isinstance(value, (nn.Module, *_OPAQUE)) or id(value) in self._visited:
                return
            self._visited[id(value)] = value
            self._facts[f"{place} (type)"] = _Object(type(value))
            self._inside(place, value)

    def _inside(self, place: str, value: Any) -> None:
        if isinstance(value, Mapping):
            self._mapping(place, value, dotted=False)
        elif isinstance(value, (list, tuple)):
            self._facts[f"{place} (length)"] = _Plain(len(value))
            for index, item in enumerate(value):
                self._value(f"{place}[{index}]", item)
        elif isinstance(value, (set, frozenset)):
            self._facts[f"{place} (members)"] = _Members(value)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._mapping(place, vars(value), dotted=True)

    def _tensor(self, place: str, tensor: torch.Tensor) -> None:
        known = id(tensor) in self._visited
        self._facts[place] = _Object(tensor)
        if known:
            return
        self._visited[id(tensor)] = tensor
        self._facts[f"{place} (tensor)"] = _Bits(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            self._tensor(f"{place}.grad", tensor.grad)
        for hooks in TENSOR_HOOK_TABLES:
            table = getattr(tensor, hooks, None)
            if table:
                self._mapping(f"{place}.{hooks}", table, dotted=False)
        if tensor.__dict__:
            self._mapping(f"{place} (attributes)", tensor.__dict__, dotted=True)


def assert_bit_identical(before: ModelSnapshot, model: ModelSnapshot | nn.Module) -> None:
    """Assert that ``model`` is bit-identical to an earlier snapshot.

    Raises:
        AssertionError: with one line for each difference.
    """
    __tracebackhide__ = True
    lines = before.differences(model)
    if lines:
        raise AssertionError(f"the model is not bit-identical to before:\n  {listed(lines)}")


def listed(lines: list[str]) -> str:
    """Join up to twenty lines, indented, with the number of further ones."""
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n  ".join([*lines[:_SHOWN], *more])


class _Object:
    """The identity of an object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def compare(self, other: _Object) -> Iterator[str]:
        if not _is_same(self.value, other.value):
            before, after = str(self), str(other)
            yield f"another object, {before} -> {after}" if before != after else f"another object, {before} as before"

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, torch.Tensor):
            return f"{type(value).__name__} {tuple(value.shape)}"
        if isinstance(value, (FunctionType, MethodType, type)):
            function = value.__func__ if isinstance(value, MethodType) else value
            return f"{type(value).__name__} {getattr(function, '__qualname__', f'of a {type(function).__name__}')}"
        return f"a {type(value).__name__}"


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two references are one object; bound methods compare by function and instance."""
    if isinstance(value, MethodType) and isinstance(other, MethodType):
        return value.__self__ is other.__self__ and value.__func__ is other.__func__
    return value is other


class _Plain:
    """The type and value of plain data; NaN equals NaN."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def compare(self, other: _Plain) -> Iterator[str]:
        # Not by ==, for which 0.0 is -0.0 and NaN is not itself.
        if type(self.value) is not type(other.value) or repr(self.value) != repr(other.value):
            yield f"{self} -> {other}"

    def __str__(self) -> str:
        return repr(self.value)


class _Members:
    """The members of a set: plain values compare by value, others by identity."""

    def __init__(self, members: Iterable[Any]) -> None:
        self.members = {repr(item) if isinstance(item, _PLAIN) else id(item): item for item in members}

    def compare(self, other: _Members) -> Iterator[str]:
        if self.members.keys() != other.members.keys():
            yield f"{self} -> {other}"

    def __str__(self) -> str:
        return f"{{{', '.join(sorted(map(repr, self.members.values())))}}}"


class _Order:
    """Names and their order."""

    def __init__(self, names: tuple[Any, ...]) -> None:
        self.names = names

    def compare(self, other: _Order) -> Iterator[str]:
        # Added and removed names have their own lines; this one compares the order of the others.
        before, after = ({_label(name): name for name in one.names} for one in (self, other))
        stayed = [name for label, name in before.items() if label in after]
        now = [name for label, name in after.items() if label in before]
        if list(map(_label, stayed)) != list(map(_label, now)):
            yield f"another order, {stayed} -> {now}"
        elif len(self.names) != len(other.names):
            yield f"{len(self.names)} -> {len(other.names)}"

    def __str__(self) -> str:
        return f"{len(self.names)} names"


def _label(name: Any) -> Any:
    """Return a name, or the identity of another key: equality of tensors is not a bool."""
    return name if isinstance(name, _PLAIN) else id(name)


class _Bits:
    """Type, dtype, shape, strides, device, requires_grad and bits of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.facts = {
            "type": type(tensor),
            "dtype": tensor.dtype,
            "shape": tuple(tensor.shape),
            "strides": tensor.stride() if tensor.layout == torch.strided else None,
            "device": tensor.device,
            "requires_grad": tensor.requires_grad,
        }
        dense = tensor.detach()
        if dense.layout != torch.strided:
            dense = dense.to_dense()
        self.values = None if tensor.is_meta else dense.resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()

    def compare(self, other: _Bits) -> Iterator[str]:
        changed = [key for key, value in self.facts.items() if other.facts[key] != value]
        yield from (f"{key} {self.facts[key]} -> {other.facts[key]}" for key in changed)
        if {"dtype", "shape"} & set(changed) or self.values is None or other.values is None:
            return
        before, after = _bytes(self.values), _bytes(other.values)
        if torch.equal(before, after):
            return
        wrong = (before != after).reshape(self.values.numel(), -1).any(dim=1)
        first = int(wrong.nonzero()[0])
        index = [int(part) for part in torch.unravel_index(torch.tensor(first), self.values.shape)]
        old, new = self.values.reshape(-1)[first].item(), other.values.reshape(-1)[first].item()
        yield f"{int(wrong.sum())} of {wrong.numel()} elements differ, first {index}: {old!r} -> {new!r}"

    def __str__(self) -> str:
        return f"{self.facts['dtype']} {self.facts['shape']}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
