"""Logits that are not computed: `DeferredLogits`, between a head and its loss.

Deferred logits know the hidden states, the head, and the elementwise operations and views of tokens that the model
applied. ``cross_entropy``, and ``log_softmax`` with ``nll_loss``, compute their loss in chunks of tokens. Any other
function computes the logits, once, and everything after it works on them: views share their memory, in-place
operations and gradients are those of the plain model.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_core import ArgumentError
from slapo_core.observers import Origin, run_from
from slapo_loss import operations
from slapo_loss.chunked import linear_cross_entropy
from slapo_loss.head_chunks import Objective, Vocabulary
from slapo_loss.operations import Operation, check_version
from slapo_loss.private import without_dynamo, without_torch_function
from slapo_loss.withheld import withheld_error


@dataclass(frozen=True)
class Head:
    """A linear layer as a function of its tensors.

    Args:
        weight: (classes here, features).
        bias: (classes here,).
        vocabulary: what of it is here.
        gather: the logits of the whole vocabulary from those here: (..., classes here) -> (..., classes).
        chunk: tokens whose logits exist at a time; None: the implementation chooses.
        implementation: of the loss.
        origin: module and step whose code computes logits and loss.
    """

    weight: Tensor
    bias: Tensor | None
    vocabulary: Vocabulary
    gather: Callable[[Tensor], Tensor] | None = None
    chunk: int | None = None
    implementation: Callable[..., Tensor] = linear_cross_entropy
    origin: Origin | None = None

    def requires_grad(self) -> bool:
        """Return whether a tensor of the layer requires grad."""
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)

    def detach(self) -> Head:
        """Return the layer without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return dataclasses.replace(self, weight=self.weight.detach(), bias=bias)


@dataclass
class Call:
    """One forward of the model, to which deferred logits belong.

    Attributes:
        used: whether a loss was computed of deferred logits.
        computed: what made real logits of them, by the name of the function.
        is_over: whether the forward has ended.
    """

    used: bool = False
    computed: list[str] = field(default_factory=list)
    is_over: bool = False


class _Values:
    """The values of deferred logits: those of one tensor of the plain model, which its views share.

    Args:
        hidden: hidden states, with their features on axis ``axis``.
        head: the layer.
        call: the forward that it is part of.
        axis: of the classes.
        classes: of the vocabulary that are left, counted from its start.
        dtype: of the logits.
        between: elementwise operations, in order.
        is_log_softmax: whether these are log-probabilities.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: Head,
        call: Call,
        axis: int,
        classes: int,
        dtype: torch.dtype,
        between: tuple[Operation, ...] = (),
        is_log_softmax: bool = False,
    ) -> None:
        self.hidden, self.head, self.call, self.axis, self.classes = hidden, head, call, axis, classes
        self.dtype, self.between, self.is_log_softmax = dtype, between, is_log_softmax
        self.version, self.members = hidden._version, list[weakref.ref[DeferredLogits]]()

    def compute(self, by: str) -> None:
        """Compute the logits, gathered over the ranks, and those of all views."""
        if self.call.is_over:
            raise withheld_error(use=by)
        self.check()
        self.call.computed.append(by)
        run_from(self.head.origin, self._compute)

    def _compute(self) -> None:
        head = self.head
        with without_torch_function(), torch.enable_grad(), operations.without_autocast(self.hidden.device.type):
            logits = F.linear(self.hidden.movedim(self.axis, -1), head.weight, head.bias)
            if head.gather is not None:
                logits = head.gather(logits)
            logits = operations.applied(self.between, 0, logits[..., : self.classes])
            if self.is_log_softmax:
                logits = logits.log_softmax(-1)
            logits = logits.movedim(-1, self.axis)
            for member in [found for ref in self.members if (found := ref()) is not None]:
                member.computed = functools.reduce(lambda value, view: view(value), member.views, logits)

    def check(self) -> None:
        """Raise if the loss cannot be that of the head's forward."""
        check_version(self.hidden, self.version, "the input of the head")
        weight = self.head.weight
        if weight.numel() and not weight.untyped_storage().size():
            raise ArgumentError(
                "the weight of the head was freed between the head's forward and the loss, which is computed from it: "
                "fully_shard resharded it",
                hint="fully_shard(model.lm_head, reshard_after_forward=False), or fully_shard it with the root",
            )


