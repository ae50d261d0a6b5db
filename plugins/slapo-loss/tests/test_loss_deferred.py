"""Between head and loss the logits are deferred: what a model does with them is what it does with logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo_loss.deferred import DeferredLogits
from slapo_loss.deferred_values import ForwardCall, HeadTensors
from slapo_loss.head_chunks import Vocabulary
from slapo_loss.linear_cross_entropy import GatherLogits

from .test_loss_chunked import in_step

BATCH, TOKENS, CLASSES, FEATURES = 2, 6, 11, 5
RANKS, ROWS = 3, 4  # 3 x 4 rows: one of padding
Program = Callable[[Any, Tensor], Tensor]


def ce(logits: Any, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **options)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def shifted(logits: Any, labels: Tensor) -> Tensor:
    return ce(logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous())


def softcapped(logits: Any, labels: Tensor) -> Tensor:
    logits = logits / 3.0
    logits = torch.tanh(logits)
    return ce(logits * 3.0, labels)


def scaled_in_place(logits: Any, labels: Tensor) -> Tensor:
    logits *= 0.5
    logits.add_(1)
    return ce(logits, labels)


def several_predictions(logits: Any, labels: Tensor) -> Tensor:
    return ce(logits, labels) + 0.3 * ce(logits[:, :-2], labels[:, 2:]) + 0.1 * ce(logits[:, 1], labels[:, 1])


def detached_beside(logits: Any, labels: Tensor) -> Tensor:
    return ce(logits, labels) + 2 * ce(logits.detach() * 2, labels)


def without_gradient_beside(logits: Any, labels: Tensor) -> Tensor:
    with torch.no_grad():
        scaled, first = logits * 2, logits[:1]
    return ce(logits, labels) + ce(scaled, labels) + ce(first, labels[:1])


def in_parts(logits: Any, labels: Tensor) -> Tensor:
    first, second = logits.split(4, dim=1)
    one, other = logits.unbind(0)
    halves = torch.chunk(logits, 2, dim=1)
    found = ce(first, labels[:, :4]) + ce(second, labels[:, 4:]) + ce(one, labels[0]) + 2 * ce(other, labels[1])
    return found + 3 * ce(halves[1], labels[:, 3:]) + ce(logits.narrow(1, 1, 3), labels[:, 1:4])


def by_steps_of_time(logits: Any, labels: Tensor) -> Tensor:
    logits = logits.transpose(0, 1).contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.t().reshape(-1))


def indexed(logits: Any, labels: Tensor) -> Tensor:
    mask, chosen = labels != -100, torch.tensor([3, 0])
    found = F.cross_entropy(logits[mask], labels[mask]) + ce(logits[:, chosen], labels[:, chosen])
    found = found + ce(logits[:, [1, 4]], labels[:, [1, 4]]) + ce(logits[1, ::2], labels[1, ::2])
    return found + ce(logits[None, ..., -2:, :], labels[None, :, -2:]) + ce(logits[:, 2][..., :9], labels[:, 2] % 9)


def in_place_beside_a_copy(logits: Any, labels: Tensor) -> Tensor:
    kept = logits.clone()
    later = logits * 2
    logits.mul_(3)
    return ce(kept, labels) + ce(logits, labels) + ce(later, labels)


def in_place_on_chosen_tokens(logits: Any, labels: Tensor) -> Tensor:
    chosen = logits[labels != -100]
    chosen *= 3
    last = logits.index_select(1, torch.tensor([5]))
    last.neg_()
    return ce(chosen, labels[labels != -100]) + ce(last, labels[:, 5:]) + ce(logits, labels)


def negative_log_likelihood(logits: Any, labels: Tensor) -> Tensor:
    found = F.log_softmax(logits, dim=-1)
    return F.nll_loss(found.view(-1, CLASSES), labels.view(-1)) + F.nll_loss(
        logits[0].log_softmax(-1), labels[0], reduction="sum"
    )


def per_token(logits: Any, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.permute(0, 2, 1), labels, reduction="none")
    return (losses * torch.arange(losses.numel()).view_as(losses)).sum()


TAKEN: dict[str, Program] = {
    "cross_entropy": ce,
    "nn.CrossEntropyLoss": lambda z, y: nn.CrossEntropyLoss(reduction="sum")(z.view(-1, CLASSES), y.view(-1)),
    "classes in the middle": lambda z, y: nn.CrossEntropyLoss()(z.transpose(1, 2), y),
    "no axis of tokens": lambda z, y: F.cross_entropy(z[0, 0], y[0, 0].clamp_min(0)),
    "per token": per_token,
    "shifted": shifted,
    "softcapped": softcapped,
    "scaled in place": scaled_in_place,
    "scaled by tensors": lambda z, y: ce(torch.tensor(2.0) * z / torch.tensor([3.0]), y),
    "subtracted from a number": lambda z, y: ce(1 - z, y) + ce(z.clamp(min=-0.5, max=0.5), y) + ce(-z, y),
    "a buffer of biases": lambda z, y: ce(z + drawn(1, CLASSES), y),
    "a buffer of scales": lambda z, y: ce((z.view(-1, CLASSES) * drawn(1, CLASSES)).div(drawn(CLASSES).exp()), y),
    "a buffer of one element": lambda z, y: ce(z * drawn(1, 1, 1), y),
    "kept tokens": lambda z, y: ce(z[:, slice(-3, None), :], y[:, -3:]),
    "first classes": lambda z, y: ce(z[..., :7], y.clamp_max(6)),
    "first classes after a buffer": lambda z, y: ce((z + drawn(CLASSES))[..., :7] * drawn(7), y.clamp_max(6)),
    "indexed": indexed,
    "in parts": in_parts,
    "by steps of time": by_steps_of_time,
    "squeezed": lambda z, y: ce(z.unsqueeze(0).squeeze(0).flatten(0, 1).unflatten(0, (2, 6)), y),
    "negative log likelihood": negative_log_likelihood,
    "ignored everywhere": lambda z, y: ce(z, torch.full_like(y, -100), reduction="sum") + 0 * ce(z, y),
    "another ignored label": lambda z, y: ce(z, y.clamp_min(0), ignore_index=0),
    "label smoothing": lambda z, y: ce(z, y, label_smoothing=0.1) + ce(z, y, label_smoothing=0.3, reduction="sum"),
    "weights of classes": lambda z, y: ce(z, y, weight=drawn(CLASSES).exp(), label_smoothing=0.2),
    "several predictions": several_predictions,
    "detached beside": detached_beside,
    "without gradient beside": without_gradient_beside,
    "in place beside a copy": in_place_beside_a_copy,
    "in place on chosen tokens": in_place_on_chosen_tokens,
}
"""The loss is taken from the hidden states."""


def masked_in_place(logits: Any, labels: Tensor) -> Tensor:
    view = logits[:, 1:]
    logits[..., 3:5] = -1.0
    logits.masked_fill_(labels.unsqueeze(-1) == -100, 0.5)
    return ce(logits, labels) + ce(view, labels[:, 1:])


def in_place_on_a_view(logits: Any, labels: Tensor) -> Tensor:
    flat = logits.view(-1, CLASSES)
    last = logits[:, -1]
    last.mul_(3)
    return ce(flat, labels) + 2 * ce(logits, labels)


def in_place_beside_views(logits: Any, labels: Tensor) -> Tensor:
    view, copied = logits[:, 1:], logits.transpose(0, 1).contiguous()
    logits.div_(3)
    return ce(view, labels[:, 1:]) + ce(copied, labels.t()) + ce(logits, labels)


def in_place_without_gradient(logits: Any, labels: Tensor) -> Tensor:
    with torch.no_grad():
        logits.mul_(2)
    return ce(logits, labels)


def smoothed_by_hand(logits: Any, labels: Tensor) -> Tensor:
    log_probs = -F.log_softmax(logits, dim=-1)
    mask = labels.eq(-100).unsqueeze(-1)
    target = log_probs.gather(-1, labels.clamp_min(0).unsqueeze(-1)).masked_fill(mask, 0.0)
    return target.sum() + 0.1 * log_probs.sum(-1, keepdim=True).masked_fill(mask, 0.0).sum()


def measured_first(logits: Any, labels: Tensor) -> Tensor:
    with torch.no_grad():
        assert 0 <= (logits.argmax(-1) == labels).double().mean() <= 1
    return ce(logits, labels)


def hooked(logits: Any, labels: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: gradient * 2)
    return ce(logits, labels) + 0 * ce(logits * 2, labels)


def activated_in_place(logits: Any, labels: Tensor) -> Tensor:
    F.relu(logits, inplace=True)
    return ce(logits, labels)


COMPUTED: dict[str, Program] = {
    "class probabilities": lambda z, y: F.cross_entropy(z.view(-1, CLASSES), drawn(12, CLASSES).softmax(-1)),
    "other classes": lambda z, y: ce(z[..., 2:], y.clamp_min(2) - 2),
    "every other class": lambda z, y: ce(z[..., ::2], y.clamp(0, 5)),
    "chosen classes": lambda z, y: ce(z[..., torch.tensor([4, 1, 7])], y.clamp(0, 2)),
    "mask of tokens": lambda z, y: ce(z.masked_fill((y == -100).unsqueeze(-1), 0.0), y),
    "mask of logits": lambda z, y: F.cross_entropy(z[drawn(2, 6, 11) > 0][:22].view(2, 11), y[:, 0].clamp_min(0)),
    "where": lambda z, y: ce(torch.where(drawn(1, 1, 11) > 0, z, -1.0), y),
    "a bias per token": lambda z, y: ce(z + drawn(TOKENS, 1), y),
    "a learned scale": lambda z, y: ce(z * drawn(1).requires_grad_(), y),
    "together": lambda z, y: ce(torch.cat([z, z * 2]), torch.cat([y, y])) + ce(torch.stack([z]), y),
    "with themselves": lambda z, y: ce(z * z + z, y),
    "z-loss": lambda z, y: ce(z, y) + 0.1 * torch.logsumexp(z, -1).pow(2).mean(),
    "smoothed by hand": smoothed_by_hand,
    "a divergence": lambda z, y: F.kl_div(F.log_softmax(z, -1), drawn(2, 6, 11).softmax(-1), reduction="batchmean"),
    "log-probabilities of some classes": lambda z, y: F.nll_loss(z.log_softmax(-1)[0, :, :7], y[0].clamp_max(6)),
    "log-probabilities scaled": lambda z, y: F.nll_loss((z.log_softmax(-1) * 2)[0], y[0]),
    "cross entropy of log-probabilities": lambda z, y: ce(z.log_softmax(-1), y),
    "softmax of tokens": lambda z, y: F.nll_loss(z.log_softmax(1).view(-1, CLASSES), y.view(-1)),
    "masked in place": masked_in_place,
    "in place on a view": in_place_on_a_view,
    "in place beside views": in_place_beside_views,
    "in place without gradient": in_place_without_gradient,
    "activated in place": activated_in_place,
    "measured first": measured_first,
    "hooked": hooked,
    "turned": lambda z, y: ce(z.mT.reshape(2, 11, 6)[:, :, :5], y[:, :1].expand(2, 11) % 5),
    "biases of classes in the middle": lambda z, y: F.cross_entropy(z.transpose(1, 2) + drawn(CLASSES, 1), y),
    "rounded": lambda z, y: ce(torch.div(z, 0.3, rounding_mode="trunc") + 0 * z, y),
}
"""Real logits are computed."""


class Tensors:
    """Hidden states, weight, bias and labels; the rank's rows of weight and bias."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(BATCH, TOKENS, FEATURES, dtype=torch.float64, requires_grad=True)
        self.weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64, requires_grad=True)
        self.bias = torch.randn(CLASSES, dtype=torch.float64, requires_grad=True)
        self.labels = torch.randint(0, CLASSES, (BATCH, TOKENS))
        self.labels[0, 1] = self.labels[1, 4] = -100

    def gradients(self, loss: Tensor, *of_head: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(loss, [self.hidden, *of_head], allow_unused=True, materialize_grads=True)
        return [loss, *found]

    def plain(self, program: Program) -> list[Tensor]:
        loss = program(F.linear(self.hidden, self.weight, self.bias), self.labels)
        return self.gradients(loss, self.weight, self.bias)

    def deferred(self, program: Program, call: ForwardCall) -> list[Tensor]:
        loss = program(self.logits(call), self.labels)
        call.is_over = True
        return self.gradients(loss, self.weight, self.bias)

    def logits(self, call: ForwardCall) -> DeferredLogits:
        return DeferredLogits(self.hidden, HeadTensors(self.weight, self.bias, Vocabulary(CLASSES), chunk=5), call)

    def split(self, program: Program, calls: list[ForwardCall]) -> list[Tensor]:
        """What the ranks of a split vocabulary give together."""
        full = [
            F.pad(self.weight.detach(), (0, 0, 0, RANKS * ROWS - CLASSES)),
            F.pad(self.bias.detach(), (0, RANKS * ROWS - CLASSES)),
        ]

        def run(rank: int, gather: Callable[[Tensor], Tensor]) -> list[Tensor]:
            weight, bias = (one[rank * ROWS : (rank + 1) * ROWS].clone().requires_grad_() for one in full)
            ranks: Any = SimpleNamespace(rank=rank, gather=gather)
            vocabulary = Vocabulary(CLASSES, min(rank * ROWS, CLASSES), gather)
            head = HeadTensors(weight, bias, vocabulary, GatherLogits(ranks, CLASSES), chunk=5)
            loss = program(DeferredLogits(self.hidden, head, calls[rank]), self.labels.clone())
            calls[rank].is_over = True
            return self.gradients(loss, weight, bias)

        found = in_step(run, RANKS)
        for each in found:
            assert torch.equal(each[0], found[0][0])
        hidden: Any = sum(each[1] for each in found)
        of_head = [torch.cat([each[position] for each in found])[:CLASSES] for position in (2, 3)]
        return [found[0][0], hidden, *of_head]


def agree(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", TAKEN)
def test_a_loss_is_taken_from_the_hidden_states(name: str) -> None:
    tensors, call, calls = Tensors(), ForwardCall(), [ForwardCall() for _ in range(RANKS)]
    expected = tensors.plain(TAKEN[name])
    agree(tensors.deferred(TAKEN[name], call), expected)
    assert (call.used, call.computed) == (True, [])
    agree(tensors.split(TAKEN[name], calls), expected)
    assert all(one.used and not one.computed for one in calls)


@pytest.mark.parametrize("name", COMPUTED)
def test_other_functions_compute_the_logits_once(name: str) -> None:
    tensors, call, calls = Tensors(), ForwardCall(), [ForwardCall() for _ in range(RANKS)]
    expected = tensors.plain(COMPUTED[name])
    agree(tensors.deferred(COMPUTED[name], call), expected)
    assert call.computed
    agree(tensors.split(COMPUTED[name], calls), expected)
    assert all(one.computed == call.computed for one in calls)


def test_metadata_computes_no_logits() -> None:
    tensors, call = Tensors(), ForwardCall()
    logits: Any = tensors.logits(call)
    assert isinstance(logits, Tensor)
    assert (logits.shape, logits.dtype, logits.device.type) == ((BATCH, TOKENS, CLASSES), torch.float64, "cpu")
    assert (logits.size(-1), logits.dim(), logits.ndim, len(logits), logits.numel()) == (CLASSES, 3, 3, BATCH, 132)
    assert logits.float().dtype == logits.to(torch.float32).dtype == torch.float32
    assert logits.double() is logits
    assert logits.requires_grad
    assert not logits.detach().requires_grad
    assert {logits: 1}[logits] == 1
    assert "DeferredLogits((2, 6, 11)" in repr(logits)
    assert repr(logits) == f"{logits}" == str(logits)
    frozen = HeadTensors(tensors.weight.detach(), None, Vocabulary(CLASSES))
    assert DeferredLogits(tensors.hidden, frozen, call).requires_grad
    assert not DeferredLogits(tensors.hidden.detach(), frozen, call).requires_grad
    assert call.computed == []


def test_graph_properties_compute_the_logits() -> None:
    tensors, call = Tensors(), ForwardCall()
    logits: Any = tensors.logits(call)
    logits.retain_grad()
    assert logits.grad_fn is not None
    assert not logits.is_leaf
    loss = ce(logits, tensors.labels)
    loss.backward()
    assert call.computed == ["retain_grad"]
    assert logits.grad.shape == logits.shape
    plain = F.linear(tensors.hidden.detach(), tensors.weight.detach(), tensors.bias.detach()).requires_grad_()
    ce(plain, tensors.labels).backward()
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(logits)


def test_withheld_logits_name_the_way_to_compute_them() -> None:
    tensors, call = Tensors(), ForwardCall()
    logits: Any = tensors.logits(call)
    ce(logits, tensors.labels)
    call.is_over = True
    for use in (
        lambda: logits.argmax(-1),
        lambda: ce(logits, tensors.labels),
        lambda: logits.float().sum(),
        lambda: logits[:, -1].tolist(),
    ):
        with pytest.raises(RuntimeError, match="keep_logits=True"):
            use()
    assert logits.grad_fn is None
    assert call.computed == []


def test_a_tensor_that_changed_before_the_loss_is_refused() -> None:
    tensors = Tensors()
    hidden = tensors.hidden * 1
    logits: Any = DeferredLogits(hidden, HeadTensors(tensors.weight, None, Vocabulary(CLASSES)), ForwardCall())
    shift, scale = logits[:, 1:], torch.tensor(2.0)
    scaled = logits * scale
    scale.zero_()
    with pytest.raises(RuntimeError, match="operand"):
        ce(scaled, tensors.labels)
    hidden.zero_()
    for use in (lambda: ce(logits, tensors.labels), lambda: shift.sum(), lambda: logits * 2):
        with pytest.raises(RuntimeError, match="input of the head was modified in place"):
            use()


class Doubled(torch.autograd.Function):
    """What a kernel of a loss is to autograd."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return (logits * 2).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.expand(BATCH, TOKENS, CLASSES)


def test_an_autograd_function_of_logits_is_refused_in_the_backward() -> None:
    tensors = Tensors()
    loss: Any = Doubled.apply(tensors.logits(ForwardCall()))  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"autograd\.Function was applied to deferred logits"):
        loss.backward()


def test_torch_errors_equal_the_plain_models() -> None:
    tensors = Tensors()
    wrong: dict[str, Program] = {
        "sizes": lambda z, y: F.cross_entropy(z.view(-1, CLASSES), y[0]),
        "labels of another type": lambda z, y: ce(z, y.clamp_min(0).int()),
        "a step backwards": lambda z, y: z[:, ::-1],
        "too many indices": lambda z, y: z[0, 0, 0, 0],
        "a shape": lambda z, y: z.view(5, 5),
        "an axis": lambda z, y: z.log_softmax(5),
        "weights of classes": lambda z, y: ce(z, y, weight=drawn(3)),
        "a reduction": lambda z, y: ce(z, y, reduction="median"),
    }
    for name, program in wrong.items():
        with pytest.raises((RuntimeError, IndexError, ValueError)) as plain:
            program(F.linear(tensors.hidden, tensors.weight), tensors.labels)
        with pytest.raises(plain.type) as deferred:
            program(tensors.logits(ForwardCall()), tensors.labels)
        assert str(deferred.value) == str(plain.value), name


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_under_autocast_a_loss_has_the_type_that_torch_gives_it(dtype: torch.dtype, reduction: str) -> None:
    tensors = Tensors()
    hidden = tensors.hidden.detach().to(dtype).requires_grad_()
    weight = tensors.weight.detach().to(dtype).requires_grad_()
    found = []
    for logits in (
        F.linear(hidden, weight),
        DeferredLogits(hidden, HeadTensors(weight, None, Vocabulary(CLASSES)), ForwardCall()),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ce(logits * 2, tensors.labels, reduction=reduction)
        found.append([loss, *torch.autograd.grad(loss.sum(), [hidden, weight])])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 if one.dtype == torch.bfloat16 else 1e-5)
