"""Batches: arguments by parameter, input signature, micro-batches, the loss and its weight."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import ArgumentError, BuildError, RankMismatchError
from slapo_runtime.private import pytree

if TYPE_CHECKING:
    from slapo_core.layout import Mesh

# From a batch to the arguments of the model's forward, by parameter: what the stages of a pipeline read.


def bound_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``model(*args, **kwargs)`` by parameter.

    Those that are left out are missing. ``*args`` is a tuple under its parameter's name, ``**kwargs`` a dictionary
    under its own: missing too where there is nothing in them.

    Raises:
        ArgumentError: the forward does not take them.
    """
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
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
    parameters = inspect.signature(model.forward).parameters.values()
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

_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None), torch.dtype, torch.device, torch.Size)


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
    def is_plain(self) -> bool:
        """Return whether all arguments are tensors and plain values."""
        return all(type(leaf) in _PLAIN for leaf in self._leaves)

    __hash__ = None  # type: ignore[assignment]


def _tensor(tensor: torch.Tensor, first: Mapping[int, int]) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, first[id(tensor)])


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and type(one) in _PLAIN and bool(one == other)


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


class LossCall:
    """Calls a model and finds the loss.

    Args:
        module: the scheduled model.
        loss: ``loss(output, batch)``; what a batch holds beyond the arguments of the forward is then left to it. None
            takes the loss that the output holds.
    """

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Any] | None) -> None:
        self._module, self._loss = module, loss
        self._takes = _Signature(module) if loss is not None else None

    def __call__(self, batch: Any, forward: Callable[..., Any] | None = None) -> tuple[torch.Tensor, Any]:
        """The loss, a scalar tensor, and the output of ``forward`` (None: the model) on a batch."""
        output = self._call(self._module if forward is None else forward, batch)
        return self.loss_of(output, batch), output

    def _call(self, forward: Callable[..., Any], batch: Any) -> Any:
        if self._takes is not None:
            batch = self._takes.of(batch)
        if isinstance(batch, Mapping):
            return forward(**batch)
        if isinstance(batch, (tuple, list)):
            return forward(*batch)
        return forward(batch)

    def loss_of(self, output: Any, batch: Any) -> torch.Tensor:
        """The loss of an output on a batch, a scalar tensor.

        Raises:
            BuildError: there is none in the output, or the user's function gives no scalar.
        """
        loss: Any
        if self._loss is not None:
            loss = self._loss(output, batch)
        elif isinstance(output, torch.Tensor):
            loss = output
        else:
            loss = getattr(output, "loss", None)
            if loss is None and isinstance(output, Mapping):
                loss = output.get("loss")
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise self._no_loss(output, loss)
        return loss

    def _no_loss(self, output: Any, loss: Any) -> BuildError:
        if self._loss is not None:
            return BuildError(
                f"loss(output, batch) must return a scalar tensor (got {_described(loss)})",
                hint="reduce it, for instance with .mean()",
            )
        return BuildError(
            f"the output of {type(self._module).__name__} holds no loss: it is {_described(output)}",
            hint="build(sch, ..., loss=lambda output, batch: "
            'torch.nn.functional.cross_entropy(output, batch["labels"])), or give the labels to the model',
        )