class DeferredLogits(Tensor):
    """A tensor without values; see the module's docstring.

    Args:
        hidden: hidden states, with their features on the last axis.
        head: the layer.
        call: the forward that it is part of.

    Attributes:
        computed: the logits, once a function has needed them.
    """

    shared: _Values
    views: tuple[Callable[[Tensor], Tensor], ...]
    hidden: Tensor
    head: Head
    axis: int
    classes: int
    computed: Tensor | None

    @staticmethod
    def __new__(cls, hidden: Tensor, head: Head, call: Call) -> DeferredLogits:
        classes = head.vocabulary.size
        return _member(_Values(hidden, head, call, hidden.dim() - 1, classes, hidden.dtype))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredLogits({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __format__(self, specification: str) -> str:
        return repr(self)

    @property
    def call(self) -> Call:
        """The forward that they are part of."""
        return self.shared.call

    @classmethod
    @without_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, DeferredLogits)]
        name = getattr(func, "__name__", str(func))
        if all(one.computed is None for one in given):
            if func in _PROPERTIES or name in _METADATA or (func in _OF_GRAPH and given[0].shared.call.is_over):
                with without_torch_function():
                    return func(*args, **kwargs)
            handler = _VIEWS.get(name) if args and isinstance(args[0], DeferredLogits) else None
            handler = handler or _FUNCTIONS.get(name)
            found = NotImplemented if handler is None else handler(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        by = f"Tensor.{func.__self__.__name__}" if name in ("__get__", "__set__") else name
        return func(*_computed(args, by), **_computed(kwargs, by))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(
            f"{func} was called below torch.Tensor's functions with deferred logits\n"
            "  hint: leave linear_cross_entropy out, or call it through torch.Tensor"
        )

    def compute(self, by: str) -> Tensor:
        """Return the logits, gathered over the ranks.

        Args:
            by: name of the function that needs them.

        Raises:
            WithheldError: the forward is over.
        """
        if self.computed is None:
            self.shared.compute(by)
        assert self.computed is not None
        return self.computed


def _computed(value: Any, by: str) -> Any:
    if isinstance(value, DeferredLogits):
        return value.compute(by)
    if type(value) is dict:
        return {key: _computed(one, by) for key, one in value.items()}
    return type(value)(_computed(one, by) for one in value) if type(value) in (list, tuple) else value


# -- making deferred logits of others ----------------------------------------------------------------------------


def _member(
    values: _Values,
    hidden: Tensor | None = None,
    head: Head | None = None,
    axis: int | None = None,
    classes: int | None = None,
    views: tuple[Callable[[Tensor], Tensor], ...] = (),
) -> DeferredLogits:
    """Make deferred logits; what is left out is that of ``values``."""
    hidden, head = values.hidden if hidden is None else hidden, head or values.head
    axis = values.axis if axis is None else axis
    classes = values.classes if classes is None else classes
    shape = [*hidden.shape]
    shape[axis] = classes
    requires_grad = hidden.requires_grad or head.requires_grad()
    logits: DeferredLogits = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        DeferredLogits, shape, dtype=values.dtype, device=hidden.device, requires_grad=requires_grad
    )
    logits.shared, logits.views, logits.computed = values, views, None
    logits.hidden, logits.head, logits.axis, logits.classes = hidden, head, axis, classes
    if requires_grad:
        with without_torch_function():
            logits.register_hook(_refuse_gradient)
    values.members.append(weakref.ref(logits))
    return logits


def _refuse_gradient(gradient: Tensor) -> None:
    raise RuntimeError(
        "a torch.autograd.Function was applied to deferred logits: their gradient would not reach the head\n"
        "  hint: leave linear_cross_entropy out where the model has a loss of its own kernel"
    )


