"""DeepSpeed's own verdict on a configuration, with our place; and what it would say only after the ranks have met."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

import slapo_core as slapo
from slapo_core.dialect import BuildArguments
from slapo_deepspeed.config.refusals import KEYS
from tests.messages import Messages

from .planned import ADAM, plan, planned, refusal, schedule_of


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stag": 2}}, ("'zero_optimization.stag' of config: ", "(got 2)")),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
            ("'zero_optimization.offload_optimizer.device' of config: ", "'nvme'", "(got 'gpu')"),
        ),
        (
            {"elasticity": {}, "bf16": {"enable": True}},
            ("\n  - 'elasticity' of config: DeepSpeedConfigError: ", "\n  - 'bf16.enable' of config: "),
        ),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, (" config: AssertionError: ", "bfloat16 and fp16")),
        ({"communication_data_type": "int4"}, ("'communication_data_type' of config: ValueError: ",)),
    ],
)
def test_what_deepspeed_refuses_is_said_in_its_own_words_with_the_place(config: Any, words: tuple[str, ...]) -> None:
    import torch.distributed as dist

    text = refusal(config)
    assert text.startswith("DeepSpeed refuses")
    assert [word for word in words if word not in text] == []
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"data_types": {"grad_accum_dtype": "fp31"}}, ("'data_types.grad_accum_dtype'", "got 'fp31'")),
        ({"data_types": {"param_dtype": "bf16"}}, ("'data_types.param_dtype'", "'bf16'", "the parameters")),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, ("'data_types.grad_accum_dtype'", "'bf16'", "without")),
        ({"bf16": {}, "bfloat16": {}}, ("'bf16'", "'bfloat16'", "both")),
        ({"zero_optimization": True}, ("'zero_optimization'", "got True")),
        ({"scheduler": {"type": "WarmpLR"}}, ("'scheduler.type'", "'WarmpLR'", "not a scheduler")),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
            ("warmup_num_steps'",),
        ),
        ({"scheduler": {"params": {}}}, ("'scheduler.type'", "got None")),
    ],
)
def test_what_deepspeed_would_refuse_after_the_ranks_have_met_is_refused_before(
    config: Any, words: tuple[str, ...], message: Messages
) -> None:
    message(refusal(config), *words)


@pytest.mark.parametrize(
    ("name", "params", "word"), [("OneCycle", {}, "missing"), ("WarmupLR", {"warmup": 3}, "'warmup'")]
)
def test_params_that_a_scheduler_does_not_take_are_refused(name: str, params: dict[str, Any], word: str) -> None:
    """In words of Python's, which differ from version to version."""
    text = refusal({"scheduler": {"type": name, "params": params}})
    assert text.startswith(f"'scheduler.params' of config: {name} ")
    assert word in text


@pytest.mark.parametrize(("dtype", "other"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_a_type_that_the_processor_lacks_is_refused(dtype: str, other: str, message: Messages) -> None:
    config = {dtype: {"enabled": True}}
    message(refusal(config, processor=[other]), f"'{dtype}.enabled' of config", "'cpu'", f'"{other}"')
    planned(config, processor=[dtype])


def test_a_scheduler_needs_something_to_schedule(message: Messages) -> None:
    config: dict[str, Any] = {"scheduler": {"type": "WarmupLR"}}
    message(refusal(config, arguments=BuildArguments()), "'scheduler'", "'WarmupLR'", "no optimizer")
    planned(config, arguments=BuildArguments(has_optimizer=True))
    assert planned({**config, "optimizer": ADAM}, arguments=BuildArguments())["scheduler"]["params"] == {}


def test_the_options_of_the_dialect_are_two(message: Messages) -> None:
    message(refusal({}, zero_optimization={"stage": 1}), "no option 'zero_optimization'", "config, batch_axes")
    message(refusal({}, origins=3), "origins", "got 3")
    message(refusal({}, batch_axes={"x": "0"}), "batch_axes", "'0'")


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