def trained(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss if it requires grad, in a training step.

    Runtimes that skip the backward pass, and pipelines, which send zero gradients back, would step with zeros.

    Raises:
        BuildError: gradients are enabled, and it has none.
    """
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise BuildError(
            "the loss does not require grad: no trainable parameter contributes to it",
            hint="unfreeze parameters before build; give loss= a function that does not detach the output",
        )
    return loss


class _Signature:
    """Select the arguments of a forward from a batch; the loss takes the rest."""

    def __init__(self, module: nn.Module) -> None:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        kinds = {parameter.kind for parameter in parameters}
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._count = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(positional)
        self._names = (
            None
            if inspect.Parameter.VAR_KEYWORD in kinds
            else frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        )

    def of(self, batch: Any) -> Any:
        if isinstance(batch, Mapping) and self._names is not None:
            return {name: value for name, value in batch.items() if name in self._names}
        if isinstance(batch, (tuple, list)) and self._count is not None:
            return batch[: self._count]
        return batch


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"


ITEMS = "num_items_in_batch"
"""The argument by which models of transformers divide a sum of losses, instead of taking their mean."""


class LossWeights:
    """Scale the losses of micro-batches, so that the runtimes' mean over them is the mean over all items.

    A runtime averages the losses of ``n`` micro-batches and of the replicas. With the weight ``w`` of a micro-batch,
    and ``W`` that of all micro-batches of all replicas, a loss is multiplied by ``w * n * replicas / W``. A loss that
    the model has divided by ``num_items_in_batch`` already is a part of a sum: it is multiplied by ``n * replicas``.

    Args:
        mesh: of the schedule.
        function: the user's ``loss_weight``; None without one.
        device: that process groups send from.
    """

    def __init__(self, mesh: Mesh | None, function: Callable[[Any], Any] | None, device: torch.device) -> None:
        self._function, self._device = function, device
        self._replicas = mesh.size("dp") if mesh is not None else 1
        self._group = mesh.group("dp") if mesh is not None and self._replicas > 1 else None
        self._is_compared = self._is_probed = False
        self._scales: list[tuple[Any, torch.Tensor]] = []

    def applies(self, batch: Any) -> bool:
        """Whether losses of a batch are weighted."""
        return self._function is not None or _items(batch) is not None

    def scales(self, batches: Sequence[Any], *, training: bool) -> list[torch.Tensor] | None:
        """Return what the loss of each micro-batch is multiplied by; None where nothing is weighted.

        A collective over the replicas for a training step. In an evaluation the weights are those of one replica.

        Args:
            batches: the micro-batches of a step, or a batch alone.
            training: whether gradients are averaged over replicas afterwards.

        Raises:
            BuildError: ``loss_weight`` gives no number, or 0 for all of them; or it is given for a batch that has
                ``num_items_in_batch``.
            RankMismatchError: replicas have another ``num_items_in_batch``.
        """
        items = _items(batches[0])
        if items is not None:
            self._check_items(items)
            return [torch.tensor(float(len(batches) * self._replicas))] * len(batches)
        if self._function is None:
            return None
        weights = torch.stack([self._weight(batch) for batch in batches]).to(self._device)
        total, replicas = weights.sum(), 1
        if training and self._group is not None:
            import torch.distributed as dist

            dist.all_reduce(total, group=self._group)
            replicas = self._replicas
        if not total > 0:
            raise BuildError(
                f"loss_weight gives {float(total):g} for all micro-batches together",
                hint='loss_weight=lambda batch: (batch["labels"] != -100).sum()',
            )
        return list((weights * (len(batches) * replicas / total)).unbind())

    def prepare(self, batches: Sequence[Any]) -> None:
        """Weigh the micro-batches of a training step, whose losses :meth:`scaled` is given one after the other."""
        scales = self.scales(batches, training=True)
        self._scales = [] if scales is None else list(zip(batches, scales, strict=True))

    def scaled(self, loss: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the loss of a micro-batch, scaled in a training step.

        Args:
            loss: a scalar tensor.
            batch: one of those given to :meth:`prepare`, or a batch that is a step of its own.
        """
        if not self.applies(batch):
            return loss
        if torch.is_grad_enabled():
            if not any(one is batch for one, _ in self._scales):
                self.prepare([batch])
            number = next(number for number, (one, _) in enumerate(self._scales) if one is batch)
            return times(loss, self._scales.pop(number)[1])
        scales = self.scales([batch], training=False)
        return times(loss, None if scales is None else scales[0])

    def probe(self, batch: Any) -> Any:
        """Return the batch to give to the model: in the first training step one whose count of items is told apart."""
        if self._is_probed or not torch.is_grad_enabled() or _items(batch) is None:
            return batch
        count = torch.as_tensor(batch[ITEMS]).detach().to(torch.float32, copy=True).requires_grad_()
        return {**batch, ITEMS: count}

    def check_divided(self, loss: torch.Tensor, probed: Any, model: nn.Module) -> None:
        """Refuse a model that takes the count of items and does not divide by it, as many of transformers do.

        Args:
            loss: of the model.
            probed: that :meth:`probe` gave.
            model: for the message.
        """
        count = _items(probed)
        if self._is_probed or not isinstance(count, torch.Tensor) or not count.requires_grad:
            return
        self._is_probed = True
        if not _depends_on(loss, count):
            raise _items_ignored(model, "does not divide its loss by it")

    def _weight(self, batch: Any) -> torch.Tensor:
        assert self._function is not None
        weight: Any = self._function(batch)
        if not isinstance(weight, (int, float)) and not (isinstance(weight, torch.Tensor) and weight.numel() == 1):
            raise BuildError(
                f"loss_weight must return a number, or a tensor of one (got {weight!r})",
                hint='loss_weight=lambda batch: (batch["labels"] != -100).sum()',
            )
        return torch.as_tensor(weight, dtype=torch.float64).detach().reshape(()).cpu()

    def _check_items(self, items: Any) -> None:
        """Refuse a count of one replica's own items, in the first step."""
        if self._function is not None:
            raise BuildError(
                f"loss_weight is given, and the batch has '{ITEMS}', by which the model divides its loss itself",
                hint=f"leave out loss_weight, or '{ITEMS}'",
            )
        if self._is_compared or self._group is None:
            return
        import torch.distributed as dist

        self._is_compared = True
        own = torch.tensor(float(items), dtype=torch.float64, device=self._device)
        everywhere = [torch.empty_like(own) for _ in range(self._replicas)]
        dist.all_gather(everywhere, own, group=self._group)
        if any(one != own for one in everywhere):
            raise RankMismatchError(
                f"'{ITEMS}' of the batch is {', '.join(f'{float(one):g}' for one in everywhere)} on the replicas: it "
                "counts the items of the batches of all of them, and must be the same",
                hint="torch.distributed.all_reduce the counts first; or leave it out, and give build(loss_weight=...)",
            )


def _items_ignored(model: nn.Module, why: str) -> BuildError:
    return BuildError(
        f"the batch has '{ITEMS}', and {type(model).__name__} {why}: losses that are means would be summed over "
        "micro-batches and replicas",
        hint=f"leave out '{ITEMS}', and give build(loss_weight=lambda batch: (batch[\"labels\"] != -100).sum())",
    )


def require_items_read(model: nn.Module, inputs: Mapping[str, Any], read: Collection[str]) -> None:
    """Refuse a count of items that the stages of a pipeline do not read, or of which that is not known.

    Args:
        model: that was cut.
        inputs: the arguments of its forward, by parameter.
        read: the parameters that stages read.

    Raises:
        BuildError: there is a count, and no stage reads it, or it is among ``**kwargs``, which are read as a whole.
    """
    if ITEMS in inputs and ITEMS not in read:
        raise _items_ignored(model, "does not divide its loss by it")
    if any(_items(value) is not None for value in inputs.values()):
        raise _items_ignored(model, "takes it among its **kwargs, of which stages do not tell what they read")


def _depends_on(value: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether autograd has a way from a value to a leaf."""
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is leaf:
            return True
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    return False


def times(loss: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Multiply a loss by a scale, in the loss's dtype; None is 1. A mean over no items is NaN, and counts 0."""
    if scale is None:
        return loss
    scale = scale.to(loss.device, loss.dtype)
    return torch.where(scale == 0, torch.zeros_like(loss), loss * scale)


def _items(batch: Any) -> Any:
    return batch.get(ITEMS) if isinstance(batch, Mapping) else None
