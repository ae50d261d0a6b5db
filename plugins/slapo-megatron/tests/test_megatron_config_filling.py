"""What the schedule and the arguments of build decide is filled in, with the reason; what is given must agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_core.spec.dialect import BuildArguments
from slapo_megatron.config.facts import trains

from .planned import RATE, plan, planned, refusal, schedule_of

FACTORY, NOTHING = BuildArguments(has_optimizer=True), BuildArguments()


def test_sizes_come_from_the_mesh() -> None:
    made = planned({"pp": 3, "dp": 2, "cp": 5, "tp": 7})
    config = made["model_parallel_config"]
    assert [config[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline", "expert")] == [7, 3, 1]
    assert (config["context_parallel_size"], config["expert_tensor_parallel_size"]) == (5, 7)
    assert made["origins"]["model_parallel_config.context_parallel_size"] == "'cp' of the mesh"
    same = planned({"tp": 2}, model_parallel_config={"tensor_model_parallel_size": 2})
    assert "model_parallel_config.tensor_model_parallel_size" not in same["origins"]


def test_nothing_is_clipped_unless_someone_asks() -> None:
    made = planned(optimizer_config=RATE)
    assert made["optimizer_config"]["clip_grad"] == 0.0
    why = "no max_grad_norm: nothing is clipped (Megatron's default is 1.0)"
    assert made["origins"]["optimizer_config.clip_grad"] == why
    asked = planned(arguments=BuildArguments(max_grad_norm=0.5))
    assert asked["optimizer_config"]["clip_grad"] == 0.5
    both = planned(optimizer_config={"clip_grad": 0.5}, arguments=BuildArguments(max_grad_norm=0.5))
    assert "optimizer_config.clip_grad" not in both["origins"]
    assert refusal(optimizer_config={"clip_grad": 1.0}, arguments=BuildArguments(max_grad_norm=0.5)) == (
        "'clip_grad' of optimizer_config is 1.0, but build(max_grad_norm=0.5)\n"
        "  hint: say it once: they are the same number"
    )


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


def test_micro_batches_are_those_that_are_accumulated() -> None:
    assert planned()["microbatches"] == 1
    assert planned(arguments=BuildArguments(accumulate=4))["microbatches"] == 4
    assert planned({"pp": 4})["microbatches"] == 4
    assert planned({"pp": 4}, arguments=BuildArguments(accumulate=8))["microbatches"] == 8
    assert planned(microbatches=3)["microbatches"] == 3
    assert refusal(microbatches=3, arguments=BuildArguments(accumulate=2)).startswith(
        "microbatches is 3, but build(accumulate=2)"
    )


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
    ("options", "said"),
    [
        (
            {"mesh": {"tp": 2}, "model_parallel_config": {"tensor_model_parallel_size": 4}},
            "'tensor_model_parallel_size' of model_parallel_config is 4, but 'tp' of the mesh {'tp': 2} is 2",
        ),
        (
            {"mesh": {"ep": 2}, "model_parallel_config": {"expert_model_parallel_size": 1}},
            "'expert_model_parallel_size' of model_parallel_config is 1, but 'ep' of the mesh {'ep': 2} is 2",
        ),
        (
            INTERLEAVED | {"model_parallel_config": {"virtual_pipeline_model_parallel_size": 4}},
            "is 4, but the schedule makes 2 stages for each rank along 'pp'",
        ),
        (
            IN_TURN | {"model_parallel_config": {"virtual_pipeline_model_parallel_size": 2}},
            "is 2, but the schedule makes one stage for each rank along 'pp'",
        ),
        (
            INTERLEAVED | {"model_parallel_config": {"batch_p2p_comm": True}},
            "'batch_p2p_comm' of model_parallel_config is True with 2 stages on each of two ranks along 'pp'",
        ),
        (INTERLEAVED | {"microbatches": 3}, "microbatches=3 cannot be run with 2 stages on each of 2 ranks along 'pp'"),
        (
            INTERLEAVED | {"model_parallel_config": {"microbatch_group_size_per_vp_stage": 1}},
            "must not be smaller than the 2 ranks along 'pp'",
        ),
        (
            IN_TURN | {"model_parallel_config": {"overlap_p2p_comm": True}},
            "'overlap_p2p_comm' of model_parallel_config is True, which Megatron has for several stages a rank only",
        ),
        ({"model_parallel_config": {"overlap_p2p_comm": True}}, "but the mesh none has one rank along 'pp'"),
        ({"mesh": {"tp": 2}, "model_parallel_config": {"sequence_parallel": True}}, "no step of the schedule scatters"),
        (
            {"model_parallel_config": {"overlap_p2p_comm_warmup_flush": True}, "mesh": {"pp": 2}},
            "Megatron refuses model_",
        ),
        ({"optimizer_config": {"bf16": True, "fp16": True}}, "bf16 and fp16 are both True"),
        (
            {"optimizer_config": {"bf16": True}, "model_parallel_config": {"bf16": False}},
            "'bf16' of optimizer_config is True, but 'bf16' of model_parallel_config is False",
        ),
        (
            {"schedule": schedule_of(dtype=torch.bfloat16), "optimizer_config": {"bf16": False}},
            "'bf16' of optimizer_config is False, but the model has parameters in bfloat16",
        ),
        ({"schedule": schedule_of(dtype=torch.float64)}, "and the model has parameters in float64"),
        (
            {"mesh": {"pp": 2}, "model_parallel_config": {"pipeline_dtype": torch.float16}},
            "'pipeline_dtype' of model_parallel_config is torch.float16, but the parameters are in torch.float32",
        ),
        ({"optimizer_config": {"fp16": True}}, "fp16 needs its scale of the loss: Megatron would begin at 2**32"),
        ({"schedule": schedule_of(dtype=torch.float16)}, "fp16 needs its scale of the loss"),
        ({"optimizer_config": {"fp16": True, "hysteresis": 2}}, "fp16 needs its scale of the loss"),
        ({"optimizer_config": {"fp16": True, "loss_scale": 8.0, "hysteresis": 2}}, "is 8.0, a fixed scale, but 'hyst"),
        ({"optimizer_config": {"bf16": True, "loss_scale": 8.0}}, "is 8.0, but only fp16 scales the loss"),
        (
            {"optimizer_config": RATE, "arguments": FACTORY},
            "two optimizers: 'lr' of optimizer_config is 0.001, and build(",
        ),
        ({"optimizer_config": {"weight_decay": 0.1}, "arguments": FACTORY}, "two optimizers: 'weight_decay'"),
        ({"optimizer_config": {"weight_decay": 0.1}, "arguments": NOTHING}, "but there is no rate to train with"),
        ({"optimizer_config": {**RATE, "optimizer": "muon"}}, "must be 'adam' or 'sgd' (got 'muon')"),
        ({"optimizer_config": {**RATE, "sgd_momentum": 0.5}}, "'sgd_momentum' of optimizer_config is 0.5, but the opt"),
        ({"optimizer_config": {**RATE, "adam_beta1": 1.0}}, "must be from 0 to below 1 (got 1.0)"),
        ({"optimizer_config": {"lr": -1.0}}, "'lr' of optimizer_config must be 0 or more (got -1.0)"),
        ({"optimizer_config": {**RATE, "min_lr": 1.0}}, "'min_lr' of optimizer_config is 1.0, above 'lr', 0.001"),
        (
            {
                "optimizer_config": {"use_distributed_optimizer": True},
                "ddp_config": {"use_distributed_optimizer": False},
            },
            "'use_distributed_optimizer' of optimizer_config is True, but 'use_distributed_optimizer' of "
            "ddp_config is F",
        ),
        (
            {"ddp_config": {"bucket_size": 100}},
            "'bucket_size' of ddp_config is 100, which does nothing without overlap_",
        ),
        ({"ddp_config": {"overlap_param_gather": True}}, "which does nothing without use_distributed_optimizer"),
        ({"ddp_config": {"align_param_gather": True}}, "which does nothing without overlap_param_gather"),
        ({"ddp_config": {"bucket_size": 0, "overlap_grad_reduce": True}}, "must be positive (got 0)"),
        ({"ddp_config": {"average_in_collective": True}}, "is True, but gloo, which CPUs use, has no average"),
        ({"scheduler": {"lr_warmup_steps": 1}, "arguments": FACTORY}, "but a factory makes the optimizer"),
        ({"scheduler": {"lr_warmup_steps": 1}, "arguments": NOTHING}, "but the engine only evaluates"),
        ({"microbatches": 0}, "microbatches must be a positive number (got 0)"),
        ({"microbatches": 2.0}, "microbatches must be a positive number (got 2.0)"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, str) else "",
)
def test_a_contradiction_names_both_values(options: dict[str, Any], said: str) -> None:
    options = dict(options)
    assert said in refusal(options.pop("mesh", None), **options)


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ({"lr_decay_style": "cosin"}, "must be one of 'constant', 'linear', 'cosine'"),
        ({"lr_decay_style": "cosine"}, "'lr_decay_style' of scheduler is 'cosine', without lr_decay_steps"),
        (
            {"lr_decay_style": "linear", "lr_decay_steps": 5, "lr_warmup_steps": 5},
            "must be more than lr_warmup_steps, 5",
        ),
        ({"lr_decay_style": "WSD", "lr_decay_steps": 5, "wsd_decay_steps": 2}, "is 'WSD', without lr_wsd_decay_style"),
        ({"lr_wsd_decay_style": "linear"}, "is 'linear', but lr_decay_style is 'constant'"),
        (
            {"lr_decay_style": "WSD", "lr_decay_steps": 5, "wsd_decay_steps": 6, "lr_wsd_decay_style": "linear"},
            "is 6, and must be positive, and not more than lr_decay_steps, 5",
        ),
        ({"init_lr": 0.1}, "which does nothing without lr_warmup_steps"),
        ({"init_lr": 0.1, "lr_warmup_steps": 1}, "Megatron refuses scheduler: AssertionError"),
        ({"max_lr": 1.0}, "'max_lr' of scheduler is 1.0, but 'lr' of optimizer_config is 0.001"),
        (
            {"end_wd": 0.5},
            "'end_wd' of scheduler is 0.5, but 'weight_decay' of optimizer_config is 0.01, Megatron's def",
        ),
        ({"wd_incr_style": "linear"}, "'wd_incr_style' of scheduler is 'linear', without start_wd"),
        (
            {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": True},
            "Megatron refuses scheduler: AssertionError: both override and use-checkpoint are set.",
        ),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, str) else "",
)
def test_a_scheduler_that_would_fail_later_is_refused_now(scheduler: dict[str, Any], said: str) -> None:
    assert said in refusal(optimizer_config=RATE, scheduler=scheduler)


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
