"""The loss of a batch: found in the output, or by the user's function, and weighed over micro-batches and replicas."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import BuildError, RankMismatchError

if TYPE_CHECKING:
    from slapo_core.layout import Mesh


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
    the model has divided by ``num_items_in_batch`` already is a term of a sum: it is multiplied by ``n * replicas``.

    Args:
        mesh: of the schedule.
        function: the user's ``loss_weight``; None without one.
        device: that process groups send from.
    """

    def __init__(self, mesh: Mesh | None, function: Callable[[Any], Any] | None, device: torch.device) -> None:
        self._function, self._device = function, device
        self._replicas = mesh.size("dp") if mesh is not None else 1
        self._group = mesh.group("dp") if mesh is not None and self._replicas > 1 else None
        self._is_compared = self._is_probed = self._is_checked = False
        self._scales: list[tuple[Any, torch.Tensor | float]] = []

    def applies(self, batch: Any) -> bool:
        """Whether losses of a batch are weighted."""
        return self._function is not None or _items(batch) is not None

    def scales(self, batches: Sequence[Any], *, training: bool) -> list[torch.Tensor | float] | None:
        """Return what the loss of each micro-batch is multiplied by; None where nothing is weighted.

        A collective over the replicas for a training step. In an evaluation the weights are those of one replica. Only
        the first call reads the sum of the weights; where a later one is 0 the losses are NaN, as torch's means over
        nothing are.

        Args:
            batches: the micro-batches of a step, or a batch alone.
            training: whether gradients are averaged over replicas afterwards.

        Raises:
            BuildError: ``loss_weight`` gives no number, or in the first call 0 for all of them; or it is given for a
                batch that has ``num_items_in_batch``.
            RankMismatchError: replicas have another ``num_items_in_batch``.
        """
        items = _items(batches[0])
        if items is not None:
            self._check_items(items)
            return [float(len(batches) * self._replicas)] * len(batches)
        if self._function is None:
            return None
        weights = torch.stack([self._weight(batch) for batch in batches])
        total, replicas = weights.sum(), 1
        if training and self._group is not None:
            import torch.distributed as dist

            dist.all_reduce(total, group=self._group)
            replicas = self._replicas
        if not self._is_checked and total <= 0:  # false where it is not known, without memory
            raise BuildError(
                f"loss_weight gives {float(total):g} for all micro-batches together",
                hint='loss_weight=lambda batch: (batch["labels"] != -100).sum()',
            )
        self._is_checked = True
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
            number = self._number_of(batch)
            if number is None:
                self.prepare([batch])
                number = 0
            return times(loss, self._scales.pop(number)[1])
        scales = self.scales([batch], training=False)
        return times(loss, None if scales is None else scales[0])

    def _number_of(self, batch: Any) -> int | None:
        return next((number for number, (one, _) in enumerate(self._scales) if one is batch), None)

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
        number = torch.as_tensor(weight, dtype=torch.float64).detach().reshape(())
        return number.to(self._device, non_blocking=self._device.type != "cpu")

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


def times(loss: torch.Tensor, scale: torch.Tensor | float | None) -> torch.Tensor:
    """Multiply a loss by a scale, in the loss's dtype; None is 1. A mean over no items is NaN, and counts 0."""
    if scale is None:
        return loss
    if isinstance(scale, float):
        return loss * scale
    scale = scale.to(loss.device, loss.dtype, non_blocking=loss.device.type != "cpu")
    return torch.where(scale == 0, torch.zeros_like(loss), loss * scale)


def _items(batch: Any) -> Any:
    return batch.get(ITEMS) if isinstance(batch, Mapping) else None
