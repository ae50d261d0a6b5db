"""Configure Megatron-core: fields that the schedule owns, fields that train wrongly here, and all others as given.

The fields of the installed version are those that exist; this module names only the owned and the dangerous ones.
"""

from __future__ import annotations

import inspect
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

import slapo_core
from slapo_core import BuildError, SlapoError
from slapo_megatron.groups import order_of
from slapo_megatron.runtime import MEGATRON
from slapo_runtime.options import Options
from slapo_runtime.planning import ScheduleFacts, boundaries, checked_axes, topology

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slapo_core import Schedule
    from slapo_core.layout import Mesh
    from slapo_runtime.stages import StagedModel

CLASSES = {
    "optimizer_config": "megatron.core.optimizer.OptimizerConfig",
    "ddp_config": "megatron.core.distributed.DistributedDataParallelConfig",
    "model_parallel_config": "megatron.core.model_parallel_config.ModelParallelConfig",
    "scheduler": "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler",
}
"""Option of the dialect -> the class of Megatron's whose fields, or arguments, it takes."""

OPTIONS = (*CLASSES, "microbatches", "batch_axes")
"""What users give; a plan has `arguments`, those of ``build``, and `origins`, where values come from, besides."""

_OPTIMIZER, _DDP, _MODEL, _SCHEDULER = CLASSES

DANGEROUS = {
    f"{_MODEL}.context_parallel_size": "no step splits sequences over ranks: ranks along 'cp' would train as replicas",
    f"{_MODEL}.enable_autocast": "eval_step would run without it, and stages expect messages of the parameters' dtype; "
    f"use bf16 of {_OPTIMIZER}",
    f"{_DDP}.use_megatron_fsdp": "the engine wraps the model in DistributedDataParallel, which is not FSDP: nothing "
    "more would be partitioned",
}
"""Fields that train wrongly or do nothing here -> why any value but Megatron's default is refused."""

_ENGINES = "the engine sets it"  # of functions: fields of model_parallel_config that end so
_FUNCTION = "_func"

_LAYERS = re.compile(
    "tp_comm_|cpu_offloading|cross_entropy_|moe_|mtp_|ep_overlap_|overlap_(moe|dispatch)_|delay_wgrad_|wgrad_deferral_|"
    "defer_embedding_wgrad_|gradient_accumulation_fusion|async_tensor_model_parallel_allreduce|perform_initialization|"
    "use_cpu_initialization|use_te_rng_tracker|deterministic_mode"
)
"""How fields of model_parallel_config for Megatron's own layers begin: they are left out, and the plan says so."""

_UNVERIFIED = re.compile(
    "fp8_|fp4_|nccl_ub|reuse_grad_buf_|num_distributed_optimizer_instances|optimizer_cpu_offload|batch_p2p_sync|"
    "use_precision_aware_optimizer|overlap_param_gather_with_optimizer_step|use_layer_wise_|average_in_collective|"
    "reduce_scatter_with_fp32_accumulation|optimizer_cuda_graph"
)
"""How fields begin that no CPU can run."""

_OF_OPTIMIZER = ("lr", "min_lr", "weight_decay", "optimizer", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum")
"""Settings of the optimizer that Megatron makes."""

_HALF = {"bf16": "bfloat16", "fp16": "float16"}
_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_tensor_parallel_size": "tp",
}
_DERIVED = {
    "autocast_dtype": "params_dtype",
    "expert_tensor_parallel_size": "tensor_model_parallel_size",
    "microbatch_group_size_per_vp_stage": "pipeline_model_parallel_size",
}
"""What Megatron's class sets itself, where nothing is given -> the field whose value it takes."""


Ask = Callable[[], "StagedModel"]


def stages_of(schedule: Schedule, options: Mapping[str, Any]) -> Ask:
    """Return a function that gives the stages of a schedule for its example inputs, found once.

    Args:
        schedule: to plan.
        options: of the dialect, which say whether there is a loss.
    """
    has_loss = bool((options.get("arguments") or {}).get("has_loss"))
    return cache(partial(slapo_core.stages, schedule, full_output=has_loss))


