"""Refuse settings that train wrongly or have no effect under this target."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slapo_core import BuildError
from slapo_deepspeed.config.draft import AUTO, Draft, Source


@dataclass(frozen=True)
class Key:
    """One key.

    Args:
        how: ``"passed"`` to DeepSpeed as it is; ``"filled"``: its value, or one of those below it, may come from the
            schedule or the arguments of ``build``; ``"refused"``: with some value, or with any.
        why: the filled-in value, the reason of a refusal, or a note on a key that is passed on.
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
        "settings of `deepspeed.checkpointing`; `.checkpoint()` steps decide what is recomputed",
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
    "zero_optimization": Key("filled", "`stage`: 0, with a pipeline or fp16 1; see below for refused values"),
}
"""Every key that DeepSpeed 0.19 reads, but for those that it has removed and refuses itself."""


def unknown_keys(config: Mapping[str, Any], source: Source, removed: frozenset[str]) -> Iterator[str]:
    """List keys that DeepSpeed would ignore silently.

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


REMOVED = frozenset(
    {
        "amp",
        "compression_training",
        "curriculum_learning",
        "eigenvalue",
        "elasticity",
        "graph_harvesting",
        "nebula",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "sparse_gradients",
    }
)
"""What DeepSpeed has removed, and refuses itself with its reason."""

_IF_ENABLED = ("autotuning", "data_efficiency", "expert_parallel", "hybrid_engine")
_WITH_ANY_VALUE = (
    "data_parallel_size",
    "seq_parallel_communication_data_type",
    "sequence_parallel_size",
    "weight_quantization",
)
_DEFAULTS = {"sequence_parallel_size": 1}
_WITH_VALUE: dict[str, Any] = {
    "dataloader_drop_last": True,
    "disable_allgather": True,
    "gradient_allreduce_op": "sum",
    "managed_gradient_accumulation": False,
    "use_data_before_expert_parallelism": True,
}
_STATE = "its state cannot be read back into the layout of the reference model"
_ZERO_PLUS = "ZeRO++ is not supported by this target"

ZERO_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "cpu_offload": (bool, '"offload_optimizer": {"device": "cpu"} is its new name'),
    "cpu_offload_param": (bool, '"offload_param": {"device": "cpu"} is its new name'),
    "legacy_stage1": (bool, "DeepSpeed has removed it"),
    "zenflow": (lambda value: value is not None, f"ZenFlow steps parts of the model later; {_STATE}"),
    "zero_hpz_partition_size": (lambda value: value > 1, _ZERO_PLUS),
    "zero_quantized_gradients": (bool, _ZERO_PLUS),
    "zero_quantized_nontrainable_weights": (bool, _ZERO_PLUS),
    "zero_quantized_weights": (bool, _ZERO_PLUS),
}
"""Key below ``zero_optimization`` -> whether a value is refused, and why."""


def refuse_unknown(config: Mapping[str, Any], source: Source) -> None:
    """
    Raises:
        BuildError: keys that DeepSpeed would pass over in silence, each with the nearest that there is.
    """
    _raise(list(unknown_keys(config, source, REMOVED)))


def refuse_settings(draft: Draft) -> None:
    """
    Raises:
        BuildError: values that would be wrong or do nothing here; each with its place and the reason.
    """
    _raise([*_general(draft), *_of_zero(draft), *_of_pipeline(draft), *_of_tensor_parallel(draft)])


def _general(draft: Draft) -> Iterator[str]:
    source = draft.source
    for name in _WITH_ANY_VALUE:
        if name in draft.config and draft.get(name) != _DEFAULTS.get(name):
            yield f"{source.of(name)} is refused: {KEYS[name].why}"
    for name, value in _WITH_VALUE.items():
        if draft.get(name) == value and name in draft.config:
            yield f"{source.of(name)} is refused: {KEYS[name].why}"
    for name in _IF_ENABLED:
        if draft.get(f"{name}.enabled"):
            yield f"{source.of(f'{name}.enabled')} is refused: {KEYS[name].why.removeprefix('enabled: ')}"
    if draft.get("compile.deepcompile"):
        yield f"{source.of('compile.deepcompile')} is refused: {KEYS['compile'].why.partition(': ')[2]}"


def _of_zero(draft: Draft) -> Iterator[str]:
    source, facts = draft.source, draft.facts
    stage = draft.get("zero_optimization.stage")
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        yield f"{source.of('zero_optimization.stage')} must be 0, 1, 2 or 3 (got {stage!r})"
        return
    if facts.pp > 1 and stage > 1:
        yield (
            f"{source.of('zero_optimization.stage')} is {stage}, and the mesh {facts.mesh} has a pipeline: its stages "
            'accumulate gradients in place, which ZeRO-2 and ZeRO-3 partition away; "stage": 1 partitions the '
            "optimizer's state"
        )
    clips = facts.max_grad_norm is not None or draft.get("gradient_clipping")
    if stage == 0 and draft.get("fp16.enabled") and (facts.has_optimizer is not False or "optimizer" in draft.config):
        yield (
            f"{source.of('zero_optimization.stage')} is 0, and fp16 is enabled: without ZeRO, DeepSpeed divides "
            'gradients by the scale of a loss that it has not scaled; "stage": 1 scales it'
        )
    if stage == 3 and facts.captured:
        yield (
            f"{source.of('zero_optimization.stage')} is 3, which moves parameters in memory in each call, "
            f'and {facts.captured[0]} replays kernels on their old addresses; "stage": 2, or undo that step'
        )
    scatters = draft.get("zero_optimization.reduce_scatter") in (None, True)
    for name, is_off in (("prescale_gradients", (None, False)), ("gradient_predivide_factor", (None, 1))):
        if stage > 1 and scatters and draft.get(name) not in is_off:
            yield (
                f"{source.of(name)} is {draft.get(name)}, which ZeRO-{stage} has only with "
                '"zero_optimization": {"reduce_scatter": false}'
            )
    if draft.get("zero_optimization.compute_grad_norm") is False and clips:
        yield f"{source.of('zero_optimization.compute_grad_norm')} is false, but gradients are clipped by their norm"
    for name, (is_refused, why) in ZERO_REFUSED.items():
        value = draft.get(f"zero_optimization.{name}")
        if value is not None and is_refused(value):
            yield f"{source.of(f'zero_optimization.{name}')} is refused: {why}"
    for name in ("offload_optimizer", "offload_param"):
        if draft.get(f"zero_optimization.{name}.device") == "nvme":
            yield f"{source.of(f'zero_optimization.{name}.device')} is refused: 'nvme', {_STATE}; use 'cpu'"
    if draft.get("zero_optimization.offload_optimizer.super_offload"):
        yield f"{source.of('zero_optimization.offload_optimizer.super_offload')} is refused: {_STATE}"


def _of_pipeline(draft: Draft) -> Iterator[str]:
    source, facts = draft.source, draft.facts
    for name in ("wall_clock_breakdown", "flops_profiler.enabled"):
        if facts.pp > 1 and draft.get(name):
            yield f"{source.of(name)} is refused with a pipeline: DeepSpeed 0.19 starts a timer twice, which fails"
    if "pipeline" not in draft.config:
        return
    if facts.pp == 1:
        yield f"{source.of('pipeline')} is given, but the mesh {facts.mesh} has one rank along 'pp'"
        return
    stages = draft.get("pipeline.stages")
    if stages is not None and stages != facts.pp:
        yield f"{source.of('pipeline.stages')} is {stages!r}, but 'pp' of the mesh {facts.mesh} is {facts.pp}"
    for name in ("use_reentrant", "pipe_partitioned", "grad_partitioned"):
        if draft.get(f"pipeline.{name}"):
            yield f"{source.of(f'pipeline.{name}')} must be false here: {KEYS['pipeline'].why.partition(': ')[2]}"
    for name, ok in (("partition", ("best", AUTO)), ("seed_layers", (False,))):
        value = draft.config["pipeline"].get(name, ok[0])
        if value not in ok:
            yield f"{source.of(f'pipeline.{name}')} is {value!r}: the steps say the stages"


def _of_tensor_parallel(draft: Draft) -> Iterator[str]:
    size, facts = draft.get("tensor_parallel.autotp_size"), draft.facts
    if size not in (None, 0, facts.tp):
        yield (
            f"{draft.source.of('tensor_parallel.autotp_size')} is {size!r}, but 'tp' of the mesh {facts.mesh} is "
            f"{facts.tp}; the steps of the schedule split the model, not DeepSpeed"
        )


def refuse_auto(draft: Draft) -> None:
    """
    Raises:
        BuildError: values "auto" that cannot be filled in here, all of them.
    """
    found = [
        draft.source.of(f"{section}.params.{key}")
        for section in ("optimizer", "scheduler")
        for key, value in _params(draft, section).items()
        if value == AUTO
    ]
    if found:
        raise BuildError(
            f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} 'auto', and nothing says what "
            f"{'it' if len(found) == 1 else 'they'} should be",
            hint="give values, or leave them out for DeepSpeed's defaults",
        )


def _params(draft: Draft, section: str) -> dict[str, Any]:
    params = draft.get(f"{section}.params")
    return params if isinstance(params, dict) else {}  # anything else is refused where it is read


def _raise(reasons: list[str]) -> None:
    if reasons:
        start = "the DeepSpeed configuration cannot be run"
        raise BuildError(
            f"{start}: {reasons[0]}" if len(reasons) == 1 else "\n".join([f"{start}:", *(f"  - {r}" for r in reasons)])
        )
