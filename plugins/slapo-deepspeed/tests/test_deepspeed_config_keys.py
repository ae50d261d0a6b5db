"""Keys go to DeepSpeed as given; those that it does not read, or that train wrongly, are refused."""

from __future__ import annotations

from typing import Any

import pytest

import slapo_core as slapo
from slapo_core.dialect import BuildArguments
from slapo_deepspeed.config import DANGERS, UNVERIFIED
from slapo_deepspeed.unknown_keys import ReadRecorder
from tests.messages import Messages

from .planned import ADAM, plan, planned, refusal, schedule_of

PASSED: dict[str, tuple[dict[str, Any], str, Any]] = {
    "dump_state": ({"dump_state": True}, "dump_state", True),
    "disable_python_gc": ({"disable_python_gc": True}, "disable_python_gc", True),
    "disable_allgather": ({"disable_allgather": True}, "disable_allgather", True),
    "communication_data_type": ({"communication_data_type": "fp32"}, "communication_data_type", "torch.float32"),
    "prescale_gradients": ({"prescale_gradients": True}, "prescale_gradients", True),
    "gradient_predivide_factor": ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor", 2.0),
    "steps_per_print": ({"steps_per_print": 7}, "steps_per_print", 7),
    "wall_clock_breakdown": ({"wall_clock_breakdown": True}, "wall_clock_breakdown", True),
    "memory_breakdown": ({"memory_breakdown": True}, "memory_breakdown", True),
    "dataloader_drop_last": ({"dataloader_drop_last": True}, "dataloader_drop_last", True),
    "log_level": ({"log_level": "error"}, "log_level", "error"),
    "aio": ({"aio": {"block_size": 1024}}, "aio_config.block_size", 1024),
    "checkpoint": ({"checkpoint": {"tag_validation": "Fail"}}, "checkpoint_tag_validation_fail", True),
    "writer": ({"checkpoint": {"writer": {"type": "PYTHON"}}}, "checkpoint_config.writer.type", "PYTHON"),
    "grad_accum_dtype": ({"data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype", "fp32"),
    "activation_checkpointing": (
        {"activation_checkpointing": {"number_checkpoints": 3}},
        "activation_checkpointing_config.number_checkpoints",
        3,
    ),
    "flops_profiler": ({"flops_profiler": {"profile_step": 3}}, "flops_profiler_config.profile_step", 3),
    "csv_monitor": ({"csv_monitor": {"job_name": "a"}}, "monitor_config.csv_monitor.job_name", "a"),
    "timers": ({"timers": {"throughput": {"enabled": False}}}, "timers_config.enabled", False),
    "comms_logger": ({"comms_logger": {"prof_all": False}}, "comms_config.comms_logger.prof_all", False),
    "legacy_fusion": ({"optimizer": {**ADAM, "legacy_fusion": True}}, "optimizer_legacy_fusion", True),
    "scheduler": ({"scheduler": {"type": "OneCycle", "params": {"x": 1}}}, "scheduler_params.x", 1),
    "torch_autocast": ({"torch_autocast": {"enabled": True}}, "torch_autocast_enabled", True),
    "check_grad_overflow": ({"bf16": {"check_grad_overflow": False}}, "bfloat16_config.check_grad_overflow", False),
    "hysteresis": ({"fp16": {"hysteresis": 4}}, "float16_config.hysteresis", 4),
    "reduce_bucket_size": ({"zero_optimization": {"reduce_bucket_size": 9}}, "zero_config.reduce_bucket_size", 9),
    "round_robin": (
        {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
        "zero_config.round_robin_gradients",
        True,
    ),
    "buffer_count": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "buffer_count": 6}}},
        "zero_config.offload_optimizer.buffer_count",
        6,
    ),
    "hpz": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        "zero_config.zero_hpz_partition_size",
        2,
    ),
}
"""Keys in no table of ours -> a configuration, and where DeepSpeed's own object has the value."""


