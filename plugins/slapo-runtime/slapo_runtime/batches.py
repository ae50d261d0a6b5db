"""Batches: arguments by parameter, modes of the model, and micro-batches."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_core.errors import ArgumentError, BuildError, warn_user

# From a batch to the arguments of the model's forward, by parameter, for the stages of a pipeline.


@dataclass(frozen=True)
class ForwardSignature:
    """The signature of a model's forward.

    Args:
        signature: as ``inspect`` has it.
        names: of the parameters that take keyword arguments; None with ``**kwargs``.
        count: of the parameters that take positional arguments; None with ``*args``.
    """

    signature: inspect.Signature
    names: frozenset[str] | None
    count: int | None

    @classmethod
    def of(cls, model: nn.Module) -> ForwardSignature:
        """Return the signature of a model's forward, cached by function."""
        forward: Any = model.forward
        function = getattr(forward, "__func__", forward)
        try:
            known = _SIGNATURES.setdefault(function, {})
        except TypeError:  # a callable without a hash, or without weak references
            known = {}
        is_method = function is not forward
        if is_method not in known:
            known[is_method] = cls._read(forward)
        return known[is_method]

    @classmethod
    def _read(cls, forward: Callable[..., Any]) -> ForwardSignature:
        signature = inspect.signature(forward)
        parameters = signature.parameters.values()
        kinds = {p.kind for p in parameters}
        named = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        return cls(
            signature,
            None if inspect.Parameter.VAR_KEYWORD in kinds else named,
            None if inspect.Parameter.VAR_POSITIONAL in kinds else count,
        )

    def select(self, batch: Any) -> Any:
        """Return a batch without the values that the forward does not take."""
        if isinstance(batch, Mapping) and self.names is not None:
            return {name: value for name, value in batch.items() if name in self.names}
        if isinstance(batch, (tuple, list)) and self.count is not None:
            return batch[: self.count]
        return batch


_SIGNATURES: weakref.WeakKeyDictionary[Callable[..., Any], dict[bool, ForwardSignature]] = weakref.WeakKeyDictionary()
"""Function -> its signature, as a method or not; weak keys."""


def bound_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``model(*args, **kwargs)`` by parameter.

    Omitted arguments are missing. ``*args`` is a tuple under its parameter's name, ``**kwargs`` a dictionary under its
    own; empty ones are missing, too.

    Raises:
        ArgumentError: the forward does not take them.
    """
    try:
        bound = ForwardSignature.of(model).signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"the forward of {type(model).__name__} does not take this batch: {error}",
            hint="a mapping holds keyword arguments, a tuple positional arguments; anything else is one argument",
        ) from None
    return dict(bound.arguments)


def bound_batch(model: nn.Module, batch: Any, *, for_loss: bool = False) -> dict[str, Any]:
    """Return a batch's arguments of the model's forward, by parameter.

    Args:
        model: whose forward it is.
        batch: a mapping (keyword arguments), a tuple or list (positional ones), or one argument.
        for_loss: whether a batch may hold more than the forward takes, for a ``loss(output, batch)``.

    Raises:
        ArgumentError: the forward does not take it.
    """
    if for_loss:
        batch = ForwardSignature.of(model).select(batch)
    if isinstance(batch, Mapping):
        return bound_call(model, (), batch)
    if isinstance(batch, (tuple, list)):
        return bound_call(model, tuple(batch), {})
    return bound_call(model, (batch,), {})


def switch_to_training(model: nn.Module) -> None:
    """Switch a model entirely in evaluation mode to training mode, with a warning.

    ``from_pretrained`` gives such models, and ``model.eval()`` between two steps leaves one: it would train without
    dropout, and with the running statistics of batch norms. If some module is in training mode, the modes are
    deliberate (a frozen batch norm), and stay.
    """
    if model.training or any(module.training for module in model.modules()):
        return
    model.train()
    warn_user(
        f"{type(model).__name__} was in evaluation mode, with all its modules (as after from_pretrained() or .eval()): "
        "a training step switches them to training mode, with dropout; to keep modules in evaluation mode, call "
        "model.train() and then .eval() on these",
    )


@contextlib.contextmanager
def in_mode(modules: Sequence[nn.Module], *, training: bool) -> Iterator[None]:
    """Set training or evaluation mode; restore the mode of every module.

    As in ``train_step``, training mode is set only if all modules are in evaluation mode.
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


_LEFT_OUT = -100  # the label that the losses of torch and transformers ignore


