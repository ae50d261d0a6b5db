"""The loss of a batch, weighted over micro-batches and replicas."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from slapo_core.errors import BuildError, RankMismatchError
from slapo_runtime.batches import ForwardSignature

if TYPE_CHECKING:
    from slapo_core.layout import Mesh


class LossCall:
    """Call a model and find the loss.

    Args:
        module: the scheduled model.
        loss: ``loss(output, batch)``; a batch may then hold more than the arguments of the forward. None takes the
            output's loss.
    """

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Any] | None) -> None:
        self._module, self._loss = module, loss
        self._signature = ForwardSignature.of(module) if loss is not None else None

    def __call__(self, batch: Any, forward: Callable[..., Any] | None = None) -> tuple[torch.Tensor, Any]:
        """Return the loss and the output of ``forward`` (None: the model) on a batch."""
        output = self.output(batch, self._module if forward is None else forward)
        return self.loss_of(output, batch), output

    def output(self, batch: Any, forward: Callable[..., Any]) -> Any:
        """Return the output of ``forward`` on a batch."""
        if self._signature is not None:
            batch = self._signature.select(batch)
        if isinstance(batch, Mapping):
            return forward(**batch)
        if isinstance(batch, (tuple, list)):
            return forward(*batch)
        return forward(batch)

    def loss_of(self, output: Any, batch: Any) -> torch.Tensor:
        """Return the loss of an output on a batch, a scalar tensor.

        Raises:
            BuildError: there is no loss in the output, or the user's function does not give a scalar.
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
        BuildError: gradients are enabled, but the loss does not require grad.
    """
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise BuildError(
            "the loss does not require grad: no trainable parameter contributes to it",
            hint="unfreeze parameters before build; give loss= a function that does not detach the output",
        )
    return loss


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"


ITEMS = "num_items_in_batch"
"""The argument by which transformers models divide a sum of losses, instead of taking their mean."""


class LossWeights:
    """Weight the losses of micro-batches for a mean over all items.

    A runtime averages the losses of ``n`` micro-batches and of the replicas. With the weight ``w`` of a micro-batch,
    and the sum ``W`` over all micro-batches of all replicas, a loss is multiplied by ``w * n * replicas / W``. A model
    that divides a sum by ``num_items_in_batch`` gets that number divided by ``n * replicas``, so that the averaged sums
    are right, and so are further terms of the loss that it does not divide.

    Args:
        mesh: of the schedule.
        model: its forward may take ``num_items_in_batch``.
        function: the user's ``loss_weight``; None without one.
        device: of the process groups.
        dtype: the widest of the model.
    """

    def __init__(
        self,
        mesh: Mesh | None,
        model: nn.Module,
        function: Callable[[Any], Any] | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._function, self._device = model, function, device
        self._dtype = torch.promote_types(torch.float32, dtype)  # of a divided count
        groups = [mesh.group(mesh_dim) for mesh_dim in ("dp_replicate", "dp")] if mesh is not None else []
        self._groups = [group for group in groups if group is not None]
        self._replicas = math.prod(group.size() for group in self._groups)
        self.total: torch.Tensor | None = None  # of the present training step, over all replicas
        self._is_compared = self._is_probed = False
        self._waiting: list[tuple[Any, Any, Scales | None, int]] = []  # micro-batches of a training step

    def applies(self, batch: Any) -> bool:
        """Return whether losses of a batch are weighted."""
        return self._function is not None or self._items(batch) is not None

    def scales(self, batches: Sequence[Any], *, training: bool) -> Scales | None:
        """Return the scales of the micro-batches' losses; None without weights.

        A collective over the replicas for a training step. In an evaluation each replica has weights of its own.

        Args:
            batches: the micro-batches of a step, or a single batch.
            training: whether gradients are averaged over replicas afterwards.

        Raises:
            BuildError: ``loss_weight`` does not give a number, or gives 0 for all micro-batches of a training step; or
                it is given for a batch with ``num_items_in_batch``.
            RankMismatchError: ``num_items_in_batch`` differs between replicas.
        """
        items = self._items(batches[0])
        if items is not None:
            self._check_items(items)
            return None
        if self._function is None:
            return None
        weights = torch.stack([self._weight(batch) for batch in batches])
        total, replicas = weights.sum(), 1
        if training and self._groups:
            import torch.distributed as dist

            for group in self._groups:
                dist.all_reduce(total, group=group)
            replicas = self._replicas
        if training:
            self.total = total
        return Scales(weights, total, len(batches) * replicas, training=training)

    def divided(self, batch: Any, count: int) -> Any:
        """Return a micro-batch with ``num_items_in_batch`` divided by the number of averaged losses.

        Args:
            batch: the micro-batch.
            count: of the micro-batches of the step.
        """
        items, parts = self._items(batch), count * self._replicas
        if items is None or parts == 1:
            return batch
        if isinstance(items, torch.Tensor):
            items = items.to(self._dtype)
        return self._with_items(batch, items / parts)

    def prepare(self, batches: Sequence[Any]) -> None:
        """Weight the micro-batches of a training step, before :meth:`of` is called for each."""
        scales, count = self.scales(batches, training=True), len(batches)
        self._waiting = [(one, self.divided(one, count), scales, number) for number, one in enumerate(batches)]

    def of(self, batch: Any) -> tuple[Any, Scales | None, int]:
        """Return the batch for the model, the scales of the step, and its number there.

        Args:
            batch: a micro-batch of :meth:`prepare`, or a batch that is a step of its own.
        """
        if not self.applies(batch):
            return batch, None, 0
        if not torch.is_grad_enabled():
            return self.divided(batch, 1), self.scales([batch], training=False), 0
        place = next((place for place, (one, *_) in enumerate(self._waiting) if one is batch), None)
        if place is None:
            self.prepare([batch])
            place = 0
        return self._waiting.pop(place)[1:]

    def probe(self, batch: Any) -> Any:
        """Return the model's batch, whose count of items requires grad in the first step."""
        items = self._items(batch)
        if self._is_probed or not torch.is_grad_enabled() or items is None:
            return batch
        return self._with_items(batch, torch.as_tensor(items).detach().to(self._dtype, copy=True).requires_grad_())

    def check_divided(self, loss: torch.Tensor, probed: Any) -> None:
        """Refuse a model that takes the count of items without dividing by it.

        Args:
            loss: of the model.
            probed: the batch of :meth:`probe`.
        """
        count = self._items(probed)
        if self._is_probed or not isinstance(count, torch.Tensor) or not count.requires_grad:
            return
        self._is_probed = True
        if not _depends_on(loss, count):
            raise _items_ignored(self._model, "does not divide its loss by it")

    def _items(self, batch: Any) -> Any:
        """Return the count of items in a batch; None without one."""
        if isinstance(batch, Mapping):
            return batch.get(ITEMS)
        place = self._place if isinstance(batch, (tuple, list)) else None
        return batch[place] if place is not None and place < len(batch) else None

    @functools.cached_property
    def _place(self) -> int | None:
        names = [*ForwardSignature.of(self._model).signature.parameters]
        return names.index(ITEMS) if ITEMS in names else None

    def _with_items(self, batch: Any, items: Any) -> Any:
        if isinstance(batch, Mapping):
            return {**batch, ITEMS: items}
        values = [items if place == self._place else value for place, value in enumerate(batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)

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
                f"loss_weight is given, but the batch has '{ITEMS}', by which the model divides its loss itself",
                hint=f"leave out loss_weight, or '{ITEMS}'",
            )
        if self._is_compared or not self._groups:
            return
        import torch.distributed as dist

        self._is_compared = True
        own = torch.tensor([float(items)], dtype=torch.float64, device=self._device)
        everywhere = own
        for group in self._groups:
            found = [torch.empty_like(everywhere) for _ in range(group.size())]
            dist.all_gather(found, everywhere, group=group)
            everywhere = torch.cat(found)
        if bool((everywhere != own).any()):
            raise RankMismatchError(
                f"'{ITEMS}' differs between replicas ({', '.join(f'{float(one):g}' for one in everywhere)}): it must "
                "count the items of all their batches",
                hint="torch.distributed.all_reduce the counts first; or leave it out, and give build(loss_weight=...)",
            )


