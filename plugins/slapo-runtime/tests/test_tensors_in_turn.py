"""A dialect that partitions as it goes takes the tensors one by one; the others find them all in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.plugins import Registry, use_registry
from slapo_runtime.correspondence.storage import LiveTensor
from tests.messages import Messages


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.embed(ids) * self.scale))


class InTurn(slapo.Dialect):
    """Keeps the first element of every tensor only; ``log`` is what it saw of the model as each came."""

    name: ClassVar[str] = "in_turn"
    supports: ClassVar[frozenset[str]] = frozenset()
    takes_tensors: ClassVar[bool] = True
    stop_after: ClassVar[int | None] = None
    log: ClassVar[list[tuple[LiveTensor, torch.Tensor, list[str]]]] = []

    def plan(self, schedule: Any, config: Mapping[str, Any]) -> slapo.Plan:
        return slapo.Plan(self.name, ("in turn",))

    def build(self, plan: slapo.Plan, context: Any) -> Any:
        self.log.clear()
        for count, live in enumerate(context.materialize(), start=1):
            full = [t.name for t in context.state.tensors() if not t.tensor.is_meta and t.tensor.numel() > 1]
            self.log.append((live, live.tensor.detach().clone(), full))
            live.tensor.data = live.tensor.detach().flatten()[:1].clone()
            if count == self.stop_after:
                break
        return context.state


@pytest.fixture(autouse=True)
def dialect() -> Iterator[None]:
    with use_registry(Registry.discover()) as registry:
        registry.register(InTurn, kind="dialects")
        yield
    InTurn.stop_after = None


def on_meta() -> slapo.Schedule:
    with torch.device("meta"):
        model = Net()
    return slapo.create_schedule(model)


def test_each_tensor_comes_alone_in_its_place_and_with_its_value() -> None:
    expected = slapo.build(on_meta()).state_dict()
    slapo.build(on_meta(), target="in_turn")
    names = [live.name for live, _, _ in InTurn.log]
    assert names == ["scale", "embed.weight", *(f"layers.{i}.{part}" for i in range(3) for part in ("weight", "bias"))]
    for live, value, full in InTurn.log:
        assert torch.equal(value, expected[live.name])
        assert full == [live.name], "no other tensor is whole while this one is"


@pytest.mark.parametrize("weights", [False, True])
def test_weights_and_real_tensors_come_in_turn_too(weights: bool) -> None:
    torch.manual_seed(1)
    model, given = Net(), {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    expected = given if weights else {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slapo.build(slapo.create_schedule(model), target="in_turn", weights=given if weights else None)
    assert [torch.equal(value, expected[live.name]) for live, value, _ in InTurn.log] == [True] * 8


def test_dialect_that_skips_tensors_is_refused_and_the_schedule_stays_usable(message: Messages) -> None:
    InTurn.stop_after = 3
    sch = on_meta()
    with pytest.raises(slapo.BuildError) as caught:
        slapo.build(sch, target="in_turn")
    message(caught, "'in_turn'", "takes_tensors = True")
    assert all(parameter.is_meta for parameter in sch.model.parameters())
    assert slapo.build(sch).state_dict().keys() == Net().state_dict().keys()
