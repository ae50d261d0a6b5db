"""What crosses from one rank to the next, in the form that DeepSpeed sends right.

DeepSpeed sends a tuple of tensors. It runs the backward pass of a rank once for each floating tensor of the tuple,
wants a gradient for every one of them, and gives one back for nothing else. So everything with a gradient goes as one
flat tensor, and everything else, whatever its type, as one tensor of bytes, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import BuildError

if TYPE_CHECKING:
    from slapo_core.spec.pipeline import Value

__all__ = ["Parcel", "attached"]

_ALIGNMENT = 16  # bytes: of the largest element, complex128
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}


class Parcel:
    """How the values of one boundary travel.

    Args:
        values: what crosses, in an order that both ranks have.
        backward: whether something goes back: a floating tensor is sent then, even if no value has a gradient, where
            the sender itself was sent one, which has to get its gradient (all zeros).

    Attributes:
        carries_gradient: whether a floating tensor is sent.
    """

    def __init__(self, values: Sequence[Value], *, backward: bool) -> None:
        # Complex ones first: torch takes two reals for a complex number at even places only.
        self._with = sorted((value for value in values if value.requires_grad), key=lambda one: one.dtype not in _REAL)
        self._without = [value for value in values if not value.requires_grad]
        self.carries_gradient = bool(self._with) or backward
        self._dtype = _common([_REAL.get(value.dtype, value.dtype) for value in self._with])
        self._elements = [math.prod(_real_shape(value)) for value in self._with]
        self._offsets: list[int] = []  # of bytes
        end = 0
        for value in self._without:
            self._offsets.append(end)
            end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._bytes = end

    def empty(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Tensors to receive it in."""
        found = []
        if self.carries_gradient:
            found.append(torch.zeros(max(sum(self._elements), 1), dtype=self._dtype, device=device))
        if self._bytes:
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
        """The tuple that is sent.

        Args:
            there: the values by name.
            link: of what the sender was sent itself; see :meth:`unpack`.
            sender: for messages, e.g. ``"stage 1"``.
            device: of what is sent.
            backward_begins: called when the gradient has come back.

        Raises:
            BuildError: a value is not what was said, and what waits for it would take it for something else.
        """
        for value in (*self._with, *self._without):
            _check(value, there[value.name], sender)
        found = []
        if self.carries_gradient:
            if link is None and torch.is_grad_enabled():
                link = torch.empty(0, device=device, requires_grad=True)
            tensors = [_as_real(there[value.name]) for value in self._with]
            found.append(_Packed.apply(self._dtype, device, backward_begins, link, *tensors))  # type: ignore[no-untyped-call]
        if self._bytes:
            message = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
            for value, offset in zip(self._without, self._offsets, strict=True):
                _place(message, value, offset).copy_(there[value.name].detach())
            found.append(message)
        return tuple(found)

    def unpack(self, message: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """The values by name, each with memory of its own.

        Also the link: an empty tensor. What is computed from it lets the whole message get its gradient, zeros for
        values that nothing used; None where no gradient goes back.
        """
        rest = list(message)
        values, link = {}, None
        if self.carries_gradient:
            shapes = [_real_shape(value) for value in self._with]
            dtypes = [_REAL.get(value.dtype, value.dtype) for value in self._with]
            link, *pieces = _Unpacked.apply(rest.pop(0), shapes, dtypes)  # type: ignore[no-untyped-call]
            for value, piece in zip(self._with, pieces, strict=True):
                values[value.name] = torch.view_as_complex(piece) if value.dtype in _REAL else piece
        for value, offset in zip(self._without, self._offsets, strict=True):
            values[value.name] = _place(rest[0], value, offset).clone()
        return values, link


def attached(loss: torch.Tensor, link: torch.Tensor | None) -> torch.Tensor:
    """The same loss; its backward pass gives what the link came with a gradient, even if it does not depend on it."""
    if link is None or not link.requires_grad:
        return loss
    return _Attached.apply(loss, link)  # type: ignore[no-untyped-call, no-any-return]


class _Packed(torch.autograd.Function):
    """Tensors after one another, flat."""

    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype,
        device: torch.device,
        begins: Callable[[], None],
        link: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.begins, ctx.link = begins, None if link is None else link.dtype
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        flat = torch.zeros(max(sum(tensor.numel() for tensor in tensors), 1), dtype=dtype, device=device)
        for tensor, place in zip(tensors, _pieces(flat, ctx.shapes), strict=True):
            place.copy_(tensor)
        return flat

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.begins()
        gradient = gradient.clone()  # DeepSpeed receives the next one in the same memory
        pieces = _pieces(gradient, ctx.shapes)
        found = [piece.to(dtype) for piece, dtype in zip(pieces, ctx.dtypes, strict=True)]
        link = None if ctx.link is None else gradient.new_zeros(0, dtype=ctx.link)
        return None, None, None, link, *found


class _Unpacked(torch.autograd.Function):
    """The reverse; the first output is the link."""

    @staticmethod
    def forward(
        ctx: Any, flat: torch.Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.like, ctx.shapes = (flat.shape, flat.dtype, flat.device), shapes
        pieces = [piece.to(dtype, copy=True) for piece, dtype in zip(_pieces(flat, shapes), dtypes, strict=True)]
        return flat.new_zeros(0), *pieces

    @staticmethod
    def backward(ctx: Any, _: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        shape, dtype, device = ctx.like
        flat = torch.zeros(shape, dtype=dtype, device=device)
        for place, gradient in zip(_pieces(flat, ctx.shapes), gradients, strict=True):
            if gradient is not None:
                place.copy_(gradient)
        return flat, None, None


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, link: torch.Tensor) -> torch.Tensor:
        ctx.link = (link.dtype, link.device)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        dtype, device = ctx.link
        return gradient, torch.zeros(0, dtype=dtype, device=device)


def _pieces(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    found, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        found.append(flat[start : start + size].view(tuple(shape)))
        start += size
    return found


def _place(message: torch.Tensor, value: Value, offset: int) -> torch.Tensor:
    return message[offset : offset + value.nbytes].view(value.dtype).view(value.shape)


def _common(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The smallest one that holds all of them exactly."""
    found = dtypes[0] if dtypes else torch.float32
    for dtype in dtypes[1:]:
        found = torch.promote_types(found, dtype)
    return found


def _real_shape(value: Value) -> tuple[int, ...]:
    return (*value.shape, 2) if value.dtype in _REAL else value.shape


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _check(value: Value, tensor: torch.Tensor, sender: str) -> None:
    if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
        raise BuildError(
            f"{sender} made '{value.name}' as {tuple(tensor.shape)} of {tensor.dtype}, and the next stage waits for "
            f"{value.shape} of {value.dtype}: its shape depends on what is in the batch, beyond shapes",
            hint="cut the model elsewhere",
        )
    if tensor.requires_grad and torch.is_grad_enabled() and not value.requires_grad:
        raise BuildError(
            f"'{value.name}', which {sender} sends, has a gradient now, and had none when the stages were made: it "
            "would be lost",
            hint="set requires_grad of parameters before build()",
        )
