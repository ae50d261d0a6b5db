"""Losses in chunks of tokens are those of torch, in float64, with every gradient."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_loss import head_chunks
from slapo_loss.chunked import linear_cross_entropy, log_probs
from slapo_loss.head_chunks import CHUNK_BYTES, Objective, Vocabulary, chunk_size

from .comparison import agrees, gradients, in_step

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


@pytest.mark.parametrize("between", [None, torch.tanh])  # the backward of tanh reads what it returned
def test_padding_leaves_what_operations_saved(between: Callable[[Tensor], Tensor] | None) -> None:
    tensors, labels = arguments(7)
    logits = F.linear(*tensors) if between is None else between(F.linear(*tensors))
    labels = labels.clamp_max(CLASSES - 4)
    expected = gradients(F.cross_entropy(logits[:, : CLASSES - 3], labels), tensors)
    found = linear_cross_entropy(*tensors, labels, between=between, vocabulary=Vocabulary(CLASSES - 3), chunk=2)
    agrees(gradients(found, tensors), expected)


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

        def run(rank: int, gather: Callable[[Tensor], Tensor], settings: dict[str, Any] = settings) -> list[Tensor]:
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


# -- labels, sizes, and what is asked twice ---------------------------------------------------------------------------


@pytest.mark.parametrize("label", [CLASSES, -1, -7])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_label_out_of_bounds_raises_as_in_torch(label: int, reduction: str) -> None:
    tensors, labels = arguments(4)
    labels[1] = label
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(F.linear(*tensors), labels)
    with pytest.raises(IndexError, match=f"label {label} is out of bounds for {CLASSES}"):
        linear_cross_entropy(*tensors, labels, objective=Objective(reduction=reduction))


def test_an_ignored_label_may_be_a_class_and_labels_of_any_integer_type() -> None:
    tensors, labels = arguments(9)
    labels[:] = torch.tensor([3, 1, 3, 2, 3, 0, 10, 9, 3])
    for reduction, weight in itertools.product(("mean", "sum", "none"), (None, torch.rand(CLASSES).double())):
        expected = F.cross_entropy(F.linear(*tensors), labels, weight=weight, ignore_index=3, reduction=reduction)
        found = linear_cross_entropy(
            *tensors, labels.int(), class_weight=weight, objective=Objective(3, reduction), chunk=4
        )
        agrees(gradients(found, tensors), gradients(expected, tensors))


def test_no_tokens_at_all_are_as_in_torch() -> None:
    tensors, labels = arguments(0)
    for reduction in ("mean", "sum", "none"):
        found = linear_cross_entropy(*tensors, labels, objective=Objective(reduction=reduction))
        expected = F.cross_entropy(F.linear(*tensors), labels, reduction=reduction)
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert all((one == 0).all() for one in torch.autograd.grad(found.sum(), tensors))
    assert [one.shape for one in log_probs(*tensors, labels)] == [(0,), (0,)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_without_a_label_are_those_of_torch(reduction: str, smoothing: float) -> None:
    tensors, labels = arguments(4)
    labels[:] = -100
    found, expected = (
        loss(objective=Objective(reduction=reduction, label_smoothing=smoothing))
        if loss is not F.cross_entropy
        else F.cross_entropy(F.linear(*tensors), labels, reduction=reduction, label_smoothing=smoothing)
        for loss in (functools.partial(linear_cross_entropy, *tensors, labels), F.cross_entropy)
    )
    torch.testing.assert_close(found, expected, equal_nan=True)
    for one, other in zip(
        torch.autograd.grad(found.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
    ):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_settings_that_torch_refuses_are_refused() -> None:
    tensors, labels = arguments(4)
    with pytest.raises(ValueError, match="reduction"):
        Objective(reduction="average").check()
    with pytest.raises(RuntimeError, match="label_smoothing"):
        Objective(label_smoothing=1.5).check()
    with pytest.raises(RuntimeError, match="class weights"):
        linear_cross_entropy(*tensors, labels, class_weight=torch.ones(CLASSES - 1).double())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_and_transforms_are_refused(reduction: str) -> None:
    tensors, labels = arguments(4)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, objective=Objective(reduction=reduction)).sum()

    (first,) = torch.autograd.grad(loss(*tensors), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(loss)(*(one.detach() for one in tensors))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(loss, in_dims=(0, None))(
            tensors[0].detach()[:, None].expand(4, 4, FEATURES), tensors[1].detach()
        )
    with pytest.raises(RuntimeError, match="forward"), torch.autograd.forward_ad.dual_level():
        loss(torch.autograd.forward_ad.make_dual(tensors[0].detach(), tensors[0].detach()), tensors[1])


# -- numbers of other types -------------------------------------------------------------------------------------------


def test_logits_far_apart_lose_nothing() -> None:
    hidden = torch.tensor([[300.0], [-200.0], [1.0]], requires_grad=True)
    weight, labels = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True), torch.tensor([1, 0, 2])
    for smoothing, reduction in itertools.product((0.0, 0.1), ("sum", "none")):
        expected = F.cross_entropy(F.linear(hidden, weight), labels, reduction=reduction, label_smoothing=smoothing)
        found = linear_cross_entropy(hidden, weight, labels, objective=Objective(-100, reduction, smoothing), chunk=2)
        assert found.isfinite().all()
        agrees(gradients(found, [hidden, weight]), gradients(expected, [hidden, weight]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_small_types_are_no_worse_than_those_of_torch(dtype: torch.dtype, reduction: str) -> None:
    """Against float64, with the sums of many chunks, and with a mean that leaves the range of float16."""
    torch.manual_seed(0)
    tokens = 4096
    hidden, weight = torch.randn(tokens, 16).to(dtype), (torch.randn(64, 16) / 4).to(dtype)
    labels = torch.randint(0, 3, (tokens,))  # few classes with large sums
    labels[::5] = -100

    def taken(loss: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        given = [one.clone().requires_grad_() for one in tensors]
        found = loss(*given)
        (found if found.dim() == 0 else found.float().sum() / 64).mul(64.0).backward()
        return [one.grad.double() for one in given if one.grad is not None]

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(
            F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32)), labels, reduction=reduction
        )

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, labels, objective=Objective(reduction=reduction), between=Tensor.float, chunk=128
        )

    exact = taken(plain, hidden.double(), weight.double())
    for one, other, right in zip(taken(ours, hidden, weight), taken(plain, hidden, weight), exact, strict=True):
        error, allowed = (one - right).norm() / right.norm(), (other - right).norm() / right.norm()
        assert error < 1.25 * allowed, (float(error), float(allowed))


def test_means_in_float16_are_taken_after_the_loss_is_scaled() -> None:
    """A gradient of 1e-8 is 0 in float16, and times the scale of the loss it is not."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2048, 8).half(), (torch.randn(16, 8) / 1024).half()
    hidden, labels = hidden.requires_grad_(), torch.randint(0, 16, (2048,))
    found = linear_cross_entropy(hidden, weight, labels, between=Tensor.float)
    exact = F.cross_entropy(F.linear(hidden.double(), weight.double()), labels)
    of_all = [torch.autograd.grad(loss * 2.0**15, hidden)[0].double() for loss in (found, exact)]
    assert (of_all[0] - of_all[1]).norm() < 1e-2 * of_all[1].norm()


