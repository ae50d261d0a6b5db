"""Apply elementwise operations to the logits between a head and its loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CASTS = frozenset(("bfloat16", "double", "float", "half", "to", "type"))
ELEMENTWISE = CASTS | frozenset((
    "__rsub__", "add", "clamp", "clamp_max", "clamp_min", "clip", "div", "divide", "mul", "multiply", "neg", "negative",
    "rsub", "sigmoid", "sub", "subtract", "tanh", "true_divide",
))  # fmt: skip
"""Functions whose derivative is finite everywhere: the columns of padding take part in them."""
IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "__iadd__": Tensor.add, "__imul__": Tensor.mul, "__isub__": Tensor.sub, "__itruediv__": Tensor.div,
    "add_": Tensor.add, "clamp_": Tensor.clamp, "div_": Tensor.div, "mul_": Tensor.mul, "neg_": Tensor.neg,
    "sigmoid_": Tensor.sigmoid, "sub_": Tensor.sub, "tanh_": Tensor.tanh,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Operation:
    """Describe an elementwise function of logits; other operands are numbers or per class.

    Args:
        function: e.g. ``Tensor.mul``.
        before: operands before the logits.
        after: operands after the logits.
        options: keyword arguments.
    """

    function: Callable[..., Tensor]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    options: dict[str, Any]
    versions: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", {id(one): one._version for one in self._tensors()})

    def __call__(self, logits: Tensor, start: int = 0) -> Tensor:
        """Compute it.

        Args:
            logits: (..., classes), some classes of the vocabulary.
            start: the first of these classes.
        """
        for one in self._tensors():
            check_version(one, self.versions[id(one)], "an operand of an operation on the logits")
        of_classes = functools.partial(_narrowed, start=start, count=logits.shape[-1])
        before, after = map(of_classes, self.before), map(of_classes, self.after)
        options = {key: of_classes(value) for key, value in self.options.items()}
        return self.function(*before, logits, *after, **options)

    def _tensors(self) -> Iterator[Tensor]:
        return (one for one in (*self.before, *self.after, *self.options.values()) if isinstance(one, Tensor))


def _narrowed(operand: Any, start: int, count: int) -> Any:
    """Return an operand for ``count`` classes from ``start`` on; 1 for padding."""
    if not isinstance(operand, Tensor) or operand.dim() == 0:
        return operand
    operand = operand.reshape(-1)
    if len(operand) == 1:
        return operand
    own = operand[start : start + count]
    return own if len(own) == count else F.pad(own, (0, count - len(own)), value=1)


def applied(operations: tuple[Operation, ...], start: int, logits: Tensor) -> Tensor:
    """Apply operations in order; see `Operation`."""
    for operation in operations:
        logits = operation(logits, start)
    return logits


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context without autocast."""
    return torch.autocast(device, enabled=False) if is_autocast(device) else nullcontext()


def is_autocast(device: str) -> bool:
    """Return whether autocast is enabled for a type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def check_version(tensor: Tensor, version: int, what: str) -> None:
    """Raise if a tensor was modified in place since it had this version."""
    if tensor._version != version:
        raise RuntimeError(
            f"{what} was modified in place before the loss was computed: it is at version {tensor._version}; "
            f"expected version {version}"
        )
