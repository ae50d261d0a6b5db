"""What users of other libraries have reported of losses without logits: here each is right."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_loss.chunked import linear_cross_entropy, log_probs
from slapo_loss.head_chunks import Objective, Vocabulary, chunk_size

from .comparison import agrees, gradients, in_step

VOCABULARY, WIDTH = 13, 6


class Model(nn.Module):
    """Embeddings, a layer and a head; the loss as a causal language model of transformers computes it."""

    def __init__(self, *, tied: bool = False, regularized: bool = False, head_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.regularized, self.head_dtype = regularized, head_dtype
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor, num_items: Tensor | None = None) -> Any:
        hidden = self.layer(self.embed(tokens)).tanh()
        logits = self.head(hidden if self.head_dtype is None else hidden.to(self.head_dtype))
        flat = logits.view(-1, VOCABULARY).float() if logits.dtype == torch.bfloat16 else logits.view(-1, VOCABULARY)
        reduction = "mean" if num_items is None else "sum"
        loss = F.cross_entropy(flat, labels.view(-1), reduction=reduction, ignore_index=-100)
        loss = loss if num_items is None else loss / num_items
        if self.regularized:
            log_probs = F.log_softmax(logits, dim=-1)
            loss = loss + 0.1 * (log_probs.exp() * log_probs).sum(-1).mean()
        return {"loss": loss, "logits": logits}


def pair(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """A model, and a copy with the step."""
    torch.manual_seed(0)
    model = Model(**settings).to(dtype)
    scheduled = copy.deepcopy(model)
    sch = slapo.create_schedule(scheduled)
    sch["head"].linear_cross_entropy()
    return model, scheduled


def batch(rows: int = 3, kept: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (rows, 6))
    labels = tokens.roll(-1, 1)
    labels[:, kept:] = -100
    return tokens, labels


def same_training(one: nn.Module, other: nn.Module, steps: Callable[[nn.Module], Tensor], **tolerance: float) -> None:
    found, expected = steps(other), steps(one)
    torch.testing.assert_close(found, expected, **tolerance)
    for (name, mine), (_, theirs) in zip(other.named_parameters(), one.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def split(hidden: Tensor, weight: Tensor, labels: Tensor, ranks: int, **settings: Any) -> list[list[Tensor]]:
    """The loss and gradients of each rank that holds a part of a padded vocabulary."""
    size = weight.shape[0]
    rows = -(-size // ranks)
    padded = F.pad(weight.detach(), (0, 0, 0, ranks * rows - size))

    def run(rank: int, gather: Callable[[Tensor], Tensor]) -> list[Tensor]:
        own = padded[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        vocabulary = Vocabulary(size, min(rank * rows, size), gather)
        loss = linear_cross_entropy(
            hidden, own, labels, objective=Objective(**settings), vocabulary=vocabulary, chunk=3
        )
        return gradients(loss, [hidden, own])

    return in_step(run, ranks)


def matches(found: list[list[Tensor]], expected: list[Tensor], size: int) -> None:
    for each in found:
        torch.testing.assert_close(each[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(each[1] for each in found), expected[1], rtol=1e-12, atol=1e-12)
    joined = torch.cat([each[2] for each in found])
    torch.testing.assert_close(joined[:size], expected[2], rtol=1e-12, atol=1e-12)
    assert (joined[size:] == 0).all()


def drawn(tokens: int, size: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    hidden, weight = torch.randn(tokens, 4).double() * scale, torch.randn(size, 4).double()
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, size, (tokens,))


def test_losses_of_ignored_tokens_are_zero_and_those_of_others_intact_under_compile() -> None:
    # linkedin/Liger-Kernel#1338: rows of ignored labels were read before they were written
    hidden, weight, labels = drawn(9, 7)
    labels[::2] = -100
    torch.full((4096,), torch.nan)  # memory that was used before
    compiled = torch.compile(linear_cross_entropy, backend="eager")
    for loss in (linear_cross_entropy, compiled):
        found = loss(hidden, weight, labels, objective=Objective(reduction="none"), chunk=2)
        assert (found[::2] == 0).all()
        expected = F.cross_entropy(F.linear(hidden, weight), labels, reduction="none")
        agrees(gradients(found, [hidden, weight]), gradients(expected, [hidden, weight]))


@pytest.mark.parametrize("reduction", ["none"])
def test_gradients_of_losses_per_token_follow_those_that_come_back(reduction: str) -> None:
    # linkedin/Liger-Kernel#1298: with reduction="none" the gradient that came back was ignored
    hidden, weight, labels = drawn(8, 7)
    scales = torch.linspace(-1, 2, 8).double()
    found = linear_cross_entropy(hidden, weight, labels, objective=Objective(reduction=reduction), chunk=3)
    expected = F.cross_entropy(F.linear(hidden, weight), labels, reduction=reduction)
    agrees(
        list(torch.autograd.grad(found @ scales, [hidden, weight])),
        list(torch.autograd.grad(expected @ scales, [hidden, weight])),
    )


def test_gradients_per_token_are_not_scaled_by_that_of_the_first_one() -> None:
    # NVIDIA-NeMo/Automodel#3853: all were scaled by the first element of the gradient
    hidden, weight, labels = drawn(8, 7)
    scales = torch.zeros(8).double()
    scales[5] = 1.0  # the first is 0
    found = linear_cross_entropy(hidden, weight, labels, objective=Objective(reduction="none"), chunk=8)
    (by_hidden,) = torch.autograd.grad(found @ scales, [hidden])
    alone = F.cross_entropy(F.linear(hidden[5:6], weight), labels[5:6])
    (expected,) = torch.autograd.grad(alone, [hidden])
    torch.testing.assert_close(by_hidden, expected, rtol=1e-12, atol=1e-12)


def test_accumulated_micro_batches_are_scaled_once() -> None:
    # unslothai/unsloth#8261: loss and gradients came out divided by the number of micro-batches once more
    model, scheduled = pair()
    batches = [batch(3, 4), batch(2, 1)]
    items = sum((labels != -100).sum() for _, labels in batches)

    def steps(model: nn.Module) -> Tensor:
        losses = [model(*each, num_items=items)["loss"] for each in batches]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).detach()

    same_training(model, scheduled, steps, rtol=1e-12, atol=1e-12)


def test_label_smoothing_over_ranks_uses_the_full_vocabulary() -> None:
    # NVIDIA/Megatron-LM#7452: each rank smoothed over its own classes; gathered logits gave loss + log(ranks)
    hidden, weight, labels = drawn(8, 12)
    for ranks, reduction in itertools.product((2, 3), ("mean", "none")):
        logits = F.linear(hidden, weight)
        expected = gradients(
            F.cross_entropy(logits, labels, reduction=reduction, label_smoothing=0.3), [hidden, weight]
        )
        found = split(hidden, weight, labels, ranks, reduction=reduction, label_smoothing=0.3)
        matches(found, expected, 12)


@pytest.mark.parametrize(("size", "ranks"), [(7, 2), (10, 4), (5, 4), (3, 4)])
def test_a_vocabulary_that_ranks_do_not_divide_is_padded_without_effect(size: int, ranks: int) -> None:
    # NVIDIA/Megatron-LM#1754: padding took part in the loss; here the last ranks hold less, or padding alone
    hidden, weight, labels = drawn(8, size)
    expected = gradients(F.cross_entropy(F.linear(hidden, weight), labels), [hidden, weight])
    matches(split(hidden, weight, labels, ranks), expected, size)


def test_a_rank_far_below_the_others_gives_no_infinity() -> None:
    # apple/ml-cross-entropy#59: with the vocabulary over ranks some losses became infinite
    hidden, weight, labels = drawn(8, 8, scale=200.0)
    with torch.no_grad():
        weight[:4] -= 5.0
    for reduction in ("none", "mean"):
        expected = gradients(F.cross_entropy(F.linear(hidden, weight), labels, reduction=reduction), [hidden, weight])
        found = split(hidden, weight, labels, 2, reduction=reduction)
        assert all(each.isfinite().all() for rank in found for each in rank)
        matches(found, expected, 8)


def test_labels_of_one_rank_alone_give_all_ranks_their_gradients() -> None:
    # apple/ml-cross-entropy#42: gradients of ranks without a label were wrong
    hidden, weight, labels = drawn(8, 12)
    labels %= 4
    for reduction in ("mean", "none"):
        expected = gradients(F.cross_entropy(F.linear(hidden, weight), labels, reduction=reduction), [hidden, weight])
        matches(split(hidden, weight, labels, 3, reduction=reduction), expected, 12)


def test_a_log_softmax_that_no_loss_takes_has_its_own_gradient() -> None:
    # pytorch/pytorch#190746: within loss_parallel such a log_softmax had the identity as its gradient
    model, scheduled = pair(regularized=True)
    tokens, labels = batch()

    def steps(model: nn.Module) -> Tensor:
        loss: Tensor = model(tokens, labels)["loss"]
        loss.backward()
        return loss.detach()

    same_training(model, scheduled, steps, rtol=1e-12, atol=1e-12)


def test_tied_head_stays_tied_and_full_through_a_state_dict() -> None:
    # pytorch/torchtitan#3764: a checkpoint corrupted a tied head
    model, scheduled = pair(tied=True)
    tokens, labels = batch()

    def steps(model: nn.Module) -> Tensor:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss: Tensor = model(tokens, labels)["loss"]
            loss.backward()
            optimizer.step()
        return loss.detach()

    same_training(model, scheduled, steps, rtol=1e-10, atol=1e-10)
    assert scheduled.head.weight is scheduled.embed.weight
    fresh, _ = pair(tied=True)
    fresh.load_state_dict(scheduled.state_dict())
    torch.testing.assert_close(fresh(tokens, labels)["loss"], scheduled(tokens, labels)["loss"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head_dtype", [None, torch.float32])
def test_the_head_computes_in_the_type_that_the_model_gives_it(head_dtype: torch.dtype | None) -> None:
    # huggingface/trl#6863: the projection was computed in another type than the head's
    model, scheduled = pair(torch.bfloat16, head_dtype=head_dtype)
    for one in (model, scheduled):
        one.head.to(head_dtype or torch.bfloat16)
    tokens, labels = batch()
    expected, found = model(tokens, labels), scheduled(tokens, labels)
    assert found["loss"].dtype == expected["loss"].dtype == torch.float32
    assert found["logits"].dtype == expected["logits"].dtype
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=1e-6)  # bfloat16 differs by 4e-3
    found["loss"].backward()
    expected["loss"].backward()
    assert scheduled.head.weight.grad.dtype == model.head.weight.grad.dtype
    torch.testing.assert_close(scheduled.head.weight.grad, model.head.weight.grad, rtol=1e-2, atol=1e-3)


def test_chunks_follow_from_classes_and_are_few() -> None:
    # linkedin/Liger-Kernel#1472: a number of chunks that only tokens decided cost 1,819 % more time
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert chunk_size(128_256, torch.float32, cpu, "in place") == (64 << 20) // (4 * 128_256) == 130
    assert chunk_size(128_256 // 8, torch.float32, cpu, "in place") > 8 * 130 - 8
    assert chunk_size(248_320, torch.bfloat16, gpu, "kernels") == 1024


def test_entropies_and_log_probs_over_ranks_equal_the_full_vocabulary() -> None:
    hidden, weight, labels = drawn(8, 10, scale=3.0)
    labels[2] = -100
    expected = gradients(log_probs(hidden, weight, labels, temperature=0.5), [hidden, weight])
    rows = 4

    def run(rank: int, gather: Callable[[Tensor], Tensor]) -> list[Tensor]:
        own = F.pad(weight.detach(), (0, 0, 0, 2))[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        vocabulary = Vocabulary(10, rank * rows, gather)
        return gradients(log_probs(hidden, own, labels, temperature=0.5, vocabulary=vocabulary, chunk=3), [hidden, own])

    found = in_step(run, 3)
    for each in found:
        torch.testing.assert_close(each[:2], expected[:2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(each[2] for each in found), expected[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([each[3] for each in found])[:10], expected[3], rtol=1e-12, atol=1e-12)