def _count(ask: Ask) -> int | None:
    """Return the number of stages; None if unknown: build and the plan say why."""
    try:
        return len(ask().partition.stages)
    except SlapoError:
        return None


def trains(options: Mapping[str, Any]) -> bool:
    """Whether an engine with these options trains: there is a factory, or a rate for Megatron's own optimizer.

    Args:
        options: of the plan.
    """
    has_factory = (options.get("arguments") or {}).get("has_optimizer")
    return bool(has_factory) or options[_OPTIMIZER].get("lr") is not None


def filled(schedule: Schedule, options: Mapping[str, Any], ask: Ask | None = None) -> dict[str, Any]:
    """Complete the options of the dialect; given a completed configuration, return an equal one; pure.

    Args:
        schedule: to build.
        options: as the user gave them to ``build``, with the arguments of ``build``; or as an earlier call made them.
        ask: for the stages of the schedule, as :func:`stages_of` gives it.

    Returns:
        ``optimizer_config``, ``ddp_config``, ``model_parallel_config``, ``scheduler``: what Megatron's classes are
        given; ``microbatches``; ``batch_axes``; ``arguments``: those of ``build``; ``origins``: of a value that was
        filled in, e.g. ``"optimizer_config.clip_grad"`` -> why.

    Raises:
        BuildError: unknown options, wrong types, and values that contradict the schedule or train wrongly.
    """
    given = {option: _read(option, options.get(option)) for option in CLASSES}
    draft = Options({**given, "microbatches": options.get("microbatches")}, origins=options.get("origins"))
    for name in sorted(set(options) - {*OPTIONS, "arguments", "origins"}):
        owner = next((option for option in CLASSES if name in fields_of(option)), None)
        hint = f'{owner}={{"{name}": {options[name]!r}}}' if owner else ""
        draft.refuse(name, f"is not an option of target 'megatron', which has {', '.join(OPTIONS)}", hint)
    _check_fields(draft)
    facts = ScheduleFacts.of(schedule, options)
    _fill_sizes(draft, facts, schedule, ask or stages_of(schedule, options))
    _fill_precision(draft, facts)
    _fill_optimizer(draft, facts, is_object=not isinstance(options.get(_OPTIMIZER) or {}, Mapping))
    _fill_replicas(draft, facts)
    draft.check("Megatron")
    _validate(draft.values, schedule.mesh)
    made = {**draft.values, "batch_axes": checked_axes(options.get("batch_axes")), "origins": draft.origins}
    return made | ({"arguments": dict(options["arguments"])} if options.get("arguments") else {})


# -- fields ---------------------------------------------------------------------------------------------------------


def megatron_class(option: str) -> Any:
    """Return Megatron's class of an option.

    Args:
        option: e.g. ``"optimizer_config"``.
    """
    from importlib import import_module

    module, _, name = CLASSES[option].rpartition(".")
    return getattr(import_module(module), name)


@cache
def fields_of(option: str) -> Mapping[str, tuple[Any, Any]]:
    """Return the fields of the installed Megatron-core: name -> default (``inspect.Parameter.empty``: none) and type.

    Args:
        option: e.g. ``"optimizer_config"``.
    """
    made_by = megatron_class(option).__init__
    hints = typing.get_type_hints(made_by, localns={"MegatronOptimizer": object})
    own = list(inspect.signature(made_by).parameters.values())[2 if option == _SCHEDULER else 1 :]  # self, optimizer
    return {one.name: (one.default, hints[one.name]) for one in own}


