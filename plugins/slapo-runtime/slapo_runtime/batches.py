"""Batches: arguments by parameter, and micro-batches."""

from __future__ import annotations

import contextlib
import enum
import inspect
import warnings
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


_LEFT_OUT = -100  # the label that torch's and transformers' losses leave out


def micro_batches(
    batch: Any,
    count: int,
    *,
    option: str = "accumulate",
    axes: Mapping[str | int, int | None] | None = None,
) -> list[Any]:
    """Cut every tensor of a batch into ``count`` equal micro-batches, along the axis of its samples.

    That is the first axis, or a given one. Integers of shape ``(k, *shape)`` beside integers of shape ``shape`` have
    their samples along the second one: positions of shape ``(3, batch, length)`` beside tokens. A list or tuple with an
    item for each sample, e.g. the dictionaries that detectors take as targets, is cut between its items.

    Args:
        batch: a mapping, a tuple or list, or one tensor. Tensors without axes and plain values go to every micro-batch.
        count: 1 gives the batch itself.
        option: that gives the number, for messages.
        axes: for a key or a place in the batch (0 for one tensor): the axis of its tensors that counts the samples;
            None: they go to every micro-batch.

    Raises:
        BuildError: the samples do not divide, tensors or lists differ in their number, or a value other than a tensor
            holds one value for each sample.
    """
    if count == 1:
        return [batch]
    plans, samples = _Cuts(batch, f"{option}={count}", axes or {}).plan()
    if samples % count or not samples:
        raise BuildError(
            f"the batch has {samples} samples, not divisible by {option}={count}: the losses of unequal micro-batches "
            "would have equal weights",
            hint="DataLoader(..., drop_last=True), with a batch_size that is a multiple of it",
        )
    size = samples // count
    return [_part(batch, plans, number * size, size) for number in range(count)]


def labels_left_out(parts: list[Any]) -> str | None:
    """Explain why the mean of the micro-batches' losses may differ from the batch's; None if no reason is found.

    A mean over labels weighs a micro-batch by its number of labels; their gradients have equal weights.
    """
    others = [dict(_outside_lists(part)) for part in parts]
    for place, value in others[0].items():
        if isinstance(value, torch.Tensor) and value.dim() and _is_integer(value):
            counts = [int((other[place] != _LEFT_OUT).sum()) for other in others]
            if len(set(counts)) > 1:
                return (
                    f"{place} has {', '.join(map(str, counts))} labels other than {_LEFT_OUT} in the micro-batches, "
                    "which have equal weights: the mean of their losses is not the mean over the batch's labels; for "
                    "that, build(..., loss_weight=lambda batch: number of labels in the batch)"
                )
    return None


