"""Losses in chunks of tokens are those of torch, in float64, with every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_loss.chunked import Objective, Vocabulary, linear_cross_entropy, log_probs

CLASSES, FEATURES = 11, 5
BETWEEN: dict[str, Callable[[Tensor], Tensor] | None] = {
    "nothing": None,
    "softcapping": lambda logits: torch.tanh(logits / 3) * 3,
    "float()": lambda logits: logits.float(),
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def arguments(tokens: int, *, bias: bool = False) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(tokens)
    tensors = [drawn(tokens, FEATURES), drawn(CLASSES, FEATURES)]
    labels = torch.randint(0, CLASSES, (tokens,))
    labels[2::3] = -100
    return [*tensors, drawn(CLASSES)] if bias else tensors, labels


def gradients(value: Any, tensors: list[Tensor]) -> list[Tensor]:
    outputs = value if isinstance(value, tuple) else (value,)
    torch.manual_seed(1)
    found = torch.autograd.grad(outputs, tensors, [torch.rand_like(one) for one in outputs])
    return [*outputs, *found]


def agrees(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        tolerance = 1e-12 if other.dtype == torch.float64 and expected[0].dtype == torch.float64 else 3e-6
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("between", BETWEEN)
def test_loss_and_gradients_are_those_of_torch(reduction: str, between: str) -> None:
    for tokens, chunk, bias, weighted, smoothing in itertools.product(
        (1, 7), (1, 3, 100), (False, True), (False, True), (0.0, 0.1)
    ):
        tensors, labels = arguments(tokens, bias=bias)
        middle = BETWEEN[between]
        logits = F.linear(*tensors)
        logits = logits if middle is None else middle(logits)
        weights = torch.rand(CLASSES, dtype=logits.dtype) if weighted else None
        settings = {"reduction": reduction, "label_smoothing": smoothing}
        expected = F.cross_entropy(logits, labels, weight=weights, **settings)
        found = linear_cross_entropy(
            *tensors[:2],
            labels,
            bias=tensors[2] if bias else None,
            class_weight=weights,
            objective=Objective(**settings),  # type: ignore[arg-type]
            between=middle,
            chunk=chunk,
        )
        agrees(gradients(found, tensors), gradients(expected, tensors))


@pytest.mark.parametrize("between", BETWEEN)
def test_log_probabilities_and_entropies_are_those_of_torch(between: str) -> None:
    for tokens, chunk, temperature in itertools.product((1, 7), (2, 100), (1.0, 0.7)):
        tensors, labels = arguments(tokens, bias=True)
        middle = BETWEEN[between]
        logits = F.linear(*tensors)
        of_all = ((logits if middle is None else middle(logits)) / temperature).log_softmax(-1)
        picked = of_all.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
        expected = torch.where(labels == -100, 0.0, picked), -(of_all.exp() * of_all).sum(-1)
        found = log_probs(*tensors[:2], labels, bias=tensors[2], temperature=temperature, between=middle, chunk=chunk)
        agrees(gradients(found, tensors), gradients(expected, tensors))


def test_a_batch_without_a_label_is_as_in_torch() -> None:
    tensors, labels = arguments(4)
    labels[:] = -100
    assert linear_cross_entropy(*tensors, labels).isnan()
    total = linear_cross_entropy(*tensors, labels, objective=Objective(reduction="sum"))
    assert total == 0
    assert all((one == 0).all() for one in torch.autograd.grad(total, tensors))


def test_infinite_logits_of_an_ignored_token_change_nothing() -> None:
    tensors, labels = arguments(6)
    expected = gradients(linear_cross_entropy(*tensors, labels), tensors)
    with torch.no_grad():
        tensors[0][2] = torch.inf
    found = linear_cross_entropy(*tensors, labels)
    assert found == expected[0]


def test_a_graph_may_be_kept_and_is_given_up_otherwise() -> None:
    tensors, labels = arguments(6)
    loss = linear_cross_entropy(*tensors, labels, chunk=2)
    (loss * 2).backward(retain_graph=True)
    (loss * 3).backward()
    whole = F.cross_entropy(F.linear(*tensors), labels)
    expected = torch.autograd.grad(5 * whole, tensors)
    agrees([one.grad for one in tensors if one.grad is not None], list(expected))
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


def test_nothing_larger_than_a_chunk_of_logits_is_made() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.extend(one.numel() for one in torch.utils._pytree.tree_leaves(result) if isinstance(one, Tensor))
            return result

    hidden, weight = drawn(64, 3), drawn(100, 3)
    labels = torch.randint(0, 100, (64,))
    with Sizes():
        linear_cross_entropy(hidden, weight, labels, chunk=4).backward()
    assert max(sizes) == 4 * 100


def test_a_split_vocabulary_gives_the_loss_of_the_whole_one() -> None:
    """Ranks as threads would run them: each one's numbers are gathered from lists."""
    size, ranks = CLASSES, 3
    rows = -(-size // ranks)
    tensors, labels = arguments(7, bias=True)
    padded = [
        F.pad(tensors[1].detach(), (0, 0, 0, ranks * rows - size)),
        F.pad(tensors[2].detach(), (0, ranks * rows - size)),
    ]
    for smoothing, reduction in itertools.product((0.0, 0.1), ("mean", "sum", "none")):
        settings = {"reduction": reduction, "label_smoothing": smoothing}
        expected = gradients(F.cross_entropy(F.linear(*tensors), labels, **settings), tensors)

        def run(rank: int, gather: Callable[[Tensor], Tensor]) -> list[Tensor]:
            own = [one[rank * rows : (rank + 1) * rows].clone().requires_grad_() for one in padded]
            vocabulary = Vocabulary(size, min(rank * rows, size), gather)
            loss = linear_cross_entropy(
                tensors[0], own[0], labels, bias=own[1], objective=Objective(**settings), vocabulary=vocabulary, chunk=3
            )
            return gradients(loss, [tensors[0], *own])

        found = in_step(run, ranks)
        for each in found:
            torch.testing.assert_close(each[0], expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sum(each[1] for each in found), expected[1], rtol=1e-12, atol=1e-12)
        for position in (2, 3):
            joined = torch.cat([each[position] for each in found])[:size]
            torch.testing.assert_close(joined, expected[position], rtol=1e-12, atol=1e-12)


def in_step(run: Callable[[int, Callable[[Tensor], Tensor]], Any], ranks: int) -> list[Any]:
    """Run functions in threads that meet in each gather."""
    import threading

    barrier, shown = threading.Barrier(ranks), [torch.empty(0)] * ranks
    results: list[Any] = [None] * ranks

    def gather_of(rank: int) -> Callable[[Tensor], Tensor]:
        def gather(tensor: Tensor) -> Tensor:
            shown[rank] = tensor
            barrier.wait(60)
            found = torch.stack(shown)
            barrier.wait(60)
            return found

        return gather

    def start(rank: int) -> None:
        results[rank] = run(rank, gather_of(rank))

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
