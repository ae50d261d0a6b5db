"""Batches: arguments by parameter, and micro-batches."""

from __future__ import annotations

import contextlib
import enum
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core.errors import ArgumentError, BuildError
from slapo_runtime.private import pytree

# From a batch to the arguments of the model's forward, by parameter: what the stages of a pipeline read.


_SIGNATURES: weakref.WeakKeyDictionary[Callable[..., Any], dict[bool, inspect.Signature]] = weakref.WeakKeyDictionary()
"""Function -> its signature, as a method or not: an entry goes with its function."""


def signature_of(model: nn.Module) -> inspect.Signature:
    """Return the signature of a model's forward; it is read once for each function."""
    forward: Any = model.forward
    function = getattr(forward, "__func__", forward)
    try:
        known = _SIGNATURES.setdefault(function, {})
    except TypeError:  # a callable without a hash, or without weak references
        return inspect.signature(forward)
    is_method = function is not forward
    if is_method not in known:
        known[is_method] = inspect.signature(forward)
    return known[is_method]


def bound_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``model(*args, **kwargs)`` by parameter.

    Those that are left out are missing. ``*args`` is a tuple under its parameter's name, ``**kwargs`` a dictionary
    under its own: missing too where there is nothing in them.

    Raises:
        ArgumentError: the forward does not take them.
    """
    try:
        bound = signature_of(model).bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"the forward of {type(model).__name__} does not take this batch: {error}",
            hint="a mapping gives keyword arguments, a tuple positional ones, anything else is one argument",
        ) from None
    return dict(bound.arguments)


def bound_batch(model: nn.Module, batch: Any, *, for_loss: bool = False) -> dict[str, Any]:
    """Return a batch's arguments of the model's forward, by parameter.

    Args:
        model: whose forward it is.
        batch: a mapping (keyword arguments), a tuple or list (positional ones), or one argument.
        for_loss: whether a batch may hold more than the forward takes, because a ``loss(output, batch)`` reads it.

    Raises:
        ArgumentError: the forward does not take it.
    """
    parameters = signature_of(model).parameters.values()
    if isinstance(batch, Mapping):
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        takes_all = not for_loss or any(p.kind is p.VAR_KEYWORD for p in parameters)
        return bound_call(model, (), {name: value for name, value in batch.items() if takes_all or name in names})
    if isinstance(batch, (tuple, list)):
        count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        takes_all = not for_loss or any(p.kind is p.VAR_POSITIONAL for p in parameters)
        return bound_call(model, tuple(batch) if takes_all else tuple(batch[:count]), {})
    return bound_call(model, (batch,), {})


# `InputSignature`: for which calls stages are the same.

_PLAIN = (bool, int, float, complex, str, bytes, tuple, slice, type(None), torch.dtype, torch.device, torch.Size)


class InputSignature:
    """Compare batches and modes for which stages are the same.

    Two are equal if their arguments have the same names, structure and plain values, their tensors the same shape,
    type, device and need of a gradient, the same ones of them are one object, and every module is in the same mode.

    Args:
        inputs: the arguments of the model's forward, by parameter.
        modes: of the modules, in their order.
    """

    def __init__(self, inputs: Mapping[str, Any], modes: Sequence[bool]) -> None:
        leaves, self._structure = pytree.tree_flatten(dict(inputs))
        first = {id(leaf): number for number, leaf in reversed(list(enumerate(leaves)))}
        self._leaves = [_tensor(leaf, first) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._modes = list(modes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InputSignature):
            return NotImplemented
        if (self._structure, self._modes) != (other._structure, other._modes):
            return False
        return all(map(_is_same, self._leaves, other._leaves))

    @property
    def unknown(self) -> str | None:
        """The type of an argument that is neither a tensor nor a plain value, and may change while it is one object."""
        return next((type(leaf).__name__ for leaf in self._leaves if not _is_plain(leaf)), None)

    __hash__ = None  # type: ignore[assignment]


def _tensor(tensor: torch.Tensor, first: Mapping[int, int]) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, first[id(tensor)])


def _is_plain(leaf: Any) -> bool:
    """Return whether a leaf is immutable, and equal to others of its value: also numpy's scalars, unlike its arrays."""
    kind = type(leaf)
    is_number = kind.__module__ == "numpy" and kind.__hash__ is not None
    return kind in _PLAIN or isinstance(leaf, enum.Enum) or is_number


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and _is_plain(one) and bool(one == other)


# The mode in which stages are asked for.


@contextlib.contextmanager
def in_mode(modules: Sequence[nn.Module], *, training: bool) -> Iterator[None]:
    """Set training or evaluation mode; restore the mode of every module.

    As ``train_step`` does it: where some module is in training mode, the modes stay as chosen.
    """
    modes = [module.training for module in modules]
    changed = (
        [module for module in modules if module.training is not training] if not training or not any(modes) else []
    )
    for module in changed:
        module.training = training
    try:
        yield
    finally:
        for module in changed:
            module.training = not training


_AXIS = ("first axis", "first axis, or the one that batch_axes names")
_LEFT_OUT = -100  # the label that torch's and transformers' losses leave out


