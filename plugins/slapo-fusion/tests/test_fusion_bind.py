"""``bind``: kernels in the place of forwards and of matches, held to shapes, gradients and numbers."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_fusion import Bind, build_kernels
from slapo_fusion.kernels import Bound, NamedInputs, without_values
from tests.messages import Messages

from .small import gradients, layers, traced

SOURCE = Path(__file__).parent / "scaled.cpp"


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Scale())


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x


def scaled_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return gradient * weight, (gradient * x).sum_to_size(weight.shape)


def detached(x: Tensor, weight: Tensor) -> Tensor:
    return x.detach() * weight.detach()


def summed(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(0)


def off(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight * 1.01


@torch.library.custom_op("slapo_fusion_test::summed", mutates_args=())
def summed_operator(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(0)


@summed_operator.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[1:])


@torch.library.custom_op("slapo_fusion_test::ungraded", mutates_args=())
def ungraded(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "step",
    [
        Bind(scaled),
        Bind(scaled, inputs=("x", "weight")),
        Bind("aten::mul"),
        Bind(detached, backward=scaled_backward),
    ],
)
def test_a_kernel_in_the_place_of_a_forward(step: Bind) -> None:
    sch: Any = slapo.create_schedule(model(), example_inputs=X)
    expected = gradients(model(), X)
    sch["1"].apply(step)
    slapo.verify(sch, X)
    again = slapo.replay(model(), sch.to_json(), example_inputs=X).model
    for each in (sch.model, pickle.loads(pickle.dumps(sch.model)), again):
        torch.testing.assert_close(gradients(each, X), expected)
    sch.undo()
    assert "forward" not in sch.model[1].__dict__


@pytest.mark.slow
@pytest.mark.breadth
def test_cpp_source_is_built_and_bound_with_its_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(slapo.PreconditionError) as refused:
        slapo.create_schedule(model())["1"].apply(Bind("slapo_fusion_test::scaled"))
    message(refused, "'slapo_fusion_test::scaled'", "registered")
    build_kernels(SOURCE, flags=("-O0",))
    sch = slapo.create_schedule(model())
    sch["1"].apply(Bind("slapo_fusion_test::scaled", backward="slapo_fusion_test::scaled_backward"))
    slapo.verify(sch, X)
    sch.undo()
    sch["1"].apply(Bind("slapo_fusion_test::scaled"))
    with pytest.raises(slapo.ApplyError) as failed:
        sch.model(X)
    message(failed, "gradient", "has none")
    with torch.no_grad():
        torch.testing.assert_close(sch.model(X), model()(X))


def test_missing_sources_are_named(message: Messages) -> None:
    with pytest.raises(slapo.ArgumentError) as refused:
        build_kernels("nowhere.cpp")
    message(refused, "'nowhere.cpp'")


def test_fallback_is_opt_in_and_recorded(message: Messages) -> None:
    sch: Any = slapo.create_schedule(model())
    sch["1"].apply(Bind("slapo_fusion_test::absent", fallback=True))
    (told,) = (effect for effect in sch.records[-1].edits if "fallback=True" in effect)
    message(told, "'slapo_fusion_test::absent'")
    assert torch.equal(sch.model(X), model()(X))


def test_a_wrong_shape_is_refused_at_once_where_inputs_are_known_and_else_at_the_first_call() -> None:
    gives = r"at '1': .*returns \(4,?\) float32"  # before the values are known the form is written in another way
    known = slapo.create_schedule(model(), example_inputs=X)
    with pytest.raises(slapo.ApplyError, match=gives):
        known["1"].apply(Bind("slapo_fusion_test::summed", backward=scaled_backward))
    assert known.records == ()
    for step in (Bind(summed), Bind("slapo_fusion_test::summed", backward=scaled_backward)):
        sch = slapo.create_schedule(model())
        sch["1"].apply(step)
        with pytest.raises(slapo.ApplyError, match=gives):
            sch.model(X)
        sch.undo()
        assert torch.equal(sch.model(X), model()(X))


def test_verify_finds_an_inaccurate_kernel_without_tolerance() -> None:
    sch = slapo.create_schedule(model())
    sch["1"].apply(Bind(off))
    with pytest.raises(slapo.VerifyError, match="bind"):
        slapo.verify(sch, X)
    sch.undo()
    sch["1"].apply(Bind(off, rtol=0.05))
    slapo.verify(sch, X)


def test_wrappers_of_a_forward_wrap_its_kernel() -> None:
    sch: Any = slapo.create_schedule(nn.Sequential(nn.Linear(6, 6)), example_inputs=torch.randn(2, 6))
    sch["0"].checkpoint().bind("aten::linear")
    assert [getattr(wrapper, "func", None) is Bound for wrapper in sch["0"].wrappers] == [True, False]
    slapo.verify(sch, torch.randn(2, 6))


def test_bind_refuses_invalid_calls(message: Messages) -> None:
    sch = slapo.create_schedule(model())
    for step, word in (
        (Bind("mul"), 'bind("namespace::mul")'),
        (Bind("aten::mull"), "no operator 'aten::mull'"),
        (Bind(scaled, inputs=("x", "gain")), "has 'gain'"),
        (Bind("slapo_fusion_test::ungraded"), "no gradient"),
    ):
        with pytest.raises(slapo.PreconditionError) as refused:
            sch["1"].apply(step)
        message(refused, word)
    split: Any = slapo.create_schedule(nn.Sequential(nn.Linear(6, 6)), mesh={"tp": 1})
    split["0"].shard("weight", axis=1)
    with pytest.raises(slapo.PreconditionError) as refused:
        split["0"].bind("aten::linear")
    message(refused, "would drop that change")
    for parameter in sch.model.parameters():
        parameter.requires_grad_(False)
    sch["1"].apply(Bind("slapo_fusion_test::ungraded"))  # nothing is trained
    torch.testing.assert_close(sch.model(X), model()(X))


def tanh_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def gelu_kernel(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(torch.add(bias, x))


def short_kernel(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)[:1]


def test_a_kernel_in_the_place_of_matches() -> None:
    def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias)

    sch, x = traced(), torch.randn(2, 6)
    expected = gradients(layers(), x)
    sch["*"].apply(Bind(gelu_kernel, bias_gelu))
    assert "gelu_kernel(" in str(sch["0"].graph)
    torch.testing.assert_close(gradients(sch.model, x), expected)
    slapo.verify(sch, x)
    sch = traced()
    sch["1"].apply(Bind(tanh_gelu, bias_gelu, rtol=1e-3, atol=1e-2))
    slapo.verify(sch, x)
    sch = traced()
    sch["1"].apply(Bind(short_kernel, bias_gelu))
    with pytest.raises(slapo.ApplyError, match=r"bind\(short_kernel\) at '1': .*returns \(1, 6\) float32"):
        sch.model(x)


def test_a_kernel_that_would_not_be_given_what_a_match_captured(message: Messages) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)))
    sch: Any = slapo.create_schedule(model, example_inputs=torch.randn(2, 6))
    sch["0"].trace(flatten=True)

    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x)

    with pytest.raises(slapo.PreconditionError) as refused:
        sch["0"].bind(gelu_kernel, dropped)
    message(refused, "captured 'p'")


def test_shapes_of_a_kernel_launched_on_addresses_are_not_known() -> None:
    launched = []

    def launches(x: Tensor) -> Tensor:
        launched.append(x.data_ptr())
        return torch.empty_like(x)

    assert without_values(torch.relu, (X,), {}) == [((3, 4), torch.float32)]
    assert without_values(launches, (X,), {}) is None
    assert launched == []


def test_signature_is_bound_once_per_call_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(module: nn.Module, x: int, *rest: int, gain: int = 2, **others: int) -> None: ...

    asked: list[Any] = []
    signature = inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda function: asked.append(function) or signature(function))
    named, module = NamedInputs(forward, ("x", "gain", "training", "rest", "others", "module")), nn.Identity()
    for one, two in ((1, 2), (3, 4)):
        assert named(module, (one,), {}) == (one, 2, True, (), {}, module)
        assert named(module, (), {"x": one, "gain": two}) == (one, two, True, (), {}, module)
        assert named(module, (one, two, 5), {"shift": two}) == (one, 2, True, (two, 5), {"shift": two}, module)
    assert len(asked) == 3
