"""Logits that are not computed: `DeferredLogits`, between a head and its loss.

They know the hidden states, the head, and the elementwise operations met on the way. ``cross_entropy``, and
``log_softmax`` with ``nll_loss``, take them without computing them whole; anything else computes them, there and then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_loss.chunked import Objective, Vocabulary, linear_cross_entropy
from slapo_loss.private import without_torch_function
from slapo_loss.withheld import withheld_error

Operation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Head:
    """A linear layer as a function of its tensors.

    Args:
        weight: (classes here, features).
        bias: (classes here,).
        vocabulary: what of it is here.
        gather: the logits of the whole vocabulary from those here: (..., classes here) -> (..., classes).
        chunk: tokens whose logits exist at a time.
    """

    weight: Tensor
    bias: Tensor | None
    vocabulary: Vocabulary
    gather: Callable[[Tensor], Tensor] | None = None
    chunk: int = 1024


@dataclass
class Call:
    """One forward of the model, to which deferred logits belong.

    Attributes:
        used: whether a loss was computed of deferred logits.
        computed: what made real logits of them, by the name of the operation.
        is_over: whether the forward has ended.
    """

    used: bool = False
    computed: list[str] = field(default_factory=list)
    is_over: bool = False


class DeferredLogits(Tensor):
    """A tensor without values; see the module's docstring.

    Args:
        hidden: hidden states, with their features on axis ``axis``.
        head: the layer.
        call: the forward that it is part of.
        between: elementwise operations, in order.
        axis: of the classes.
        classes: of the vocabulary that are left, counted from its start.
        is_log_softmax: whether these are log-probabilities.
    """

    hidden: Tensor
    head: Head
    call: Call
    between: tuple[Operation, ...]
    axis: int
    classes: int
    is_log_softmax: bool

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        head: Head,
        call: Call,
        between: tuple[Operation, ...] = (),
        axis: int = -1,
        classes: int | None = None,
        is_log_softmax: bool = False,
    ) -> DeferredLogits:
        axis %= hidden.dim()
        classes = head.vocabulary.size if classes is None else classes
        shape = [*hidden.shape]
        shape[axis] = classes
        dtype = _dtype_of(hidden, head, between)
        self: DeferredLogits = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=hidden.device, requires_grad=False
        )
        self.hidden, self.head, self.call, self.between = hidden, head, call, between
        self.axis, self.classes, self.is_log_softmax = axis, classes, is_log_softmax
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredLogits({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        handler = _HANDLERS.get(name)
        if name in _METADATA or func in _PROPERTIES:
            with without_torch_function():
                return func(*args, **kwargs)
        if handler is not None:
            found = handler(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*[_compute(arg, name) for arg in args], **{key: _compute(arg, name) for key, arg in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} on deferred logits")

    def with_(self, **changes: Any) -> DeferredLogits:
        settings = {
            "hidden": self.hidden,
            "head": self.head,
            "call": self.call,
            "between": self.between,
            "axis": self.axis,
            "classes": self.classes,
            "is_log_softmax": self.is_log_softmax,
        }
        return DeferredLogits(**{**settings, **changes})

    def compute(self, by: str) -> Tensor:
        """Compute the logits, gathered over the ranks."""
        if self.call.is_over:
            raise withheld_error(use=by)
        self.call.computed.append(by)
        head = self.head
        logits = F.linear(self.hidden.movedim(self.axis, -1), head.weight, head.bias)
        if head.gather is not None:
            logits = head.gather(logits)
        logits = logits[..., : self.classes]
        for operation in self.between:
            logits = operation(logits)
        logits = logits.movedim(-1, self.axis)
        return logits.log_softmax(self.axis) if self.is_log_softmax else logits


def _dtype_of(hidden: Tensor, head: Head, between: tuple[Operation, ...]) -> torch.dtype:
    with without_torch_function():
        probe = F.linear(hidden.new_empty((0, head.weight.shape[1])), head.weight[:1])
        for operation in between:
            probe = operation(probe)
    return probe.dtype


def _compute(value: Any, by: str) -> Any:
    if isinstance(value, DeferredLogits):
        return value.compute(by)
    if type(value) in (list, tuple):
        return type(value)(_compute(one, by) for one in value)
    return value


_METADATA = frozenset(
    {
        "dim",
        "size",
        "numel",
        "is_floating_point",
        "is_complex",
        "__len__",
        "get_device",
        "element_size",
        "ndimension",
        "nelement",
    }
)
_PROPERTIES = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "is_cuda",
        "is_meta",
        "is_cpu",
        "layout",
        "is_sparse",
        "is_quantized",
        "names",
        "is_nested",
        "is_mps",
        "is_xla",
        "itemsize",
        "nbytes",
    )
    if hasattr(getattr(Tensor, name, None), "__get__")
)
_HANDLERS: dict[str, Callable[..., Any]] = {}


def _handles(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _HANDLERS.update(dict.fromkeys(names, function))
        return function

    return register


# -- elementwise ----------------------------------------------------------------------------------------------


def _is_scalar(value: Any) -> bool:
    if isinstance(value, DeferredLogits):
        return False
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dim() == 0 and not value.requires_grad
    return isinstance(value, (int, float, bool, torch.dtype, torch.device, type(None), torch.memory_format))


@_handles(
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "type",
    "mul",
    "div",
    "true_divide",
    "tanh",
    "neg",
    "__mul__",
    "__rmul__",
    "__truediv__",
    "__neg__",
    "clamp",
    "sigmoid",
    "add",
    "sub",
    "__add__",
    "__radd__",
    "__sub__",
    "multiply",
    "divide",
    "mul_",
    "div_",
    "tanh_",
    "__imul__",
    "__itruediv__",
    "__rtruediv__",
    "__iadd__",
    "__isub__",
    "add_",
    "sub_",
    "clamp_",
)
def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    deferred = [arg for arg in args if isinstance(arg, DeferredLogits)]
    others = [arg for arg in (*args, *kwargs.values()) if not isinstance(arg, DeferredLogits)]
    if len(deferred) != 1 or not all(map(_is_scalar, others)) or deferred[0].is_log_softmax:
        return NotImplemented
    at = next(position for position, arg in enumerate(args) if isinstance(arg, DeferredLogits))
    before, after = args[:at], args[at + 1 :]

    def operation(logits: Tensor) -> Tensor:
        return func(*before, logits, *after, **kwargs)  # type: ignore[no-any-return]

    name = func.__name__
    logits = deferred[0]
    if (name.endswith("_") and not name.startswith("__")) or name in (
        "__imul__",
        "__itruediv__",
        "__iadd__",
        "__isub__",
    ):
        out_of_place = getattr(Tensor, name.rstrip("_") if not name.startswith("__") else "__" + name[3:])
        logits.between = (*logits.between, lambda z: out_of_place(z, *after, **kwargs))
        return logits
    changed = logits.with_(between=(*logits.between, operation))
    return changed if changed.device == logits.device else NotImplemented


# -- views of tokens ------------------------------------------------------------------------------------------


@_handles("contiguous", "clone", "detach", "requires_grad_")
def _itself(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    return logits.with_(hidden=logits.hidden.detach()) if func.__name__ == "detach" else logits


@_handles("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
def _in_order(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if logits.axis != logits.dim() - 1 or any(isinstance(arg, torch.dtype) for arg in args):
        return NotImplemented
    with without_torch_function():
        shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.classes or shape[:-1].numel() != logits.shape[:-1].numel():
        return NotImplemented
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return logits.with_(hidden=hidden, axis=hidden.dim() - 1)


@_handles("transpose", "permute", "movedim", "swapaxes", "swapdims")
def _permuted(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    with without_torch_function():
        marked = torch.empty([2 if axis == logits.axis else 1 for axis in range(logits.dim())], device="meta")
        axis = list(func(marked, *args, **kwargs).shape).index(2)
        hidden = func(logits.hidden, *args, **kwargs)
    return logits.with_(hidden=hidden, axis=axis)


@_handles("__getitem__")
def _indexed(func: Any, logits: DeferredLogits, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, DeferredLogits) for item in items) or logits.axis != logits.dim() - 1:
        return NotImplemented
    taken = sum(
        item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1
        for item in items
        if item is not None and item is not Ellipsis
    )
    if any(item is Ellipsis for item in items):
        at = next(position for position, item in enumerate(items) if item is Ellipsis)
        items = (*items[:at], *[slice(None)] * (logits.dim() - taken), *items[at + 1 :])
    else:
        items = (*items, *[slice(None)] * (logits.dim() - taken))
    last = items[-1]
    if not isinstance(last, slice) or last.step not in (None, 1) or last.start not in (None, 0):
        return NotImplemented
    _, stop, _ = last.indices(logits.classes)
    if stop < 1:
        return NotImplemented
    hidden = logits.hidden[(*items[:-1], slice(None))]
    return logits.with_(hidden=hidden, axis=hidden.dim() - 1, classes=stop)


@_handles("narrow", "select", "index_select", "unbind", "chunk", "split")
def _of_tokens(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    axis = kwargs.get(
        "dim", args[-1] if func.__name__ in ("unbind", "chunk", "split") and len(args) > 1 else args[0] if args else 0
    )
    if not isinstance(axis, int) or axis % logits.dim() == logits.axis:
        return NotImplemented
    found = func(logits.hidden, *args, **kwargs)
    lost = (
        logits.axis - 1 if func.__name__ in ("select", "unbind") and axis % logits.dim() < logits.axis else logits.axis
    )
    if isinstance(found, Tensor):
        return logits.with_(hidden=found, axis=lost)
    return tuple(logits.with_(hidden=one, axis=lost) for one in found)


# -- losses ---------------------------------------------------------------------------------------------------


@_handles("cross_entropy")
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
    if not isinstance(input, DeferredLogits) or input.is_log_softmax or target.is_floating_point():
        return NotImplemented
    if size_average is not None or reduce is not None or (weight is not None and weight.requires_grad):
        return NotImplemented
    if (
        input.axis != (1 if input.dim() > 1 else 0)
        or target.shape != (*input.shape[:1], *input.shape[2:])[: target.dim()]
    ):
        return NotImplemented
    return _loss(input, target, weight, Objective(ignore_index, reduction, label_smoothing))


def _loss(logits: DeferredLogits, target: Tensor, weight: Tensor | None, objective: Objective) -> Tensor:
    head, between = logits.head, logits.between
    hidden = logits.hidden.movedim(logits.axis, -1)
    vocabulary = Vocabulary(logits.classes, head.vocabulary.start, head.vocabulary.gather)
    logits.call.used = True
    found = linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        head.weight,
        target.reshape(-1),
        bias=head.bias,
        class_weight=weight,
        objective=objective,
        vocabulary=vocabulary,
        between=functools.partial(_all, between) if between else None,
        chunk=head.chunk,
    )
    return found.reshape(target.shape) if objective.reduction == "none" else found


def _all(between: tuple[Operation, ...], logits: Tensor) -> Tensor:
    for operation in between:
        logits = operation(logits)
    return logits


@_handles("log_softmax")
def _log_softmax(
    func: Any, input: DeferredLogits, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Any:
    if dim is None or dim % input.dim() != input.axis or input.is_log_softmax:
        return NotImplemented
    logits = input if dtype is None else _elementwise(Tensor.to, input, dtype)
    return logits.with_(is_log_softmax=True)


@_handles("nll_loss")
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
    if not isinstance(input, DeferredLogits) or not input.is_log_softmax:
        return NotImplemented
    return _cross_entropy(
        func, input.with_(is_log_softmax=False), target, weight, size_average, ignore_index, reduce, reduction
    )


def deferred(value: Any) -> Iterator[DeferredLogits]:
    """Yield the deferred logits in a nested output."""
    if isinstance(value, DeferredLogits):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from deferred(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from deferred(one)
