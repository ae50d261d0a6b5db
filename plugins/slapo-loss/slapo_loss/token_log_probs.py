"""Per-token log-probabilities and entropies of a scheduled head, for the losses of reinforcement learning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slapo_core import ArgumentError, Node
from slapo_loss import chunked
from slapo_loss.head_chunks import Between, Vocabulary
from slapo_loss.private import all_reduce_functional
from slapo_loss.ranks import Ranks
from slapo_loss.rules import split_violations


def log_probs(
    hidden: Tensor,
    head: Node,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    between: Between | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute each label's log-probability and each distribution's entropy, in chunks of tokens.

    Of the head's classes over all ranks, with gradients for hidden states, weight and bias; the same on every rank.
    No tensor of all tokens by the classes exists.

    Args:
        hidden: (..., features), the full input of the head on every rank.
        head: the layer in its schedule, e.g. ``sch["lm_head"]``; its weight may be split along the classes.
        labels: (...), of the full vocabulary; shifted already.
        temperature: by which logits are divided.
        ignore_index: label of tokens whose log-probability is 0.
        between: elementwise operations on the logits, before the temperature, e.g. softcapping.
        chunk: tokens whose logits exist at a time; None: as many as the bound of the device holds.

    Returns:
        log-probabilities and entropies in nats, both of the shape of ``labels``.

    Raises:
        ArgumentError: the head is not a linear layer of a schedule, or is split otherwise; shapes or the temperature do
            not fit.
        IndexError: a label is neither a class nor the ignored one.
    """
    if not isinstance(head, Node) or not isinstance(head.module, nn.Linear):
        raise ArgumentError(
            f"log_probs: head must be an nn.Linear of a schedule (got {type(getattr(head, 'module', head)).__name__})",
            hint='log_probs(hidden, sch["lm_head"], labels)',
        )
    if labels.shape != hidden.shape[:-1]:
        raise ArgumentError(
            f"log_probs: labels must have shape {tuple(hidden.shape[:-1])}, that of the hidden states without features "
            f"(got {tuple(labels.shape)})",
            path=head.path,
            hint="with sequence parallelism, gather the hidden states first",
        )
    if not temperature > 0:
        raise ArgumentError(f"log_probs: temperature must be positive (got {temperature})", path=head.path)
    module, flat = head.module, hidden.reshape(-1, hidden.shape[-1])
    vocabulary, group = _vocabulary(head)
    if group is not None:
        flat = _SumGradient.apply(flat, group)  # type: ignore[no-untyped-call]
    found = chunked.log_probs(
        flat,
        module.weight,
        labels.reshape(-1),
        bias=module.bias,
        temperature=temperature,
        ignore_index=ignore_index,
        vocabulary=vocabulary,
        between=between,
        chunk=chunk,
    )
    return found[0].view(labels.shape), found[1].view(labels.shape)


def _vocabulary(head: Node) -> tuple[Vocabulary, str | None]:
    layout, here = head.layout("weight"), head.parameters["weight"].shape[0]
    size, mesh = layout.shape[0], head.mesh
    dims = [mesh_dim for mesh_dim, _ in layout.shards() if mesh is not None and mesh.size(mesh_dim) > 1]
    if not dims or mesh is None:
        return Vocabulary(size), None
    refused = next(split_violations(head, dims[0]), None)
    if refused is not None:
        raise ArgumentError(f"log_probs: {refused.message}", path=head.path, hint=refused.hint)
    ranks = Ranks.along(mesh, dims[0])
    if ranks.name is None:
        raise ArgumentError(
            f"log_probs ran on an abstract mesh: this process has no process group for the {ranks.size} ranks",
            path=head.path,
            hint=ranks.launch,
        )
    return Vocabulary(size, min(ranks.rank * here, size), ranks.gather, ranks.name), ranks.name


class _SumGradient(torch.autograd.Function):
    """Sum the gradient over the ranks that hold the vocabulary."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: str) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_reduce_functional(gradient, ctx.group), None
