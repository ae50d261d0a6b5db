"""Cross entropy of a linear head in chunks of tokens, without a tensor of all logits.

``rewrite: cross_entropy(between(hidden @ weight.T + bias), labels) -> chunks of it, and their gradients``

Where the loss is one number (``"mean"`` or ``"sum"``) a chunk's logits are made once: their gradient is known with
their log-sum-exp, so that the gradients of hidden states, weight and bias are made in the forward and scaled in the
backward. Where there is a loss per token the backward makes the logits again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slapo_loss.head_chunks import Between, ChunkedHead, Numbers, Objective, Vocabulary
from slapo_loss.head_gradients import Gradients
from slapo_loss.private import keeps_graph


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    objective: Objective | None = None,
    vocabulary: Vocabulary | None = None,
    between: Between | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute the cross entropy of ``hidden @ weight.T + bias`` in chunks of tokens.

    Args:
        hidden: (tokens, features).
        weight: (classes here, features); classes past the end of the vocabulary are padding.
        labels: (tokens,), of the full vocabulary.
        bias: (classes here,).
        class_weight: (classes,), of the full vocabulary.
        objective: reduction, label smoothing and the ignored label; None: a mean.
        vocabulary: the classes here; None: all.
        between: elementwise operations on the logits.
        chunk: tokens whose logits exist at a time; None: as many as the bound of the device holds.

    Returns:
        a scalar, or (tokens,) for ``reduction="none"``.

    Raises:
        IndexError: a label is neither a class nor the ignored one; on a GPU, an assertion on the device.
    """
    objective = objective or Objective()
    objective.check()
    apply = _PerToken.apply if objective.reduction == "none" else _ReducedLoss.apply
    settings = (objective, vocabulary or Vocabulary(weight.shape[0]), between, chunk)
    return _applied(apply, hidden, weight, bias, labels, class_weight, settings)  # type: ignore[no-any-return]


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
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute each label's log-probability and each distribution's entropy, in chunks.

    Args:
        hidden: (tokens, features).
        weight: (classes here, features).
        labels: (tokens,); an ignored one has log-probability 0.
        bias: (classes here,).
        temperature: by which logits are divided.
        ignore_index: the ignored label.
        vocabulary: the classes here; None: all.
        between: elementwise operations on the logits, before the temperature.
        chunk: tokens whose logits exist at a time; None: as many as the bound of the device holds.

    Returns:
        log-probabilities (tokens,) and entropies (tokens,), in nats.
    """
    cooled = between if temperature == 1.0 else functools.partial(_cooled, between, temperature)
    settings = (Objective(ignore_index), vocabulary or Vocabulary(weight.shape[0]), cooled, chunk)
    return _applied(_LogProbs.apply, hidden, weight, bias, labels, None, settings)  # type: ignore[no-any-return]


def _cooled(between: Between | None, temperature: float, logits: Tensor) -> Tensor:
    return (logits if between is None else between(logits)) / temperature


def _applied(apply: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """Call an autograd function as autocast would: losses in float32."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return apply(hidden, weight, bias, *rest)
    dtype = torch.get_autocast_dtype(kind)
    tensors = (one if one is None or one.dtype == torch.float64 else one.to(dtype) for one in (hidden, weight, bias))
    *given, (objective, vocabulary, between, chunk) = rest
    under = functools.partial(_under_autocast, between, kind, dtype)
    with torch.autocast(kind, enabled=False):
        return apply(*tensors, *given, (objective, vocabulary, under, chunk))