def micro_batches(
    batch: Any,
    count: int,
    *,
    option: str = "accumulate",
    axes: Mapping[str | int, int | None] | None = None,
) -> list[Any]:
    """Cut every tensor of a batch into ``count`` equal micro-batches, along its first axis or a given one.

    Args:
        batch: a mapping, a tuple or list, or one tensor. Tensors without axes and plain values go to every micro-batch.
        count: 1 gives the batch itself.
        option: that gives the number, for messages.
        axes: for a key or a place in the batch (0 for one tensor): the axis of its tensors that counts the samples;
            None: they go to every micro-batch.

    Raises:
        BuildError: the samples do not divide, tensors differ in their number, or a value other than a tensor holds
            one value for each sample.
    """
    if count == 1:
        return [batch]
    axes = axes or {}
    leaves = list(_leaves("batch", batch))
    for place, value in leaves:
        if not (value is None or isinstance(value, (torch.Tensor, bool, int, float, str))):
            raise BuildError(
                f"{option}={count} cannot cut {place}, a {type(value).__name__}: only tensors are cut into "
                "micro-batches",
                hint="give it as a tensor whose first axis counts the samples",
            )
    lengths = dict(_lengths(batch, axes))
    if not lengths:
        raise BuildError(f"{option}={count} finds no tensor to cut in the batch", hint=f"{option}=1")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{place}: {length}" for place, length in lengths.items())
        raise BuildError(
            f"{option}={count} cuts every tensor of the batch along its {_AXIS[bool(axes)]}, which must count the "
            f"samples in all of them (got {shown})",
            hint="expand() what all samples share, or make it a buffer of the model"
            if option == "accumulate"
            else 'batch_axes={"bias": None, "x": 1}: no tensor of "bias" is cut, those of "x" along their second axis',
        )
    samples = next(iter(lengths.values()))
    if samples % count or not samples:
        raise BuildError(
            f"the batch has {samples} samples, not divisible by {option}={count}: the losses of unequal micro-batches "
            "would have equal weights",
            hint="DataLoader(..., drop_last=True), with a batch_size that is a multiple of it",
        )
    size = samples // count
    return [_cut(batch, number * size, size, axes) for number in range(count)]


def labels_left_out(parts: list[Any]) -> str | None:
    """Explain why the mean of the micro-batches' losses may differ from the batch's; None if no reason is found.

    A mean over labels weighs a micro-batch by its number of labels; their gradients have equal weights.
    """
    for place, value in _leaves("batch", parts[0]):
        if isinstance(value, torch.Tensor) and value.dim() and not value.is_floating_point() and not value.is_complex():
            others = [dict(_leaves("batch", part))[place] for part in parts]
            counts = [int((other != _LEFT_OUT).sum()) for other in others]
            if len(set(counts)) > 1:
                return (
                    f"{place} has {', '.join(map(str, counts))} labels other than {_LEFT_OUT} in the micro-batches, "
                    "which have equal weights: the mean of their losses is not the mean over the batch's labels; for "
                    "that, build(..., loss_weight=lambda batch: number of labels in the batch)"
                )
    return None


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{place}[{key!r}]", item)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            # Plain values further inside may be one for each sample; arguments are not.
            if place != "batch" and not isinstance(item, (torch.Tensor, Mapping, tuple, list)):
                yield place, value
                return
            yield from _leaves(f"{place}[{number}]", item)
    else:
        yield place, value


def _parts(batch: Any) -> Iterator[tuple[Any, str, Any]]:
    """The arguments in a batch: key or place, how messages name it, and the value."""
    if isinstance(batch, Mapping):
        yield from ((key, f"batch[{key!r}]", value) for key, value in batch.items())
    elif isinstance(batch, (tuple, list)):
        yield from ((number, f"batch[{number}]", value) for number, value in enumerate(batch))
    else:
        yield 0, "batch", batch


def _lengths(batch: Any, axes: Mapping[Any, int | None]) -> Iterator[tuple[str, int]]:
    for key, name, part in _parts(batch):
        axis = axes.get(key, 0)
        for place, value in _leaves(name, part):
            if isinstance(value, torch.Tensor) and value.dim() and axis is not None:
                if not -value.dim() <= axis < value.dim():
                    raise BuildError(
                        f"batch_axes names axis {axis} of {place}, which has {value.dim()} axes {tuple(value.shape)}",
                        hint=f"batch_axes={{{key!r}: {value.dim() - 1}}}",
                    )
                yield place, value.shape[axis]


def _cut(batch: Any, start: int, size: int, axes: Mapping[Any, int | None]) -> Any:
    """Cut one micro-batch."""
    parts = {key: _slice(value, start, size, axes.get(key, 0)) for key, _, value in _parts(batch)}
    if isinstance(batch, Mapping):
        return parts
    return _like(batch, list(parts.values())) if isinstance(batch, (tuple, list)) else parts[0]


def _slice(value: Any, start: int, size: int, axis: int | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.narrow(axis, start, size) if value.dim() and axis is not None else value
    if isinstance(value, Mapping):
        return {key: _slice(item, start, size, axis) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return _like(value, [_slice(item, start, size, axis) for item in value])
    return value


def _like(value: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    if hasattr(value, "_fields"):  # a named tuple takes them one by one
        return type(value)(*items)
    return tuple(items) if isinstance(value, tuple) else items
