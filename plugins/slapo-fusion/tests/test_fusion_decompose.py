"""``decompose``: the pieces of a module's arithmetic, seen by patterns, with the parameters that it had."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_fusion import Decompose, Fuse
from tests.messages import Messages


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.plain, self.bare = nn.Linear(6, 6, bias=False), nn.LayerNorm(6, elementwise_affine=False)
        self.batch, self.average = nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(self.norm(x))) + self.plain(self.bare(x))
        return self.average(self.batch(x))


def block() -> nn.Module:
    torch.manual_seed(0)
    made = Block()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(0.2, 1)
    return nn.Sequential(made)


X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1))


def test_every_kind_computes_the_same_with_the_same_tensors_and_names() -> None:
    model = block()
    before, tensors = list(model.state_dict()), {name: id(tensor) for name, tensor in model.named_parameters()}
    sch = slapo.create_schedule(model)
    sch["0.*"].apply(Decompose())
    assert list(model.state_dict()) == before
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == tensors
    assert isinstance(model[0].up, nn.Linear)
    slapo.verify(sch, X)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(X), model(X))
    sch.undo(to=0)
    assert type(model[0].up) is nn.Linear


def test_a_pattern_sees_the_bias_of_a_linear_behind_it() -> None:
    def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias)

    torch.manual_seed(0)
    sch: Any = slapo.create_schedule(nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.GELU())), example_inputs=X)
    sch["0.0"].apply(Decompose())
    sch["0"].trace(flatten=True)
    sch["0"].apply(Fuse(bias_gelu, "eager", name_="bias_gelu"))
    assert "bias_gelu(" in str(sch["0"].graph)
    slapo.verify(sch, X)


def test_autocast_rounds_as_before() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    expected = copy.deepcopy(model)
    slapo.create_schedule(model)["0"].apply(Decompose())
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X).dtype == expected(X).dtype == torch.bfloat16
        torch.testing.assert_close(model(X), expected(X), rtol=0, atol=2e-2)


@pytest.mark.parametrize("position", range(3))
def test_a_row_split_layer_adds_its_bias_once_whenever_it_is_decomposed(position: int) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    sch: Any = slapo.create_schedule(model, mesh={"tp": 2}, example_inputs=X)
    sch["0.0"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    steps = [lambda node: node.shard("weight", axis=1), lambda node: node.sync("fwd_post", "all_reduce")]
    steps.insert(position, lambda node: node.decompose())
    for step in steps:
        step(sch["0.1"])
    sch["0"].trace(flatten=True)
    code = str(sch["0"].graph)
    assert code.count("1.bias") == 1
    assert code.index("all_reduce_(") < code.index("1.bias")


def test_decompose_refuses_invalid_calls(message: Messages) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), *(nn.Linear(6, 6) for _ in range(3)))
    model[2].forward = model[2].forward
    sch: Any = slapo.create_schedule(model, example_inputs=X)
    sch["3"].trace()
    sch["4"].bind("aten::linear")
    refusals = {
        "": "root", "1": "GELU", "2": "outside of the schedule", "3": "its graph would be lost", "4": "bound by bind()",
    }  # fmt: skip
    for path, word in refusals.items():
        with pytest.raises(slapo.PreconditionError) as refused:
            sch[path].apply(Decompose()) if path else sch.root.apply(Decompose())
        message(refused, word)
    sch["0"].apply(Decompose())
    with pytest.raises(slapo.PreconditionError, match="decomposed already"):
        sch["0"].apply(Decompose())