@pytest.mark.parametrize("name", sorted(PASSED))
def test_a_key_in_no_table_goes_to_deepspeed_as_given(name: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    given, where, value = PASSED[name]
    made = planned(given)
    for key, inner in given.items():
        assert made[key] == inner or {**made[key], **{k: v for k, v in inner.items() if k != "params"}} == made[key]
    found: Any = DeepSpeedConfig(made)
    for attribute in where.split("."):
        found = found[attribute] if isinstance(found, dict) else getattr(found, attribute)
    assert value in (found, str(found))


@pytest.mark.parametrize(
    ("config", "key", "nearest"),
    [
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "'zero_optimization'"),
        ({"gradient_clip": 1.0}, "gradient_clip", "'gradient_clipping'"),
        ({"optimizer": {**ADAM, "lr": 1}}, "optimizer.lr", "legacy_fusion, params, type"),
        ({"scheduler": {"type": "WarmupLR", "parms": {}}}, "scheduler.parms", "'params'"),
        ({"aio": {"blok_size": 1}}, "aio.blok_size", "'block_size'"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "data_types.grad_acum_dtype", "'grad_accum_dtype'"),
        ({"flops_profiler": {"enabeld": True}}, "flops_profiler.enabeld", "'enabled'"),
        ({"torch_autocast": {"enabeld": True}}, "torch_autocast.enabeld", "'enabled'"),
        ({"timers": {"througput": {}}}, "timers.througput", "throughput"),
        (
            {"activation_checkpointing": {"partitioned_activations": True}},
            "activation_checkpointing.partitioned_activations",
            "'partition_activations'",
        ),
        ({"checkpoint": {"writer": {"typ": "x"}}}, "checkpoint.writer.typ", "'type'"),
        ({"checkpoint": {"parallel_write": {"stage": 1}}}, "checkpoint.parallel_write.stage", "pipeline_stage"),
        ({"data_efficiency": {"data_samplng": {}}}, "data_efficiency.data_samplng", "'data_sampling'"),
        (
            {"data_efficiency": {"data_routing": {"random_ltd": {"enabeld": False}}}},
            "data_efficiency.data_routing.random_ltd.enabeld",
            "'enabled'",
        ),
        ({"bf16": {}, "bfloat16": {}}, "bfloat16", "'bf16'"),
    ],
)
def test_a_key_that_deepspeed_does_not_read_is_an_error_with_the_nearest(
    config: Any, key: str, nearest: str, message: Messages
) -> None:
    message(refusal(config), f"DeepSpeed does not read '{key}' of config", nearest)


def test_a_pipeline_has_these_keys(message: Messages) -> None:
    message(refusal({"pipeline": {"stagez": 2}}, {"pp": 2}), "'pipeline.stagez'", "'stages'")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stag": 2}}, ("'zero_optimization.stag' of config", "(got 2)")),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
            ("'zero_optimization.offload_optimizer.device' of config", "'nvme'", "(got 'gpu')"),
        ),
        (
            {"zero_optimization": {"offload_param": {"devic": 1}}},
            ("'zero_optimization.offload_param.devic' of config",),
        ),
        ({"tensorboard": {"enabeld": True}}, ("'tensorboard.enabeld' of config",)),
        ({"tensor_parallel": {"autotp_siz": 2}}, ("'tensor_parallel.autotp_siz' of config",)),
        ({"elasticity": {}}, ("'elasticity' of config", "removed")),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ("bfloat16 and fp16",)),
        ({"fp16": 3}, ("'fp16' of config", "must be a mapping, not int")),
        ({"communication_data_type": "int4"}, ("'communication_data_type' of config", "int4")),
    ],
)
def test_refusals_of_deepspeed_keep_its_words_and_name_the_key(config: Any, words: tuple[str, ...]) -> None:
    import torch.distributed as dist

    text = refusal(config)
    assert [word for word in ("refused by DeepSpeed", *words) if word not in text] == []
    assert not dist.is_initialized()


