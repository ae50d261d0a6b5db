"""Cross entropy of a linear head in chunks of tokens: no tensor of all tokens by the whole vocabulary exists.

``rewrite: cross_entropy(between(hidden @ weight.T + bias), labels) -> chunks of it, and their gradients``

Where the loss is one number (``"mean"`` or ``"sum"``) a chunk's logits are made once: their gradient is known with their
log-sum-exp, so that the gradients of hidden states, weight and bias are made in the forward and scaled in the
backward. Where there is a loss per token the backward makes the logits again.

With the vocabulary split over ranks a chunk takes one exchange: each rank's log-sum-exp, target logit and (for label
smoothing) sum of logits, three numbers a token; from the gathered log-sum-exps that of the whole vocabulary follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slapo_loss.private import keeps_graph

Between = Callable[[Tensor], Tensor]
"""Elementwise operations between the head and its loss, e.g. ``lambda z: z.float()``: logits -> logits of one shape."""

Gather = Callable[[Tensor], Tensor]
"""Gathers over the ranks that hold the vocabulary: (...) -> (ranks, ...)."""


@dataclass(frozen=True)
class Vocabulary:
    """The part of a vocabulary that this process holds.

    Args:
        size: classes in all, without padding.
        start: the first class here.
        gather: over the ranks that hold the others; None where all of it is here.
    """

    size: int
    start: int = 0
    gather: Gather | None = None


@dataclass(frozen=True)
class Objective:
    """What `torch.nn.functional.cross_entropy` takes beside logits and labels.

    Args:
        ignore_index: label of a token that has no part in the loss.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: share of the uniform distribution in the target, 0 to 1.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    objective: Objective = Objective(),
    vocabulary: Vocabulary | None = None,
    between: Between | None = None,
    chunk: int = 1024,
) -> Tensor:
    """Compute the cross entropy of ``hidden @ weight.T + bias`` in chunks of tokens.

    Args:
        hidden: (tokens, features).
        weight: (classes here, features); classes past the end of the vocabulary are padding.
        labels: (tokens,), of the whole vocabulary.
        bias: (classes here,).
        class_weight: (classes,), of the whole vocabulary.
        objective: reduction, label smoothing and the ignored label.
        vocabulary: what of it is here; None: all.
        between: elementwise operations on the logits.
        chunk: tokens whose logits exist at a time.

    Returns:
        a scalar, or (tokens,) for ``reduction="none"``.
    """
    vocabulary = vocabulary or Vocabulary(weight.shape[0])
    settings = _Settings(objective, vocabulary, between, max(1, min(chunk, max(1, hidden.shape[0]))))
    apply = _PerToken.apply if objective.reduction == "none" else _Reduced.apply
    return apply(hidden, weight, bias, labels, class_weight, settings)  # type: ignore[no-any-return,no-untyped-call]


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    vocabulary: Vocabulary | None = None,
    between: Between | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each label, and the entropy of each distribution, in chunks of tokens.

    Args:
        hidden: (tokens, features).
        weight: (classes here, features).
        labels: (tokens,); an ignored one has log-probability 0.
        bias: (classes here,).
        temperature: by which logits are divided.
        ignore_index: the ignored label.
        vocabulary: what of it is here; None: all.
        between: elementwise operations on the logits, before the temperature.
        chunk: tokens whose logits exist at a time.

    Returns:
        log-probabilities (tokens,) and entropies (tokens,), in nats.
    """

    def shown(logits: Tensor) -> Tensor:
        return (logits if between is None else between(logits)) / temperature

    vocabulary = vocabulary or Vocabulary(weight.shape[0])
    cooled = between if temperature == 1.0 else shown
    settings = _Settings(Objective(ignore_index), vocabulary, cooled, max(1, chunk))
    found: tuple[Tensor, Tensor] = _LogProbs.apply(hidden, weight, bias, labels, None, settings)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class _Settings:
    objective: Objective
    vocabulary: Vocabulary
    between: Between | None
    chunk: int


class _Reduced(torch.autograd.Function):
    """One number, with its gradients made in the forward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        head, needs = _Head(*arguments), ctx.needs_input_grad[:3]
        norm = head.target_weights.sum() if head.objective.reduction == "mean" else None
        scale = None if norm is None else norm.reciprocal()
        gradients = _Gradients(head, needs) if any(needs) else None
        total = torch.zeros((), dtype=head.dtype, device=head.hidden.device)
        for part in head.chunks():
            logits = _Logits(head, part)
            total += logits.losses().sum()
            if gradients is not None:
                gradients.add(logits, scale)
        ctx.gradients = None if gradients is None else gradients.of_inputs()
        return (total if norm is None else total / norm).to(head.returned)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError("its gradients were used in another backward: backward(retain_graph=True) keeps them")
        if keeps_graph():
            found = [None if one is None else one * scale.to(one.dtype) for one in gradients]
        else:
            ctx.gradients = None
            found = [None if one is None else one.mul_(scale.to(one.dtype)) for one in gradients]
        return (*found, None, None, None)


