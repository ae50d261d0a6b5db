"""What DeepSpeed would pass over in silence, or run wrongly, is refused, with its place and the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_core.dialect import BuildArguments
from slapo_deepspeed.config.refusals import KEYS, REMOVED, ZERO_REFUSED
from tests.messages import Messages

from .planned import ADAM, planned, refusal, schedule_of


def test_every_key_that_deepspeed_reads_is_in_the_table() -> None:
    from deepspeed.runtime import config as theirs

    seen: set[str] = set()

    class Keys:
        def __init__(self, names: list[str]) -> None:
            self.names = names

        def __contains__(self, name: str) -> bool:
            seen.add(name)
            return name in self.names

    class Watched(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            seen.add(name)
            return super().get(name, default)

        def __contains__(self, name: object) -> bool:
            seen.add(str(name))
            return super().__contains__(name)

        def keys(self) -> Any:
            return Keys(list(self))

    theirs.DeepSpeedConfig(Watched(train_batch_size=1))
    assert frozenset(theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS) == REMOVED
    assert {"zero_optimization", "scheduler", "aio", *REMOVED} < seen  # it watches
    # Two more are read by deepspeed.initialize.
    assert seen - REMOVED == set(KEYS) - {"data_parallel_size", "sequence_parallel_size"}


@pytest.mark.parametrize(
    ("config", "key", "nearest"),
    [
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "'zero_optimization'"),
        ({"gradient_clip": 1.0}, "gradient_clip", "'gradient_clipping'"),
        (
            {"activation_checkpointing": {"partitioned_activations": True}},
            "activation_checkpointing.partitioned_activations",
            "'partition_activations'",
        ),
        ({"optimizer": {**ADAM, "lr": 1}}, "optimizer.lr", "legacy_fusion, params, type"),
        ({"tensor_parallel": {"autotp_size": 1, "tp_grain_size": 8}}, "tensor_parallel.tp_grain_size", "autotp_size"),
    ],
)
def test_a_key_that_deepspeed_would_pass_over_is_an_error_with_the_nearest(
    config: Any, key: str, nearest: str, message: Messages
) -> None:
    message(refusal(config), f"has no {key!r}", nearest)


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"autotuning": {"enabled": True}}, "autotuning.enabled"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"disable_allgather": True}, "disable_allgather"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"seq_parallel_communication_data_type": "fp32"}, "seq_parallel_communication_data_type"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"use_data_before_expert_parallelism": True}, "use_data_before_expert_parallelism"),
        ({"weight_quantization": {}}, "weight_quantization"),
    ],
)
def test_every_refused_key_says_why(config: dict[str, Any], place: str, message: Messages) -> None:
    message(refusal(config), f"'{place}' of config is refused: ")
    reason = refusal(config).partition("is refused: ")[2]
    assert reason in KEYS[next(iter(config))].why


def test_every_key_of_the_table_that_is_refused_is_tried() -> None:
    tried = {next(iter(mark.args[1][number][0])) for mark in _cases() for number in range(len(mark.args[1]))}
    assert tried == {name for name, key in KEYS.items() if key.how == "refused"}


def _cases() -> list[Any]:
    return list(test_every_refused_key_says_why.pytestmark)  # type: ignore[attr-defined]


def test_sections_that_are_not_enabled_pass() -> None:
    off = {"enabled": False}
    config = {"autotuning": off, "data_efficiency": off, "hybrid_engine": off, "compile": {"deepcompile": False}}
    config |= {"expert_parallel": off, "sequence_parallel_size": 1}
    config |= {"gradient_allreduce_op": "mean", "managed_gradient_accumulation": True, "dataloader_drop_last": False}
    made = planned(config)
    assert {name: made[name] for name in config} == config


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
def test_state_in_files_is_refused_by_the_plan(name: str, message: Messages) -> None:
    text = refusal({"zero_optimization": {"stage": 3, name: {"device": "nvme", "nvme_path": "/tmp"}}})
    message(text, f"'zero_optimization.{name}.device' of config is refused", "'cpu'")


PASSED: dict[str, Any] = {
    "activation_checkpointing": {"partition_activations": True},
    "aio": {"block_size": 1024},
    "bf16": {"enabled": True},
    "checkpoint": {"tag_validation": "Fail"},
    "comms_logger": {"enabled": False},
    "communication_data_type": "fp32",
    "csv_monitor": {"enabled": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "disable_python_gc": False,
    "dump_state": False,
    "flops_profiler": {"enabled": True, "profile_step": 3},
    "gradient_predivide_factor": 2.0,
    "log_level": "error",
    "memory_breakdown": True,
    "prescale_gradients": True,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "timers": {"throughput": {"enabled": False}},
    "vocabulary_size": 128,
    "wall_clock_breakdown": True,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "round_robin_gradients": True},
}


def test_what_passes_is_given_to_deepspeed_as_it_is() -> None:
    made = planned(PASSED)
    assert {name: made[name] for name in PASSED} == PASSED


@pytest.mark.parametrize("name", sorted(ZERO_REFUSED))
def test_settings_of_zero_that_this_target_cannot_run_say_why(name: str, message: Messages) -> None:
    value = 2 if name == "zero_hpz_partition_size" else {} if name == "zenflow" else True
    message(refusal({"zero_optimization": {"stage": 3, name: value}}), f"'zero_optimization.{name}'")
    if name != "zenflow":
        allowed = 1 if name == "zero_hpz_partition_size" else False
        assert planned({"zero_optimization": {"stage": 3, name: allowed}})["zero_optimization"][name] == allowed


def test_zero_stages_that_no_pipeline_runs_are_refused(message: Messages) -> None:
    for stage in (2, 3):
        text = refusal({"zero_optimization": {"stage": stage}}, {"pp": 2})
        message(text, f"'zero_optimization.stage' of config is {stage}", "'pp': 2")
    planned({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "gradient_clipping": 1}, {"pp": 2})
    planned({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}, {"pp": 2})
    planned({"zero_optimization": {"stage": 0}, "gradient_clipping": 1.0}, {"pp": 2})


def test_fp16_is_not_trained_without_zero(message: Messages) -> None:
    """DeepSpeed divides gradients by a scale there that it has not multiplied the loss by."""
    config: dict[str, Any] = {"fp16": {"enabled": True}}
    assert planned(config)["zero_optimization"] == {"stage": 1}
    assert planned(config, {"pp": 2})["zero_optimization"] == {"stage": 1}
    for mesh in (None, {"pp": 2}):
        message(refusal({**config, "zero_optimization": {"stage": 0}}, mesh), "'zero_optimization.stage'", "fp16")
    assert planned(config, arguments=BuildArguments())["zero_optimization"] == {"stage": 0}  # it only evaluates
    planned({"fp16": {"enabled": False}, "zero_optimization": {"stage": 0}})
    half = schedule_of(dtype=torch.float16)
    assert planned({"fp16": {"enabled": "auto"}}, schedule=half)["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize("stage", [4, -1, "2", 1.0, True, [1]])
def test_a_stage_is_a_number_from_0_to_3(stage: Any, message: Messages) -> None:
    message(refusal({"zero_optimization": {"stage": stage}}), "'zero_optimization.stage'", f"got {stage!r}")


@pytest.mark.parametrize("config", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}])
def test_gradients_are_scaled_before_they_are_reduced_only_where_deepspeed_can(
    config: dict[str, Any], message: Messages
) -> None:
    for stage in (2, 3):
        text = refusal({**config, "zero_optimization": {"stage": stage}})
        message(text, f"'{next(iter(config))}' of config", f"ZeRO-{stage}", '{"reduce_scatter": false}')
        planned({**config, "zero_optimization": {"stage": stage, "reduce_scatter": False}})
    planned({**config, "zero_optimization": {"stage": 1}})
    planned({"prescale_gradients": False, "gradient_predivide_factor": 1.0, "zero_optimization": {"stage": 2}})


@pytest.mark.parametrize("config", [{"wall_clock_breakdown": True}, {"flops_profiler": {"enabled": True}}])
def test_what_fails_in_every_pipeline_of_deepspeed_is_refused(config: dict[str, Any], message: Messages) -> None:
    message(refusal(config, {"pp": 2}), next(iter(config)), "with a pipeline", "timer")
    planned(config, {"dp": 2})


def test_a_norm_that_is_not_computed_clips_nothing(message: Messages) -> None:
    zero = {"zero_optimization": {"stage": 1, "compute_grad_norm": False}}
    planned(zero)
    text = refusal({**zero, "gradient_clipping": 1.0})
    message(text, "'zero_optimization.compute_grad_norm' of config is false", "clipped")
    assert refusal(zero, arguments=BuildArguments(max_grad_norm=1.0)) == text


@pytest.mark.parametrize(
    ("pipeline", "word"),
    [
        ({"stages": 4}, "of the mesh {'pp': 2} is 2"),
        ({"use_reentrant": True}, "must be false"),
        ({"pipe_partitioned": True}, "must be false"),
        ({"grad_partitioned": True}, "must be false"),
        ({"partition": "uniform"}, "is 'uniform'"),
        ({"seed_layers": True}, "is True"),
    ],
)
def test_a_pipeline_is_that_of_the_schedule(pipeline: dict[str, Any], word: str, message: Messages) -> None:
    message(refusal({"pipeline": pipeline}, {"pp": 2}), f"'pipeline.{next(iter(pipeline))}' of config", word)
    message(refusal({"pipeline": pipeline}, {"dp": 2}), "'pipeline' of config", "{'dp': 2}")


def test_another_tensor_parallel_size_is_refused_with_both(message: Messages) -> None:
    text = refusal({"tensor_parallel": {"autotp_size": 4}}, {"tp": 2})
    message(text, "'tensor_parallel.autotp_size' of config is 4", "{'tp': 2} is 2")


def test_every_reason_is_given_at_once() -> None:
    text = refusal({"sequence_parallel_size": 2, "zero_optimization": {"stage": 2}}, {"pp": 2})
    assert text.count("\n  - ") == 2
