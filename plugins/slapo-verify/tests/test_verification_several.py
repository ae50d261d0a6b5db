"""verify with a list of schedules: each against the reference model, and only of one model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from slapo_testing.models import Doubled
from tests.messages import Messages
from tests.support.failing_ranks import INPUTS, Fail, Net, net, outcome, scheduled


def right() -> slapo.Schedule:
    sch = slapo.create_schedule(net())
    sch["up"].checkpoint()
    return sch


@dataclass(frozen=True)
class Freeze(slapo.Primitive):
    name = "test.freeze"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.set_requires_grad(node, "weight", False)


def doubled(mesh: Any = None) -> slapo.Schedule:
    sch = slapo.create_schedule(net(), mesh=mesh)
    sch["head"].replace(Doubled(8, 4))
    return sch


def test_every_schedule_gets_a_report() -> None:
    first, second = slapo.verify([right(), slapo.create_schedule(net())], INPUTS)
    assert (first.steps_verified, second.steps_verified) == (1, 0)
    assert first == slapo.verify(right(), INPUTS)


def test_the_inputs_are_those_of_the_first_schedule_that_has_some() -> None:
    other = slapo.create_schedule(net(), example_inputs=INPUTS)
    assert slapo.verify([right(), other]) == slapo.verify((right(), other), INPUTS)


class Detached(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.detach(), self.bias)


@pytest.mark.parametrize("by_a_step", [False, True])
def test_schedules_do_not_share_frozen_parameters(by_a_step: bool) -> None:
    model = net()
    model.up.weight.requires_grad_(by_a_step)
    frozen = slapo.create_schedule(model)
    if by_a_step:
        frozen["up"].apply(Freeze())
    first, second = slapo.verify([frozen, right()], INPUTS)
    assert ("set by the schedule, in both models: up.weight (frozen)" in first.notes) is by_a_step
    assert second == slapo.verify(right(), INPUTS)
    cut = slapo.create_schedule(net())
    cut["up"].replace(Detached(8, 16))
    with pytest.raises(slapo.VerifyError, match=r"^schedule 2 of 2: ") as caught:
        slapo.verify([frozen, cut], INPUTS)
    assert caught.value.tensor == "gradient of up.weight"


def test_wrong_schedule_is_named_with_the_others_outcomes() -> None:
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify([right(), doubled(), right(), doubled()], INPUTS)
    lines = caught.value.message.splitlines()
    assert lines[0].startswith("schedule 2 of 4: ")
    assert lines[3].startswith("    #1 replace(")
    assert [line.split()[1:3] for line in lines[-3:]] == [["1", "agrees"], ["3", "agrees"], ["4", "fails"]]
    assert (caught.value.tensor, len(caught.value.steps)) == ("output", 1)


class Other(Net):
    pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: Other(), ("the root", "1: Net()", "2: Other()")),
        (lambda: Net(), ("'up.weight'", "1: (16, 8), torch.float32, checksum")),
    ],
)
def test_schedules_of_different_models_are_refused(change: Any, words: tuple[str, ...], message: Messages) -> None:
    torch.manual_seed(1)
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo.verify([right(), slapo.create_schedule(change())], INPUTS)
    message(re.sub(r"checksum \w+", "checksum", str(caught.value)), *words, "load_state_dict")


def test_another_probability_is_another_model() -> None:
    models = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Dropout(p)) for p in (0.1, 0.2)]
    models[1].load_state_dict(models[0].state_dict())
    with pytest.raises(slapo.ArgumentError, match=r"module '1':\n  schedule 1: Dropout\(p=0.1"):
        slapo.verify([slapo.create_schedule(model) for model in models], INPUTS)


@pytest.mark.parametrize(
    ("given", "got"), [([], "list"), ([1], "int"), ("x", "str"), (nn.Linear(1, 1), "Linear"), ([nn.ReLU()], "ReLU")]
)
def test_other_objects_than_schedules_are_refused(given: Any, got: str, message: Messages) -> None:
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo.verify(given, INPUTS)
    message(caught, "list of schedules", f"(got {got})", "verify([sch_a, sch_b], batch)")


def test_schedule_given_as_inputs_is_refused(message: Messages) -> None:
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo.verify(right(), right())
    message(caught, "verify([sch_a, sch_b], batch)")


@pytest.mark.ranks
def test_declared_meshes_may_differ() -> None:
    schedules = [right(), scheduled({"tp": 2}), scheduled({"dp": 2, "tp": 2}), scheduled({"tp": 2})]
    assert [report.world_size for report in slapo.verify(schedules, INPUTS)] == [1, 2, 4, 2]
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify([scheduled({"tp": 2}), doubled({"tp": 2})], INPUTS)
    assert caught.value.tensor == "output"
    assert caught.value.message.startswith("schedule 2 of 2: ")
    assert "schedule 1 agrees" in caught.value.message.splitlines()[-1]
    other = scheduled({"tp": 2}, model=Other())
    with pytest.raises(slapo.ArgumentError, match="differ in the root"):
        slapo.verify([right(), other], INPUTS)


def live() -> list[Any]:
    sizes: list[Any] = [{"tp": 2}, {"dp": 2}]
    agreeing = outcome([scheduled(sizes[0]), slapo.create_schedule(net(), mesh=sizes[1])])
    one_wrong = outcome([scheduled(sizes[0], ("down", Fail((1,), "forward"))), scheduled(sizes[0])])
    rank = dist.get_rank()
    second = scheduled(sizes[0], model=Other() if rank else net())
    other_model = outcome([scheduled(sizes[0]), second, scheduled(sizes[0])])
    another_number = outcome([scheduled(sizes[0])] * (1 + rank))
    return [agreeing, one_wrong, other_model, another_number]


@pytest.mark.ranks
def test_on_several_ranks_schedules_with_different_meshes_are_compared(message: Messages) -> None:
    first, second = run_ranks(live, world_size=2, timeout=300)
    assert first[0] == second[0]
    assert [report.world_size for report in first[0]] == [2, 2]
    assert first[1].message == second[1].message
    assert first[1].message.startswith("schedule 1 of 2: ")
    assert "raises on rank 1" in first[1].message
    assert "schedule 2 agrees" in first[1].message.splitlines()[-1]
    assert first[2].message.startswith("rank 1 could not start: ArgumentError: ")
    assert "differ in the root" in second[2].message
    assert [type(found[3]) for found in (first, second)] == [slapo.RankMismatchError] * 2
    message(first[3], "rank 0: 1\n  rank 1: 2")
