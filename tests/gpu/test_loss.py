"""The loss of a large vocabulary on a GPU: right in bfloat16, without a wait, as small and as fast as stated."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_loss import log_probs
from tests.gpu.subjects import microseconds

MILLISECONDS, GIGABYTES = 110, 4.0
"""Of 16,384 tokens, 248,320 classes and 2,048 features in bfloat16: forward and backward, with the weight."""

SETTINGS: list[dict[str, Any]] = [
    {},
    {"bias": True, "classes": 5003},  # more than a program of a kernel reads at a time; rows that are not aligned
    {"softcap": 3.0},
    {"smoothing": 0.1},
    {"smoothing": 0.1, "weighted": True, "classes": 1001},
]

PACKAGES = {"liger": "liger_kernel", "cce": "cut_cross_entropy"}


class Model(nn.Module):
    def __init__(
        self,
        features: int,
        classes: int,
        *,
        softcap: float | None = None,
        bias: bool = False,
        smoothing: float = 0.0,
        weighted: bool = False,
    ) -> None:
        super().__init__()
        self.head, self.softcap, self.smoothing = nn.Linear(features, classes, bias=bias), softcap, smoothing
        self.register_buffer("class_weights", torch.rand(classes) + 0.5 if weighted else None)

    def forward(self, hidden: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        logits = self.head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        weights = None if self.class_weights is None else self.class_weights.to(logits.dtype)
        return F.cross_entropy(logits, labels, weights, reduction=reduction, label_smoothing=self.smoothing)


def pair(
    device: torch.device, dtype: torch.dtype, implementation: str = "auto", classes: int = 1000, **settings: Any
) -> list[nn.Module]:
    torch.manual_seed(0)
    plain = Model(64, classes, **settings).to(device, dtype)
    model = copy.deepcopy(plain)
    slapo.create_schedule(model)["head"].linear_cross_entropy(implementation=implementation)
    return [plain, model]


def batch(device: torch.device, dtype: torch.dtype, tokens: int = 300) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(0, 1000, (tokens,), device=device)
    labels[::5] = -100
    return torch.randn(tokens, 64, device=device).to(dtype).requires_grad_(), labels


def trained(model: nn.Module, hidden: Tensor, labels: Tensor, **given: Any) -> list[Tensor]:
    loss = model(hidden, labels, **given)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), [hidden, *model.parameters()])]


def near(found: list[Tensor], exact: list[Tensor], plain: list[Tensor], names: str) -> None:
    """Compare with float64: no further off than half as much again as the plain model is."""
    for place, (one, right, other) in enumerate(zip(found, exact, plain, strict=True)):
        size = right.norm()
        error, allowed = (one.double() - right).norm() / size, (other.double() - right).norm() / size
        assert error <= 1.5 * allowed + 1e-6, (names, place, float(error), float(allowed))


@pytest.mark.gpu(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_and_gradients_are_no_further_off_than_those_of_the_plain_model(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slapo_loss import head_chunks

    monkeypatch.setattr(head_chunks, "OTHER_CHUNK_BYTES", 256 << 10)
    monkeypatch.setitem(head_chunks.CHUNK_BYTES, "cpu", 256 << 10)
    for settings in SETTINGS:
        plain, model = pair(device, dtype, **settings)
        hidden, labels = batch(device, dtype)
        doubled = copy.deepcopy(plain).double()
        for reduction in ("mean", "sum", "none"):
            wide = hidden.detach().double().requires_grad_()
            exact, theirs = (
                trained(doubled, wide, labels, reduction=reduction),
                trained(plain, hidden, labels, reduction=reduction),
            )
            near(trained(model, hidden, labels, reduction=reduction), exact, theirs, f"{settings} {reduction}")


@pytest.mark.gpu(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_labels_that_are_almost_certain_keep_their_precision(
    device: torch.device, dtype: torch.dtype
) -> None:
    plain, model = pair(device, dtype)
    labels = torch.arange(64, device=device)
    with torch.no_grad():
        plain.head.weight[:64] = torch.eye(64)
        model.head.weight.copy_(plain.head.weight)
    hidden = (12 * torch.eye(64, device=device)).to(dtype).requires_grad_()
    exact = trained(copy.deepcopy(plain).double(), hidden.detach().double().requires_grad_(), labels)
    near(trained(model, hidden, labels), exact, trained(plain, hidden, labels), "certain")


@pytest.mark.gpu(3)
@pytest.mark.parametrize("implementation", ["torch", "liger", "cce"])
def test_other_implementations_train_as_the_plain_model(device: torch.device, implementation: str) -> None:
    if implementation == "torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch 2.13 has linear_cross_entropy")
    package = PACKAGES.get(implementation)
    if package is not None and (importlib.util.find_spec(package) is None or device.type != "cuda"):
        pytest.skip(f"needs {package} and a GPU")
    plain, model = pair(device, torch.bfloat16, implementation)
    hidden, labels = batch(device, torch.bfloat16, 512)
    for one, other in zip(trained(model, hidden, labels), trained(plain, hidden, labels), strict=True):
        assert ((one - other).float().norm() / other.float().norm()) < (5e-2 if implementation == "cce" else 1e-2)


@pytest.mark.gpu(3)
def test_log_probabilities_and_entropies_are_those_of_the_logits(device: torch.device) -> None:
    sch = slapo.create_schedule(Model(64, 1000).to(device, torch.bfloat16))
    hidden, labels = batch(device, torch.bfloat16)
    found, entropies = log_probs(hidden, sch["head"], labels, temperature=0.7, between=Tensor.float, chunk=64)
    of_all = (F.linear(hidden, sch["head"].module.weight).float() / 0.7).log_softmax(-1)
    picked = of_all.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
    torch.testing.assert_close(found, torch.where(labels == -100, 0.0, picked), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, -(of_all.exp() * of_all).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu(4, needs="CUDA's warnings of synchronization")
def test_a_step_does_not_wait_for_the_device(device: torch.device) -> None:
    _, model = pair(device, torch.bfloat16)
    hidden, labels = batch(device, torch.bfloat16)
    trained(model, hidden, labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trained(model, hidden, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu(5, needs="the memory and the speed of a GPU")
def test_a_vocabulary_of_a_quarter_million_is_as_fast_and_small_as_stated(
    device: torch.device, measured: Callable[..., None]
) -> None:
    tokens, classes, features = 16_384, 248_320, 2_048
    with device:
        hidden = torch.randn(tokens, features, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, classes, (tokens,))
    with torch.device("meta"):
        model = Model(features, classes)
    weight = torch.randn(classes, features, device=device, dtype=torch.bfloat16).mul_(features**-0.5)
    model.head.weight = nn.Parameter(weight)
    slapo.create_schedule(model)["head"].linear_cross_entropy()

    def step() -> None:
        torch.autograd.grad(model(hidden, labels), [hidden, model.head.weight])

    step()
    others = torch.cuda.memory_allocated(device) - sum(each.nbytes for each in (hidden, labels, weight))
    torch.cuda.reset_peak_memory_stats(device)
    milliseconds = microseconds(step, device, calls=5)[1] / 1e3
    peak = (torch.cuda.max_memory_allocated(device) - others) / 1e9
    measured(milliseconds=milliseconds, peak_gigabytes=peak)
    assert peak <= GIGABYTES
    assert milliseconds <= MILLISECONDS
