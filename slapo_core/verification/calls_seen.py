"""Two runs of one model side by side, module by module: the first call that gets, or gives, something else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from slapo_core.verification.precision import is_inexact

__all__ = ["OtherCall", "SeenCalls", "first_other_call"]

_CLOSE = 1e-6
Marks = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class OtherCall:
    """A call of a module that is another one in the second run.

    Args:
        path: of the module.
        how: in words, e.g. ``"gets other inputs"``.
        in_backward: whether only its gradient is another.
    """

    path: str
    how: str
    in_backward: bool = False


@dataclass
class _Call:
    path: str
    number: int
    given: Marks
    gave: Marks = ()
    gradients: dict[int, Marks] = field(default_factory=dict)


class SeenCalls:
    """What every call of a module gets and gives while the block runs; two numbers stand for a tensor.

    Args:
        modules: with their paths; of copies that nobody else runs.
        but: paths of modules that are left alone.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], *, but: Collection[str] = ()) -> None:
        self.calls: list[_Call] = []
        self._open: list[_Call] = []
        self._counts: dict[str, int] = {}
        self._modules = [(path, module) for path, module in modules if path and path not in but]
        self._handles: list[Any] = []

    def __enter__(self) -> SeenCalls:
        for path, module in self._modules:
            before = module.register_forward_pre_hook(self._before(path), with_kwargs=True)
            self._handles += [before, module.register_forward_hook(self._after)]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, path: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            number = self._counts.get(path, 0)
            self._counts[path] = number + 1
            call = _Call(path, number, _marks((args, kwargs)))
            self.calls.append(call)
            self._open.append(call)

        return note

    def _after(self, _: nn.Module, __: Any, output: Any) -> None:
        call = self._open.pop()
        call.gave = _marks(output)
        for number, tensor in enumerate(_tensors(output)):
            if tensor.requires_grad:
                tensor.register_hook(_keeping(call.gradients, number))


def _keeping(gradients: dict[int, Marks], number: int) -> Callable[[torch.Tensor], None]:
    def keep(gradient: torch.Tensor) -> None:
        gradients[number] = _marks(gradient)

    return keep


def first_other_call(one: Sequence[_Call], other: Sequence[_Call]) -> OtherCall | None:
    """The first call of ``one`` that is another in ``other``; else the last one whose gradient is another.

    Args:
        one: what was seen of the first run.
        other: of the second.
    """
    there = {(call.path, call.number): call for call in other}
    for call in one:
        found = there.get((call.path, call.number))
        if found is None:
            return OtherCall(call.path, "is not called" + (" again" if call.number else ""))
        if not _close(call.given, found.given):
            return OtherCall(call.path, "gets other inputs")
        if not _close(call.gave, found.gave):
            return OtherCall(call.path, "gets the same inputs and gives something else")
    for call in reversed(one):
        theirs = there[call.path, call.number].gradients
        for number, marks in call.gradients.items():
            if not _close(marks, theirs.get(number, ())):
                how = "gets no gradient" if number not in theirs else "gets another gradient"
                return OtherCall(call.path, how, in_backward=True)
    return None


def _close(one: Marks, other: Marks) -> bool:
    if len(one) != len(other):
        return False
    pairs = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return all(a == b or abs(a - b) <= _CLOSE * max(abs(a), abs(b), 1e-12) or (a != a and b != b) for a, b in pairs)


def _marks(value: Any) -> Marks:
    return tuple(_numbers(tensor) for tensor in _tensors(value))


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a value; the contents of an object of another kind are left out in both runs alike."""
    plain = dict(value) if isinstance(value, Mapping) else value
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def _numbers(tensor: torch.Tensor) -> tuple[float, float]:
    values = tensor.detach().reshape(-1)
    if values.is_complex():
        values = torch.view_as_real(values).reshape(-1)
    values = values.double() if is_inexact(tensor) or values.dtype is not torch.float64 else values
    weights = torch.arange(1, values.numel() + 1, device=values.device, dtype=torch.float64).cos_()
    return float(values.abs().sum()), float(torch.dot(values, weights))
