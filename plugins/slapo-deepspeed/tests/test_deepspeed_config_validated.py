"""DeepSpeed's own verdict on a configuration, with our place; and what it would say only after the ranks have met."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

import slapo_core as slapo
from slapo_core.spec.dialect import BuildArguments
from slapo_deepspeed.config.keys import KEYS

from .planned import ADAM, plan, planned, refusal, schedule_of


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"zero_optimization": {"stag": 2}},
            "DeepSpeed refuses 'zero_optimization.stag' of config: Extra inputs are not permitted (got 2)",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
            "DeepSpeed refuses 'zero_optimization.offload_optimizer.device' of config: Input should be 'none', 'cpu' "
            "or 'nvme' (got 'gpu')",
        ),
        (
            {"elasticity": {}, "bf16": {"enable": True}},
            "DeepSpeed refuses:\n  - 'elasticity' of config: DeepSpeedConfigError: Elastic training has been removed; ",
        ),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            "DeepSpeed refuses config: AssertionError: bfloat16 and fp16 modes cannot be simultaneously enabled",
        ),
        (
            {"communication_data_type": "int4"},
            "DeepSpeed refuses 'communication_data_type' of config: ValueError: Invalid communication_data_type. ",
        ),
    ],
)
def test_what_deepspeed_refuses_is_said_in_its_own_words_with_the_place(config: Any, expected: str) -> None:
    import torch.distributed as dist

    assert refusal(config).startswith(expected)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"data_types": {"grad_accum_dtype": "fp31"}},
            "'data_types.grad_accum_dtype' of config must be a type (got 'f",
        ),
        (
            {"data_types": {"param_dtype": "bf16"}},
            "'data_types.param_dtype' of config is 'bf16', but the parameters ar",
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "'data_types.grad_accum_dtype' of config is 'bf16', but without",
        ),
        ({"bf16": {}, "bfloat16": {}}, "'bf16' of config and its old name 'bfloat16' of config are both given; "),
        ({"zero_optimization": True}, "'zero_optimization' of config must be an object (got True)"),
        (
            {"scheduler": {"type": "WarmpLR"}},
            "'scheduler.type' of config is 'WarmpLR', which is no scheduler of DeepSp",
        ),
        (
            {"scheduler": {"type": "OneCycle"}},
            "'scheduler.params' of config: OneCycle missing a required argument: 'cy",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, "'scheduler.params' of config: WarmupLR got an"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "'scheduler.params.warmup_num_s"),
        ({"scheduler": {"params": {}}}, "'scheduler.type' of config must name a scheduler (got None)"),
    ],
)
def test_what_deepspeed_would_refuse_after_the_ranks_have_met_is_refused_before(config: Any, expected: str) -> None:
    assert refusal(config).startswith(expected)


def test_a_scheduler_needs_something_to_schedule() -> None:
    config: dict[str, Any] = {"scheduler": {"type": "WarmupLR"}}
    assert refusal(config, arguments=BuildArguments()).startswith(
        "'scheduler' of config is 'WarmupLR', but there is no optimiser: the engine only evaluates"
    )
    planned(config, arguments=BuildArguments(has_optimizer=True))
    assert planned({**config, "optimizer": ADAM}, arguments=BuildArguments())["scheduler"]["params"] == {}


def test_the_options_of_the_dialect_are_two() -> None:
    assert refusal({}, zero_optimization={"stage": 1}) == (
        "target 'deepspeed' has no option 'zero_optimization'; it has config, batch_axes\n"
        '  hint: what DeepSpeed itself takes goes into config={"zero_optimization": ...}'
    )
    assert refusal({}, origins=3) == "origins is what a plan of target 'deepspeed' says, and no option (got 3)"
    assert refusal({}, batch_axes={"x": "0"}).startswith("batch_axes must be an axis, or None, for arguments of the ")


def test_a_refused_configuration_leaves_the_schedule_usable() -> None:
    schedule = schedule_of()
    with pytest.raises(slapo.BuildError, match="zero_optimisation"):
        slapo.build(schedule, target="deepspeed", config={"zero_optimisation": {}})
    assert not schedule.is_sealed
    plan({}, schedule=schedule)


ODD: list[Any] = [
    *(None, True, 0, 2, -1, 1.5, "auto", "x", [], {}, {"enabled": True}, {"enabled": "auto"}, {"enabled": 3}),
    *({"stage": 1}, {"stage": 3}, {"type": "AdamW"}, {"type": "SGD", "params": [1]}, {"type": None}, {"params": None}),
    *({"type": "WarmupLR", "params": {}}, {"device": "cpu"}, {"autotp_size": 2}, {"stages": 2}, {"x": 1}),
]
MESHES: list[Any] = [None, {"dp": 2}, {"pp": 2}, {"tp": 2, "dp": 2}]


def test_whatever_is_given_is_planned_or_refused_in_words() -> None:
    """And what is planned is planned again: ``plan`` asks twice."""
    chosen, taken, schedules = random.Random(0), 0, [schedule_of(mesh) for mesh in MESHES]
    for _ in range(200):
        config = {name: chosen.choice(ODD) for name in chosen.sample(sorted(KEYS), chosen.choice([1, 1, 2]))}
        arguments = BuildArguments(has_optimizer=chosen.random() < 0.5, accumulate=chosen.choice([1, 2]))
        with contextlib.suppress(slapo.BuildError):
            plan(config, schedule=chosen.choice(schedules), arguments=arguments)
            taken += 1
    assert 30 < taken < 170