def _outside_lists(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a batch that no list or tuple holds, with how messages name them."""
    waiting = [(name, value) for _, name, value in _arguments(batch)]
    while waiting:
        place, value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting += [(f"{place}[{key!r}]", item) for key, item in value.items()]
        else:
            yield place, value


def _arguments(batch: Any) -> Iterator[tuple[Any, str, Any]]:
    """The arguments in a batch: key or place, how messages name it, and the value."""
    if isinstance(batch, Mapping):
        yield from ((key, f"batch[{key!r}]", value) for key, value in batch.items())
    elif isinstance(batch, (tuple, list)):
        yield from ((number, f"batch[{number}]", value) for number, value in enumerate(batch))
    else:
        yield 0, "batch", batch


_BY_ITEM = "between its items"
_Plan = (
    Any  # of a value: the axis of its samples, None (in every micro-batch), _BY_ITEM, or a dictionary or list of them
)


class _Cuts:
    """Find where each value of a batch has its samples.

    Args:
        batch: the whole one.
        asked: how it is asked for, e.g. ``"accumulate=2"``.
        axes: given ones, by key or place.
    """

    def __init__(self, batch: Any, asked: str, axes: Mapping[Any, int | None]) -> None:
        self._asked, self._axes = asked, axes
        self._arguments = list(_arguments(batch))
        self._lengths: dict[str, int] = {}  # along the axes that are given or known without the other values
        self._tensors: dict[str, torch.Tensor] = {}  # whose first axis may count the samples, outside of lists
        self._lists: dict[str, Sequence[Any]] = {}
        self._keys: dict[str, Any] = {}  # of the arguments that these are in
        self._inside: dict[str, dict[str, torch.Tensor]] = {}  # those in a list that may be cut through its tensors
        for key, name, value in self._arguments:
            self._note(name, value, key)

    def plan(self) -> tuple[dict[Any, _Plan], int]:
        """Return how each argument is cut, and the number of samples."""
        samples = self._samples()
        return {key: self._plan(name, value, key, samples) for key, name, value in self._arguments}, samples

    # -- what there is ----------------------------------------------------------------------------------------

    def _note(self, place: str, value: Any, key: Any) -> None:
        if key in self._axes:
            axis = self._axes[key]
            for inner, tensor in _tensors(place, value):
                if axis is not None:
                    if not -tensor.dim() <= axis < tensor.dim():
                        raise BuildError(
                            f"batch_axes names axis {axis} of {inner}, which has {tensor.dim()} axes "
                            f"{tuple(tensor.shape)}",
                            hint=f"batch_axes={{{key!r}: {tensor.dim() - 1}}}",
                        )
                    self._lengths[inner] = tensor.shape[axis]
        elif isinstance(value, Mapping):
            for name, item in value.items():
                self._note(f"{place}[{name!r}]", item, key)
        elif isinstance(value, (tuple, list)):
            self._keys[place] = key
            inside = dict(_tensors(place, value))
            if value and not inside and not _are_records(value):
                raise self._uncuttable(place, value)
            self._lists[place], self._inside[place] = value, inside
        elif isinstance(value, torch.Tensor):
            if value.dim():
                self._tensors[place], self._keys[place] = value, key
        elif not (value is None or isinstance(value, (bool, int, float, str))):
            raise self._uncuttable(place, value)

    def _uncuttable(self, place: str, value: Any) -> BuildError:
        return BuildError(
            f"{self._asked} cannot cut {place}, a {type(value).__name__}: only tensors, and lists with one dictionary "
            "or tensor for each sample, are cut into micro-batches",
            hint="give it as a tensor whose first axis counts the samples",
        )

    # -- the number of samples --------------------------------------------------------------------------------

    def _samples(self) -> int:
        lengths = {**self._lengths, **{place: tensor.shape[0] for place, tensor in self._tensors.items()}}
        if not lengths:  # everything is in lists
            records = {place: len(value) for place, value in self._lists.items() if _are_records(value)}
            inside = {place: one.shape[0] for found in self._inside.values() for place, one in found.items()}
            items = {place: len(value) for place, value in self._lists.items()}
            lengths = records or (inside if len(set(inside.values())) == 1 or len(set(items.values())) > 1 else items)
        if not lengths:
            raise BuildError(
                f"{self._asked} finds no tensor to cut in the batch", hint=f"{self._asked.split('=')[0]}=1"
            )
        possible = set(lengths.values())
        if len(possible) > 1:
            given = set(self._lengths.values())
            possible = {one for one in given or possible if all(self._fits(p, n, one) for p, n in lengths.items())}
        if len(possible) != 1:
            raise self._different(lengths)
        return possible.pop()

    def _fits(self, place: str, length: int, samples: int) -> bool:
        return length == samples or (place in self._tensors and self._is_stacked(place, samples))

    def _is_stacked(self, place: str, samples: int) -> bool:
        """Whether a tensor of integers is a stack of several ones of the shape of another: ``(3, batch, length)``."""
        tensor = self._tensors[place]
        return (
            tensor.dim() > 2
            and tensor.shape[0] > 1
            and tensor.shape[1] == samples
            and _is_integer(tensor)
            and any(_is_integer(one) and one.shape == tensor.shape[1:] for one in self._tensors.values())
        )

    def _different(self, lengths: Mapping[str, int]) -> BuildError:
        shown = ", ".join(f"{place}: {length}" for place, length in lengths.items())
        usual = max(lengths.values(), key=list(lengths.values()).count)
        odd = next((place for place in self._tensors if lengths[place] != usual), None)
        hint = "batch_axes: the axis of an argument's tensors that counts the samples"
        if odd is not None:
            axes = [axis for axis, size in enumerate(self._tensors[odd].shape) if axis and size == usual]
            hint = f"{self._axes_call(odd, None)}: every micro-batch has it as a whole"
            if axes:
                hint = f"{self._axes_call(odd, axes[0])} if that axis counts the samples; {hint}"
        return BuildError(
            f"{self._asked} cuts every tensor of the batch along its first axis, or the one that batch_axes names, "
            f"which must count the samples in all of them (got {shown})",
            hint=hint,
        )

    # -- where each value has them ----------------------------------------------------------------------------

    def _plan(self, place: str, value: Any, key: Any, samples: int) -> _Plan:
        if key in self._axes:
            return _through(value, self._axes[key])
        if isinstance(value, Mapping):
            return {name: self._plan(f"{place}[{name!r}]", item, key, samples) for name, item in value.items()}
        if isinstance(value, (tuple, list)):
            return _BY_ITEM if self._is_by_item(place, samples) else _through(value, 0)
        return self._axis(place, samples) if place in self._tensors else None

    def _axis(self, place: str, samples: int) -> int:
        tensor = self._tensors[place]
        if tensor.shape[0] != samples:
            return 1
        if self._is_stacked(place, samples):  # as many as there are samples
            if "pos" in place.lower():
                return 1
            warnings.warn(
                f"{self._asked} cuts {place} of shape {tuple(tensor.shape)} along its first axis, and its second one "
                f"has {samples} elements too: if that counts the samples, {self._axes_call(place, 1)}",
                stacklevel=7,
            )
        return 0

    def _is_by_item(self, place: str, samples: int) -> bool:
        """Return whether a list is cut between its items, instead of through its tensors."""
        value, inside = self._lists[place], self._inside[place]
        through = bool(inside) and all(tensor.shape[0] == samples for tensor in inside.values())
        by_item = len(value) == samples and (_are_records(value) or _are_of_a_kind(value))
        if not value or (through and not by_item):
            for _, item in _leaves(value):
                if not (item is None or isinstance(item, (torch.Tensor, bool, int, float, str))):
                    raise self._uncuttable(place, value)
            return False
        if not by_item:
            found = {place: len(value), **{inner: tensor.shape[0] for inner, tensor in inside.items()}}
            shown = ", ".join(f"{where}: {length}" for where, length in found.items())
            raise BuildError(
                f"{self._asked} cuts {place} between its items, or all tensors inside along their first axis, and "
                f"neither count the {samples} samples of the batch (got {shown})",
                hint="give a list with one item for each sample, or "
                f"{self._axes_call(place, None)} for every micro-batch to have it as a whole",
            )
        if through:
            both = (
                f"{place} has {samples} items for {samples} samples, and all tensors inside have {samples} elements "
                "along their first axis"
            )
            call = f"{self._axes_call(place, 0)} cuts the tensors along their first axis"
            if not _are_records(value):
                if any(_are_records(other) and len(other) == samples for other in self._lists.values()):
                    return True  # as the images of detectors, beside their targets
                raise BuildError(
                    f"{self._asked} can cut between the items or through them: {both}",
                    hint=f"{call}; a list with one dictionary for each sample is cut between them",
                )
            warnings.warn(f"{self._asked} cuts between the dictionaries: {both}; {call}", stacklevel=2)
        return True

    def _axes_call(self, place: str, axis: int | None) -> str:
        key = self._keys[place]
        return f"batch_axes={{{key if isinstance(key, str) else 'name of the argument'!r}: {axis}}}"


def _are_records(value: Sequence[Any]) -> bool:
    """Whether a list holds dictionaries, and None for what has none."""
    return any(isinstance(item, Mapping) for item in value) and all(
        item is None or isinstance(item, Mapping) for item in value
    )


def _are_of_a_kind(value: Sequence[Any]) -> bool:
    """Whether the items of a list may be one for each sample: tensors, or tuples of them, alike in all but sizes."""
    if hasattr(value, "_fields"):
        return False
    return all(_kind(item) == _kind(value[0]) for item in value)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dim(), value.dtype
    if isinstance(value, Mapping):
        return {key: _kind(item) for key, item in value.items()}
    return [type(value), *map(_kind, value)] if isinstance(value, (tuple, list)) else type(value)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{place}[{number}]")
    else:
        yield place, value


def _tensors(place: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with axes in a value."""
    for inner, leaf in _leaves(value, place):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            yield inner, leaf


def _through(value: Any, axis: int | None) -> _Plan:
    """Cut all tensors in a value along one axis."""
    if isinstance(value, Mapping):
        return {key: _through(item, axis) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_through(item, axis) for item in value]
    return axis if isinstance(value, torch.Tensor) and value.dim() else None


def _part(batch: Any, plans: Mapping[Any, _Plan], start: int, size: int) -> Any:
    """Cut one micro-batch."""
    parts = {key: _slice(value, plans[key], start, size) for key, _, value in _arguments(batch)}
    if isinstance(batch, Mapping):
        return parts
    return _like(batch, list(parts.values())) if isinstance(batch, (tuple, list)) else parts[0]


def _slice(value: Any, plan: _Plan, start: int, size: int) -> Any:
    if plan is None:
        return value
    if plan is _BY_ITEM:
        return value[start : start + size]
    if isinstance(plan, dict):
        return {key: _slice(item, plan[key], start, size) for key, item in value.items()}
    if isinstance(plan, list):
        return _like(value, [_slice(item, one, start, size) for item, one in zip(value, plan, strict=True)])
    return value.narrow(plan, start, size)


def _like(value: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    if hasattr(value, "_fields"):  # a named tuple takes them one by one
        return type(value)(*items)
    return tuple(items) if isinstance(value, tuple) else items
