"""Every mistake a user makes ends in one clear error, and the model stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import ModelSnapshot
from slapo_tp import Shard, Sync


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 64)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


@dataclass(frozen=True)
class Raises(slapo.Primitive):
    """Changes something and then breaks.

    rewrite: module -> no module
    """

    name = "bad.raises"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.set_attribute(node, "in_features", 3)
        edit.add_hook(node, "forward", lambda module, args, kwargs, output: None)
        raise RuntimeError("out of paint")


def wrong_path(model: Mlp) -> None:
    slapo.create_schedule(model)["fc3"]


def wrong_glob(model: Mlp) -> None:
    slapo.create_schedule(model)["layers.*"]


def wrong_axis(model: Mlp) -> None:
    slapo.create_schedule(model, mesh={"tp": 2})["fc1"].shard("weight", axis=2)


def wrong_parameter(model: Mlp) -> None:
    slapo.create_schedule(model, mesh={"tp": 2})["fc1"].shard("wieght", axis=0)


def indivisible(model: Mlp) -> None:
    slapo.create_schedule(model, mesh={"tp": 3})["fc1"].shard("weight", axis=0)


def twice(model: Mlp) -> None:
    slapo.create_schedule(model, mesh={"tp": 2})["fc1"].shard("weight", axis=0).shard("weight", axis=0)


def sync_first(model: Mlp) -> None:
    slapo.create_schedule(model, mesh={"tp": 2})["fc1"].sync("fwd_post", "all_reduce")


def no_mesh(model: Mlp) -> None:
    slapo.create_schedule(model)["fc1"].shard("weight", axis=0)


def wrong_mesh(model: Mlp) -> None:
    slapo.create_schedule(model, mesh={"tpp": 2})


def wrong_size(model: Mlp) -> None:
    slapo.create_schedule(model, mesh={"tp": 0})


def raises(model: Mlp) -> None:
    slapo.create_schedule(model)["fc1"].apply(Raises())


def misspelt(model: Mlp) -> None:
    slapo.create_schedule(model)["fc1"].shrad("weight", axis=0)


def wrong_type(model: Mlp) -> None:
    slapo.create_schedule(model, mesh={"tp": 2})["fc1"].shard("weight", axis="no")


def foreign_optimizer(model: Mlp) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slapo.build(slapo.create_schedule(model), optimizer=optimizer)


def optimizer_of_other_parameters(model: Mlp) -> None:
    optimizer = torch.optim.SGD(Mlp().parameters(), lr=0.1)
    slapo.build(slapo.create_schedule(model), optimizer=lambda parameters: optimizer)


def dry_build(model: Mlp) -> None:
    slapo.build(slapo.create_schedule(model, mesh={"tp": 2}))


def unknown_target(model: Mlp) -> None:
    slapo.build(slapo.create_schedule(model), target="torhc")


MISTAKES: list[tuple[Callable[[Mlp], None], type[slapo.SlapoError], tuple[str, ...]]] = [
    (wrong_path, slapo.PathError, ("'fc3'", "sch['fc1']", "sch['fc2']")),
    (wrong_glob, slapo.PathError, ("'layers.*' matches no module",)),
    (wrong_axis, slapo.PreconditionError, ("'weight' has 2 axes (64, 16)", "axis=0", "axis=1")),
    (wrong_parameter, slapo.PreconditionError, ("'wieght'", "'weight'")),
    (indivisible, slapo.PreconditionError, ("64", "tp size 3")),
    (twice, slapo.PreconditionError, ("fc1", "weight")),
    (sync_first, slapo.PreconditionError, ("shard",)),
    (no_mesh, slapo.PreconditionError, ('create_schedule(model, mesh={"tp": N})',)),
    (wrong_mesh, slapo.MeshError, ("'tpp'", "dp, pp, cp, ep, tp")),
    (wrong_size, slapo.MeshError, ("positive integer (got 0)",)),
    (raises, slapo.ApplyError, ("rolled back", "RuntimeError: out of paint")),
    (misspelt, slapo.UnknownNameError, ("'shrad'", "'shard'")),
    (wrong_type, slapo.ArgumentError, ("tp.shard", "'axis' must be int (got 'no')")),
    (foreign_optimizer, slapo.OptimizerError, ("lambda params:",)),
    (optimizer_of_other_parameters, slapo.OptimizerError, ("parameters",)),
    (dry_build, slapo.BuildError, ("torchrun --nproc-per-node 2",)),
    (unknown_target, slapo.UnknownNameError, ("'torhc'", "torch")),
]


@pytest.mark.parametrize(("mistake", "error", "words"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_is_one_clear_error_and_the_model_stays_intact(
    mistake: Callable[[Mlp], None], error: type[slapo.SlapoError], words: tuple[str, ...]
) -> None:
    model = Mlp()
    before = ModelSnapshot(model)
    with pytest.raises(error) as caught:
        mistake(model)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    if mistake is twice:  # the first call was right: only what it did has changed
        assert tuple(model.fc1.weight.shape) == (32, 16)
    else:
        assert before.differences(model) == []


def test_a_right_schedule_does_change_the_model() -> None:
    """The control: the snapshot above would notice."""
    model = Mlp()
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["fc2"].apply(Shard("weight", axis=1)).apply(Sync("fwd_post", "all_reduce"))
    assert before.differences(model) != []
    sch.undo(to=0)
    assert before.differences(model) == []