def _read(option: str, given: Any) -> dict[str, Any]:
    """Return the values that the user gave: of a mapping all, of an object those that differ from the defaults."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    found = megatron_class(option)
    if option == _SCHEDULER or not isinstance(given, found):  # a scheduler's class needs the optimizer
        what = "a dictionary" if option == _SCHEDULER else f"a dictionary, or Megatron's {found.__name__}"
        raise BuildError(f"{option} must be {what} (got {given!r})")
    values = {name: getattr(given, name) for name in fields_of(option)}
    return {
        name: value
        for name, value in values.items()
        if not _same(value, fields_of(option)[name][0]) and not _same(value, values.get(_DERIVED.get(name, ""), ""))
    }


def _check_fields(draft: Options) -> None:
    """Refuse names that the installed version does not have, types, and dangerous values; leave out those of layers."""
    runtime = f"Megatron-core {MEGATRON.version}"
    for option in CLASSES:
        values = draft.values.setdefault(option, {})
        draft.refuse_unknown(option, values, fields_of(option), runtime)
        for name, value in list(values.items()):
            if name not in fields_of(option):
                continue
            key, (default, annotation) = f"{option}.{name}", fields_of(option)[name]
            why = DANGEROUS.get(key, _ENGINES if option == _MODEL and name.endswith(_FUNCTION) else "")
            if _same(value, default):
                continue
            if why:
                draft.refuse(key, f"is refused: {why}", "leave it out")
            elif not _fits(value, annotation):
                kind = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
                draft.refuse(key, f"must be {kind} (got {value!r})")
            elif option == _MODEL and _LAYERS.match(name):
                draft.leave_out(key, "it is for Megatron's own layers")


def _fits(value: Any, annotation: Any) -> bool:
    try:
        check_type(value, annotation, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
    except TypeCheckError:
        return False
    return True


def _same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and value == other)


# -- what the schedule and build decide ------------------------------------------------------------------------------


def _fill_sizes(draft: Options, facts: ScheduleFacts, schedule: Schedule, ask: Ask) -> None:
    for name, mesh_dim in _SIZES.items():
        draft.own(f"{_MODEL}.{name}", getattr(facts, mesh_dim), f"'{mesh_dim}' of the mesh")
    if draft.get(f"{_MODEL}.sequence_parallel") and not _cuts_sequences(schedule):
        draft.refuse(
            f"{_MODEL}.sequence_parallel",
            "is True, but no step scatters activations over 'tp', and no parameter is marked sequence_parallel",
            '.sync("fwd_post", "reduce_scatter", axis=1) after the sharded layers',
        )
    count = draft.get("microbatches")
    if count is not None and (type(count) is not int or count < 1):
        draft.refuse("microbatches", f"must be a positive number (got {count!r})", f"microbatches={max(2, facts.pp)}")
        draft.values["microbatches"] = None
    facts.micro_batches(draft, "microbatches")
    if facts.pp > 1:
        if draft.get(f"{_MODEL}.overlap_p2p_comm"):
            draft.default(f"{_MODEL}.batch_p2p_comm", False, "with overlap_p2p_comm")
        _fill_stages(draft, _count(ask), facts.pp)
    elif draft.get(_VIRTUAL) is not None:
        draft.own(_VIRTUAL, 1, f"the mesh {facts.mesh}, with one rank along 'pp'")


_VIRTUAL = f"{_MODEL}.virtual_pipeline_model_parallel_size"


def _fill_stages(draft: Options, stages: int | None, pp: int) -> None:
    """Complete what depends on the number of stages; None where ``build`` will know it."""
    per_rank = None if stages is None or stages % pp else stages // pp
    if per_rank is not None and (per_rank > 1 or draft.get(_VIRTUAL) is not None):
        draft.own(_VIRTUAL, per_rank, f"{stages} stages on {pp} ranks along 'pp'")
    if per_rank != 1:
        fill = draft.own if pp == 2 else draft.default
        why = f"several stages on each of {pp} ranks: Megatron confuses the messages of two neighbors that are one"
        fill(f"{_MODEL}.batch_p2p_comm", False, why)


def check_stages(config: Mapping[str, Any], stages: int, pp: int) -> None:
    """Check options that depend on the number of stages.

    Args:
        config: of the plan.
        stages: of the model.
        pp: the number of ranks along ``pp``.

    Raises:
        BuildError: Megatron's schedule for this number of stages does not run it.
    """
    draft = Options({_MODEL: config[_MODEL], "microbatches": config["microbatches"]}, origins=config["origins"])
    _fill_stages(draft, stages, pp)
    draft.check("Megatron")


def _cuts_sequences(schedule: Schedule) -> bool:
    """Whether a step scatters activations over ``tp``, or a parameter is marked as one of sequence parallelism."""
    steps = (record.primitive for record in schedule.records)
    scatters = any(one.name == "tp.sync" and getattr(one, "op", None) == "reduce_scatter" for one in steps)
    return scatters or any(getattr(one, "sequence_parallel", False) for one in schedule.model.parameters())


def _fill_precision(draft: Options, facts: ScheduleFacts) -> None:
    """``bf16`` and ``fp16`` are given once for both configurations; default: the model's dtype."""
    import torch

    for name, dtype in _HALF.items():
        places = (f"{_OPTIMIZER}.{name}", f"{_MODEL}.{name}")
        draft.agree(*places)
        if dtype in facts.trained_dtypes:
            for place in places:
                draft.own(place, True, f"the model's parameters in {dtype}", "model.float() before")
    halves = [name for name in _HALF if draft.get(f"{_OPTIMIZER}.{name}")]
    dtypes = facts.trained_dtypes
    name = _HALF[halves[0]] if halves else next(iter(dtypes)) if len(dtypes) == 1 else "float32"
    why = f"with {halves[0]}" if halves else "that of the parameters"
    for option in (_OPTIMIZER, _MODEL):
        draft.own(f"{option}.params_dtype", getattr(torch, name), why)
    if facts.pp > 1:
        draft.own(f"{_MODEL}.pipeline_dtype", getattr(torch, name), "as params_dtype")
    if draft.get(f"{_OPTIMIZER}.fp16") and draft.get(f"{_OPTIMIZER}.loss_scale") is None:
        why = "Megatron's default of 2**32 skips the first steps"
        draft.default(f"{_OPTIMIZER}.initial_loss_scale", 2.0**16, why)
    if draft.get(f"{_OPTIMIZER}.bf16"):
        draft.default(f"{_DDP}.grad_reduce_in_fp32", True, "with bf16, as Megatron-LM has it")