def test_reading_is_recorded() -> None:
    recorder = ReadRecorder({"a": {"b": 1, "c": {"d": 1}}, "e": 2, "f": {"g": 1}, "h": {"i": 1}, "j": 3, "k": {"l": 1}})
    assert recorder["a"]["b"] == 1
    assert "e" in recorder.keys()  # noqa: SIM118 - DeepSpeed asks so
    dict(**recorder.get("f"))
    recorder.pop("h")
    assert len(list(recorder["k"].keys())) == 1
    assert list(recorder.unread()) == [("", ["j"], {"a", "e", "f", "h", "k"}), ("a.", ["c"], {"b"})]


# -- what trains wrongly ---------------------------------------------------------------------------------------------


def split() -> slapo.Schedule:
    schedule = schedule_of({"tp": 2})
    schedule["0"].shard("weight", axis=0)
    schedule["0"].shard("bias", axis=0)
    schedule["0"].sync(mode="fwd_post", op="all_gather", axis=1)
    return schedule


def captured(**options: Any) -> slapo.Schedule:
    schedule = schedule_of({"dp": 2})
    schedule["0"].compile(**options)
    return schedule


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def of(name: str, stage: int = 0) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-3}}, **zero(stage)}


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
GRAPHS = {"options": {"triton.cudagraphs": True}}
AUTOCAST = {"torch_autocast": {"enabled": True}}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "ZeRO-2, pipeline": (zero(2), {"mesh": {"pp": 2}}, "accumulates gradients in place"),
    "ZeRO-3, pipeline": (zero(3), {"mesh": {"pp": 2}}, "accumulates gradients in place"),
    "fp16 without ZeRO": ({**FP16, **zero(0)}, {}, "was not scaled"),
    "bf16 without ZeRO": ({**BF16, **zero(0)}, {}, "steps the optimizer once"),
    "fp16 without ZeRO, pipeline": ({**FP16, **zero(0)}, {"mesh": {"pp": 2}}, "was not scaled"),
    "ZeRO-3, cudagraphs": (zero(3), {"schedule": captured(mode="reduce-overhead")}, "fixed addresses"),
    "ZeRO-3, options": (zero(3), {"schedule": captured(**GRAPHS)}, "fixed addresses"),
    "sum": ({"gradient_allreduce_op": "sum"}, {}, "averaged"),
    "unmanaged": ({"managed_gradient_accumulation": False}, {}, "boundaries of accumulation"),
    "data efficiency": ({"data_efficiency": {"enabled": True}}, {}, "its own loader"),
    "deepcompile": ({"compile": {"deepcompile": True}}, {}, "rewrite modules"),
    "experts": ({"expert_parallel": {"enabled": True}}, {}, "'expert_parallel.enabled'"),
    "hybrid engine": ({"hybrid_engine": {"enabled": True}}, {}, "'hybrid_engine.enabled'"),
    "autocast, pipeline": (AUTOCAST, {"mesh": {"pp": 2}}, "P2P messages"),
    "MuAdam, ZeRO": (of("MuAdam", 1), {}, "not known to be element-wise"),
    "Muon, split": (of("Muon", 1), {"schedule": split()}, "a step splits parameters"),
    "Lamb, ZeRO": (of("Lamb", 2), {}, "not known to be element-wise"),
    "Adafactor, split": (of("Adafactor"), {"schedule": split()}, "not known to be element-wise"),
    "LBFGS": (of("LBFGS", 0), {}, "requires a closure"),
    "Lamb, pipeline in bf16": ({**of("Lamb"), "bf16": {"enabled": True}}, {"mesh": {"pp": 2}}, "element-wise"),
}
RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ZeRO-1, pipeline": (zero(1), {"mesh": {"pp": 2}}),
    "fp16, it only evaluates": ({**FP16, **zero(0)}, {"arguments": BuildArguments()}),
    "bf16, it only evaluates": ({**BF16, **zero(0)}, {"arguments": BuildArguments()}),
    "bf16 without ZeRO, pipeline": ({**BF16, **zero(0)}, {"mesh": {"pp": 2}}),
    "fp16 off": ({"fp16": {"enabled": False}, **zero(0)}, {}),
    "ZeRO-2, cudagraphs": (zero(2), {"schedule": captured(mode="reduce-overhead")}),
    "ZeRO-3, compiled": (zero(3), {"schedule": captured()}),
    "mean": ({"gradient_allreduce_op": "mean"}, {}),
    "prescale, no scatter": ({"prescale_gradients": True, **zero(2, reduce_scatter=False)}, {}),
    "prescale, ZeRO-1": ({"prescale_gradients": True, "gradient_predivide_factor": 2.0, **zero(1)}, {}),
    "no norm, no clipping": (zero(1, compute_grad_norm=False), {}),
    "off": ({name: {"enabled": False} for name in ("data_efficiency", "hybrid_engine", "expert_parallel")}, {}),
    "autocast": (AUTOCAST, {}),
    "Lamb, tp without a split": (of("Lamb"), {"mesh": {"tp": 2}}),
    "Lamb, pipeline": (of("Lamb"), {"mesh": {"pp": 2}}),
    "AdamW, split": (of("AdamW", 2), {"schedule": split()}),
    "Lion, split": (of("Lion", 2), {"schedule": split()}),
    "SGD, split": (of("SGD", 2), {"schedule": split()}),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_settings_that_train_wrongly_are_refused(name: str, message: Messages) -> None:
    config, more, word = WRONG[name]
    message(refusal(config, **more), " of config is ", word)


