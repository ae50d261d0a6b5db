"""Describe logits that are not computed: hidden states, a head, and the operations and views of a model."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_core import ArgumentError
from slapo_core.observers import Origin, happened, run_from
from slapo_loss import operations
from slapo_loss.chunked import linear_cross_entropy
from slapo_loss.head_chunks import Vocabulary
from slapo_loss.operations import Operation, check_version
from slapo_loss.private import without_torch_function
from slapo_loss.withheld import withheld_error

OUTPUT = "the output"
"""What takes the logits of a forward without a loss, or those that a step keeps."""


@dataclass(frozen=True)
class HeadTensors:
    """Describe a linear layer by its tensors.

    Args:
        weight: (classes here, features).
        bias: (classes here,).
        vocabulary: the classes here.
        gather: gathers the logits over the ranks: (..., classes here) -> (..., classes).
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

    def detach(self) -> HeadTensors:
        """Return the layer without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return dataclasses.replace(self, weight=self.weight.detach(), bias=bias)


@dataclass
class ForwardCall:
    """Describe the forward of the model to which deferred logits belong.

    Attributes:
        used: whether a loss was computed of deferred logits.
        computed: names of the functions that needed real logits.
        is_over: whether the forward has ended.
    """

    used: bool = False
    computed: list[str] = field(default_factory=list)
    is_over: bool = False


class LogitsValues:
    """Describe the values of a tensor of deferred logits, which its views share.

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
        head: HeadTensors,
        call: ForwardCall,
        axis: int,
        classes: int,
        dtype: torch.dtype,
        between: tuple[Operation, ...] = (),
        is_log_softmax: bool = False,
    ) -> None:
        self.hidden, self.head, self.call, self.axis, self.classes = hidden, head, call, axis, classes
        self.dtype, self.between, self.is_log_softmax = dtype, between, is_log_softmax
        self.version, self.members = hidden._version, list[weakref.ref[ValuelessLogits]]()

    def compute(self, by: str) -> None:
        """Compute the logits, gathered over the ranks, and all views of them."""
        if self.call.is_over:
            raise withheld_error(use=by)
        self.check()
        self.call.computed.append(by)
        if by != OUTPUT:
            run_from(self.head.origin, happened, "fallback", f"{by} took the logits")
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
        """Raise if the head's tensors changed since its forward."""
        check_version(self.hidden, self.version, "the input of the head")
        weight = self.head.weight
        if weight.numel() and not weight.untyped_storage().size():
            raise ArgumentError(
                "the weight of the head was freed between the head's forward and the loss, which is computed from it: "
                "fully_shard resharded it",
                hint="fully_shard(model.lm_head, reshard_after_forward=False), or fully_shard it with the root",
            )


class ValuelessLogits(Tensor):
    """Describe a tensor of logits without values.

    Attributes:
        shared: its values, shared by views.
        views: that made it of the logits, in order.
        hidden: hidden states, with their features on axis ``axis``.
        head: the layer.
        axis: of the classes.
        classes: of the vocabulary that are left, counted from its start.
        computed: the logits, once a function has needed them.
    """

    shared: LogitsValues
    views: tuple[Callable[[Tensor], Tensor], ...]
    hidden: Tensor
    head: HeadTensors
    axis: int
    classes: int
    computed: Tensor | None

    @property
    def call(self) -> ForwardCall:
        """Return the forward that they are part of."""
        return self.shared.call

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


Logits = TypeVar("Logits", bound=ValuelessLogits)


def member(
    cls: type[Logits],
    values: LogitsValues,
    hidden: Tensor | None = None,
    head: HeadTensors | None = None,
    axis: int | None = None,
    classes: int | None = None,
    views: tuple[Callable[[Tensor], Tensor], ...] = (),
) -> Logits:
    """Make deferred logits of a class; defaults follow from ``values``."""
    hidden, head = values.hidden if hidden is None else hidden, head or values.head
    axis = values.axis if axis is None else axis
    classes = values.classes if classes is None else classes
    shape = [*hidden.shape]
    shape[axis] = classes
    requires_grad = hidden.requires_grad or head.requires_grad()
    logits: Logits = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, shape, dtype=values.dtype, device=hidden.device, requires_grad=requires_grad
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


def view_of(
    logits: Logits,
    view: Callable[[Tensor], Tensor],
    hidden: Tensor,
    *,
    axis: int | None = None,
    classes: int | None = None,
    head: HeadTensors | None = None,
) -> Logits:
    """Make a view, or a copy of some tokens; ``view`` does it with real logits."""
    views, head = (*logits.views, view), head or logits.head
    if not torch.is_grad_enabled():
        hidden, head, views = hidden.detach(), head.detach(), (*views, Tensor.detach)
    axis = logits.axis if axis is None else axis
    return member(
        type(logits), logits.shared, hidden, head, axis, logits.classes if classes is None else classes, views
    )


def new_of(
    logits: Logits,
    *after: Operation,
    dtype: torch.dtype | None = None,
    hidden: Tensor | None = None,
    classes: int | None = None,
    log_softmax: bool = False,
) -> Logits:
    """Make a tensor with memory of its own: logits of some tokens, after operations."""
    values, head = logits.shared, logits.head
    values.check()
    hidden, axis = (logits.hidden, logits.axis) if hidden is None else (hidden, hidden.dim() - 1)
    if not torch.is_grad_enabled():
        hidden, head = hidden.detach(), head.detach()
    return member(
        type(logits),
        LogitsValues(
            hidden,
            head,
            values.call,
            axis,
            logits.classes if classes is None else classes,
            dtype or values.dtype,
            (*values.between, *after),
            values.is_log_softmax or log_softmax,
        ),
    )
