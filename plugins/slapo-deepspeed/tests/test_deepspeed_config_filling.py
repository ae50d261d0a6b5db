"""What the schedule, and the arguments of ``build``, say is filled into DeepSpeed's configuration."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_core.dialect import BuildArguments
from tests.messages import Messages

from .planned import ADAM, plan, planned, refusal, schedule_of

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def sizes(config: dict[str, Any] | None = None, mesh: dict[str, int] | None = None, **more: Any) -> tuple[int, ...]:
    made = planned(config, mesh, **more)
    return made[TOTAL], made[MICRO], made[STEPS]


@pytest.mark.parametrize(
    ("config", "mesh", "samples", "accumulate", "expected"),
    [
        ({}, None, None, 1, (1, 1, 1)),
        ({}, None, 6, 1, (6, 6, 1)),
        ({}, {"dp": 2}, 6, 1, (12, 6, 1)),
        ({}, {"dp": 2}, 6, 3, (12, 2, 3)),
        ({}, None, 7, 2, (2, 1, 2)),
        ({MICRO: 4}, {"dp": 2}, 6, 1, (8, 4, 1)),
        ({STEPS: 4}, None, None, 1, (4, 1, 4)),
        ({STEPS: 4}, None, None, 4, (4, 1, 4)),
        ({TOTAL: 24}, {"dp": 2}, 6, 3, (24, 4, 3)),
        ({TOTAL: 24, MICRO: 4}, {"dp": 2}, None, 1, (24, 4, 3)),
        ({TOTAL: 24, MICRO: 4, STEPS: 3}, {"dp": 2}, None, 3, (24, 4, 3)),
        ({TOTAL: "auto", MICRO: "auto", STEPS: "auto"}, {"dp": 2}, 6, 3, (12, 2, 3)),
        ({}, {"pp": 2}, 8, 1, (8, 4, 2)),
        ({}, {"pp": 2, "dp": 2, "tp": 2}, 8, 4, (16, 2, 4)),
        ({STEPS: 1}, {"pp": 2}, 8, 1, (8, 8, 1)),
    ],
)
def test_the_three_sizes_are_those_that_are_not_given(
    config: dict[str, Any], mesh: Any, samples: int | None, accumulate: int, expected: tuple[int, int, int]
) -> None:
    schedule, arguments = schedule_of(mesh, samples=samples), BuildArguments(accumulate=accumulate)
    assert sizes(config, schedule=schedule, arguments=arguments) == expected


def test_the_samples_are_counted_along_the_axis_that_counts_them() -> None:
    model = torch.nn.Linear(4, 2)
    inputs = {"input": torch.zeros(3, 5, 4)}
    schedule = slapo.create_schedule(model, example_inputs=inputs)
    assert sizes(schedule=schedule) == (3, 3, 1)
    assert sizes(schedule=schedule, batch_axes={"input": 1}) == (5, 5, 1)
    assert sizes(schedule=schedule, batch_axes={"input": None}) == (1, 1, 1)


@pytest.mark.parametrize(
    ("config", "accumulate", "words"),
    [
        ({STEPS: 4}, 2, (f"'{STEPS}' of config is 4", "accumulate=2")),
        ({TOTAL: 10, MICRO: 4, STEPS: 1}, 1, (f"'{TOTAL}' of config is 10", MICRO, STEPS, "2 replicas", "is 8")),
        ({TOTAL: 10, MICRO: 4}, 1, (f"'{TOTAL}'", "divide", MICRO, "is 1.25")),
        ({TOTAL: 10}, 3, (f"'{TOTAL}'", "divide", STEPS, "e.g. 12")),
        ({MICRO: 0}, 1, (f"'{MICRO}'", "positive", "got 0")),
        ({STEPS: True}, 1, (f"'{STEPS}'", "positive", "got True")),
        ({TOTAL: "8"}, 1, (f"'{TOTAL}'", "positive", "got '8'")),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_with_both(
    config: dict[str, Any], accumulate: int, words: tuple[str, ...], message: Messages
) -> None:
    message(refusal(config, {"dp": 2}, arguments=BuildArguments(accumulate=accumulate)), *words)


def test_clipping_is_what_build_says_and_nothing_without_it(message: Messages) -> None:
    """DeepSpeed's own default is to clip at 1.0, which no other target does."""
    assert planned()["gradient_clipping"] == 0.0
    assert planned({"gradient_clipping": "auto"})["gradient_clipping"] == 0.0
    assert planned({"gradient_clipping": 0.5})["gradient_clipping"] == 0.5
    clips = BuildArguments(max_grad_norm=0.5)
    assert planned(arguments=clips)["gradient_clipping"] == 0.5
    assert planned({"gradient_clipping": 0.5}, arguments=clips)["gradient_clipping"] == 0.5
    message(refusal({"gradient_clipping": 1.0}, arguments=clips), "'gradient_clipping'", "max_grad_norm=0.5")
    message(refusal({"gradient_clipping": -1}), "'gradient_clipping'", "got -1")