def _view(
    logits: DeferredLogits,
    view: Callable[[Tensor], Tensor],
    hidden: Tensor,
    *,
    axis: int | None = None,
    classes: int | None = None,
    head: Head | None = None,
) -> DeferredLogits:
    """Make a view, or a copy of some tokens; ``view`` makes it of the real logits."""
    views, head = (*logits.views, view), head or logits.head
    if not torch.is_grad_enabled():
        hidden, head, views = hidden.detach(), head.detach(), (*views, Tensor.detach)
    axis = logits.axis if axis is None else axis
    return _member(logits.shared, hidden, head, axis, logits.classes if classes is None else classes, views)


def _new(
    logits: DeferredLogits,
    *after: Operation,
    dtype: torch.dtype | None = None,
    hidden: Tensor | None = None,
    classes: int | None = None,
    log_softmax: bool = False,
) -> DeferredLogits:
    """Make a tensor of its own, which shares no memory: the logits of some tokens, after operations."""
    values, head = logits.shared, logits.head
    values.check()
    hidden, axis = (logits.hidden, logits.axis) if hidden is None else (hidden, hidden.dim() - 1)
    if not torch.is_grad_enabled():
        hidden, head = hidden.detach(), head.detach()
    return _member(
        _Values(
            hidden,
            head,
            values.call,
            axis,
            logits.classes if classes is None else classes,
            dtype or values.dtype,
            (*values.between, *after),
            values.is_log_softmax or log_softmax,
        )
    )


# -- metadata ----------------------------------------------------------------------------------------------------

_METADATA = frozenset((
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_floating_point", "is_signed", "ndimension",
    "nelement", "numel", "size",
))  # fmt: skip
_PROPERTIES = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_xla",
        "is_xpu", "itemsize", "layout", "names", "nbytes", "ndim", "requires_grad", "shape",
    )
    if hasattr(getattr(Tensor, name, None), "__get__")
)  # fmt: skip
"""Answered without computing the logits."""
_OF_GRAPH = frozenset(getattr(Tensor, name).__get__ for name in ("grad", "grad_fn", "is_leaf", "retains_grad"))
"""Answered without the logits once the forward is over: then no graph leads to them."""

# -- elementwise operations --------------------------------------------------------------------------------------


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    at = next((position for position, one in enumerate(args) if isinstance(one, DeferredLogits)), None)
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
    return _new(logits, operation, dtype=probe.dtype)


def _is_operand(value: Any, logits: DeferredLogits) -> bool:
    if isinstance(value, DeferredLogits):
        return False
    if isinstance(value, Tensor):
        of_classes = value.shape[-1:].numel() == value.numel() and value.numel() in (1, logits.classes)
        on_last_axis = value.dim() == 0 or (
            value.dim() <= logits.hidden.dim() and logits.axis == logits.hidden.dim() - 1
        )
        return of_classes and on_last_axis and not value.requires_grad
    return isinstance(value, (int, float, torch.dtype, torch.device, type(None), torch.memory_format))


