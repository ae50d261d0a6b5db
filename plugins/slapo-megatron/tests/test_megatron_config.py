"""Options: what the schedule owns is filled in, what trains wrongly is refused, and all else reaches Megatron."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from slapo_core.dialect import BuildArguments
from slapo_megatron.config import DANGERS, fields_of, megatron_class, trains
from slapo_runtime.installed import Runtime
from tests.messages import Messages

from .planned import RATE, plan, planned, refusal, schedule_of

FACTORY, NOTHING = BuildArguments(has_optimizer=True), BuildArguments()
INTERLEAVED = {"schedule": schedule_of({"pp": 2}, samples=4, cuts=3)}
IN_TURN = {"schedule": schedule_of({"pp": 2}, samples=4, cuts=1)}


@pytest.fixture
def one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "version", property(lambda _: "0.16.1"))


# -- passed through -------------------------------------------------------------------------------------------------

PASSED: dict[str, dict[str, Any]] = {
    "optimizer_config": {
        "lr": 1e-3,
        "apply_wd_to_qk_layernorm": True,
        "adam_beta2": 0.95,
        "adam_eps": 1e-6,
        "decoupled_weight_decay": False,
        "loss_scale_window": 500,
        "hysteresis": 1,
        "log_num_zeros_in_grad": True,
        "muon_momentum": 0.9,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "config_logger_dir": "logs",
        "barrier_with_L1_time": True,
    },
    "ddp_config": {
        "check_for_nan_in_grad": True,
        "check_for_large_grads": True,
        "bucket_size": 100,
        "pad_buckets_for_high_nccl_busbw": True,
        "num_distributed_optimizer_instances": 2,
        "keep_fp8_transpose_cache": True,
    },
    "model_parallel_config": {
        "deallocate_pipeline_outputs": True,
        "batch_p2p_sync": False,
        "barrier_with_L1_time": False,
        "use_ring_exchange_p2p": True,
    },
}


def test_fields_that_no_table_names_reach_megatrons_own_objects() -> None:
    made = planned({"dp": 2}, **PASSED)
    assert sum(map(len, PASSED.values())) > 20
    for option, values in PASSED.items():
        found = megatron_class(option)(**made[option])
        assert {name: getattr(found, name) for name in values} == values


def test_fields_that_no_cpu_runs_are_marked_in_the_plan() -> None:
    lines = [line for line in str(plan({"dp": 2}, **PASSED)).splitlines() if "not verified" in line]
    assert len(lines) == 2
    assert lines[0].strip().startswith("optimizer_config.optimizer_cpu_offload: True  (not verified")


def test_fields_of_megatrons_own_layers_are_left_out_and_named() -> None:
    made = plan(model_parallel_config={"gradient_accumulation_fusion": True, "tp_comm_bulk_dgrad": False})
    assert "  left out, for Megatron's own layers: gradient_accumulation_fusion, tp_comm_bulk_dgrad" in str(made)
    assert "gradient_accumulation_fusion" not in made.config["model_parallel_config"]


def test_megatrons_objects_give_fields_that_differ_from_defaults() -> None:
    made = planned(
        optimizer_config=OptimizerConfig(lr=1e-3, adam_beta2=0.95),
        ddp_config=DistributedDataParallelConfig(overlap_grad_reduce=True),
        model_parallel_config=ModelParallelConfig(deallocate_pipeline_outputs=True),
    )
    assert made == {
        **planned(
            optimizer_config={"lr": 1e-3, "adam_beta2": 0.95},
            ddp_config={"overlap_grad_reduce": True},
            model_parallel_config={"deallocate_pipeline_outputs": True},
        ),
        "origins": made["origins"],
    }


def test_fields_derived_by_megatrons_class_do_not_count_as_set(message: Messages) -> None:
    config = ModelParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32
    )
    made = planned({"tp": 2, "pp": 2}, model_parallel_config=config)["model_parallel_config"]
    assert not {"autocast_dtype", "microbatch_group_size_per_vp_stage"} & set(made)
    text = refusal(model_parallel_config=ModelParallelConfig(tensor_model_parallel_size=2))
    message(text, "'tensor_model_parallel_size' of model_parallel_config is 2", "is 1")


def test_the_users_options_are_not_changed() -> None:
    given = dict(RATE)
    planned(optimizer_config=given)
    assert given == RATE


GPT_345M = argparse.Namespace(
    num_layers=24,
    hidden_size=1024,
    num_attention_heads=16,
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    gradient_accumulation_fusion=True,
    deallocate_pipeline_outputs=True,
    optimizer="adam",
    lr=1.5e-4,
    min_lr=1e-5,
    weight_decay=0.01,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_eps=1e-8,
    clip_grad=1.0,
    initial_loss_scale=2.0**32,
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    grad_reduce_in_fp32=True,
    check_for_nan_in_grad=True,
    average_in_collective=False,
    bucket_size=None,
    lr_decay_style="cosine",
    lr_warmup_steps=3200,
    lr_decay_steps=320000,
    init_lr=0.0,
    start_wd=0.01,
    end_wd=0.01,
    wd_incr_steps=500000,
    wd_incr_style="constant",
    use_checkpoint_opt_param_scheduler=False,
    override_opt_param_scheduler=True,
    wsd_decay_steps=None,
    lr_wsd_decay_style="exponential",
)
"""As Megatron-LM's script parses pretrain_gpt's arguments of 345M parameters."""


def made_of(kind: Any) -> Any:
    """As Megatron-LM makes its configurations: every field that the arguments have."""
    names = [one.name for one in dataclasses.fields(kind) if hasattr(GPT_345M, one.name)]
    return kind(**{name: getattr(GPT_345M, name) for name in names})


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_the_arguments_of_a_public_recipe_go_through(mesh: dict[str, int]) -> None:
    config = made_of(TransformerConfig)
    config.tensor_model_parallel_size = config.expert_tensor_parallel_size = mesh.get("tp", 1)
    config.pipeline_model_parallel_size = config.microbatch_group_size_per_vp_stage = mesh.get("pp", 1)
    made = plan(
        mesh,
        optimizer_config=made_of(OptimizerConfig),
        ddp_config=made_of(DistributedDataParallelConfig),
        model_parallel_config=config,
        scheduler={name: getattr(GPT_345M, name) for name in fields_of("scheduler") if hasattr(GPT_345M, name)},
        arguments=BuildArguments(device=torch.device("cuda")),
    )
    optimizer = OptimizerConfig(**made.config["optimizer_config"])
    for name in ("lr", "min_lr", "weight_decay", "adam_beta2", "clip_grad", "bf16", "overlap_param_gather"):
        assert getattr(optimizer, name) == getattr(GPT_345M, name), name
    assert made.config["model_parallel_config"]["deallocate_pipeline_outputs"] is True


# -- names and types ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer_config": {"clip_gard": 1.0}}, ("does not read 'clip_gard' of optimizer_config", "'clip_grad'")),
        ({"ddp_config": {"overlap_grad_reduc": True}}, ("'overlap_grad_reduc' of ddp", "'overlap_grad_reduce'")),
        ({"model_parallel_config": {"pipeline_dtyp": 1}}, ("'pipeline_dtyp' of model", "'pipeline_dtype'")),
        ({"scheduler": {"lr_warmup_step": 1}, "optimizer_config": RATE}, ("'lr_warmup_step'", "'lr_warmup_steps'")),
        ({"optimizer_config": {"lr": "0.1"}}, ("'lr' of optimizer_config", "got '0.1'")),
        ({"optimizer_config": {"bf16": 1}}, ("'bf16' of optimizer_config", "bool", "got 1")),
        ({"optimizer_config": {"params_dtype": "bf16"}}, ("'params_dtype'", "dtype", "got 'bf16'")),
        ({"ddp_config": {"bucket_size": 1.5}}, ("'bucket_size'", "int", "got 1.5")),
        ({"ddp_config": {"overlap_grad_reduce": "False"}}, ("'overlap_grad_reduce'", "bool", "got 'False'")),
        ({"ddp_config": [1]}, ("ddp_config", "DistributedDataParallelConfig", "got [1]")),
        ({"scheduler": 3}, ("scheduler", "dictionary", "got 3")),
        ({"optimizer": "adam"}, ("optimizer is not an option", "optimizer_config, ddp_config")),
        ({"config": {"zero_optimization": {}}}, ("config is not an option", "optimizer_config")),
        ({"lr": 1.0}, ('optimizer_config={"lr": 1.0}',)),
        ({"batch_axes": {"x": "a"}}, ("batch_axes", "'a'")),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("one_version")
def test_a_wrong_name_or_type_is_refused_with_its_field(
    options: dict[str, Any], words: tuple[str, ...], message: Messages
) -> None:
    message(refusal(**options), *words)


def test_all_errors_of_a_configuration_are_reported_at_once() -> None:
    text = refusal(optimizer_config={"clip_gard": 1.0, "lr": "x"}, ddp_config={"use_megatron_fsdp": True})
    assert len(text.splitlines()) == 4


# -- what the schedule and build decide -----------------------------------------------------------------------------


def test_sizes_come_from_the_mesh() -> None:
    made = planned({"pp": 3, "dp": 2, "tp": 7})
    config = made["model_parallel_config"]
    assert [config[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline")] == [7, 3]
    assert config["expert_tensor_parallel_size"] == 7
    assert made["origins"]["model_parallel_config.pipeline_model_parallel_size"] == "'pp' of the mesh"
    same = planned({"tp": 2}, model_parallel_config={"tensor_model_parallel_size": 2})
    assert "model_parallel_config.tensor_model_parallel_size" not in same["origins"]


def test_clipping_follows_max_grad_norm_or_megatrons_default(message: Messages) -> None:
    distributed = {name: {"use_distributed_optimizer": True} for name in ("optimizer_config", "ddp_config")}
    for given in ({}, distributed):
        made = planned(arguments=BuildArguments(has_optimizer=True), **given)
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


def test_lower_precision_is_given_once() -> None:
    for option in ("optimizer_config", "model_parallel_config"):
        made = planned({"pp": 2}, **{option: {"bf16": True}})
        assert made["optimizer_config"]["bf16"] is made["model_parallel_config"]["bf16"] is True
        assert made["model_parallel_config"]["pipeline_dtype"] == torch.bfloat16
        assert made["optimizer_config"]["params_dtype"] == torch.bfloat16
        assert made["ddp_config"]["grad_reduce_in_fp32"] is True
    found = planned(schedule=schedule_of(dtype=torch.bfloat16))
    assert found["optimizer_config"]["bf16"] is True
    assert found["origins"]["optimizer_config.bf16"] == "the model's parameters in bfloat16"
    plain = planned({"pp": 2})
    assert "grad_reduce_in_fp32" not in plain["ddp_config"]
    assert plain["model_parallel_config"]["pipeline_dtype"] == torch.float32
    assert planned(ddp_config={"grad_reduce_in_fp32": False}, optimizer_config={"bf16": True})["ddp_config"] == {
        "grad_reduce_in_fp32": False
    }


def test_fp16_begins_with_a_scale_that_does_not_overflow() -> None:
    for made in (planned(optimizer_config={**RATE, "fp16": True}), planned(schedule=schedule_of(dtype=torch.float16))):
        assert made["optimizer_config"]["initial_loss_scale"] == 2.0**16
        assert "2**32" in made["origins"]["optimizer_config.initial_loss_scale"]
    for given in ({"initial_loss_scale": 2.0**20}, {"loss_scale": 64.0}):
        made = planned(optimizer_config={**RATE, "fp16": True, **given})
        assert "optimizer_config.initial_loss_scale" not in made["origins"]


def test_the_distributed_optimizer_is_given_once() -> None:
    for option, other in (("optimizer_config", "ddp_config"), ("ddp_config", "optimizer_config")):
        made = planned({"dp": 2}, arguments=FACTORY, **{option: {"use_distributed_optimizer": True}})
        assert made["origins"][f"{other}.use_distributed_optimizer"] == f"as 'use_distributed_optimizer' of {option}"
    assert not trains(planned({"dp": 2}, arguments=NOTHING, ddp_config={"use_distributed_optimizer": True}))


def test_microbatches_equal_accumulate(message: Messages) -> None:
    assert planned()["microbatches"] == 1
    assert planned(arguments=BuildArguments(accumulate=4))["microbatches"] == 4
    assert planned({"pp": 4})["microbatches"] == 4
    assert planned({"pp": 4}, arguments=BuildArguments(accumulate=8))["microbatches"] == 8
    assert planned(microbatches=3)["microbatches"] == 3
    message(refusal(microbatches=3, arguments=BuildArguments(accumulate=2)), "microbatches is 3", "accumulate=2")


def test_several_stages_a_rank_are_interleaved_as_megatron_runs_them_right() -> None:
    config = planned(**INTERLEAVED)["model_parallel_config"]
    assert (config["virtual_pipeline_model_parallel_size"], config["batch_p2p_comm"]) == (2, False)
    plain = planned(**IN_TURN)["model_parallel_config"]
    assert not {"virtual_pipeline_model_parallel_size", "batch_p2p_comm"} & set(plain)
    overlapped = planned(**INTERLEAVED, model_parallel_config={"overlap_p2p_comm": True})
    assert overlapped["origins"]["model_parallel_config.batch_p2p_comm"] == "with overlap_p2p_comm"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"mesh": {"tp": 2}, "model_parallel_config": {"tensor_model_parallel_size": 4}},
            "'tensor_model_parallel_size' of model_parallel_config is 4|2 by 'tp' of the mesh",
        ),
        (INTERLEAVED | {"model_parallel_config": {"virtual_pipeline_model_parallel_size": 4}}, "is 4|4 stages"),
        (IN_TURN | {"model_parallel_config": {"virtual_pipeline_model_parallel_size": 2}}, "is 2|2 stages on 2 ranks"),
        ({"model_parallel_config": {"virtual_pipeline_model_parallel_size": 2}}, "is 2|one rank along 'pp'"),
        (
            {"optimizer_config": {"bf16": True}, "model_parallel_config": {"bf16": False}},
            "'bf16' of optimizer_config is True|'bf16' of model_parallel_config is False",
        ),
        (
            {"schedule": schedule_of(dtype=torch.bfloat16), "optimizer_config": {"bf16": False}},
            "'bf16' of optimizer_config is False|bfloat16",
        ),
        (
            {"mesh": {"pp": 2}, "model_parallel_config": {"pipeline_dtype": torch.float16}},
            "'pipeline_dtype' of model_parallel_config is torch.float16|torch.float32",
        ),
        ({"optimizer_config": RATE, "arguments": FACTORY}, "two optimizers|'lr' of optimizer_config is 0.001"),
        ({"optimizer_config": {"weight_decay": 0.1}, "arguments": FACTORY}, "two optimizers|'weight_decay'"),
        (
            {
                "optimizer_config": {"use_distributed_optimizer": True},
                "ddp_config": {"use_distributed_optimizer": False},
            },
            "'use_distributed_optimizer' of optimizer_config is True|of ddp_config is False",
        ),
        ({"scheduler": {"lr_warmup_steps": 1}, "arguments": FACTORY}, "scheduler|factory"),
        ({"scheduler": {"lr_warmup_steps": 1}, "arguments": NOTHING}, "scheduler|evaluates"),
        ({"scheduler": {"max_lr": 1.0}, "optimizer_config": RATE}, "'max_lr' of scheduler is 1.0|'lr' of optimizer"),
        (
            {"scheduler": {"min_lr": 0.5}, "optimizer_config": RATE},
            "'min_lr' of scheduler is 0.5|'min_lr' of optimizer",
        ),
        (
            {"optimizer_config": {"overlap_param_gather": False}, "ddp_config": {"overlap_param_gather": True}},
            "'overlap_param_gather' of optimizer_config is False|of ddp_config is True",
        ),
        ({"scheduler": {"end_wd": 0.5}, "optimizer_config": RATE}, "'end_wd' of scheduler is 0.5|'weight_decay'"),
        ({"microbatches": 0}, "microbatches|got 0"),
        ({"microbatches": 2.0}, "microbatches|got 2.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_contradiction_names_both_values(options: dict[str, Any], words: str, message: Messages) -> None:
    options = dict(options)
    message(refusal(options.pop("mesh", None), **options), *words.split("|"))


# -- what trains wrongly --------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, str]] = {
    "model_parallel_config.context_parallel_size": (2, "no step splits sequences"),
    "model_parallel_config.enable_autocast": (True, "eval_step would run without it"),
    "ddp_config.use_megatron_fsdp": (True, "FSDP"),
}
"""What `test_megatron_dangerous.py` shows the training of, and why it is refused."""


@pytest.mark.parametrize("key", WRONG)
def test_a_dangerous_field_is_refused_with_its_reason(key: str) -> None:
    (option, _, name), (value, why) = key.partition("."), WRONG[key]
    text = refusal({"dp": 2}, **{option: {name: value}})
    assert f"'{name}' of {option} is refused: " in text
    assert why in text
    planned({"dp": 2}, **{option: {name: fields_of(option)[name][0]}})


def test_every_dangerous_field_is_shown() -> None:
    assert set(DANGERS) == set(WRONG)


@pytest.mark.parametrize(
    "name",
    ["lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"],
)
def test_settings_of_megatrons_own_optimizer_beside_a_factory_are_refused(name: str) -> None:
    text = refusal(optimizer_config={name: 0.5}, arguments=FACTORY)
    assert f"'{name}' of optimizer_config is 0.5, and build(optimizer=...) is a factory" in text
    assert "two optimizers" in refusal(optimizer_config={"optimizer": "sgd"}, arguments=FACTORY)


@pytest.mark.parametrize(
    "name",
    [
        "tp_comm_overlap",
        "cpu_offloading",
        "cross_entropy_loss_fusion",
        "moe_extended_tp",
        "mtp_standalone",
        "ep_overlap_early_attn_memory_release",
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
        "wgrad_deferral_limit",
        "perform_initialization",
        "defer_embedding_wgrad_compute",
        "gradient_accumulation_fusion",
        "async_tensor_model_parallel_allreduce",
        "use_cpu_initialization",
        "use_te_rng_tracker",
        "deterministic_mode",
    ],
)
def test_a_field_of_megatrons_own_layers_does_not_reach_its_schedules(name: str) -> None:
    if name not in fields_of("model_parallel_config"):
        pytest.skip(f"the installed Megatron-core has no {name}")
    given = not fields_of("model_parallel_config")[name][0]
    made = plan({"pp": 2}, model_parallel_config={name: given})
    assert name not in made.config["model_parallel_config"]
    assert f"left out, for Megatron's own layers: {name}" in str(made)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_parallel_config": {"finalize_model_grads_func": print}}, "'finalize_model_grads_func'|engine sets it"),
        ({"model_parallel_config": {"no_sync_func": print}}, "'no_sync_func'|engine sets it"),
        ({"mesh": {"tp": 2}, "model_parallel_config": {"sequence_parallel": True}}, "'sequence_parallel'|scatters"),
        (INTERLEAVED | {"model_parallel_config": {"batch_p2p_comm": True}}, "'batch_p2p_comm'|is True|2 ranks"),
        ({"mesh": {"tp": 2}, "model_parallel_config": {"expert_tensor_parallel_size": 1}}, "is 1|'tp' of the mesh"),
        ({"ddp_config": {"overlap_param_gather": True}}, "without use_distributed_optimizer"),
        (
            {"ddp_config": {"overlap_param_gather": True, "use_distributed_optimizer": True}},
            "without overlap_grad_reduce",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_train_wrongly_are_refused(options: dict[str, Any], words: str, message: Messages) -> None:
    options = dict(options)
    message(refusal(options.pop("mesh", None), **options), *words.split("|"))


def test_refusals_of_megatron_name_the_option() -> None:
    """In words of Megatron's, which differ from version to version."""
    for config in (
        {"overlap_p2p_comm_warmup_flush": True},
        {"expert_model_parallel_size": 2},
        {"bf16": True, "fp16": True},
    ):
        text = refusal({"pp": 2}, model_parallel_config=config)
        assert "Megatron refuses model_parallel_config: ValueError: " in text
    wsd: dict[str, Any] = {"lr_decay_style": "WSD", "lr_decay_steps": 5}
    for scheduler in (
        {"init_lr": 0.1, "lr_warmup_steps": 1},
        {"lr_decay_style": "cosin", "lr_decay_steps": 9},
        {"lr_decay_style": "cosine"},
        {"lr_decay_style": "linear", "lr_decay_steps": 5, "lr_warmup_steps": 5},
        {"wd_incr_style": "linear"},
        {**wsd, "lr_wsd_decay_style": "linear"},
        {**wsd, "wsd_decay_steps": 2},
        {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": True},
    ):
        assert "Megatron refuses scheduler: " in refusal(optimizer_config=RATE, scheduler=scheduler)
    assert "Megatron refuses scheduler: " in refusal(optimizer_config={**RATE, "min_lr": 1.0})


def test_right_options_are_accepted() -> None:
    plan(optimizer_config={**RATE, "fp16": True, "initial_loss_scale": 2.0**16})
    plan(schedule=schedule_of(dtype=torch.float64), optimizer_config={**RATE, "clip_grad": 0.0})
    text = refusal(schedule=schedule_of(dtype=torch.float64), arguments=BuildArguments(max_grad_norm=0.5))
    assert "'clip_grad' of optimizer_config is 0.5, and Megatron clips no gradients in float64" in text
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