class _PerToken(torch.autograd.Function):
    """A number per token; the backward makes the logits again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        head = _Head(*arguments)
        losses, log_sums = [], []
        for part in head.chunks():
            logits = _Logits(head, part)
            losses.append(logits.losses())
            log_sums.append(logits.log_sum)
        *tensors, ctx.settings = arguments
        ctx.save_for_backward(*tensors, *log_sums)
        return (torch.cat(losses) if losses else head.target_weights).to(head.returned)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scales: Tensor) -> Any:
        (*tensors,) = ctx.saved_tensors
        head = _Head(*tensors[:5], ctx.settings)
        gradients = _Gradients(head, ctx.needs_input_grad[:3])
        for part, log_sum in zip(head.chunks(), tensors[5:], strict=True):
            gradients.add(_Logits(head, part, log_sum), scales[part].to(head.dtype))
        return (*gradients.of_inputs(), None, None, None)


class _LogProbs(torch.autograd.Function):
    """A log-probability and an entropy per token; the backward makes the logits again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        head = _Head(*arguments)
        found, kept = [], []
        for part in head.chunks():
            logits = _Logits(head, part)
            mean = logits.mean()
            found.append((-logits.losses(), logits.log_sum - mean))
            kept += [logits.log_sum, mean]
        *tensors, ctx.settings = arguments
        ctx.save_for_backward(*tensors, *kept)
        empty = head.kept
        log_probs, entropies = (
            ([torch.cat(one) for one in zip(*found, strict=True)]) if found else (empty, empty.clone())
        )
        return log_probs.to(head.returned), entropies.to(head.returned)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_log_probs: Tensor, of_entropies: Tensor) -> Any:
        tensors = ctx.saved_tensors
        head = _Head(*tensors[:5], ctx.settings)
        gradients = _Gradients(head, ctx.needs_input_grad[:3])
        for number, part in enumerate(head.chunks()):
            log_sum, mean = tensors[5 + 2 * number : 7 + 2 * number]
            logits = _Logits(head, part, log_sum)
            gradients.add(logits, -of_log_probs[part].to(head.dtype), (mean, of_entropies[part].to(head.dtype)))
        return (*gradients.of_inputs(), None, None, None)


