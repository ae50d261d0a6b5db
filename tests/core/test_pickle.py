"""A scheduled model can be saved whole: what comes back runs as it did, or saving says why it cannot."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.tree.edit import Edit
from slapo_core.tree.forward import ModuleForward
from slapo_core.tree.node import Node
from slapo_testing.models import MLP
from tests.messages import Messages


@dataclass(frozen=True)
class Doubled(slapo.Primitive):
    """Wraps the forward in a local function, which pickle cannot find again."""

    name = "trial.doubled"
    equivalence = slapo.Equivalence.APPROXIMATE(2.0, 0.0)

    def apply(self, node: Node, edit: Edit) -> None:
        def doubled(forward: Any) -> Any:
            return lambda module, x: 2 * forward(module, x)

        edit.wrap_forward(node, doubled)


@pytest.fixture
def saved() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = MLP(2)
    sch = slapo.create_schedule(model)
    sch["layers.*"].checkpoint()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return model, torch.load(file, weights_only=False)


def test_a_checkpointed_model_comes_back_checkpointed_and_bound_to_itself(saved: tuple[Any, Any]) -> None:
    model, loaded = saved
    x = torch.randn(3, 8, requires_grad=True)
    assert torch.equal(loaded(x), model(x))
    for layer in loaded.layers:
        assert isinstance(layer.__dict__["forward"], ModuleForward)
        assert layer.forward.__self__ is layer
        assert layer.forward.__func__.__qualname__ == model.layers[0].forward.__func__.__qualname__
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loaded.layers[0](x)
    plain: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: plain.append(t.numel()) or t, lambda t: t):
        MLP(1).layers[0](x)
    assert len(kept) < len(plain)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    assert not loaded(x).any()
    assert model(x).any()


def test_a_layer_that_leaves_its_bias_out_and_is_checkpointed_still_does_when_it_comes_back() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    slapo.create_schedule(model, mesh={"tp": 2})["0"].shard("weight", axis=1).checkpoint()
    x = torch.randn(2, 4, requires_grad=True)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(x), x @ model[0].weight.T)
    assert torch.equal(pickle.loads(pickle.dumps(loaded))(x), model(x))


def test_a_forward_wrapped_by_a_local_function_says_what_to_do_instead(message: Messages) -> None:
    model = MLP(1)
    slapo.create_schedule(model)["head"].apply(Doubled())
    with pytest.raises(slapo.SerializationError) as caught:
        pickle.dumps(model)
    message(caught, "Doubled.apply.<locals>.doubled", "edit.wrap_forward")
