"""``quantize``: torchao's quantization-aware training, as by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_fusion import Quantize
from slapo_testing import ModelSnapshot
from tests.messages import Messages


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Sequential(nn.Linear(8, 4), nn.Tanh()))


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def by_hand(activation: str | None, weight: str, group_size: int | None) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    granularity: dict[str, Any] = {"granularity": "per_channel"} if group_size is None else {"group_size": group_size}
    weights = IntxFakeQuantizeConfig(getattr(torch, weight), is_symmetric=True, **granularity)
    activations = None
    if activation is not None:
        activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    made = model()
    quantization.quantize_(made, QATConfig(activation_config=activations, weight_config=weights, step="prepare"))
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("activation", "weight", "group_size"), [(None, "int8", None), ("int8", "int4", 4)])
def test_numbers_gradients_and_names_are_those_of_torchao_by_hand(
    activation: Any, weight: Any, group_size: int | None
) -> None:
    expected = by_hand(activation, weight, group_size)
    scheduled = model()
    sch = slapo.create_schedule(scheduled)
    for path in ("0", "2"):
        sch[path].apply(Quantize(weight, activation=activation, group_size=group_size))
    assert list(scheduled.state_dict()) == list(expected.state_dict())
    for each in (expected, scheduled):
        each(X).square().sum().backward()
    assert torch.equal(scheduled(X), expected(X))
    for one, other in zip(scheduled.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert not torch.equal(scheduled(X), model()(X))
    slapo.verify(sch, X)


@pytest.mark.filterwarnings("ignore")
def test_undo_puts_the_modules_back_and_hooks_go_over() -> None:
    pytest.importorskip("torchao")
    made = model()
    before = ModelSnapshot(made)
    sch = slapo.create_schedule(made)
    sch["2"].apply(Quantize())
    assert type(copy.deepcopy(made)[2][0]).__name__ == "FakeQuantizedLinear"
    sch.undo()
    assert before.differences(made) == []


def test_quantize_refuses_invalid_calls(message: Messages) -> None:
    pytest.importorskip("torchao")
    sch = slapo.create_schedule(model())
    for path, step, word in (
        ("1", Quantize(), "no nn.Linear"),
        ("0", Quantize(group_size=3), "groups of 3"),
    ):
        with pytest.raises(slapo.PreconditionError) as refused:
            sch[path].apply(step)
        message(refused, f"at '{path}'", word)


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(slapo.PreconditionError) as refused:
        slapo.create_schedule(model())["0"].apply(Quantize())
    message(refused, "not installed", "pip install 'slapo-fusion[quantize]'")