class _Head:
    """The arguments of a call, and what its chunks share."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        class_weight: Tensor | None,
        settings: _Settings,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.objective, self.vocabulary = settings.objective, settings.vocabulary
        self.between, self._chunk = settings.between, settings.chunk
        shown = self.shown(F.linear(hidden[:0], weight, bias))
        self.returned = shown.dtype
        self.dtype = torch.promote_types(shown.dtype, torch.float32)
        self.classes = max(0, min(weight.shape[0], self.vocabulary.size - self.vocabulary.start))
        kept = labels != self.objective.ignore_index
        known = torch.where(kept, labels, 0)
        self.kept = kept.to(self.dtype)
        self.target_weights, self.class_weight = self.kept, None
        if class_weight is not None:
            class_weight = class_weight.to(self.dtype)
            self.target_weights = self.kept * class_weight[known]
            self.class_weight = class_weight.narrow(0, min(self.vocabulary.start, self.vocabulary.size), self.classes)
        self.total_weight = self.vocabulary.size if class_weight is None else class_weight.sum()
        self.targets = known - self.vocabulary.start
        self.is_here = (self.targets >= 0) & (self.targets < self.classes)
        self.targets = torch.where(self.is_here, self.targets, 0)

    def shown(self, logits: Tensor) -> Tensor:
        return logits if self.between is None else self.between(logits)

    def chunks(self) -> Iterator[slice]:
        for start in range(0, self.hidden.shape[0], self._chunk):
            yield slice(start, start + self._chunk)


class _Logits:
    """The logits of a chunk, with the log-sum-exp of the whole vocabulary."""

    def __init__(self, head: _Head, part: slice, log_sum: Tensor | None = None) -> None:
        self.head, self.part = head, part
        self._of_head = F.linear(head.hidden[part], head.weight, head.bias)
        self._shown = self._of_head
        if head.between is not None:
            with torch.enable_grad():
                self._of_head.requires_grad_()
                self._shown = head.shown(self._of_head)
        self._values = self._shown.detach().to(head.dtype)
        if head.classes < self._values.shape[1]:
            self._values = self._values.clone() if self._values is self._shown else self._values
            self._values[:, head.classes :] = -torch.inf
        self.log_sum = self._exchange() if log_sum is None else log_sum

    def _exchange(self) -> Tensor:
        """Take the log-sum-exp, the target logits and the sums of logits of the whole vocabulary."""
        head, values = self.head, self._values
        target = values.gather(1, head.targets[self.part, None]).squeeze(1)
        self._target = torch.where(head.is_here[self.part], target, 0.0)
        log_sum = values.logsumexp(1)
        self._sum = None
        if head.objective.label_smoothing:
            own = values[:, : head.classes]
            self._sum = own.sum(1) if head.class_weight is None else own @ head.class_weight
        gather = head.vocabulary.gather
        if gather is None:
            return log_sum
        parts = [log_sum, self._target] if self._sum is None else [log_sum, self._target, self._sum]
        gathered = gather(torch.stack(parts))
        self._target = gathered[:, 1].sum(0)
        if self._sum is not None:
            self._sum = gathered[:, 2].sum(0)
        return gathered[:, 0].logsumexp(0)

    def mean(self) -> Tensor:
        """Return the mean logit of each token under its distribution."""
        own = self._values[:, : self.head.classes]
        found = (torch.exp(own - self.log_sum[:, None]) * own).sum(1)
        gather = self.head.vocabulary.gather
        return found if gather is None else gather(found).sum(0)

    def losses(self) -> Tensor:
        """Return the loss of each token."""
        head, smoothing = self.head, self.head.objective.label_smoothing
        losses = head.target_weights[self.part] * (self.log_sum - self._target)
        losses = torch.where(head.kept[self.part] > 0, losses, 0.0)  # the logits of an ignored token may be infinite
        if self._sum is None:
            return losses
        smooth = head.kept[self.part] * (self.log_sum * head.total_weight - self._sum)
        return losses * (1 - smoothing) + smooth * (smoothing / head.vocabulary.size)

    def gradient(self, scale: Tensor | None, entropy: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the gradient of what the head gave.

        Args:
            scale: gradient of the losses of the tokens; a scalar or one for each. None: 1.
            entropy: mean logits of the tokens, and gradient of their entropies.
        """
        head, smoothing = self.head, self.head.objective.label_smoothing
        of_target, kept = head.target_weights[self.part], head.kept[self.part]
        if scale is not None:
            of_target, kept = of_target * scale, kept * scale
        of_target = of_target * (1 - smoothing) if smoothing else of_target
        uniform = kept * (smoothing / head.vocabulary.size) if smoothing else None
        of_all = of_target if uniform is None else of_target + uniform * head.total_weight
        found = torch.sub(self._values, self.log_sum[:, None]).exp_()
        if entropy is None:
            found.mul_(of_all[:, None])
        else:
            mean, of_entropy = entropy
            values = self._values.clamp_min(torch.finfo(head.dtype).min)  # of padding: times a probability of 0
            found.mul_(of_all[:, None] - of_entropy[:, None] * (values - mean[:, None]))
        here = torch.where(head.is_here[self.part], of_target, 0.0)
        found.scatter_add_(1, head.targets[self.part, None], -here[:, None])
        if uniform is not None:
            classes = 1.0 if head.class_weight is None else head.class_weight
            found[:, : head.classes] -= uniform[:, None] * classes
        if head.between is None:
            return found.to(self._of_head.dtype)
        (found,) = torch.autograd.grad(self._shown, self._of_head, found.to(self._shown.dtype))
        return found


class _Gradients:
    """The gradients of hidden states, weight and bias, chunk by chunk."""

    def __init__(self, head: _Head, needs: Any) -> None:
        self._head = head
        hidden, weight, bias = needs
        several = head.hidden.shape[0] > head._chunk
        sums = torch.promote_types(head.weight.dtype, torch.float32) if several else head.weight.dtype
        self._hidden = torch.empty_like(head.hidden) if hidden else None
        self._weight = torch.zeros_like(head.weight, dtype=sums) if weight else None
        self._bias = torch.zeros_like(head.bias, dtype=sums) if bias and head.bias is not None else None

    def add(self, logits: _Logits, scale: Tensor | None, entropy: tuple[Tensor, Tensor] | None = None) -> None:
        """Add a chunk's; see `_Logits.gradient`."""
        gradient, head = logits.gradient(scale, entropy), self._head
        if self._hidden is not None:
            torch.mm(gradient, head.weight, out=self._hidden[logits.part])
        if self._bias is not None:
            self._bias += gradient.sum(0, dtype=self._bias.dtype)
        if self._weight is not None:
            hidden = head.hidden[logits.part]
            if self._weight.dtype == gradient.dtype:
                self._weight.addmm_(gradient.t(), hidden)
            else:
                self._weight += gradient.t() @ hidden

    def of_inputs(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weight = None if self._weight is None else self._weight.to(self._head.weight.dtype)
        bias = None if self._bias is None else self._bias.to(self._head.weight.dtype)
        return self._hidden, weight, bias