def _under_autocast(between: Between | None, kind: str, dtype: torch.dtype, logits: Tensor) -> Tensor:
    if between is not None:
        with torch.autocast(kind, dtype=dtype):
            logits = between(logits)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _ReducedLoss(torch.autograd.Function):
    """Compute one number, and its gradients in the forward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        head, needs = ChunkedHead(*arguments, ways=("in place", "kernels")), ctx.needs_input_grad[:3]
        gradients = Gradients(head, needs) if any(needs) else None
        norm, is_mean = head.target_weights.sum(), head.objective.reduction == "mean"
        total, mean = torch.zeros_like(norm), None
        if is_mean:
            mean = torch.where(head.kept.any(), norm.reciprocal(), 0.0)  # as torch: no label, no gradient
        is_late = head.hidden.dtype == torch.float16  # a mean may leave its range before the loss is scaled
        for part in head.chunks():
            targets = head.targets_of(part, None)
            logits, numbers = head.taken(part, targets if gradients is not None else None)
            total += head.losses(part, numbers).sum()
            if gradients is not None:
                gradients.add(part, logits, targets.factors if mean is None or is_late else targets.factors * mean)
        head.free()
        ctx.gradients, ctx.factor = gradients, mean if is_late else None
        return (total / norm if is_mean else total).to(head.returned)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError("its gradients were used in another backward: backward(retain_graph=True) keeps them")
        is_kept = keeps_graph()
        if not is_kept:
            ctx.gradients = None
        scale = scale.to(gradients.dtype)
        return (*gradients.scaled(scale if ctx.factor is None else scale * ctx.factor, is_kept), None, None, None)


class _PerToken(torch.autograd.Function):
    """Compute a number per token; the backward makes the logits again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        head = ChunkedHead(*arguments, ways=("kernels",))
        losses, kept = head.kept.clone(), []
        for part in head.chunks():
            _, numbers = head.taken(part, None)
            losses[part] = head.losses(part, numbers)
            kept += [numbers.shift, numbers.log_sum]
        *tensors, ctx.settings = arguments
        ctx.save_for_backward(*tensors, *kept)
        return losses.to(head.returned)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scales: Tensor) -> Any:
        tensors, head = _again(ctx, "kernels")
        gradients = Gradients(head, ctx.needs_input_grad[:3])
        for number, part in enumerate(head.chunks()):
            targets = head.targets_of(part, scales[part].to(head.dtype))
            logits = head.logits(part)
            head.to_gradient(part, logits, targets, Numbers(*tensors[2 * number : 2 * number + 2]))
            gradients.add(part, logits, targets.factors)
        return (*gradients.scaled(None, False), None, None, None)


class _LogProbs(torch.autograd.Function):
    """Compute log-probabilities and entropies; the backward makes the logits again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        head = ChunkedHead(*arguments)
        log_probs, entropies, kept = head.kept.clone(), head.kept.clone(), []
        for part in head.chunks():
            _, numbers = head.taken(part, None, entropy=True)
            assert numbers.entropy is not None
            log_probs[part], entropies[part] = -head.losses(part, numbers), numbers.entropy
            kept += [numbers.shift, numbers.log_sum, numbers.entropy]
        *tensors, ctx.settings = arguments
        ctx.save_for_backward(*tensors, *kept)
        return log_probs.to(head.returned), entropies.to(head.returned)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_log_probs: Tensor, of_entropies: Tensor) -> Any:
        tensors, head = _again(ctx)
        gradients = Gradients(head, ctx.needs_input_grad[:3])
        for number, part in enumerate(head.chunks()):
            targets = head.targets_of(part, -of_log_probs[part].to(head.dtype))
            logits = head.logits(part)
            shift, log_sum, entropy = tensors[3 * number : 3 * number + 3]
            numbers = Numbers(shift, log_sum, entropy=entropy)
            head.to_gradient(part, logits, targets, numbers, of_entropies[part].to(head.dtype))
            gradients.add(part, logits, None)
        return (*gradients.scaled(None, False), None, None, None)


def _again(ctx: Any, *ways: str) -> tuple[tuple[Tensor, ...], ChunkedHead]:
    hidden, weight, bias, labels, class_weight, *kept = ctx.saved_tensors
    return tuple(kept), ChunkedHead(hidden, weight, bias, labels, class_weight, ctx.settings, ways=ways)