def test_every_danger_is_tried() -> None:
    said = "\n".join(refusal(config, **more) for config, more, _ in WRONG.values())
    assert [danger.key for danger in DANGERS if danger.why not in said] == []


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_the_same_where_it_trains_right_is_taken(name: str) -> None:
    config, more = RIGHT[name]
    plan(config, **more)


def test_every_reason_is_given_at_once() -> None:
    text = refusal({"sequence_parallel_size": 2, "gradient_clip": 1, **zero(2)}, {"pp": 2})
    assert text.count("\n  - ") == 3, text


NVME, CPU = {"device": "nvme"}, {"device": "cpu"}
UNTRIED: dict[str, dict[str, Any]] = {
    "zero_optimization.offload_optimizer.device": zero(3, offload_optimizer=NVME),
    "zero_optimization.offload_param.device": zero(3, offload_param=NVME),
    "zero_optimization.offload_optimizer.super_offload": zero(3, offload_optimizer={**CPU, "super_offload": True}),
    "zero_optimization.zenflow": zero(2, zenflow={}),
    "zero_optimization.zero_hpz_partition_size": zero(3, zero_hpz_partition_size=2),
    "zero_optimization.zero_quantized_weights": zero(3, zero_quantized_weights=True),
    "zero_optimization.zero_quantized_nontrainable_weights": zero(3, zero_quantized_nontrainable_weights=True),
    "zero_optimization.zero_quantized_gradients": zero(3, zero_quantized_gradients=True),
    "optimizer.type": of("Muon", 1),
}


def unverified(config: dict[str, Any]) -> list[str]:
    return [line for line in str(plan(config)).splitlines() if "not verified" in line]


@pytest.mark.parametrize("key", UNTRIED)
def test_untested_settings_are_marked_in_the_plan(key: str) -> None:
    (line,) = unverified(UNTRIED[key])
    assert f"'{key}' " in line


def test_tested_settings_are_not_marked() -> None:
    for config in (zero(3), zero(2, offload_optimizer=CPU), zero(3, zero_hpz_partition_size=1), of("AdamW", 1)):
        assert unverified(config) == []
    assert sorted(UNTRIED) == sorted(one.key for one in UNVERIFIED)