def _items_ignored(model: nn.Module, why: str) -> BuildError:
    return BuildError(
        f"the batch has '{ITEMS}', but {type(model).__name__} {why}: mean losses would be summed over micro-batches "
        "and replicas",
        hint=f"leave out '{ITEMS}', and give build(loss_weight=lambda batch: (batch[\"labels\"] != -100).sum())",
    )


def require_items_read(model: nn.Module, inputs: Mapping[str, Any], read: Collection[str]) -> None:
    """Refuse a count of items that pipeline stages may not read.

    Args:
        model: the cut model.
        inputs: the arguments of its forward, by parameter.
        read: the parameters that stages read.

    Raises:
        BuildError: there is a count, but no stage reads it; or it is among ``**kwargs``, which are read as one value.
    """
    if ITEMS in inputs and ITEMS not in read:
        raise _items_ignored(model, "does not divide its loss by it")
    if any(isinstance(value, Mapping) and value.get(ITEMS) is not None for value in inputs.values()):
        raise _items_ignored(model, "takes it among its **kwargs, which stages read as one value")


def _depends_on(value: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Return whether a leaf is in the graph of a value."""
    return any(getattr(node, "variable", None) is leaf for node in graph_of(value))


class Scales:
    """Scale the losses of a step's micro-batches by their weights.

    The host reads the weights, because a loss without items may have NaN gradients, which no factor sets to 0. From an
    accelerator it reads them after the first loss, and waits until the device begins the step.

    Args:
        weights: of the micro-batches.
        total: of all micro-batches, on all replicas.
        count: the divisor of the runtime's sum of losses.
        training: whether a total of 0 is refused.
    """

    def __init__(self, weights: torch.Tensor, total: torch.Tensor, count: int, *, training: bool) -> None:
        self._factors, self._training = weights * (count / total), training
        self._numbers, self._copied = torch.cat([weights, total.reshape(1)]), None
        if self._numbers.device.type != "cpu":
            there, self._numbers = self._numbers, torch.empty_like(self._numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(there, non_blocking=True)
            self._copied = torch.Event(there.device.type)
            self._copied.record()
        else:
            self.read()

    def read(self) -> list[float]:
        """Return the weights, followed by their total.

        Raises:
            BuildError: the total is 0, in a training step.
        """
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        numbers: list[float] = self._numbers.tolist()
        if self._training and self._numbers[-1] <= 0:  # false for fake tensors
            raise BuildError(
                f"the loss weights of the batch sum to {numbers[-1]:g} over all micro-batches and replicas",
                hint='loss_weight=lambda batch: (batch["labels"] != -100).sum(); skip batches without items',
            )
        return numbers

    def apply(self, loss: torch.Tensor, number: int) -> torch.Tensor:
        """Return a scaled loss; without items it is 0, with gradients of 0.

        Args:
            loss: a scalar tensor.
            number: of the micro-batch.
        """
        *weights, total = self.read()
        if weights[number] == 0 and total > 0:
            return _silenced(loss)
        return loss * self._factors[number].to(loss.device, loss.dtype, non_blocking=loss.device.type != "cpu")


def _silenced(loss: torch.Tensor) -> torch.Tensor:
    """Return 0 with the graph of a loss, for gradients of 0, never NaN.

    The backward pass runs as usual, with its hooks and collectives.
    """
    for node in graph_of(loss):
        following = [one for one, _ in node.next_functions if one is not None]
        # A function in Python may run a backward pass of its own, as reentrant checkpointing does.
        if isinstance(node, BackwardCFunction) or any(map(is_leaf, following)):
            node.register_prehook(_zeros)
            node.register_hook(lambda inputs, _: _zeros(inputs))
    return loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0)


def _zeros(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in gradients)


def is_leaf(node: Any) -> bool:
    """Return whether a node of autograd accumulates the gradient of a leaf, its ``variable``."""
    is_custom = isinstance(node, BackwardCFunction)  # with attributes of the user's function
    return not is_custom and bool(node.name() == "torch::autograd::AccumulateGrad")


def graph_of(value: torch.Tensor, seen: set[Any] | None = None) -> Iterator[Any]:
    """Yield the nodes of a value's graph, down to the leaves, in no order.

    Args:
        value: of a differentiable computation.
        seen: nodes to leave out; yielded nodes are added.
    """
    waiting, seen = [value.grad_fn], set() if seen is None else seen
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            yield node