def _fill_optimizer(draft: Options, facts: ScheduleFacts, *, is_object: bool) -> None:
    """Complete the options of Megatron's own optimizer and its scheduler, and clipping."""
    rate, clipping = draft.get(f"{_OPTIMIZER}.lr"), f"{_OPTIMIZER}.clip_grad"
    said = next((name for name in _OF_OPTIMIZER if draft.given(f"{_OPTIMIZER}.{name}")), None)
    if facts.has_optimizer and said is not None:
        value = draft.get(f"{_OPTIMIZER}.{said}")
        draft.refuse(
            f"{_OPTIMIZER}.{said}",
            f"is {value!r}, and build(optimizer=...) is a factory: two optimizers",
            f"leave {said!r} out, or optimizer= of build",
        )
    elif rate is not None:
        draft.default(f"{_OPTIMIZER}.min_lr", 0.0, "without it Megatron's scheduler ends at None")
        _fill_scheduler(draft)
    elif draft.values[_SCHEDULER] and facts.has_optimizer is not None:
        what = "a factory makes the optimizer" if facts.has_optimizer else "the engine only evaluates"
        draft.refuse(
            f"{_SCHEDULER}.{next(iter(draft.values[_SCHEDULER]))}",
            f"is given, but {what}: Megatron's scheduler sets rates and decays by {_OPTIMIZER}",
            f'{_OPTIMIZER}={{"lr": 1e-4}} without optimizer= of build, or a scheduler of torch\'s on engine.optimizer',
        )
    asked = facts.max_grad_norm
    if asked is not None:
        draft.own(clipping, float(asked), f"build(max_grad_norm={asked})", "say it once")
    elif rate is not None or is_object:
        why = 'OptimizerConfig\'s default; "clip_grad": 0.0 does not clip'
        draft.default(clipping, fields_of(_OPTIMIZER)["clip_grad"][0], why)
    else:
        draft.default(clipping, 0.0, "no max_grad_norm: nothing is clipped (Megatron's default is 1.0)")
    if draft.get(clipping) and "float64" in facts.dtypes:
        hint = 'model.float(), or "clip_grad": 0.0 without max_grad_norm'
        draft.refuse(clipping, f"is {draft.get(clipping)}, and Megatron clips no gradients in float64", hint)


