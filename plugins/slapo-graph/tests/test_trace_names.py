"""Names of children and arguments that the code of a graph uses for other things."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LAYER = "encoder.layer.0"
NAMES = ("self", "torch", "device", "inf", "len", "captured_0")


class Named(nn.Module):
    """A child and an argument by one name; the code of its graph needs torch, devices and infinity."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.output = name, nn.Linear(4, 4)
        self.add_module(name, nn.Linear(4, 4))


def of(name: str) -> nn.Module:
    def calls(module: Named, given: torch.Tensor) -> torch.Tensor:
        h = F.gelu(module.get_submodule(name)(given))
        h = h + torch.zeros(h.shape, dtype=h.dtype, device=h.device).clamp(max=float("inf")) * len(h)
        return module.output(h.to(given.device))

    itself = "this" if name == "self" else "self"

    def forward(first: Any, second: Any) -> torch.Tensor:
        return calls(first, second)

    forward.__code__ = forward.__code__.replace(co_varnames=(itself, name))
    torch.manual_seed(0)
    return nn.Sequential(type("Of", (Named,), {"forward": forward})(name)).double()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_model_hides_none_of_the_graphs_code(name: str) -> None:
    model = of(name)
    expected = copy.deepcopy(model)(X)
    sch = slapo.create_schedule(model, example_inputs=X)
    sch["0"].trace()
    assert torch.equal(model(X), expected)
    sch["0"].checkpoint(match=sch["0"].find(name))
    sch["0"].checkpoint(match=F.gelu)
    assert torch.equal(model(X), expected)
    sch.undo(to=0)
    sch[f"0.{name}"].pipeline_split()
    assert slapo.verify(sch).steps_verified == 1


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Electra"])
def test_an_attention_with_a_child_called_self_is_traced(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "embedding_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    config = getattr(transformers, f"{family}Config")(vocab_size=48, num_hidden_layers=1, **sizes)
    model, ids = getattr(transformers, f"{family}Model")(config).eval(), torch.arange(16).reshape(2, 8)
    expected = model(ids)[0]
    sch = slapo.create_schedule(model, example_inputs={"input_ids": ids})
    for path, options in (
        (f"{LAYER}.attention", {}),
        (f"{LAYER}.attention", {"flatten": True}),
        (LAYER, {"recursive": True}),
    ):
        sch[path].trace(**options)
        assert torch.equal(model(ids)[0], expected)
        sch.undo()
