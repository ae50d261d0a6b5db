"""What becomes of each key of DeepSpeed's configuration, as data: the table of docs/deepspeed.md."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slapo_deepspeed.config.reading import Source

__all__ = ["KEYS", "Key", "unknown_keys"]


@dataclass(frozen=True)
class Key:
    """One key.

    Args:
        how: ``"passed"`` to DeepSpeed as it is; ``"filled"``: its value, or one of those below it, may come from the
            schedule or the arguments of ``build``; ``"refused"``: with some value, or with any.
        why: what is filled in, or refused and why; what to know about one that is passed.
        inner: the keys below it, where DeepSpeed does not check them itself; None where it does, or all are free.
    """

    how: Literal["passed", "filled", "refused"]
    why: str
    inner: frozenset[str] | None = None


def _keys(*names: str) -> frozenset[str]:
    return frozenset(names)


KEYS: dict[str, Key] = {
    "activation_checkpointing": Key(
        "passed",
        "settings of `deepspeed.checkpointing`; what is recomputed is what `.checkpoint()` steps say",
        _keys(
            "partition_activations",
            "number_checkpoints",
            "contiguous_memory_optimization",
            "cpu_checkpointing",
            "profile",
            "synchronize_checkpoint_boundary",
        ),
    ),
    "aio": Key(
        "passed",
        "of `engine.deepspeed`; offloading to NVMe is refused",
        _keys(
            "block_size",
            "queue_depth",
            "intra_op_parallelism",
            "thread_count",
            "single_submit",
            "overlap_events",
            "use_gds",
        ),
    ),
    "autotuning": Key("refused", "enabled: it starts the script again and again; run it on the plain model"),
    "bf16": Key("passed", '`"enabled": "auto"` is filled in: whether the model is in bfloat16'),
    "bfloat16": Key("passed", "the old name of `bf16`; both at once are refused"),
    "checkpoint": Key("passed", "of `engine.deepspeed.save_checkpoint`"),
    "comet": Key("passed", "monitor"),
    "comms_logger": Key("passed", ""),
    "communication_data_type": Key("passed", "the type in which gradients are reduced"),
    "compile": Key("refused", "`deepcompile`: it rewrites the model; `.compile()` steps compile parts of it"),
    "csv_monitor": Key("passed", "monitor"),
    "data_efficiency": Key("refused", "enabled: it samples batches and drops tokens; batches are yours here"),
    "data_parallel_size": Key("refused", "the mesh says it"),
    "data_types": Key("passed", "", _keys("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules")),
    "dataloader_drop_last": Key("refused", "true: DeepSpeed makes no loader here; batches are yours"),
    "datastates_ckpt": Key("passed", "of `engine.deepspeed.save_checkpoint`"),
    "disable_allgather": Key("refused", "true: DeepSpeed reads it, and does nothing with it"),
    "disable_python_gc": Key("passed", ""),
    "dump_state": Key("passed", ""),
    "expert_parallel": Key("refused", "enabled: DeepSpeed would replace modules that steps have replaced already"),
    "flops_profiler": Key(
        "passed",
        "not with a pipeline: DeepSpeed 0.19 starts a timer twice there",
        _keys(
            "enabled",
            "recompute_fwd_factor",
            "profile_step",
            "module_depth",
            "top_modules",
            "detailed",
            "output_file",
        ),
    ),
    "fp16": Key(
        "passed",
        '`"enabled": "auto"` is filled in: whether the model is in float16; not with `"stage": 0`, where DeepSpeed '
        "does not scale the loss",
    ),
    "gradient_accumulation_steps": Key("filled", "`build(accumulate=...)`; with a pipeline the number of its ranks"),
    "gradient_allreduce_op": Key("refused", '`"sum"`: replicas train as one process, so gradients are averaged'),
    "gradient_clipping": Key("filled", "`build(max_grad_norm=...)`; 0 without it (DeepSpeed's own default is 1.0)"),
    "gradient_predivide_factor": Key("passed", "not with ZeRO-2 and ZeRO-3, unless `reduce_scatter` is false"),
    "hybrid_engine": Key("refused", "enabled: it replaces modules for generation"),
    "log_level": Key("passed", "DeepSpeed's log shows warnings by default"),
    "managed_gradient_accumulation": Key("refused", "false: a training step of the engine is the boundary"),
    "memory_breakdown": Key("passed", ""),
    "optimizer": Key(
        "passed",
        "instead of a factory; `torch_adam` is filled in for Adam and AdamW on CPUs",
        _keys("type", "params", "legacy_fusion"),
    ),
    "pipeline": Key(
        "filled",
        "`use_reentrant`, `pipe_partitioned` and `grad_partitioned` are false: so tuples cross stages exactly; "
        "the stages are the schedule's",
        _keys(
            "stages",
            "partition",
            "seed_layers",
            "activation_checkpoint_interval",
            "pipe_partitioned",
            "grad_partitioned",
            "use_reentrant",
        ),
    ),
    "prescale_gradients": Key("passed", "not with ZeRO-2 and ZeRO-3, unless `reduce_scatter` is false"),
    "scheduler": Key("passed", "moves on after each step of the optimizer", _keys("type", "params")),
    "seq_parallel_communication_data_type": Key("refused", "no step makes DeepSpeed's sequence parallelism"),
    "sequence_parallel_size": Key("refused", "above 1: no step makes DeepSpeed's sequence parallelism"),
    "steps_per_print": Key("passed", "nothing is printed without it"),
    "tensor_parallel": Key(
        "filled",
        "left out: the steps split the model; `autotp_size` must be the mesh's `tp`, or 0",
        _keys("autotp_size"),
    ),
    "tensorboard": Key("passed", "monitor"),
    "timers": Key("passed", ""),
    "torch_autocast": Key("passed", "", _keys("enabled", "dtype", "lower_precision_safe_modules")),
    "train_batch_size": Key("filled", "micro-batch x accumulation x replicas"),
    "train_micro_batch_size_per_gpu": Key("filled", "of the other two, or of the example inputs"),
    "use_data_before_expert_parallelism": Key("refused", "true: no step makes experts"),
    "vocabulary_size": Key("passed", ""),
    "wall_clock_breakdown": Key("passed", "not with a pipeline: DeepSpeed 0.19 starts a timer twice there"),
    "wandb": Key("passed", "monitor"),
    "weight_quantization": Key("refused", "it is for inference"),
    "zero_allow_untested_optimizer": Key("filled", "true: DeepSpeed asks for it for SGD and others"),
    "zero_force_ds_cpu_optimizer": Key("filled", "false for a factory with offloading to CPUs"),
    "zero_optimization": Key("filled", "`stage`: 0, with a pipeline or fp16 1; see below for what is refused"),
}
"""Every key that DeepSpeed 0.19 reads, but for those that it has removed and refuses itself."""


def unknown_keys(config: Mapping[str, Any], source: Source, removed: frozenset[str]) -> Iterator[str]:
    """What is wrong with each key that DeepSpeed would pass over in silence.

    Args:
        config: the whole configuration.
        source: where it comes from.
        removed: keys that DeepSpeed refuses itself, with its own reason.
    """
    for name, value in config.items():
        if name in removed:
            continue
        if name not in KEYS:
            yield f"DeepSpeed has no {source.of(name)}{_nearest(name, KEYS)}"
            continue
        inner = KEYS[name].inner
        if inner is not None and isinstance(value, Mapping):
            for key in value:
                if key not in inner:
                    yield f"DeepSpeed has no {source.of(f'{name}.{key}')}{_nearest(key, inner)}"


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; it has {', '.join(sorted(known))}"
