"""What a replacement gives up stays in the state dict with its reference value; what it adds stays out of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.internals import Internals


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Other(nn.Module):
    """Another function with parameters of the same names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 4), 0.5))
        self.bias = nn.Parameter(torch.full((6,), 7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def test_dropped_parameter_is_distinct_from_a_new_one_of_its_name() -> None:
    torch.manual_seed(0)
    model = Net()
    untouched = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sch = slapo.create_schedule(model)
    sch["first"].replace(Other(), drop=["bias"])
    assert torch.equal(model.first.bias, torch.full((6,), 7.0))
    assert sch["first"].layout("bias").origin == ""
    with pytest.warns(UserWarning, match=r"first\.bias"):
        state = slapo.build(sch).state_dict()
    assert state.keys() == untouched.keys()
    for name, tensor in untouched.items():
        assert torch.equal(state[name], tensor), name
    Net().load_state_dict(state, strict=True)


def test_undo_forgets_that_a_parameter_was_dropped() -> None:
    sch = slapo.create_schedule(Net())
    sch["first"].replace(Other(), drop=["bias"])
    sch.undo()
    assert sch["first"].layout("bias").origin == "first.bias"
    assert Internals(sch).tree.layouts == {}


def test_new_tensor_does_not_inherit_the_layout_of_a_dropped_one() -> None:
    sch = slapo.create_schedule(Net(), mesh={"tp": 2})
    sch["first"].shard(["weight", "bias"], axis=0)
    assert sch["first"].layout("bias").is_sharded
    sch["first"].replace(Other(), drop=["weight", "bias"])
    for name in ("weight", "bias"):
        layout = sch["first"].layout(name)
        assert (layout.origin, layout.is_sharded, layout.shape) == (
            "",
            False,
            tuple(sch["first"].parameters[name].shape),
        )
    sch.undo()
    assert sch["first"].layout("bias").is_sharded
