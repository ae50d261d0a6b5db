"""Apply functions of torch to logits without values: operations, views of tokens, and losses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_core.observers import happened, run_from
from slapo_loss import operations
from slapo_loss.deferred_values import ValuelessLogits, new_of, view_of
from slapo_loss.head_chunks import Objective
from slapo_loss.operations import Operation
from slapo_loss.private import without_torch_function

# -- metadata ----------------------------------------------------------------------------------------------------

METADATA = frozenset((
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_floating_point", "is_signed", "ndimension",
    "nelement", "numel", "size",
))  # fmt: skip
PROPERTIES = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_xla",
        "is_xpu", "itemsize", "layout", "names", "nbytes", "ndim", "requires_grad", "shape",
    )
    if hasattr(getattr(Tensor, name, None), "__get__")
)  # fmt: skip
"""Answered without computing the logits."""
OF_GRAPH = frozenset(getattr(Tensor, name).__get__ for name in ("grad", "grad_fn", "is_leaf", "retains_grad"))
"""Answered without the logits once the forward is over: then no graph leads to them."""

# -- elementwise operations --------------------------------------------------------------------------------------


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    at = next((position for position, one in enumerate(args) if isinstance(one, ValuelessLogits)), None)
    if at is None or args[at].shared.is_log_softmax:
        return NotImplemented
    logits, others = args[at], (*args[:at], *args[at + 1 :], *kwargs.values())
    if not all(_is_operand(one, logits) for one in others):
        return NotImplemented
    name = func.__name__
    if name in operations.CASTS and any(
        one is True for one in others
    ):  # a copy, or another device without waiting for it
        return NotImplemented
    in_place = name in operations.IN_PLACE
    operation = Operation(operations.IN_PLACE.get(name, func), args[:at], args[at + 1 :], kwargs)
    with without_torch_function():
        probe = operation(torch.empty((0, logits.classes), dtype=logits.shared.dtype, device=logits.hidden.device))
    if not isinstance(probe, Tensor) or probe.device != logits.hidden.device or probe.shape != (0, logits.classes):
        return NotImplemented
    if in_place:
        alone = len(logits.shared.members) == 1 and torch.is_grad_enabled()
        if at or not alone or probe.dtype != logits.shared.dtype:
            return NotImplemented
        logits.shared.between = (*logits.shared.between, operation)
        return logits
    if name in operations.CASTS and probe.dtype == logits.shared.dtype:
        return logits
    return new_of(logits, operation, dtype=probe.dtype)


def _is_operand(value: Any, logits: ValuelessLogits) -> bool:
    if isinstance(value, ValuelessLogits):
        return False
    if isinstance(value, Tensor):
        of_classes = value.shape[-1:].numel() == value.numel() and value.numel() in (1, logits.classes)
        on_last_axis = value.dim() == 0 or (
            value.dim() <= logits.hidden.dim() and logits.axis == logits.hidden.dim() - 1
        )
        return of_classes and on_last_axis and not value.requires_grad
    return isinstance(value, (int, float, torch.dtype, torch.device, type(None), torch.memory_format))


def _clone(func: Any, logits: ValuelessLogits, *args: Any, **kwargs: Any) -> Any:
    return new_of(logits)


# -- views of tokens ---------------------------------------------------------------------------------------------


def _contiguous(func: Any, logits: ValuelessLogits, *args: Any, **kwargs: Any) -> Any:
    return view_of(logits, lambda real: func(real, *args, **kwargs), logits.hidden)


def _detach(func: Any, logits: ValuelessLogits) -> Any:
    return view_of(logits, Tensor.detach, logits.hidden.detach(), head=logits.head.detach())


def _in_order(func: Any, logits: ValuelessLogits, *args: Any, **kwargs: Any) -> Any:
    if logits.axis != logits.hidden.dim() - 1 or any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
        return NotImplemented
    with without_torch_function():
        shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.classes or shape.numel() != logits.shape.numel():
        return NotImplemented
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return view_of(logits, lambda real: func(real, *args, **kwargs), hidden, axis=len(shape) - 1)


def _permuted(func: Any, logits: ValuelessLogits, *args: Any, **kwargs: Any) -> Any:
    with without_torch_function():
        marked = torch.empty([2 if axis == logits.axis else 1 for axis in range(logits.hidden.dim())], device="meta")
        axis = list(func(marked, *args, **kwargs).shape).index(2)
    return view_of(logits, lambda real: func(real, *args, **kwargs), func(logits.hidden, *args, **kwargs), axis=axis)


def _indexed(func: Any, logits: ValuelessLogits, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if logits.axis != logits.hidden.dim() - 1 or not all(map(_is_index, items)):
        return NotImplemented
    indexed = sum(
        one.dim() if isinstance(one, Tensor) and one.dtype == torch.bool else 1
        for one in items
        if one is not None and one is not Ellipsis
    )
    rest = [slice(None)] * (logits.hidden.dim() - indexed)
    at = next((position for position, one in enumerate(items) if one is Ellipsis), len(items))
    items = (*items[:at], *rest, *items[at + 1 :])
    last = items[-1]
    if not isinstance(last, slice) or last.step not in (None, 1) or last.start not in (None, 0):
        return NotImplemented
    stop = last.indices(logits.classes)[1]
    if stop < 1 or (logits.shared.is_log_softmax and stop != logits.classes):
        return NotImplemented
    hidden = logits.hidden[(*items[:-1], slice(None))]
    if any(isinstance(one, (Tensor, list)) for one in items):
        return new_of(logits, hidden=hidden, classes=stop)
    return view_of(logits, lambda real: real[index], hidden, axis=hidden.dim() - 1, classes=stop)


def _is_index(item: Any) -> bool:
    if isinstance(item, Tensor):
        return not isinstance(item, ValuelessLogits) and item.dtype in (torch.bool, torch.int64) and item.dim() > 0
    if type(item) is list:
        return all(type(one) is int for one in item)
    return item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int


_POSITIONS = {"chunk": 1, "index_select": 0, "narrow": 0, "select": 0, "split": 1, "unbind": 0}
"""Where among the arguments after the tensor a function takes ``dim``."""


def _of_tokens(func: Any, logits: ValuelessLogits, *args: Any, **kwargs: Any) -> Any:
    name = func.__name__
    position = _POSITIONS[name]
    axis = kwargs.get("dim", args[position] if len(args) > position else 0)
    if _axis(axis, logits) in (None, logits.axis):
        return NotImplemented
    found = func(logits.hidden, *args, **kwargs)
    if name == "index_select":
        return new_of(logits, hidden=found) if logits.axis == logits.hidden.dim() - 1 else NotImplemented
    is_lost = name in ("select", "unbind") and axis % logits.hidden.dim() < logits.axis
    classes_axis = logits.axis - is_lost
    if isinstance(found, Tensor):
        return view_of(logits, lambda real: func(real, *args, **kwargs), found, axis=classes_axis)

    def part(number: int) -> ValuelessLogits:
        return view_of(logits, lambda real: func(real, *args, **kwargs)[number], found[number], axis=classes_axis)

    return tuple(map(part, range(len(found))))


# -- losses ------------------------------------------------------------------------------------------------------


def _cross_entropy(
    func: Any,
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if not isinstance(input, ValuelessLogits) or input.shared.is_log_softmax:
        return NotImplemented
    return _loss(input, target, weight, (size_average, reduce), Objective(ignore_index, reduction, label_smoothing))


def _axis(dim: Any, logits: ValuelessLogits) -> int | None:
    """Return an axis counted from the front; None if torch has to refuse it."""
    axes = logits.hidden.dim()
    return dim % axes if type(dim) is int and -axes <= dim < axes else None


def _log_softmax(
    func: Any, input: ValuelessLogits, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Any:
    if func is not F.log_softmax:  # torch.log_softmax(input, dim, dtype)
        dtype = dtype if _stacklevel == 3 else _stacklevel
    logits = input if dtype is None else _elementwise(Tensor.to, input, dtype)
    if logits is NotImplemented or input.shared.is_log_softmax or _axis(dim, input) != input.axis:
        return NotImplemented
    return new_of(logits, log_softmax=True)


def _nll_loss(
    func: Any,
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if not isinstance(input, ValuelessLogits) or not input.shared.is_log_softmax:
        return NotImplemented
    return _loss(input, target, weight, (size_average, reduce), Objective(ignore_index, reduction))


def _loss(
    logits: ValuelessLogits, target: Tensor, weight: Tensor | None, old: tuple[Any, Any], objective: Objective
) -> Any:
    """Compute the cross entropy in chunks; NotImplemented where torch has to decide."""
    values, axis = logits.shared, 1 if logits.hidden.dim() > 1 else 0
    if old != (None, None) or objective.reduction not in ("mean", "none", "sum") or logits.axis != axis:
        return NotImplemented
    if not isinstance(target, Tensor) or isinstance(target, ValuelessLogits) or target.dtype != torch.int64:
        return NotImplemented
    if target.shape != logits.shape[:axis] + logits.shape[axis + 1 :] or target.device != logits.hidden.device:
        return NotImplemented
    if weight is not None and (weight.requires_grad or weight.shape != (logits.classes,)):
        return NotImplemented
    if not 0 <= objective.label_smoothing <= 1 or values.call.is_over:
        return NotImplemented
    values.check()
    head, kind = logits.head, logits.hidden.device.type
    between = values.between
    if operations.is_autocast(kind) and values.dtype != torch.float64:  # which autocast leaves
        between = (*between, Operation(Tensor.float, (), (), {}))
    hidden = logits.hidden.movedim(axis, -1)
    vocabulary = dataclasses.replace(head.vocabulary, size=logits.classes)
    values.call.used = True
    with operations.without_autocast(kind):
        found = run_from(
            head.origin,
            _computed,
            head.implementation,
            hidden.reshape(-1, hidden.shape[-1]),
            head.weight,
            target.reshape(-1),
            bias=head.bias,
            class_weight=weight,
            objective=objective,
            vocabulary=vocabulary,
            between=functools.partial(operations.applied, between, vocabulary.start) if between else None,
            chunk=head.chunk,
        )
    return found.reshape(target.shape) if objective.reduction == "none" else found


def _computed(implementation: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a loss, and report what computes it."""
    happened("call", getattr(implementation, "name", ""))
    found: Tensor = implementation(*args, **kwargs)
    return found


VIEWS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("flatten", "reshape", "squeeze", "unflatten", "unsqueeze", "view"), _in_order),
    **dict.fromkeys(("moveaxis", "movedim", "permute", "swapaxes", "swapdims", "transpose"), _permuted),
    **dict.fromkeys(_POSITIONS, _of_tokens),
    "__getitem__": _indexed,
    "clone": _clone,
    "contiguous": _contiguous,
    "detach": _detach,
}
"""By the name of a function whose first argument is deferred logits."""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((*operations.ELEMENTWISE, *operations.IN_PLACE), _elementwise),
    "cross_entropy": _cross_entropy,
    "log_softmax": _log_softmax,
    "nll_loss": _nll_loss,
}
"""By the name of a function with deferred logits among its arguments."""
