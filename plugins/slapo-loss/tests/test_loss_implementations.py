"""Implementations of the loss: what each serves and refuses, how one is named, and that a plan shows it.

Kernels of a GPU are not here: modules of their names stand in, by which the choice is seen; tests/gpu has the numbers.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_core import ArgumentError, Equivalence, PreconditionError
from slapo_core.plugins import current_registry
from slapo_loss import Implementation, LinearCrossEntropy, Objective, Situation, Vocabulary, implementations
from slapo_loss.implementations import Cce, Chunked, Liger, Torch
from slapo_runtime.planning import plan_of

GPU = Situation("cuda", torch.bfloat16)


class Model(nn.Module):
    def __init__(self, *, softcaps: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.softcaps = nn.Embedding(11, 6), nn.Linear(6, 11, bias=bias), softcaps

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.embed(tokens).sin()).float()
        if self.softcaps:
            logits = (logits / 3).tanh() * 3
        return {"loss": F.cross_entropy(logits.view(-1, 11), labels.view(-1))}


def scheduled(model: nn.Module, **settings: Any) -> slapo.Schedule:
    sch = slapo.create_schedule(model)
    sch["head"].linear_cross_entropy(**settings)
    return sch


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (3, 5))
    return tokens, tokens.roll(1)


def arguments(**changes: Any) -> dict[str, Any]:
    given = {"bias": None, "class_weight": None, "objective": Objective(), "vocabulary": Vocabulary(7), "chunk": None}
    return {**given, **changes}


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Let a module of that name be installed."""
    root, _, below = name.partition(".")
    package = ModuleType(root)
    module = ModuleType(name) if below else package
    for key, value in functions.items():
        setattr(module, key, value)
    if below:
        setattr(package, below, module)
        monkeypatch.setitem(sys.modules, root, package)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(implementations, "_is_installed", {root}.__contains__)


def test_four_are_installed_under_their_names() -> None:
    for name, of_name in {"cce": Cce, "chunked": Chunked, "liger": Liger, "torch": Torch}.items():
        assert current_registry().load(name, "losses") is of_name
        assert of_name.name == name
        assert issubclass(of_name, Implementation)


@pytest.mark.parametrize("settings", [{}, {"implementation": "chunked"}, {"chunk": 4}])
def test_ours_serves_by_itself_and_the_plan_says_so(settings: dict[str, Any]) -> None:
    model = Model()
    sch = scheduled(model, **settings)
    lines = "\n".join(plan_of(_dialect(sch), sch, {}).steps)
    assert "the loss is computed by 'chunked' in chunks of" in lines
    assert "linear_cross_entropy" in lines
    assert sch.records[0].primitive.equivalence == Equivalence.REORDERED
    sch.undo()
    assert "computed by" not in "\n".join(plan_of(_dialect(sch), sch, {}).steps)


def _dialect(sch: slapo.Schedule) -> Any:
    return current_registry().load("torch", "dialects")()


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13")
@pytest.mark.parametrize("bias", [False, True])
def test_torch_implementation_trains_as_the_plain_model(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Model(bias=bias)
    model, asked = copy.deepcopy(plain), []
    real = F.linear_cross_entropy
    monkeypatch.setattr(
        F, "linear_cross_entropy", lambda *args, **kwargs: asked.append(kwargs) or real(*args, **kwargs)
    )
    scheduled(model, implementation="torch", chunk=4)
    for one in (plain, model):
        one(*batch())["loss"].backward()
    assert asked[0]["options"].batch_chunk_size == 4
    for (name, mine), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 0])
def test_torch_implementation_gives_zero_gradients_for_ignored_labels(reduction: str, ignored: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (7, 3), (7,))]
    hidden, weight, bias = tensors
    labels, found = torch.full((5,), ignored), []
    objective = Objective(ignored, reduction)
    for loss in (
        Torch()(hidden, weight, labels, **arguments(bias=bias, objective=objective)),
        F.cross_entropy(F.linear(hidden, weight, bias), labels, ignore_index=ignored, reduction=reduction),
    ):
        gradients = torch.autograd.grad(loss.sum(), tensors)
        assert not any(one.any() for one in gradients)
        found.append(loss)
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13")
def test_unsupported_loss_raises_without_a_fallback() -> None:
    model = Model(softcaps=True)
    scheduled(model, implementation="torch")
    with pytest.raises(ArgumentError, match="softcapping") as raised:
        model(*batch())
    assert "chunked" in (raised.value.hint or "")
    with pytest.raises(ArgumentError, match="smooth"):
        Torch()(
            torch.ones(3, 2),
            torch.ones(7, 2),
            torch.ones(3).long(),
            **arguments(objective=Objective(label_smoothing=0.1)),
        )


@pytest.mark.parametrize(("name", "reason"), [("liger", "GPU"), ("cce", "GPU"), ("nothing", "no installed plugin")])
def test_unsupported_implementation_is_refused_by_name(name: str, reason: str) -> None:
    model = Model()
    with pytest.raises(PreconditionError, match=reason):
        scheduled(model, implementation=name)
    assert "forward" not in vars(model.head)


