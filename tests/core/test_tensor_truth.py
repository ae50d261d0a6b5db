"""Which tensor stands for which is decided in one place, and what nobody said is refused by everybody."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import slapo_core as slapo
from slapo_core.ranks.launcher import run_ranks
from slapo_core.weights.state import reference_state_dict
from tests.messages import Messages


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


def test_what_a_step_says_it_drops_keeps_its_untouched_value() -> None:
    model = Net()
    bias = model.first.bias.detach().clone()
    sch = slapo.create_schedule(model)
    sch["first"].apply(LoseBias(said=True))
    assert sch.tree.tensors.dropped == {"first.bias"}
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
    assert sch.tree.tensors.dropped == frozenset()


def test_a_tensor_put_in_outside_of_the_schedule_takes_the_place_of_the_one_before() -> None:
    """As ``module.to_empty`` and ``load_state_dict(assign=True)`` do it."""
    model = Net()
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    from tests.core.building_support import Split

    sch["first"].apply(Split(("weight",)))
    layout = sch["first"].layout("weight")
    model.first.weight = nn.Parameter(torch.zeros(3, 4))
    sch.tree.structure_changed()
    assert sch["first"].layout("weight") == layout
    own = model.first.weight
    with sch.untouched():
        assert model.first.weight.shape == (6, 4)
    assert model.first.weight is own, "looking at the untouched model does not take it away"
    model.second.weight = nn.Parameter(torch.zeros(4, 6))
    sch.tree.structure_changed()
    assert sch["second"].layout("weight").origin == "second.weight"


# -- tensors that live on another rank --------------------------------------------------------------------------


def computed_by_owner(forward: Any, *, owner: int, features: int) -> Any:
    """The owner computes and broadcasts; the others take its result. Enough for evaluation."""

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        y = forward(module, x) if dist.get_rank() == owner else x.new_empty(*x.shape[:-1], features)
        y = y.detach().contiguous()
        dist.broadcast(y, group_src=owner, group=group)
        return y

    return run


@dataclass(frozen=True)
class OnRank(slapo.Primitive):
    """Let the layer live on one rank only."""

    name = "trial.on_rank"
    equivalence = slapo.Equivalence.EXACT
    rank: int

    def apply(self, node: Any, edit: Any) -> None:
        features = node.module.out_features
        for name in list(node.parameters):
            edit.keep_on_rank(node, name, "tp", self.rank)
        wrapper = functools.partial(computed_by_owner, owner=self.rank, features=features)
        edit.wrap_forward(node, wrapper)


def build_with_a_layer_on_one_rank(directory: str) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = Net()
    x = torch.randn(2, 4)
    expected, weights = plain(x), {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    with torch.device("meta"):
        model = Net()
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["second"].apply(OnRank(1))
    effects = sch.records[0].effects
    engine = slapo.build(sch, weights=weights, max_grad_norm=1.0, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    own = [name for name, parameter in model.named_parameters() if parameter is not None]
    with torch.no_grad():
        same = torch.equal(engine.module(x), expected)
    state = engine.state_dict()
    engine.load_state_dict({name: tensor + 1 for name, tensor in weights.items()})
    moved = engine.state_dict()
    return {
        "effects": effects,
        "own": own,
        "same": same,
        "keys": list(state) == list(weights),
        "equal": all(torch.equal(state[name], weights[name]) for name in weights),
        "loaded": all(torch.equal(moved[name], weights[name] + 1) for name in weights),
    }


@pytest.mark.ranks
def test_a_tensor_that_lives_on_another_rank_is_in_every_state_dict(tmp_path: Path) -> None:
    ranks = run_ranks(build_with_a_layer_on_one_rank, str(tmp_path), world_size=2)
    assert [rank["own"] for rank in ranks] == [
        ["first.weight", "first.bias"],
        ["first.weight", "first.bias", "second.weight", "second.bias"],
    ]
    for rank in ranks:
        assert "weight is kept on rank 1 of 'tp' only" in rank["effects"]
        assert rank["same"]
        assert rank["keys"]
        assert rank["equal"]
        assert rank["loaded"]


def test_keeping_on_a_rank_is_undone_and_needs_that_rank(message: Messages) -> None:
    model = Net()
    weight = model.second.weight
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["second"].apply(OnRank(1))
    assert model.second.weight is None
    assert sch.tree.tensors.kept_on == {"second.weight": ("tp", 1), "second.bias": ("tp", 1)}
    assert sch.tree.tensors.dropped == frozenset()
    sch.undo()
    assert model.second.weight is weight
    assert sch.tree.tensors.kept_on == {}
    with pytest.raises(slapo.ApplyError) as caught:
        sch["second"].apply(OnRank(2))
    message(caught, "rank 2 of mesh_dim 'tp'", "{'tp': 2}")
