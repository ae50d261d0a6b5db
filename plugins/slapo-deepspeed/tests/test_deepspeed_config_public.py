"""Configurations as tutorials and training scripts have them are taken as they are."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_core.dialect import BuildArguments

from .planned import planned

HALF = {"enabled": False, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}
TUTORIAL: dict[str, Any] = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": False},
    "fp16": {**HALF, "fp16_master_weights_and_grads": False, "initial_scale_power": 15},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
}
TRAINER: dict[str, Any] = {
    "fp16": {**HALF, "enabled": "auto", "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
MEGATRON: dict[str, Any] = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "prescale_gradients": True,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": False,
}
PIPELINED: dict[str, Any] = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8}},
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}


@pytest.mark.parametrize(
    ("config", "mesh", "has_optimizer"),
    [
        (TUTORIAL, {"dp": 4}, False),
        (TUTORIAL, None, False),
        (TRAINER, {"dp": 2, "tp": 2}, True),
        (MEGATRON, {"pp": 2, "dp": 4, "tp": 2}, True),
        (MEGATRON, {"dp": 8}, True),
        (PIPELINED, {"pp": 2}, False),
    ],
)
def test_a_public_configuration_is_taken(config: dict[str, Any], mesh: Any, has_optimizer: bool) -> None:
    made = planned(config, mesh, arguments=BuildArguments(has_optimizer=has_optimizer))
    for name, value in config.items():
        if not isinstance(value, dict) and value != "auto":
            assert made[name] == value
    sizes = made["train_micro_batch_size_per_gpu"] * made["gradient_accumulation_steps"] * (mesh or {}).get("dp", 1)
    assert made["train_batch_size"] == sizes
