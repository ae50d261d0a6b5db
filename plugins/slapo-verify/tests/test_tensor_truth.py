"""Which tensor stands for which is decided in one place, and what nobody said is refused by everybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_core as slapo
from slapo_core.internals import Internals
from tests.messages import Messages
from tests.support.reference_weights import reference_state_dict


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def transposed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, module.weight.t(), module.bias)

    return run


@dataclass(frozen=True)
class Transpose(slapo.Primitive):
    """Keep the weight transposed, and tell nobody."""

    name = "trial.transpose"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: Any, edit: Any) -> None:
        edit.set_parameter(node, "weight", node.module.weight.detach().t().contiguous())
        edit.wrap_forward(node, transposed)


@dataclass(frozen=True)
class LoseBias(slapo.Primitive):
    """Replace a layer by one without bias; ``said`` or not."""

    name = "trial.lose_bias"
    equivalence = slapo.Equivalence.APPROXIMATE(10.0, 10.0)
    said: bool = False

    def apply(self, node: Any, edit: Any) -> None:
        old = node.module
        new = nn.Linear(old.in_features, old.out_features, bias=False)
        edit.replace_module(node, new, dropped=["bias"] if self.said else [])
        edit.set_parameter(node, "weight", old.weight)


@pytest.mark.parametrize(
    ("step", "word", "hint"),
    [
        (Transpose(), "'first.weight' of shape (4, 6)", 'layout=Layout("", (4, 6))'),
        (LoseBias(), "'first.bias' (6,)", 'dropped=["bias"]'),
    ],
)
def test_a_tensor_that_nobody_explains_is_refused_by_build_and_by_verify(
    step: slapo.Primitive, word: str, hint: str, message: Messages
) -> None:
    x = torch.randn(2, 4)
    sch = slapo.create_schedule(Net())
    sch["second"].checkpoint()
    sch["first"].apply(step)
    with pytest.raises(slapo.WeightsError) as refused:
        slapo.build(sch)
    message(refused, word, hint)
    with pytest.raises(slapo.WeightsError, match="'first"):
        reference_state_dict(sch)
    with pytest.raises(slapo.VerifyError) as found:
        slapo.verify(sch, x)
    assert f"{refused.value.message}\n" in found.value.message
    assert found.value.steps == (str(sch.records[1]),)
    sch.undo()
    slapo.verify(sch, x)


def test_dropped_tensors_keep_their_reference_values() -> None:
    model = Net()
    bias = model.first.bias.detach().clone()
    sch = slapo.create_schedule(model)
    sch["first"].apply(LoseBias(said=True))
    assert Internals(sch).tree.tensors.dropped == {"first.bias"}
    state = slapo.build(sch).state_dict()
    assert torch.equal(state["first.bias"], bias)


def test_a_tie_made_by_a_step_gives_the_old_tensor_up_and_undo_takes_that_back() -> None:
    @dataclass(frozen=True)
    class Tie(slapo.Primitive):
        name = "trial.tie"
        equivalence = slapo.Equivalence.EXACT

        def apply(self, node: Any, edit: Any) -> None:
            edit.set_parameter(node["b"], "weight", node["a"].module.weight)

    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    weight = model["b"].weight.detach().clone()
    sch = slapo.create_schedule(model)
    sch.apply(Tie())
    assert sch["b"].layout("weight").origin == "a.weight"
    assert torch.equal(reference_state_dict(sch)["b.weight"], weight)
    sch.undo()
    assert sch["b"].layout("weight").origin == "b.weight"
    assert Internals(sch).tree.tensors.dropped == frozenset()


def test_a_tensor_put_in_outside_of_the_schedule_takes_the_place_of_the_one_before() -> None:
    """As ``module.to_empty`` and ``load_state_dict(assign=True)`` do it."""
    model = Net()
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    from tests.support.building import Split

    sch["first"].apply(Split(("weight",)))
    layout = sch["first"].layout("weight")
    model.first.weight = nn.Parameter(torch.zeros(3, 4))
    Internals(sch).tree.structure_changed()
    assert sch["first"].layout("weight") == layout
    own = model.first.weight
    with sch.reference():
        assert model.first.weight.shape == (6, 4)
    assert model.first.weight is own, "looking at the reference model does not take it away"
    model.second.weight = nn.Parameter(torch.zeros(4, 6))
    Internals(sch).tree.structure_changed()
    assert sch["second"].layout("weight").origin == "second.weight"
