"""verify with a list of schedules: each against the untouched model, and only of one model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.ranks.launcher import run_ranks
from tests.core.failing_ranks import INPUTS, Fail, Net, net, outcome, scheduled


def right() -> slapo.Schedule:
    sch = slapo.create_schedule(net())
    sch["up"].checkpoint()
    return sch


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def doubled(mesh: Any = None) -> slapo.Schedule:
    sch = slapo.create_schedule(net(), mesh=mesh)
    sch["head"].replace(Doubled(8, 4))
    return sch


def test_every_schedule_gets_a_report() -> None:
    first, second = slapo.verify([right(), slapo.create_schedule(net())], INPUTS)
    assert (first.steps_verified, second.steps_verified) == (1, 0)
    assert first == slapo.verify(right(), INPUTS)


def test_what_one_schedule_freezes_is_not_frozen_for_the_next() -> None:
    model = net()
    model.up.weight.requires_grad_(False)
    frozen = slapo.create_schedule(model)
    first, second = slapo.verify([frozen, right()], INPUTS)
    compared = [{entry.kind: entry.compared for entry in report.largest}["gradient"] for report in (first, second)]
    assert compared == [4, 5] or compared == [5, 5]
    again = slapo.verify(right(), INPUTS)
    assert second == again


def test_the_wrong_one_is_named_with_what_came_of_the_others() -> None:
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify([right(), doubled(), right(), doubled()], INPUTS)
    lines = caught.value.message.splitlines()
    assert lines[0].startswith("schedule 2 of 4: the scheduled model differs from the untouched one, first in output:")
    assert lines[3].startswith("    #1 replace(")
    assert lines[-3:-1] == [
        "  schedule 1 agrees with the untouched model",
        "  schedule 3 agrees with the untouched model",
    ]
    assert lines[-1].startswith("  schedule 4 fails too: the scheduled model differs from the untouched one")
    assert (caught.value.tensor, len(caught.value.steps)) == ("output", 1)


class Other(Net):
    pass


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda: Other(), "the root:\n  schedule 1: Net()\n  schedule 2: Other()"),
        (lambda: Net(), "'up.weight':\n  schedule 1: (16, 8), torch.float32, checksum "),
    ],
)
def test_schedules_of_different_models_are_refused(change: Any, what: str) -> None:
    torch.manual_seed(1)
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo.verify([right(), slapo.create_schedule(change())], INPUTS)
    assert caught.value.message.startswith(
        f"verify compares schedules of one model, and the untouched models differ in {what}"
    )
    assert "load_state_dict" in (caught.value.hint or "")


def test_another_probability_is_another_model() -> None:
    models = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Dropout(p)) for p in (0.1, 0.2)]
    models[1].load_state_dict(models[0].state_dict())
    with pytest.raises(slapo.ArgumentError, match=r"module '1':\n  schedule 1: Dropout\(p=0.1"):
        slapo.verify([slapo.create_schedule(model) for model in models], INPUTS)


@pytest.mark.parametrize("given", [[], [1], "x"])
def test_what_is_no_schedule_is_refused(given: Any) -> None:
    with pytest.raises(slapo.ArgumentError, match="verify takes a schedule, or a list of schedules") as caught:
        slapo.verify(given, INPUTS)
    assert caught.value.hint == "verify(sch, batch), or verify([sch_a, sch_b], batch)"


def test_a_second_schedule_in_the_place_of_the_inputs_is_refused() -> None:
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo.verify(right(), right())
    assert caught.value.hint == "verify([sch_a, sch_b], batch)"


@pytest.mark.ranks
def test_declared_meshes_may_differ() -> None:
    schedules = [right(), scheduled({"tp": 2}), scheduled({"dp": 2, "tp": 2}), scheduled({"tp": 2})]
    assert [report.world_size for report in slapo.verify(schedules, INPUTS)] == [1, 2, 4, 2]
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify([scheduled({"tp": 2}), doubled({"tp": 2})], INPUTS)
    assert caught.value.message.startswith("schedule 2 of 2: the scheduled model differs from the untouched one")
    assert caught.value.message.endswith("\n  schedule 1 agrees with the untouched model")
    other = scheduled({"tp": 2}, model=Other())
    with pytest.raises(slapo.ArgumentError, match="the untouched models differ in the root"):
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
def test_on_several_ranks_schedules_with_different_meshes_are_compared() -> None:
    first, second = run_ranks(live, world_size=2, timeout=300)
    assert first[0] == second[0]
    assert [report.world_size for report in first[0]] == [2, 2]
    assert first[1].message == second[1].message
    assert first[1].message.startswith("schedule 1 of 2: the scheduled model raises on rank 1 where")
    assert first[1].message.endswith("  schedule 2 agrees with the untouched model")
    assert first[2].message.startswith("rank 1 could not start: ArgumentError: verify compares schedules of one model")
    assert "the untouched models differ in the root" in second[2].message
    assert [type(found[3]) for found in (first, second)] == [slapo.RankMismatchError] * 2
    assert "the number of schedules given to verify:\n  rank 0: 1\n  rank 1: 2" in first[3].message