def test_class_weights_are_not_rounded_to_the_type_of_the_head() -> None:
    """1.003 is 1 in bfloat16: gradients of the weight would all be smaller by 0.3 %."""
    torch.manual_seed(0)
    given = [torch.randn(512, 16).bfloat16().requires_grad_(), torch.randn(32, 16).bfloat16().requires_grad_()]
    labels, weights, total = torch.randint(0, 32, (512,)), torch.full((32,), 1.003), Objective(reduction="sum")
    found = linear_cross_entropy(*given, labels, class_weight=weights, objective=total, between=Tensor.float, chunk=64)
    logits = F.linear(given[0].double(), given[1].double())
    exact = F.cross_entropy(logits, labels, weights.double(), reduction="sum")
    for one, right in zip(torch.autograd.grad(found, given), torch.autograd.grad(exact, given), strict=True):
        one, right = one.double(), right.double()
        assert float((one * right).sum() / (right * right).sum()) == pytest.approx(1, abs=5e-4)


@pytest.mark.parametrize(("cast", "taken"), [(Tensor.float, True), (Tensor.double, False)])
def test_kernels_take_losses_of_float32_only(cast: Callable[[Tensor], Tensor], taken: bool) -> None:
    """They compute in float32, and a model may cast its logits to float64."""
    hidden, weight, labels = torch.randn(8, 4).bfloat16(), torch.randn(5, 4).bfloat16(), torch.randint(0, 5, (8,))
    kernels = mock.Mock()
    kernels.log_sum_exp.side_effect = lambda logits: (logits.amax(1).float(), logits.float().logsumexp(1))
    with mock.patch.object(head_chunks, "has_kernels", return_value=True):
        with mock.patch.object(head_chunks, "_operators", return_value=kernels):
            linear_cross_entropy(hidden, weight, labels, between=cast)
    assert kernels.log_sum_exp.called == taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_labels_that_are_almost_certain_keep_their_precision(dtype: torch.dtype, ranks: int) -> None:
    """Probabilities of 0.999 are 1 in bfloat16, and their gradients would be 0."""
    hidden = torch.eye(16, dtype=dtype).repeat(4, 1) * 10
    weight = torch.eye(16, dtype=dtype) + 0.01 * torch.randn(16, 16, dtype=dtype)
    given, labels = [hidden.requires_grad_(), weight.requires_grad_()], torch.arange(64) % 16
    padding = torch.tensor([-torch.inf, 0.0, -torch.inf])[:, None].expand(3, 16)
    vocabulary = Vocabulary(16, 0, None if ranks == 1 else lambda own: torch.stack([own, padding]))
    found = linear_cross_entropy(hidden, weight, labels, vocabulary=vocabulary, between=Tensor.float, chunk=16)
    exact = F.cross_entropy(F.linear(hidden.double(), weight.double()), labels)
    for one, right in zip(torch.autograd.grad(found, given), torch.autograd.grad(exact, given), strict=True):
        error = (one - right).double().norm() / right.double().norm()
        assert error < 2e-2, float(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_autocast_types_are_those_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(8, 5, dtype=dtype, requires_grad=True),
        torch.randn(CLASSES, 5, dtype=dtype, requires_grad=True),
    ]
    labels = torch.randint(0, CLASSES, (8,))
    for between in (None, lambda z: z.tanh()):
        with torch.autocast("cpu", torch.bfloat16):
            logits = F.linear(*tensors)
            expected = F.cross_entropy(logits if between is None else between(logits), labels)
            found = linear_cross_entropy(*tensors, labels, between=between, chunk=3)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        for one, other in zip(torch.autograd.grad(found, tensors), torch.autograd.grad(expected, tensors), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


# -- memory -----------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Bytes that are alive, of what was allocated within, and the most elements of a tensor."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self._inputs = {one.untyped_storage()._cdata for one in inputs}
        self.bytes = self.most_bytes = self.most_elements = 0
        self._storages: dict[Any, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(result):
            if isinstance(one, Tensor):
                self.most_elements = max(self.most_elements, one.numel())
                storage = one.untyped_storage()
                if storage._cdata in self._inputs:
                    continue
                self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._storages = {key: value for key, value in self._storages.items() if not value[0].expired()}
        self.bytes = sum(size for _, size in self._storages.values())
        self.most_bytes = max(self.most_bytes, self.bytes)
        return result


def test_between_forward_and_backward_only_gradients_are_kept() -> None:
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True)
    with Live(hidden, weight) as live:
        loss = linear_cross_entropy(hidden, weight, torch.randint(0, 4096, (256,)), chunk=64)
        torch.zeros(())  # after what the forward freed
    assert live.bytes < hidden.nbytes + weight.nbytes + 64 * 1024
    loss.backward()


@pytest.mark.parametrize("way", ["in place", "cast", "between", "none", "entropy"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_forward_and_backward_take_no_more_than_the_stated_bound(
    way: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, tokens, features, size = 1 << 20, 256, 8, 8192
    monkeypatch.setitem(CHUNK_BYTES, "cpu", bound)
    dtype = torch.bfloat16 if way == "cast" else torch.float32
    hidden, weight = (
        torch.randn(tokens, features).to(dtype).requires_grad_(),
        torch.randn(size // ranks, features).to(dtype),
    )
    weight.requires_grad_()
    labels = torch.randint(0, size, (tokens,))
    vocabulary = Vocabulary(size, 0, None if ranks == 1 else lambda own: torch.stack([own, own]))
    between = {"cast": Tensor.float, "between": lambda z: torch.tanh(z / 3) * 3}.get(way)
    with Live(hidden, weight) as live:
        if way == "entropy":
            sum(log_probs(hidden, weight, labels, vocabulary=vocabulary)).sum().backward()  # type: ignore[union-attr]
        else:
            objective = Objective(reduction="none" if way == "none" else "mean")
            linear_cross_entropy(
                hidden, weight, labels, objective=objective, vocabulary=vocabulary, between=between
            ).sum().backward()
    sums = weight.numel() * 4
    allowed = hidden.nbytes + sums + 1.1 * bound
    assert live.most_bytes <= allowed, live.most_bytes - allowed
    assert live.most_bytes > 0.7 * bound + sums  # the bound is used
    assert live.most_elements <= chunk_size(size // ranks, dtype, hidden.device, "in place") * (size // ranks)
    assert live.most_elements < tokens * size // ranks // 2