def micro_batches(
    batch: Any,
    count: int,
    *,
    option: str = "accumulate",
    axes: Mapping[str | int, int | None] | None = None,
) -> list[Any]:
    """Cut a batch into ``count`` equal micro-batches, along the axis of the samples.

    That is the first axis, or a given one. Integers of shape ``(k, *shape)`` beside integers of shape ``shape`` have
    their samples along the second axis: positions of shape ``(3, batch, length)`` beside tokens. A list or tuple with
    one item for each sample, e.g. the target dictionaries of detectors, is cut between its items.

    Args:
        batch: a mapping, a tuple or list, or one tensor. Tensors without axes and plain values go to every micro-batch.
        count: 1 gives the batch itself.
        option: the option with the number, for messages.
        axes: for a key or a position in the batch (0 for one tensor): the axis of its tensors that counts the samples;
            None: they go to every micro-batch.

    Raises:
        BuildError: the number of samples is not divisible, tensors or lists differ in it, or a value other than a
            tensor holds one value for each sample.
    """
    if count == 1:
        return [batch]
    plans, samples = _Cuts(batch, f"{option}={count}", axes or {}).plan()
    if samples % count or not samples:
        raise BuildError(
            f"the batch has {samples} samples, not divisible by {option}={count}: the losses of unequal micro-batches "
            "would have equal weights",
            hint="DataLoader(..., drop_last=True), or slapo_runtime.data.sampler(..., drop_last=True), with a "
            f"batch_size that is a multiple of {count}",
        )
    size = samples // count
    return [_part(batch, plans, number * size, size) for number in range(count)]


def labels_left_out(parts: list[Any]) -> str | None:
    """Explain a difference between the micro-batches' mean loss and the batch's; None without one.

    A mean over labels weights a micro-batch by its number of labels, but their gradients have equal weights.
    """
    others = [dict(_outside_lists(part)) for part in parts]
    for place, value in others[0].items():
        if isinstance(value, torch.Tensor) and value.dim() and _is_integer(value):
            counts = [int((other[place] != _LEFT_OUT).sum()) for other in others]
            if len(set(counts)) > 1:
                return (
                    f"{place} has {', '.join(map(str, counts))} labels other than {_LEFT_OUT} in the micro-batches, "
                    "which have equal weights: the mean of their losses is not the mean over the batch's labels; "
                    "build(..., loss_weight=lambda batch: number of labels in the batch) gives that mean"
                )
    return None


def _outside_lists(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values outside of lists and tuples, with names for messages."""
    waiting = [(name, value) for _, name, value in _arguments(batch)]
    while waiting:
        place, value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting += [(f"{place}[{key!r}]", item) for key, item in value.items()]
        else:
            yield place, value


def _arguments(batch: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the arguments in a batch: key or position, name for messages, and value."""
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
        batch: the full batch.
        asked: the user's option, e.g. ``"accumulate=2"``.
        axes: the user's, by key or position.
    """

    def __init__(self, batch: Any, asked: str, axes: Mapping[Any, int | None]) -> None:
        self._asked, self._axes = asked, axes
        self._arguments = list(_arguments(batch))
        self._lengths: dict[str, int] = {}  # along the given axes
        self._tensors: dict[str, torch.Tensor] = {}  # whose first axis may count the samples, outside of lists
        self._lists: dict[str, Sequence[Any]] = {}
        self._keys: dict[str, Any] = {}  # of the arguments that hold them
        self._inside: dict[str, dict[str, torch.Tensor]] = {}  # the tensors in a list, which may be cut instead of it
        for key, name, value in self._arguments:
            self._note(name, value, key)

    def plan(self) -> tuple[dict[Any, _Plan], int]:
        """Return the plan of each argument, and the number of samples."""
        samples = self._samples()
        return {key: self._plan(name, value, key, samples) for key, name, value in self._arguments}, samples

    # -- the contents of the batch ----------------------------------------------------------------------------

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
        """Return whether integers are stacked as ``(3, batch, length)`` beside ``(batch, length)``."""
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
            hint = f"{self._axes_call(odd, None)} gives every micro-batch the full tensor"
            if axes:
                hint = f"{self._axes_call(odd, axes[0])} if that axis counts the samples; {hint}"
        return BuildError(
            f"{self._asked} cuts every tensor of the batch along its first axis, or its axis in batch_axes, which must "
            f"count the samples in all of them (got {shown})",
            hint=hint,
        )

    # -- the plan of each value -------------------------------------------------------------------------------

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
            warn_user(
                f"{self._asked} cuts {place} of shape {tuple(tensor.shape)} along its first axis, but its second axis "
                f"has {samples} elements, too: if that counts the samples, give {self._axes_call(place, 1)}",
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
                f"{self._asked} cuts {place} between its items, or all tensors inside along their first axis, but "
                f"neither count the {samples} samples of the batch (got {shown})",
                hint="give a list with one item for each sample, or "
                f"{self._axes_call(place, None)} to give every micro-batch the full list",
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
            warn_user(f"{self._asked} cuts between the dictionaries: {both}; {call}")
        return True

    def _axes_call(self, place: str, axis: int | None) -> str:
        key = self._keys[place]
        return f"batch_axes={{{key if isinstance(key, str) else 'name of the argument'!r}: {axis}}}"


def _are_records(value: Sequence[Any]) -> bool:
    """Return whether a list holds dictionaries, or None instead."""
    return any(isinstance(item, Mapping) for item in value) and all(
        item is None or isinstance(item, Mapping) for item in value
    )


def _are_of_a_kind(value: Sequence[Any]) -> bool:
    """Return whether list items are equal except for the sizes of tensors."""
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
