"""``slapo_loss.log_probs`` of a scheduled head: the right numbers, over ranks, and calls that are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo
import slapo_loss
from slapo_core import ArgumentError
from slapo_testing import run_ranks

CLASSES = 11


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES, bias=bias)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.embed(tokens).sin())


def made(bias: bool) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (3, 5))
    labels[1, :2] = -100
    return Model(bias).double(), torch.randn(3, 5, 6).double().requires_grad_(), labels


def objective(found: tuple[Tensor, Tensor]) -> Tensor:
    """A loss as policy gradients have it: by ratios, advantages and an entropy bonus."""
    advantages = torch.linspace(-1, 1, found[0].numel()).view_as(found[0]).double()
    return (found[0].exp() * advantages).sum() - 0.3 * found[1].mean()


def plain(model: Model, hidden: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    of_all = (model.head(hidden) / temperature).log_softmax(-1)
    picked = of_all.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    return torch.where(labels == -100, 0.0, picked), -(of_all.exp() * of_all).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
def test_numbers_and_gradients_are_those_of_the_logits(bias: bool) -> None:
    model, hidden, labels = made(bias)
    sch = slapo.create_schedule(copy.deepcopy(model))
    for chunk in (None, 2):
        found = slapo_loss.log_probs(hidden, sch["head"], labels, temperature=0.7, chunk=chunk)
        expected = plain(model, hidden, labels, 0.7)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        given = [hidden, *sch.model.head.parameters()]
        for one, other in zip(
            torch.autograd.grad(objective(found), given),
            torch.autograd.grad(objective(expected), [hidden, *model.head.parameters()]),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        old, _ = slapo_loss.log_probs(hidden, sch["head"], labels, temperature=0.7)
    assert torch.equal(old, found[0])


@pytest.mark.ranks
def test_over_ranks_they_are_those_of_the_whole_vocabulary() -> None:
    model, hidden, labels = made(bias=True)
    expected = plain(model, hidden, labels, 0.7)
    of_hidden, of_weight = torch.autograd.grad(objective(expected), [hidden, model.head.weight])
    found = run_ranks(_on_a_rank, world_size=2)
    for values, entropies, by_hidden, _ in found:
        torch.testing.assert_close(
            (values, entropies), tuple(each.detach() for each in expected), rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(by_hidden, of_hidden, rtol=1e-12, atol=1e-12)
    joined = torch.cat([each[3] for each in found])
    torch.testing.assert_close(joined[:CLASSES], of_weight, rtol=1e-12, atol=1e-12)


def _on_a_rank() -> list[Tensor]:
    model, hidden, labels = made(bias=True)
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["head"].shard("weight", axis=0, pad=True)
    sch["head"].shard("bias", axis=0, pad=True)
    found = slapo_loss.log_probs(hidden, sch["head"], labels, temperature=0.7, chunk=4)
    by_hidden, by_weight = torch.autograd.grad(objective(found), [hidden, sch["head"].parameters["weight"]])
    return [found[0].detach(), found[1].detach(), by_hidden, by_weight]


def test_calls_without_a_schedule_or_with_other_shapes_are_refused() -> None:
    model, hidden, labels = made(bias=False)
    sch = slapo.create_schedule(model)
    with pytest.raises(ArgumentError, match="of a schedule") as raised:
        slapo_loss.log_probs(hidden, model.head, labels)  # type: ignore[arg-type]
    assert 'sch["lm_head"]' in (raised.value.hint or "")
    with pytest.raises(ArgumentError, match="Embedding"):
        slapo_loss.log_probs(hidden, sch["embed"], labels)
    with pytest.raises(ArgumentError, match="labels must have shape") as raised:
        slapo_loss.log_probs(hidden[:, :2], sch["head"], labels)
    assert raised.value.path == "head"
    with pytest.raises(ArgumentError, match="positive"):
        slapo_loss.log_probs(hidden, sch["head"], labels, temperature=0.0)
    labels[0, 0] = CLASSES
    with pytest.raises(IndexError, match="out of bounds"):
        slapo_loss.log_probs(hidden, sch["head"], labels)


def test_on_an_abstract_mesh_it_names_the_launch() -> None:
    model, hidden, labels = made(bias=False)
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["head"].shard("weight", axis=0, pad=True)
    with pytest.raises(ArgumentError, match="abstract mesh") as raised:
        slapo_loss.log_probs(hidden, sch["head"], labels)
    assert raised.value.hint


@pytest.mark.parametrize("options", [{"shards": 2}, {"packed": 2}])
def test_classes_that_ranks_share_or_that_are_not_in_their_order_are_refused(options: dict[str, int]) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Identity(), nn.Linear(6, 8)), mesh={"tp": 4})
    sch["1"].shard(["weight", "bias"], axis=0, **options)
    with pytest.raises(ArgumentError, match="'weight' is") as raised:
        slapo_loss.log_probs(torch.zeros(2, 6), sch["1"], torch.zeros(2, dtype=torch.long))
    assert 'shard("weight", axis=0)' in (raised.value.hint or "")
