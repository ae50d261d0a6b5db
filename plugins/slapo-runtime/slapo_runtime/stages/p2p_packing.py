"""Pack the values of a stage boundary into few tensors, for P2P messages.

Values with a gradient are packed into one flat floating tensor, all others as bytes: into a second tensor, for a
runtime that sends a tuple of tensors (DeepSpeed), or after the first in the same memory, for a runtime that sends a
single tensor (Megatron). A runtime runs one backward pass for the floating tensor, and only sends back its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError

if TYPE_CHECKING:
    from slapo_runtime.stages.partition import Value

__all__ = ["P2PMessage", "attached", "check_sent", "common_dtype"]


_ALIGNMENT = 16  # bytes: of the largest element, complex128
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}


class P2PMessage:
    """The format of a boundary's P2P message.

    Args:
        values: of the boundary, in the same order on both ranks.
        backward: whether a floating tensor is sent even without a value with a gradient: the message to the sender
            itself had one, which needs a gradient (zeros).
        joined: whether all values are packed into one floating tensor, which is always sent.
        dtype: of the floating tensor; None: the smallest that holds all values exactly.

    Attributes:
        carries_gradient: whether a floating tensor is sent.
        dtype: of the floating tensor.
        length: its number of elements.
    """

    def __init__(
        self, values: Sequence[Value], *, backward: bool, joined: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        # Complex values first: torch views two reals as a complex number at even offsets only.
        self._with = sorted((value for value in values if value.requires_grad), key=lambda one: one.dtype not in _REAL)
        self._without = [value for value in values if not value.requires_grad]
        self.carries_gradient = bool(self._with) or backward or joined
        self.dtype = dtype or common_dtype(values)
        elements = sum(math.prod(_real_shape(value)) for value in self._with)
        self._offsets: list[int] = []  # of bytes
        end = 0
        for value in self._without:
            self._offsets.append(end)
            end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._bytes, self._joined = end, joined
        if joined and end:  # after the numbers
            before = -(-elements * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            elements = (before + end) // self.dtype.itemsize
        self.length = max(elements, 1)

    def empty(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Make the tensors to receive the message."""
        found = []
        if self.carries_gradient:
            found.append(torch.zeros(self.length, dtype=self.dtype, device=device))
        if self._bytes and not self._joined:
            found.append(torch.zeros(self._bytes, dtype=torch.uint8, device=device))
        return tuple(found)

    def pack(
        self,
        there: Mapping[str, torch.Tensor],
        link: torch.Tensor | None,
        *,
        sender: str,
        device: torch.device,
        backward_begins: Callable[[], None] = lambda: None,
    ) -> tuple[torch.Tensor, ...]:
        """Pack the values into the tensors to send.

        Args:
            there: the values by name.
            link: of the message that the sender received; see :meth:`unpack`.
            sender: for messages, e.g. ``"stage 1"``.
            device: of the message.
            backward_begins: called when the gradient is received.

        Raises:
            BuildError: the shape, type or ``requires_grad`` of a value differs from its receiver's.
        """
        for value in (*self._with, *self._without):
            check_sent(value, there[value.name], sender)
        found = []
        message = self._attachment(there, device)
        if self.carries_gradient:
            if link is None and torch.is_grad_enabled():
                link = torch.empty(0, device=device, requires_grad=True)
            tensors = [_as_real(there[value.name]) for value in self._with]
            flat = torch.zeros(self.length, dtype=self.dtype, device=device)
            if self._joined and message is not None:
                flat.view(torch.uint8)[-self._bytes :] = message
            found.append(_Packed.apply(flat, backward_begins, link, *tensors))  # type: ignore[no-untyped-call]
        if message is not None and not self._joined:
            found.append(message)
        return tuple(found)

    def _attachment(self, there: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor | None:
        """Pack the values without a gradient as bytes; None if there are none."""
        if not self._bytes:
            return None
        message = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
        for value, offset in zip(self._without, self._offsets, strict=True):
            _place(message, value, offset).copy_(there[value.name].detach())
        return message

    def unpack(self, message: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Unpack the values by name, each with its own memory, and return the link.

        The link is an empty tensor: a result computed from it gives the full message a gradient, with zeros for unused
        values. It is None if no gradient is sent back.
        """
        rest = list(message)
        values, link = {}, None
        attachment = rest[-1].detach().view(torch.uint8)[-self._bytes :] if self._bytes else None
        if self.carries_gradient:
            shapes = [_real_shape(value) for value in self._with]
            dtypes = [_REAL.get(value.dtype, value.dtype) for value in self._with]
            link, *views = _Unpacked.apply(rest.pop(0), shapes, dtypes)  # type: ignore[no-untyped-call]
            for value, view in zip(self._with, views, strict=True):
                values[value.name] = torch.view_as_complex(view) if value.dtype in _REAL else view
        for value, offset in zip(self._without, self._offsets, strict=True):
            assert attachment is not None
            values[value.name] = _place(attachment, value, offset).clone()
        return values, link


def attached(loss: torch.Tensor, link: torch.Tensor | None) -> torch.Tensor:
    """Attach a link to a loss, for a backward pass to the message."""
    if link is None or not link.requires_grad:
        return loss
    return _Attached.apply(loss, link)  # type: ignore[no-untyped-call, no-any-return]


class _Packed(torch.autograd.Function):
    """Concatenate tensors, flat."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: torch.Tensor,
        begins: Callable[[], None],
        link: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.begins, ctx.link = begins, None if link is None else link.dtype
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.mark_dirty(flat)
        for tensor, place in zip(tensors, _views(flat, ctx.shapes), strict=True):
            place.copy_(tensor)
        return flat

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.begins()
        gradient = gradient.clone()  # a runtime may reuse its memory
        views = _views(gradient, ctx.shapes)
        found = [view.to(dtype) for view, dtype in zip(views, ctx.dtypes, strict=True)]
        link = None if ctx.link is None else gradient.new_zeros(0, dtype=ctx.link)
        return None, None, link, *found


class _Unpacked(torch.autograd.Function):
    """Split a flat tensor; the first output is the link."""

    @staticmethod
    def forward(
        ctx: Any, flat: torch.Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.like, ctx.shapes = (flat.shape, flat.dtype, flat.device), shapes
        views = [view.to(dtype, copy=True) for view, dtype in zip(_views(flat, shapes), dtypes, strict=True)]
        return flat.new_zeros(0), *views

    @staticmethod
    def backward(ctx: Any, _: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        shape, dtype, device = ctx.like
        flat = torch.zeros(shape, dtype=dtype, device=device)
        for place, gradient in zip(_views(flat, ctx.shapes), gradients, strict=True):
            if gradient is not None:
                place.copy_(gradient)
        return flat, None, None


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, link: torch.Tensor) -> torch.Tensor:
        ctx.link = (link.dtype, link.device)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, device = ctx.link
        return gradient, torch.zeros(0, dtype=dtype, device=device)


def _views(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    found, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        found.append(flat[start : start + size].view(tuple(shape)))
        start += size
    return found


def _place(message: torch.Tensor, value: Value, offset: int) -> torch.Tensor:
    return message[offset : offset + value.nbytes].view(value.dtype).view(value.shape)


def common_dtype(values: Iterable[Value]) -> torch.dtype:
    """Return the smallest floating type that holds all values with a gradient exactly."""
    dtypes = [_REAL.get(value.dtype, value.dtype) for value in values if value.requires_grad]
    found = dtypes[0] if dtypes else torch.float32
    for dtype in dtypes[1:]:
        found = torch.promote_types(found, dtype)
    return found


def _real_shape(value: Value) -> tuple[int, ...]:
    return (*value.shape, 2) if value.dtype in _REAL else value.shape


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def check_sent(value: Value, tensor: torch.Tensor, sender: str) -> None:
    """Refuse a sent tensor that differs from its receiver's value.

    Args:
        value: the expected shape and type.
        tensor: of the stage.
        sender: for messages, e.g. ``"stage 1"``.

    Raises:
        BuildError: the shape or type differs, or a gradient would be lost.
    """
    if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
        raise BuildError(
            f"{sender} made '{value.name}' as {tuple(tensor.shape)} of {tensor.dtype}, but the next stage expects "
            f"{value.shape} of {value.dtype}: its shape depends on values of the batch",
            hint="cut the model after another module",
        )
    if tensor.requires_grad and torch.is_grad_enabled() and not value.requires_grad:
        raise BuildError(
            f"'{value.name}', sent by {sender}, requires grad, but did not when the stages were made: its gradient "
            "would be lost",
            hint="set requires_grad of parameters before build()",
        )
