"""A plan says what is used, what each rank is, what crosses stages, and where every value comes from."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
import slapo_deepspeed
from slapo_core.dialect import BuildArguments
from tests.support.dialect_models import Masked

from .planned import ADAM, plan, schedule_of


def cut() -> slapo.Schedule:
    schedule = slapo.create_schedule(Masked(), mesh={"dp": 2, "pp": 2}, example_inputs=torch.zeros(6, 4))
    schedule["first"].pipeline_split()
    return schedule


def test_the_plan_lists_features_and_the_configuration() -> None:
    config = {"optimizer": ADAM, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    config |= {"bf16": {"enabled": True}, "scheduler": {"type": "WarmupLR"}}
    made = plan(config, {"dp": 2, "tp": 2}, arguments=BuildArguments(accumulate=2, max_grad_norm=0.5))
    head, _, rest = str(made).partition("  DeepSpeed's configuration:\n")
    assert head == (
        "plan for target 'deepspeed'\n"
        "  the scheduled Sequential, 0 steps applied\n"
        "  ZeRO-2: replicas partition optimizer state and gradients over mesh_dim 'dp' (2 ranks)\n"
        "  collectives over mesh_dim 'tp' (2 ranks) by the steps; DeepSpeed gets the process groups\n"
        "  a step: 2 micro-batches on each of 2 replicas, one after the other; by the configuration of 1 samples each\n"
        "  optimizer: AdamW, of the configuration\n"
        "  gradients are clipped to a norm of 0.5 over all ranks\n"
        "  ranks: 0: dp 0, tp 0; 1: dp 0, tp 1; 2: dp 1, tp 0; 3: dp 1, tp 1\n"
    )
    assert "    gradient_accumulation_steps: 2  (filled in: build(accumulate=2))\n" in rest
    assert "    zero_optimization.stage: 2" in rest.splitlines()


def test_the_plan_lists_messages_between_stages() -> None:
    lines = str(plan({}, schedule=cut())).splitlines()
    (sent,) = [line for line in lines if "sends" in line]
    assert sent.startswith("  stage 0 sends stage 1: ")
    assert "float32" in sent
    assert "  ranks: 0: dp 0, pp 0; 1: dp 0, pp 1; 2: dp 1, pp 0; 3: dp 1, pp 1" in lines
    without = slapo.create_schedule(Masked(), mesh={"pp": 2})
    without["first"].pipeline_split()
    assert "the values sent between stages are unknown before the first batch: there are no example inputs" in str(
        plan({}, schedule=without)
    )
    uncut = schedule_of({"pp": 2}, samples=4)
    assert "the values sent between stages are unknown: " in str(plan({}, schedule=uncut))


def test_a_plan_changes_nothing_and_draws_nothing() -> None:
    schedule = cut()
    state, modes = copy.deepcopy(schedule.model.state_dict()), [one.training for one in schedule.model.modules()]
    random = torch.get_rng_state()
    plan({"optimizer": ADAM}, schedule=schedule)
    assert torch.equal(random, torch.get_rng_state())
    assert modes == [one.training for one in schedule.model.modules()]
    assert all(torch.equal(value, state[name]) for name, value in schedule.model.state_dict().items())
    assert len(schedule.records) == 1


def test_a_plan_can_be_asked_for_with_the_arguments_of_build() -> None:
    made = slapo_deepspeed.plan(
        schedule_of({"dp": 2}), {"zero_optimization": {"stage": 1}}, optimizer=torch.optim.SGD, accumulate=2
    )
    arguments = BuildArguments(has_optimizer=True, accumulate=2)
    assert made == plan({"zero_optimization": {"stage": 1}}, {"dp": 2}, arguments=arguments, batch_axes=None)


@pytest.mark.parametrize("mesh", [{"dp": 2, "pp": 2, "tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "dp": 2}])
def test_the_dimensions_of_the_mesh_come_in_any_order(mesh: dict[str, int]) -> None:
    assert "  ranks: 0: " in str(plan({}, mesh))


def test_complex_parameters_are_refused() -> None:
    model: Any = nn.Linear(2, 2)
    model.spectrum = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(slapo.BuildError, match="'spectrum' is complex"):
        slapo.build(slapo.create_schedule(model), target="deepspeed", loss=lambda output, batch: output.mean())
