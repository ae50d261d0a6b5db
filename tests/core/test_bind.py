"""``Primitive.bind``: what a step finds out once is what is recorded, and replayed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.plugins import Registry, use_registry
from tests.messages import Messages


@dataclass(frozen=True)
class Largest(slapo.Primitive):
    """Finds out which child is largest in the reference model.

    rewrite: x -> x
    """

    name = "test.largest"
    equivalence = slapo.Equivalence.EXACT
    child: str | None = None
    raises: str = ""

    def bind(self, node: slapo.Node) -> slapo.Primitive:
        if self.raises == "error":
            raise ValueError("cannot say")
        if self.raises == "refusal":
            raise slapo.PreconditionError("not here", violations=[], path=node.path)
        if self.raises == "other":
            return Other()
        if self.child is not None:
            return self
        with node.reference() as module:
            sizes = {name: sum(each.numel() for each in child.parameters()) for name, child in module.named_children()}
        return dataclasses.replace(self, child=max(sizes, key=lambda name: sizes[name]))

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note(f"largest is {self.child}")


@dataclass(frozen=True)
class Other(slapo.Primitive):
    """Something else.

    rewrite: x -> x
    """

    name = "test.other"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("other")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 9), nn.Linear(9, 1))


@pytest.fixture
def sch() -> Iterator[slapo.Schedule]:
    with use_registry(Registry.discover(environ={})) as registry:
        registry.register(Largest)
        yield slapo.create_schedule(model())


def test_bound_arguments_are_recorded_saved_and_replayed(sch: slapo.Schedule) -> None:
    sch["1"].replace(nn.Linear(3, 9, bias=False), drop="bias")
    sch.apply(Largest())
    assert sch.records[-1].primitive == Largest("1")
    assert "bias" not in dict(sch.model[1].named_parameters())  # the reference model was there only for a moment
    sch.undo(to=0)
    sch.apply(Largest())
    document = json.loads(sch.to_json())
    assert document["records"][0]["arguments"]["child"] == "1"
    document["records"][0]["arguments"]["child"] = "2"
    assert slapo.replay(model(), document).records[-1].primitive == Largest("2")


def test_a_bind_that_fails_leaves_nothing_behind(sch: slapo.Schedule, message: Messages) -> None:
    before = [parameter.clone() for parameter in sch.model.parameters()]
    with pytest.raises(slapo.ApplyError) as caught:
        sch.apply(Largest(raises="error"))
    message(caught, "largest(raises='error') at the root", "ValueError: cannot say")
    with pytest.raises(slapo.PreconditionError, match="not here"):
        sch.apply(Largest(raises="refusal"))
    with pytest.raises(slapo.ApplyError, match=r"\(got Other\(\)\)"):
        sch.apply(Largest(raises="other"))
    assert sch.records == ()
    assert all(torch.equal(each, value) for each, value in zip(sch.model.parameters(), before, strict=True))


def test_a_place_that_a_step_brought_has_no_untouched_module(sch: slapo.Schedule, message: Messages) -> None:
    sch["1"].replace(nn.Sequential(nn.Linear(3, 9)), drop=("weight", "bias"))
    with pytest.raises(slapo.PathError) as caught:
        with sch["1.0"].reference():
            pass
    message(caught, "'1.0'")
    assert isinstance(sch.model[1], nn.Sequential)
