"""Everything that one can see of a model, and the first thing in which two looks at it differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

REGISTRIES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """Holds every object that it saw, so that an identity cannot be given to another object meanwhile.

    Args:
        model: it is looked at, never changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.facts: dict[str, Any] = {}
        for path, module in _modules(model):
            self._module(path or "(root)", module)

    def difference(self, later: Snapshot) -> str | None:
        """The first fact that is not the same, or None."""
        for fact, value in self.facts.items():
            if fact not in later.facts:
                return f"{fact} is gone"
            if not _same(value, later.facts[fact]):
                return f"{fact} was {_shown(value)}, is {_shown(later.facts[fact])}"
        added = [fact for fact in later.facts if fact not in self.facts]
        return f"{added[0]} was added" if added else None

    def _module(self, where: str, module: nn.Module) -> None:
        self.facts[f"{where}: type"] = _Identity(type(module))
        self.facts[f"{where}: module"] = _Identity(module)
        self.facts[f"{where}: order of __dict__"] = tuple(module.__dict__)
        for key, value in module.__dict__.items():
            self._value(f"{where}.{key}", value)
        for registry in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, registry).items():
                if tensor is not None:
                    self._tensor(f"{where}.{name}", tensor)

    def _value(self, where: str, value: Any) -> None:
        self.facts[where] = _Identity(value)
        if isinstance(value, Mapping):  # the registries, and every dictionary of hooks
            self.facts[f"{where}: order"] = tuple(value)
            for key, item in value.items():
                self.facts[f"{where}[{key!r}]"] = _Identity(item)
        elif isinstance(value, list):
            self.facts[f"{where}: items"] = tuple(map(_Identity, value))
        elif isinstance(value, (set, frozenset)):
            self.facts[f"{where}: members"] = frozenset(value)
        elif isinstance(value, torch.Tensor):
            self._tensor(where, value)

    def _tensor(self, where: str, tensor: torch.Tensor) -> None:
        self.facts[f"{where}: requires_grad"] = tensor.requires_grad
        self.facts[f"{where}: shape, dtype, stride"] = (tuple(tensor.shape), tensor.dtype, tensor.stride())
        self.facts[f"{where}: values"] = _Bits(tensor)
        self.facts[f"{where}: attributes"] = tuple(tensor.__dict__)
        for key, value in tensor.__dict__.items():
            self.facts[f"{where}: attribute {key}"] = _Identity(value)
        gradient = tensor.grad if tensor.is_leaf else None
        self.facts[f"{where}: grad"] = _Identity(gradient)
        if gradient is not None:
            self.facts[f"{where}: grad values"] = _Bits(gradient)


class _Identity:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        # Numbers and texts may be equal without being one object.
        plain = isinstance(self.value, (int, float, str, bytes, type(None)))
        assert isinstance(other, _Identity)
        if plain:
            return type(self.value) is type(other.value) and self.value == other.value
        return self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        if isinstance(self.value, torch.Tensor):
            return f"tensor {tuple(self.value.shape)} object {id(self.value):x}"
        text = repr(self.value).partition("\n")[0]
        return f"{text[:60]} object {id(self.value):x}"


class _Bits:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.copy = tensor.detach().clone() if not tensor.is_meta else None

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Bits)
        if self.copy is None or other.copy is None:
            return self.copy is other.copy
        same_kind = self.copy.shape == other.copy.shape and self.copy.dtype == other.copy.dtype
        return same_kind and bytes_of(self.copy) == bytes_of(other.copy)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "meta" if self.copy is None else f"{self.copy.flatten()[:4].tolist()}..."


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor: -0.0 is not 0.0, and one NaN is not another."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield from model.named_modules(remove_duplicate=False)


def _same(old: Any, new: Any) -> bool:
    return bool(old == new)


def _shown(value: Any) -> str:
    return repr(value)


def assert_bit_identical(before: Snapshot, model: nn.Module) -> None:
    """Fail, naming the first difference, unless the model is as it was at ``before``."""
    difference = before.difference(Snapshot(model))
    assert difference is None, difference