def _clone(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    return _new(logits)


# -- views of tokens ---------------------------------------------------------------------------------------------


def _contiguous(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    return _view(logits, lambda real: func(real, *args, **kwargs), logits.hidden)


def _detach(func: Any, logits: DeferredLogits) -> Any:
    return _view(logits, Tensor.detach, logits.hidden.detach(), head=logits.head.detach())


def _in_order(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if logits.axis != logits.hidden.dim() - 1 or any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
        return NotImplemented
    with without_torch_function():
        shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.classes or shape.numel() != logits.shape.numel():
        return NotImplemented
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return _view(logits, lambda real: func(real, *args, **kwargs), hidden, axis=len(shape) - 1)


def _permuted(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    with without_torch_function():
        marked = torch.empty([2 if axis == logits.axis else 1 for axis in range(logits.hidden.dim())], device="meta")
        axis = list(func(marked, *args, **kwargs).shape).index(2)
    return _view(logits, lambda real: func(real, *args, **kwargs), func(logits.hidden, *args, **kwargs), axis=axis)


def _indexed(func: Any, logits: DeferredLogits, index: Any) -> Any:
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
        return _new(logits, hidden=hidden, classes=stop)
    return _view(logits, lambda real: real[index], hidden, axis=hidden.dim() - 1, classes=stop)


def _is_index(item: Any) -> bool:
    if isinstance(item, Tensor):
        return not isinstance(item, DeferredLogits) and item.dtype in (torch.bool, torch.int64) and item.dim() > 0
    if type(item) is list:
        return all(type(one) is int for one in item)
    return item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int


_POSITIONS = {"chunk": 1, "index_select": 0, "narrow": 0, "select": 0, "split": 1, "unbind": 0}
"""Where among the arguments after the tensor a function takes ``dim``."""


def _of_tokens(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    name = func.__name__
    position = _POSITIONS[name]
    axis = kwargs.get("dim", args[position] if len(args) > position else 0)
    if _axis(axis, logits) in (None, logits.axis):
        return NotImplemented
    found = func(logits.hidden, *args, **kwargs)
    if name == "index_select":
        return _new(logits, hidden=found) if logits.axis == logits.hidden.dim() - 1 else NotImplemented
    is_lost = name in ("select", "unbind") and axis % logits.hidden.dim() < logits.axis
    classes_axis = logits.axis - is_lost
    if isinstance(found, Tensor):
        return _view(logits, lambda real: func(real, *args, **kwargs), found, axis=classes_axis)

    def part(number: int) -> DeferredLogits:
        return _view(logits, lambda real: func(real, *args, **kwargs)[number], found[number], axis=classes_axis)

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
    if not isinstance(input, DeferredLogits) or input.shared.is_log_softmax:
        return NotImplemented
    return _loss(input, target, weight, (size_average, reduce), Objective(ignore_index, reduction, label_smoothing))


def _axis(dim: Any, logits: DeferredLogits) -> int | None:
    """Return an axis counted from the front; None for what torch has to refuse."""
    axes = logits.hidden.dim()
    return dim % axes if type(dim) is int and -axes <= dim < axes else None


def _log_softmax(
    func: Any, input: DeferredLogits, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Any:
    if func is not F.log_softmax:  # torch.log_softmax(input, dim, dtype)
        dtype = dtype if _stacklevel == 3 else _stacklevel
    logits = input if dtype is None else _elementwise(Tensor.to, input, dtype)
    if logits is NotImplemented or input.shared.is_log_softmax or _axis(dim, input) != input.axis:
        return NotImplemented
    return _new(logits, log_softmax=True)


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
    if not isinstance(input, DeferredLogits) or not input.shared.is_log_softmax:
        return NotImplemented
    return _loss(input, target, weight, (size_average, reduce), Objective(ignore_index, reduction))


def _loss(
    logits: DeferredLogits, target: Tensor, weight: Tensor | None, old: tuple[Any, Any], objective: Objective
) -> Any:
    """Compute the cross entropy in chunks; NotImplemented where torch has to say what is wrong, or right."""
    values, axis = logits.shared, 1 if logits.hidden.dim() > 1 else 0
    if old != (None, None) or objective.reduction not in ("mean", "none", "sum") or logits.axis != axis:
        return NotImplemented
    if not isinstance(target, Tensor) or isinstance(target, DeferredLogits) or target.dtype != torch.int64:
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


_VIEWS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("flatten", "reshape", "squeeze", "unflatten", "unsqueeze", "view"), _in_order),
    **dict.fromkeys(("moveaxis", "movedim", "permute", "swapaxes", "swapdims", "transpose"), _permuted),
    **dict.fromkeys(_POSITIONS, _of_tokens),
    "__getitem__": _indexed,
    "clone": _clone,
    "contiguous": _contiguous,
    "detach": _detach,
}
"""By the name of a function whose first argument is deferred logits."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((*operations.ELEMENTWISE, *operations.IN_PLACE), _elementwise),
    "cross_entropy": _cross_entropy,
    "log_softmax": _log_softmax,
    "nll_loss": _nll_loss,
}
"""By the name of a function with deferred logits among its arguments."""