@pytest.mark.parametrize(
    ("implementation", "situation", "reason"),
    [
        (Liger, {"device": "cpu"}, "GPU"),
        (Liger, {"has_operations": True}, "operations"),
        (Liger, {"objective": Objective(reduction="none")}, "per token"),
        (Liger, {"ranks": 2, "is_even": False}, "multiple of the 2 ranks"),
        (Liger, {"ranks": 2, "has_bias": True}, "bias"),
        (Liger, {"ranks": 2, "objective": Objective(label_smoothing=0.1)}, "smoothing"),
        (Liger, {}, None),
        (Liger, {"ranks": 2}, None),
        (Liger, {"has_bias": True, "has_class_weight": True, "objective": Objective(label_smoothing=0.1)}, None),
        (Cce, {"device": "cpu"}, "GPU"),
        (Cce, {"ranks": 2}, "ranks"),
        (Cce, {"dtype": torch.float32}, "float32"),
        (Cce, {"has_bias": True}, "takes a bias"),
        (Cce, {"has_class_weight": True}, "class weights"),
        (Cce, {"is_even": False}, "padding"),
        (Cce, {}, None),
        (Torch, {"ranks": 2}, "ranks"),
        (Torch, {"objective": Objective(label_smoothing=0.1)}, "smooth"),
        (Chunked, {"ranks": 8, "is_even": False, "has_operations": True, "device": "mps"}, None),
    ],
)
def test_refusals_of_implementations_have_a_reason(
    implementation: type[Implementation], situation: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor_parallel = object()
    if implementation is Liger:
        installed(monkeypatch, "liger_kernel.ops", LigerFusedLinearScaledCrossEntropyTPFunction=tensor_parallel)
    if implementation is Cce:
        installed(monkeypatch, "cut_cross_entropy", linear_cross_entropy=lambda e, c, targets: None)
    found = implementation().refuses(Situation(**{**vars(GPU), **situation}))
    assert found is None if reason is None else reason in (found or "nothing")


def test_kernels_that_are_not_installed_are_named() -> None:
    assert "cut-cross-entropy" in (Cce().refuses(GPU) or "")
    assert "liger-kernel" in (Liger().refuses(GPU) or "")


def test_approximate_kernels_promise_no_more() -> None:
    step = LinearCrossEntropy(implementation="cce")
    assert step.equivalence.rtol > 0
    assert "filter" in step.equivalence.conditions[0]
    assert LinearCrossEntropy(implementation="liger").equivalence == Equivalence.REORDERED


def test_liger_is_called_with_sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    class Function:
        @staticmethod
        def apply(*given: Any) -> Any:
            called.extend(given)
            return given[0].sum().float(), None, None, None

    installed(monkeypatch, "liger_kernel.ops", LigerFusedLinearCrossEntropyFunction=Function)
    hidden, weight, labels = torch.ones(3, 2), torch.ones(7, 2), torch.zeros(3).long()
    found = Liger().compute(hidden, weight, labels, **arguments(between=None, objective=Objective(5, "sum", 0.1)))
    assert found == 6
    assert called == [hidden, weight, labels, None, None, 5, 0.0, 0.1, "sum", None, False, torch.float32]


def test_the_tensor_parallel_form_of_liger_sums_no_gradient_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reduces the gradient of hidden states over the ranks, and so does the schedule."""

    class Function:
        @staticmethod
        def apply(hidden: Tensor, weight: Tensor, labels: Tensor, group: Any, *rest: Any) -> Tensor:
            assert (group, rest) == (Group, (1.0, -100))
            return torch.where(labels == -100, 0.0, hidden.sum(1))

    class Group:
        size = staticmethod(lambda: 4)

    installed(monkeypatch, "liger_kernel.ops", LigerFusedLinearScaledCrossEntropyTPFunction=Function)
    monkeypatch.setattr(implementations, "find_group", {"tp": Group}.get)
    hidden, labels = torch.ones(3, 2, requires_grad=True), torch.tensor([1, -100, 2])
    found = Liger().compute(
        hidden, torch.ones(2, 2), labels, **arguments(between=None, vocabulary=Vocabulary(8, 0, torch.clone, "tp"))
    )
    assert found == 2
    found.backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[0.125] * 2, [0.0] * 2, [0.125] * 2]


def test_cce_is_called_by_names_and_its_loss_has_the_type_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Any] = {}

    def function(e: Tensor, c: Tensor, targets: Tensor, bias: Any = None, **given: Any) -> Tensor:
        called.update(given, bias=bias)
        return e.sum()

    installed(monkeypatch, "cut_cross_entropy", linear_cross_entropy=function)
    monkeypatch.setattr(Cce, "refuses", lambda self, situation: None)
    hidden, weight = torch.ones(3, 2).bfloat16(), torch.ones(7, 2).bfloat16()
    found = Cce()(hidden, weight, torch.zeros(3).long(), between=Tensor.float, **arguments(bias=weight[:, 0]))
    assert found.dtype == torch.float32
    assert called.pop("bias") is not None
    assert called == {"ignore_index": -100, "reduction": "mean"}


def test_third_party_implementation_replaces_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(Implementation):
        name = "doubled"

        def refuses(self, situation: Situation) -> str | None:
            return "has no bias" if situation.has_bias else None

        def compute(self, hidden: Tensor, weight: Tensor, labels: Tensor, **given: Any) -> Tensor:
            return 2 * Chunked().compute(hidden, weight, labels, **given)

    plain = Model()
    model = copy.deepcopy(plain)
    _load(monkeypatch, "doubled", Doubled)
    scheduled(model, implementation="doubled")
    torch.testing.assert_close(model(*batch())["loss"], 2 * plain(*batch())["loss"])
    with pytest.raises(PreconditionError, match="has no bias"):
        scheduled(Model(bias=True), implementation="doubled")


def _load(monkeypatch: pytest.MonkeyPatch, name: str, found: Any) -> None:
    registry = type(current_registry())
    resolve: Callable[..., Any] = registry.resolve
    load: Callable[..., Any] = registry.load
    monkeypatch.setattr(
        registry, "load", lambda self, given, *rest: found if given == name else load(self, given, *rest)
    )
    monkeypatch.setattr(
        registry,
        "resolve",
        lambda self, kind, given, **rest: given if given == name else resolve(self, kind, given, **rest),
    )