def _fill_scheduler(draft: Options) -> None:
    """Complete all arguments. Weight decay by groups acts through the scheduler alone."""
    draft.own(f"{_SCHEDULER}.max_lr", draft.get(f"{_OPTIMIZER}.lr"), f"'lr' of {_OPTIMIZER}")
    draft.own(f"{_SCHEDULER}.min_lr", draft.get(f"{_OPTIMIZER}.min_lr"), f"'min_lr' of {_OPTIMIZER}")
    warmup = draft.default(f"{_SCHEDULER}.lr_warmup_steps", 0, "no warm-up")
    draft.default(f"{_SCHEDULER}.init_lr", 0.0, "Megatron-LM's default")
    style = draft.default(f"{_SCHEDULER}.lr_decay_style", "constant", "nothing is said")
    if style == "constant":
        draft.default(f"{_SCHEDULER}.lr_decay_steps", warmup + 1, "the rate stays the same")
    if draft.default(f"{_SCHEDULER}.wd_incr_style", "constant", "nothing is said") == "constant":
        decay = draft.get(f"{_OPTIMIZER}.weight_decay", fields_of(_OPTIMIZER)["weight_decay"][0])
        for name in ("start_wd", "end_wd"):
            draft.own(f"{_SCHEDULER}.{name}", decay, f"'weight_decay' of {_OPTIMIZER}")
        draft.default(f"{_SCHEDULER}.wd_incr_steps", 1, "the decay stays the same")


def _fill_replicas(draft: Options, facts: ScheduleFacts) -> None:
    """Complete the partitioning and communication of replicas: equal in both configurations."""
    for name in ("use_distributed_optimizer", "overlap_param_gather"):
        draft.agree(f"{_OPTIMIZER}.{name}", f"{_DDP}.{name}")
    for needed in ("use_distributed_optimizer", "overlap_grad_reduce"):
        if draft.get(f"{_DDP}.overlap_param_gather") and not draft.get(f"{_DDP}.{needed}"):
            draft.refuse(
                f"{_DDP}.overlap_param_gather",
                f"is True, which does nothing, or the wrong thing, without {needed}",
                f'{_DDP}={{"overlap_param_gather": True, "{needed}": True}}',
            )


def transformer_config(options: Mapping[str, Any], mesh: Mesh | None) -> TransformerConfig:
    """Make the configuration for DistributedDataParallel and the schedules; its layer sizes are dummies.

    Args:
        options: of the plan.
        mesh: of the schedule.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    size = mesh.size if mesh is not None else lambda _: 1
    heads = size("tp")
    return TransformerConfig(
        num_layers=size("pp"),
        hidden_size=heads,
        num_attention_heads=heads,
        **options["model_parallel_config"],
    )


def _validate(options: Mapping[str, Any], mesh: Mesh | None) -> None:
    """Ask Megatron's own classes, and its scheduler at every step where its rule changes."""
    for option in CLASSES:
        kind, given = megatron_class(option), options[option]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if option != _SCHEDULER:
                    kind(**given)
                if option == _MODEL:
                    transformer_config(options, mesh)
                if option == _SCHEDULER and given:
                    made = kind(SimpleNamespace(param_groups=[]), **given)
                    for made.num_steps in (0, given["lr_warmup_steps"] + 1, given["lr_decay_steps"]):
                        made.get_lr({}), made.get_wd({})
        except Exception as error:  # its checks raise assertions, and whatever a wrong value leads to
            raise BuildError(f"Megatron refuses {option}: {type(error).__name__}: {error}") from error


# -- the plan -------------------------------------------------------------------------------------------------------


