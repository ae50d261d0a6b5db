"""What the schedule and the arguments of build decide is filled in, with the reason; what is given must agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from slapo_core.dialect import BuildArguments
from slapo_megatron.config.draft import trains
from tests.messages import Messages

from .planned import RATE, plan, planned, refusal, schedule_of

FACTORY, NOTHING = BuildArguments(has_optimizer=True), BuildArguments()


def test_sizes_come_from_the_mesh() -> None:
    made = planned({"pp": 3, "dp": 2, "tp": 7})
    config = made["model_parallel_config"]
    assert [config[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline")] == [7, 3]
    assert config["expert_tensor_parallel_size"] == 7
    assert made["origins"]["model_parallel_config.pipeline_model_parallel_size"] == "'pp' of the mesh"
    same = planned({"tp": 2}, model_parallel_config={"tensor_model_parallel_size": 2})
    assert "model_parallel_config.tensor_model_parallel_size" not in same["origins"]


def test_gradients_are_clipped_as_max_grad_norm_or_a_given_optimizer_config_says(message: Messages) -> None:
    made = planned(arguments=BuildArguments())
    assert made["optimizer_config"]["clip_grad"] == 0.0
    assert "nothing is clipped" in made["origins"]["optimizer_config.clip_grad"]
    for given in (RATE, OptimizerConfig(**RATE)):
        made = planned(optimizer_config=given)
        assert made["optimizer_config"]["clip_grad"] == OptimizerConfig().clip_grad == 1.0
        assert "OptimizerConfig's default" in made["origins"]["optimizer_config.clip_grad"]
        asked = planned(optimizer_config=given, arguments=BuildArguments(max_grad_norm=0.5))
        assert asked["optimizer_config"]["clip_grad"] == 0.5
    for given in ({"clip_grad": 0.0}, OptimizerConfig(clip_grad=0.0)):
        assert planned(optimizer_config=given)["optimizer_config"]["clip_grad"] == 0.0
    asked = planned(arguments=BuildArguments(max_grad_norm=0.5))
    assert asked["optimizer_config"]["clip_grad"] == 0.5
    both = planned(optimizer_config={"clip_grad": 0.5}, arguments=BuildArguments(max_grad_norm=0.5))
    assert "optimizer_config.clip_grad" not in both["origins"]
    text = refusal(optimizer_config={"clip_grad": 1.0}, arguments=BuildArguments(max_grad_norm=0.5))
    message(text, "'clip_grad' of optimizer_config is 1.0", "max_grad_norm=0.5")


def test_the_scheduler_has_every_argument() -> None:
    made = planned(optimizer_config={"lr": 0.5, "weight_decay": 0.2})
    assert made["optimizer_config"]["min_lr"] == 0.0
    assert made["scheduler"] == {
        "init_lr": 0.0,
        "max_lr": 0.5,
        "min_lr": 0.0,
        "lr_warmup_steps": 0,
        "lr_decay_steps": 1,
        "lr_decay_style": "constant",
        "start_wd": 0.2,
        "end_wd": 0.2,
        "wd_incr_steps": 1,
        "wd_incr_style": "constant",
    }
    cosine = {"lr_decay_style": "cosine", "lr_decay_steps": 10, "lr_warmup_steps": 2}
    made = planned(optimizer_config={"lr": 0.5, "min_lr": 0.1}, scheduler=cosine)["scheduler"]
    assert (made["max_lr"], made["min_lr"], made["lr_decay_steps"]) == (0.5, 0.1, 10)
    rising = {"wd_incr_style": "linear", "wd_incr_steps": 10, "start_wd": 0.0, "end_wd": 0.1}
    assert planned(optimizer_config=RATE, scheduler=rising)["scheduler"]["end_wd"] == 0.1
    assert planned(arguments=FACTORY)["scheduler"] == planned(arguments=NOTHING)["scheduler"] == {}


def test_half_precision_is_said_once() -> None:
    for option in ("optimizer_config", "model_parallel_config"):
        made = planned({"pp": 2}, **{option: {"bf16": True}})
        assert made["optimizer_config"]["bf16"] is made["model_parallel_config"]["bf16"] is True
        assert made["model_parallel_config"]["pipeline_dtype"] == torch.bfloat16
        assert made["optimizer_config"]["params_dtype"] == torch.bfloat16
        assert made["ddp_config"]["grad_reduce_in_fp32"] is True
    found = planned(schedule=schedule_of(dtype=torch.bfloat16))
    assert found["optimizer_config"]["bf16"] is True
    assert found["origins"]["optimizer_config.bf16"] == "the model is in bfloat16"
    plain = planned({"pp": 2})
    assert "grad_reduce_in_fp32" not in plain["ddp_config"]
    assert plain["model_parallel_config"]["pipeline_dtype"] == torch.float32
    assert planned(ddp_config={"grad_reduce_in_fp32": False}, optimizer_config={"bf16": True})["ddp_config"] == {
        "grad_reduce_in_fp32": False
    }


def test_the_distributed_optimizer_is_said_once() -> None:
    for option, other in (("optimizer_config", "ddp_config"), ("ddp_config", "optimizer_config")):
        made = planned({"dp": 2}, arguments=FACTORY, **{option: {"use_distributed_optimizer": True}})
        assert made[other]["use_distributed_optimizer"] is True
        assert made["origins"][f"{other}.use_distributed_optimizer"] == f"'use_distributed_optimizer' of {option}"
    evaluating = planned({"dp": 2}, arguments=NOTHING, ddp_config={"use_distributed_optimizer": True})
    assert evaluating["ddp_config"]["use_distributed_optimizer"] is False
    assert not trains(evaluating)


def test_micro_batches_are_those_that_are_accumulated(message: Messages) -> None:
    assert planned()["microbatches"] == 1
    assert planned(arguments=BuildArguments(accumulate=4))["microbatches"] == 4
    assert planned({"pp": 4})["microbatches"] == 4
    assert planned({"pp": 4}, arguments=BuildArguments(accumulate=8))["microbatches"] == 8
    assert planned(microbatches=3)["microbatches"] == 3
    message(refusal(microbatches=3, arguments=BuildArguments(accumulate=2)), "microbatches is 3", "accumulate=2")


def test_several_stages_a_rank_are_interleaved_as_megatron_runs_them_right() -> None:
    made = planned(schedule=schedule_of({"pp": 2}, samples=4, cuts=3))
    config = made["model_parallel_config"]
    assert (config["virtual_pipeline_model_parallel_size"], config["batch_p2p_comm"]) == (2, False)
    plain = planned(schedule=schedule_of({"pp": 2}, samples=4, cuts=1))["model_parallel_config"]
    assert not {"virtual_pipeline_model_parallel_size", "batch_p2p_comm"} & set(plain)
    overlapped = planned(
        schedule=schedule_of({"pp": 2}, samples=4, cuts=3), model_parallel_config={"overlap_p2p_comm": True}
    )
    assert overlapped["origins"]["model_parallel_config.batch_p2p_comm"] == "with overlap_p2p_comm"


INTERLEAVED = {"schedule": schedule_of({"pp": 2}, samples=4, cuts=3)}
IN_TURN = {"schedule": schedule_of({"pp": 2}, samples=4, cuts=1)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"mesh": {"tp": 2}, "model_parallel_config": {"tensor_model_parallel_size": 4}},
            "'tensor_model_parallel_size' of model_parallel_config is 4|'tp' of the mesh {'tp': 2} is 2",
        ),
        (
            {"model_parallel_config": {"context_parallel_size": 2}},
            "'context_parallel_size' of model_parallel_config is refused",
        ),
        (INTERLEAVED | {"model_parallel_config": {"virtual_pipeline_model_parallel_size": 4}}, "is 4|2 stages"),
        (IN_TURN | {"model_parallel_config": {"virtual_pipeline_model_parallel_size": 2}}, "is 2|one stage"),
        (INTERLEAVED | {"model_parallel_config": {"batch_p2p_comm": True}}, "'batch_p2p_comm'|is True|2 stages"),
        (INTERLEAVED | {"microbatches": 3}, "microbatches=3|2 stages|2 ranks"),
        (
            INTERLEAVED | {"model_parallel_config": {"microbatch_group_size_per_vp_stage": 1}},
            "'microbatch_group_size_per_vp_stage'|2 ranks",
        ),
        (IN_TURN | {"model_parallel_config": {"overlap_p2p_comm": True}}, "'overlap_p2p_comm'|several stages"),
        ({"model_parallel_config": {"overlap_p2p_comm": True}}, "'overlap_p2p_comm'|one rank"),
        ({"mesh": {"tp": 2}, "model_parallel_config": {"sequence_parallel": True}}, "'sequence_parallel'|scatters"),
        ({"optimizer_config": {"bf16": True, "fp16": True}}, "bf16 and fp16"),
        (
            {"optimizer_config": {"bf16": True}, "model_parallel_config": {"bf16": False}},
            "'bf16' of optimizer_config is True|'bf16' of model_parallel_config is False",
        ),
        (
            {"schedule": schedule_of(dtype=torch.bfloat16), "optimizer_config": {"bf16": False}},
            "'bf16' of optimizer_config is False|bfloat16",
        ),
        ({"schedule": schedule_of(dtype=torch.float64)}, "parameters in float64"),
        (
            {"mesh": {"pp": 2}, "model_parallel_config": {"pipeline_dtype": torch.float16}},
            "'pipeline_dtype' of model_parallel_config is torch.float16|torch.float32",
        ),
        ({"optimizer_config": {"fp16": True}}, "fp16 needs|scale"),
        ({"schedule": schedule_of(dtype=torch.float16)}, "fp16 needs|scale"),
        ({"optimizer_config": {"fp16": True, "hysteresis": 2}}, "fp16 needs|scale"),
        ({"optimizer_config": {"fp16": True, "loss_scale": 8.0, "hysteresis": 2}}, "is 8.0|'hysteresis'"),
        ({"optimizer_config": {"bf16": True, "loss_scale": 8.0}}, "is 8.0|only fp16"),
        ({"optimizer_config": RATE, "arguments": FACTORY}, "two optimizers|'lr' of optimizer_config is 0.001"),
        ({"optimizer_config": {"weight_decay": 0.1}, "arguments": FACTORY}, "two optimizers|'weight_decay'"),
        ({"optimizer_config": {"weight_decay": 0.1}, "arguments": NOTHING}, "'weight_decay'|no rate"),
        ({"optimizer_config": {**RATE, "optimizer": "muon"}}, "got 'muon'"),
        ({"optimizer_config": {**RATE, "sgd_momentum": 0.5}}, "'sgd_momentum' of optimizer_config is 0.5"),
        ({"optimizer_config": {**RATE, "adam_beta1": 1.0}}, "'adam_beta1'|got 1.0"),
        ({"optimizer_config": {"lr": -1.0}}, "'lr' of optimizer_config|got -1.0"),
        ({"optimizer_config": {**RATE, "min_lr": 1.0}}, "'min_lr' of optimizer_config is 1.0|'lr', 0.001"),
        (
            {
                "optimizer_config": {"use_distributed_optimizer": True},
                "ddp_config": {"use_distributed_optimizer": False},
            },
            "'use_distributed_optimizer' of optimizer_config is True|of ddp_config is False",
        ),
        ({"ddp_config": {"bucket_size": 100}}, "'bucket_size' of ddp_config is 100|without overlap_grad_reduce"),
        ({"ddp_config": {"overlap_param_gather": True}}, "without use_distributed_optimizer"),
        ({"ddp_config": {"align_param_gather": True}}, "without overlap_param_gather"),
        ({"ddp_config": {"bucket_size": 0, "overlap_grad_reduce": True}}, "'bucket_size'|got 0"),
        ({"ddp_config": {"average_in_collective": True}}, "'average_in_collective'|gloo"),
        ({"scheduler": {"lr_warmup_steps": 1}, "arguments": FACTORY}, "scheduler|factory"),
        ({"scheduler": {"lr_warmup_steps": 1}, "arguments": NOTHING}, "scheduler|evaluates"),
        ({"microbatches": 0}, "microbatches|got 0"),
        ({"microbatches": 2.0}, "microbatches|got 2.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_contradiction_names_both_values(options: dict[str, Any], words: str, message: Messages) -> None:
    options = dict(options)
    message(refusal(options.pop("mesh", None), **options), *words.split("|"))


def test_what_megatron_refuses_is_said_with_its_place() -> None:
    """In words of Megatron's, which differ from version to version."""
    text = refusal({"pp": 2}, model_parallel_config={"overlap_p2p_comm_warmup_flush": True})
    assert "Megatron refuses model_parallel_config: " in text
    for scheduler in (
        {"init_lr": 0.1, "lr_warmup_steps": 1},
        {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": True},
    ):
        assert "Megatron refuses scheduler: AssertionError" in refusal(optimizer_config=RATE, scheduler=scheduler)


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        ({"lr_decay_style": "cosin"}, "'constant', 'linear', 'cosine'"),
        ({"lr_decay_style": "cosine"}, "'lr_decay_style' of scheduler is 'cosine'|without lr_decay_steps"),
        ({"lr_decay_style": "linear", "lr_decay_steps": 5, "lr_warmup_steps": 5}, "more than lr_warmup_steps, 5"),
        ({"lr_decay_style": "WSD", "lr_decay_steps": 5, "wsd_decay_steps": 2}, "is 'WSD'|without lr_wsd_decay_style"),
        ({"lr_wsd_decay_style": "linear"}, "is 'linear'|lr_decay_style is 'constant'"),
        (
            {"lr_decay_style": "WSD", "lr_decay_steps": 5, "wsd_decay_steps": 6, "lr_wsd_decay_style": "linear"},
            "is 6|lr_decay_steps, 5",
        ),
        ({"init_lr": 0.1}, "'init_lr'|without lr_warmup_steps"),
        ({"max_lr": 1.0}, "'max_lr' of scheduler is 1.0|'lr' of optimizer_config is 0.001"),
        ({"end_wd": 0.5}, "'end_wd' of scheduler is 0.5|'weight_decay' of optimizer_config is 0.01"),
        ({"wd_incr_style": "linear"}, "'wd_incr_style' of scheduler is 'linear'|without start_wd"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_scheduler_that_would_fail_later_is_refused_now(
    scheduler: dict[str, Any], words: str, message: Messages
) -> None:
    message(refusal(optimizer_config=RATE, scheduler=scheduler), *words.split("|"))


def test_what_is_right_is_accepted() -> None:
    plan(optimizer_config={**RATE, "fp16": True, "initial_loss_scale": 2.0**16})
    plan(optimizer_config={**RATE, "fp16": True, "loss_scale": 1024})
    plan(optimizer_config={"fp16": True}, arguments=NOTHING)
    plan(optimizer_config={**RATE, "optimizer": "sgd", "sgd_momentum": 0.0})
    plan({"dp": 2}, ddp_config={"overlap_grad_reduce": True, "bucket_size": 5}, arguments=FACTORY)
    overlapping = {"overlap_grad_reduce": True, "overlap_param_gather": True, "align_param_gather": True}
    plan({"dp": 2}, optimizer_config=RATE, ddp_config={**overlapping, "use_distributed_optimizer": True})
    plan(optimizer_config={"min_lr": None, "lr": None, "loss_scale": None})
    wsd = {"lr_decay_style": "WSD", "lr_decay_steps": 5, "wsd_decay_steps": 2, "lr_wsd_decay_style": "minus_sqrt"}
    plan(optimizer_config=RATE, scheduler=wsd)
    plan(schedule=schedule_of({"pp": 2}, samples=4, cuts=3), microbatches=6)