def test_a_pipeline_is_given_the_settings_under_which_it_is_exact() -> None:
    made = planned({}, {"pp": 2, "dp": 2})
    assert made["pipeline"] == {"use_reentrant": False, "pipe_partitioned": False, "grad_partitioned": False}
    assert made["zero_optimization"] == {"stage": 1}
    assert planned({"zero_optimization": {"stage": 0}}, {"pp": 2})["zero_optimization"] == {"stage": 0}
    assert planned({"pipeline": {"stages": 2, "use_reentrant": False}}, {"pp": 2})["pipeline"]["stages"] == 2
    alone = planned()
    assert alone["zero_optimization"] == {"stage": 0}
    assert "pipeline" not in alone


def test_tensor_parallelism_is_not_left_to_deepspeed() -> None:
    for size in (2, 0):
        made = plan({"tensor_parallel": {"autotp_size": size}}, {"tp": 2})
        assert "tensor_parallel" not in made.config["config"]
        assert "tensor_parallel is left out: the steps of the schedule split the model" in str(made)


def test_an_optimizer_that_deepspeed_does_not_know_is_allowed() -> None:
    key, factory = "zero_allow_untested_optimizer", BuildArguments(has_optimizer=True)
    zero = {"zero_optimization": {"stage": 2}}
    assert planned(zero, arguments=factory)[key] is True
    assert planned({**zero, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})[key] is True
    assert planned({**zero, key: False}, arguments=factory)[key] is False
    assert key not in planned({**zero, "optimizer": ADAM})
    assert key not in planned({}, arguments=factory)


def test_offloading_takes_the_optimizer_of_a_factory() -> None:
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    key = "zero_force_ds_cpu_optimizer"
    assert planned(zero, arguments=BuildArguments(has_optimizer=True))[key] is False
    own = planned({**zero, "optimizer": ADAM}, arguments=BuildArguments())
    assert key not in own
    assert own["optimizer"]["params"] == {"lr": 1e-3}  # DeepSpeed's own Adam, which works on what was offloaded


def test_adam_of_the_configuration_needs_no_compiler_on_cpus() -> None:
    """And decays weights no more than DeepSpeed's own, whose default is another one than torch's."""
    from deepspeed.ops.adam import FusedAdam

    own = inspect.signature(FusedAdam).parameters["weight_decay"].default
    assert own != inspect.signature(torch.optim.AdamW).parameters["weight_decay"].default
    params = {"lr": 1e-3, "torch_adam": True, "weight_decay": own}
    assert planned({"optimizer": ADAM})["optimizer"]["params"] == params
    decaying = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    assert planned({"optimizer": decaying})["optimizer"]["params"] == {**params, "weight_decay": 0.1}
    for more in ({"torch_adam": False}, {"torch_adam": True}, {"bias_correction": False}):
        given = {"type": "Adam", "params": {"lr": 1e-3, **more}}
        assert planned({"optimizer": given})["optimizer"] == given


def test_without_an_optimizer_nothing_is_partitioned_that_it_needs() -> None:
    for stage, expected in ((1, 0), (2, 0), (3, 3)):
        zero = {"zero_optimization": {"stage": stage}}
        assert planned(zero, arguments=BuildArguments())["zero_optimization"]["stage"] == expected
        assert planned(zero, arguments=BuildArguments(has_optimizer=True))["zero_optimization"]["stage"] == stage
        with_own = planned({**zero, "optimizer": ADAM}, arguments=BuildArguments())
        assert with_own["zero_optimization"]["stage"] == stage


def test_auto_is_filled_in_as_for_transformers() -> None:
    config = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    zero = {"stage": "auto", "reduce_bucket_size": "auto", "stage3_max_live_parameters": 5}
    single = planned({**config, "zero_optimization": zero})
    assert (single["fp16"]["enabled"], single["bf16"]["enabled"]) == (False, False)
    assert single["zero_optimization"] == {"stage": 0, "stage3_max_live_parameters": 5}
    half = planned(config, schedule=schedule_of(dtype=torch.bfloat16))
    assert (half["fp16"]["enabled"], half["bf16"]["enabled"]) == (False, True)


def test_what_the_user_gave_is_not_touched() -> None:
    config: dict[str, Any] = {"optimizer": ADAM, "scheduler": {"type": "WarmupLR"}, "zero_optimization": {"stage": 2}}
    before = copy.deepcopy(config)
    plan(config, {"dp": 2}, arguments=BuildArguments(accumulate=2))
    assert config == before