def steps_of(schedule: Schedule, options: Mapping[str, Any], ask: Ask) -> Iterator[str]:
    """Yield the lines of the plan: ranks, groups, buckets and optimizer, what crosses stages, the options.

    Args:
        schedule: to build.
        options: as :func:`filled` made them.
        ask: for the stages of the schedule.
    """
    mesh = schedule.mesh
    yield f"the scheduled {type(schedule.model).__name__}, {len(schedule.records)} steps applied"
    yield from _of_groups(mesh)
    yield from _of_training(options, mesh)
    if mesh is not None and mesh.size("pp") > 1:
        yield from _of_pipeline(schedule, ask, mesh.size("pp"))
    yield "what Megatron is given:"
    draft = Options({option: options[option] for option in CLASSES}, origins=options["origins"])
    for option in CLASSES:
        for name, value in sorted(options[option].items()):
            key = f"{option}.{name}"
            why = f"  (filled in: {draft.origins[key]})" if key in draft.origins else ""
            note = "  (not verified: no CPU runs it)" if value and _UNVERIFIED.match(name) else ""
            yield f"  {key}: {value!r}{why}{note}"
    left = [key.partition(".")[2] for key, why in draft.origins.items() if why.startswith("left out")]
    if left:
        yield f"left out, for Megatron's own layers: {', '.join(sorted(left))}"


def _of_groups(mesh: Mesh | None) -> Iterator[str]:
    if mesh is None or mesh.world_size == 1:
        yield "Megatron's process groups: one rank in each, made here, or the script's own if it has made them before"
        return
    order = order_of(mesh)
    yield f"Megatron's process groups: of {mesh}, made here in order '{order}', or the script's own of the same ranks"
    yield f"ranks: {topology(mesh)}"
    if mesh.size("tp") > 1:
        yield "one random state for the ranks of mesh_dim 'tp': that of the first of them"


def _of_training(options: Mapping[str, Any], mesh: Mesh | None) -> Iterator[str]:
    optimizer, ddp, count = options[_OPTIMIZER], options[_DDP], options["microbatches"]
    replicas, pp = (mesh.size("dp"), mesh.size("pp")) if mesh is not None else (1, 1)
    how = f"through {pp} ranks along mesh_dim 'pp'" if pp > 1 else "one after the other"
    on = f" on each of {replicas} replicas" if replicas > 1 else ""
    yield f"a step: {count} micro-batches{on}, {how}" if count > 1 or pp > 1 else f"a step: one batch{on}"
    for name in _HALF:
        if optimizer.get(name):
            yield f"{name}: the model computes in it, the optimizer has main parameters in float32"
    has_factory = (options.get("arguments") or {}).get("has_optimizer")
    if not trains(options) and has_factory is False:
        yield "no optimizer: it only evaluates"
        return
    yield f"gradients: {_buckets(ddp, replicas)}"
    if optimizer.get("lr") is None or has_factory:
        without = "" if has_factory else "; without one the engine only evaluates"
        yield f"optimizer: that of the factory given to build{without}"
    else:
        style = options[_SCHEDULER]["lr_decay_style"]
        yield f"optimizer: Megatron's {optimizer.get('optimizer', 'adam')}, lr {optimizer['lr']:g}"
        yield f"scheduler: {style}, one step after each of the optimizer; no decay of biases and 1-D"
    if ddp.get("use_distributed_optimizer"):
        yield f"distributed optimizer: {replicas} replicas partition the state of the optimizer"
    largest = optimizer["clip_grad"]
    yield f"gradients are clipped to a norm of {largest:g} over all ranks" if largest else "gradients are not clipped"


def _buckets(ddp: Mapping[str, Any], replicas: int) -> str:
    kind = "float32" if ddp.get("grad_reduce_in_fp32") else "the type of the parameters"
    if not ddp.get("overlap_grad_reduce"):
        return f"accumulated and averaged in {kind}, in one bucket after the backward pass"
    size = ddp.get("bucket_size") or max(40_000_000, 1_000_000 * replicas)
    buckets = f"{ddp['num_buckets']} buckets" if ddp.get("num_buckets") else f"buckets of {size} parameters"
    return f"accumulated and averaged in {kind}, {buckets} while the backward pass goes on"


def _of_pipeline(schedule: Schedule, ask: Ask, pp: int) -> Iterator[str]:
    count = _count(ask)
    on_each = {None: "1F1B with one stage a rank, interleaved 1F1B with several", pp: "a stage on each: 1F1B"}
    several = f"{(count or 0) / pp:g} stages on each, alternating: interleaved 1F1B"
    yield f"a pipeline over {pp} ranks, {on_each.get(count, several)}"
    yield from boundaries(schedule, ask)
    yield "  packed into one tensor for each micro-batch: floats together, everything else bit by bit"
