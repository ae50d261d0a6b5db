"""A primitive may freeze a parameter: undone exactly, kept through other steps, and verified alike on both sides."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import ModelSnapshot


@dataclass(frozen=True)
class Freeze(slapo.Primitive):
    """Stop training a parameter.

    Args:
        param: the module's own parameter.

    rewrite: weight with a gradient -> weight without one
    """

    name = "test.freeze"
    equivalence = slapo.Equivalence.EXACT

    param: str

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.set_requires_grad(node, self.param, False)


@dataclass(frozen=True)
class Thaw(slapo.Primitive):
    """Forget to keep a parameter trained: a mistake.

    rewrite: a parameter -> another one that is not trained
    """

    name = "test.thaw"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        value = node.parameters["weight"].detach().clone()
        edit.set_parameter(node, "weight", nn.Parameter(value, requires_grad=False))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.inner = nn.Linear(8, 8)
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(self.embed(ids)))


IDS = torch.arange(6).view(2, 3)


def test_freezing_is_undone_exactly() -> None:
    model = Tied()
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    sch["out"].apply(Freeze("weight"))
    assert not model.embed.weight.requires_grad
    assert before.differences(model)
    assert sch.records[0].edits == ("weight is frozen",)
    sch.undo()
    assert before.differences(model) == []
    assert sch._core.tree.tensors.trained == {}


def test_verify_freezes_the_untouched_model_alike_and_says_so() -> None:
    sch = slapo.create_schedule(Tied())
    sch["out"].apply(Freeze("weight"))
    report = slapo.verify(sch, IDS)
    assert any("embed.weight (frozen)" in note for note in report.notes), report.notes


def test_verify_refuses_a_parameter_that_lost_its_gradient_by_mistake() -> None:
    sch = slapo.create_schedule(Tied())
    sch["inner"].apply(Thaw())
    with pytest.raises(slapo.VerifyError, match=r"gradient of inner\.weight: it has no gradient"):
        slapo.verify(sch, IDS)


def test_the_optimizer_of_a_built_model_leaves_a_frozen_parameter_alone() -> None:
    torch.manual_seed(0)
    model = Tied()
    sch = slapo.create_schedule(model)
    sch["inner"].apply(Freeze("weight"))
    frozen, trained = model.inner.weight.detach().clone(), model.inner.bias.detach().clone()
    engine = slapo.build(
        sch, optimizer=lambda params: torch.optim.SGD(params, lr=0.5), loss=lambda output, batch: output.square().mean()
    )
    engine.train_step(IDS)
    assert torch.equal(model.inner.weight, frozen)
    assert not torch.equal(model.inner.bias, trained)


def test_requires_grad_is_no_annotation() -> None:
    @dataclass(frozen=True)
    class Wrong(slapo.Primitive):
        """Annotate what is no annotation.

        rewrite: x -> x
        """

        name = "test.wrong"
        equivalence = slapo.Equivalence.EXACT

        def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
            edit.annotate(node, "weight", "requires_grad", False)

    model = Tied()
    before = ModelSnapshot(model)
    with pytest.raises(slapo.ApplyError, match=r"edit\.set_requires_grad"):
        slapo.create_schedule(model)["inner"].apply(Wrong())
    assert before.differences(model) == []
