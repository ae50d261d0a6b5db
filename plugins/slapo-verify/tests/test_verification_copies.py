"""What verify copies of a model is a deep copy, though its many empty containers are not left to ``deepcopy``."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.schedule_copies import copy_model


class Kept(dict):  # type: ignore[type-arg]
    """Empty, and of a class of its own."""

    def __deepcopy__(self, memo: Any) -> str:
        return "its own copy"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.seen: list[int] = []
        self.first.seen = self.seen  # type: ignore[assignment]
        self.filled, self.kept, self.marked = {"seen": self.seen}, Kept(), OrderedDict[str, int]()
        self.marked.note = "here"  # type: ignore[attr-defined]


def test_empty_containers_are_the_copys_own_and_shared_as_they_were() -> None:
    model = Model()
    made: Any = copy_model(model)
    assert made.seen is made.first.seen is made.filled["seen"]
    assert made.seen is not model.seen
    assert made.kept == "its own copy"
    assert (made.marked.note, made.marked) == ("here", OrderedDict())
    for ours, theirs in zip(model.modules(), made.modules(), strict=True):
        for name, value in vars(ours).items():
            if isinstance(value, (dict, list, set)):
                assert vars(theirs)[name] is not value, name
                assert name == "kept" or type(vars(theirs)[name]) is type(value)
    made.second.register_forward_hook(lambda *_: None)
    made.seen.append(1)
    assert (len(model.second._forward_hooks), len(made.first._forward_hooks), model.seen) == (0, 0, [])
    assert torch.equal(made.first.weight, model.first.weight)


class Router(nn.Linear):
    """A layer that leaves results of its forward on itself, as routers leave their auxiliary losses."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = super().forward(input)
        self.aux_loss = out.sum()
        self.losses, self.by_name = [self.aux_loss], {"aux": self.aux_loss * 2}
        return out


def test_outputs_kept_on_a_module_are_copied_without_their_graph() -> None:
    """Deepcopy refuses a tensor with a graph, also the weight that the older weight_norm computes."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(Router(4, 4), nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    model(torch.randn(2, 4))
    assert not model[0].aux_loss.is_leaf
    assert not model[1].weight.is_leaf
    sch = slapo.create_schedule(model, example_inputs=torch.randn(2, 4))
    sch["2"].checkpoint()
    assert slapo.verify(sch, torch.randn(2, 4))
    sch["1"].trace(flatten=True)
    made: Any = copy_model(model)
    assert made[0].aux_loss is made[0].losses[0]
    assert (made[0].aux_loss.is_leaf, made[0].by_name["aux"]) == (True, model[0].by_name["aux"])
    assert model[0].aux_loss.grad_fn is not None
