"""DeepSpeed's configuration: completed by the schedule and ``build``, checked, and shown in the plan.

About fifteen keys are owned by the schedule and ``build``; a table has those known to train wrongly. Everything else
goes to the installed DeepSpeed as given, which says itself what it refuses.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import slapo_core
from slapo_core import BuildError
from slapo_deepspeed.reading import let_deepspeed_read
from slapo_runtime.options import Options
from slapo_runtime.planning import ScheduleFacts, boundaries, checked_axes, topology

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.primitive import Record

OPTIONS = ("config", "batch_axes")
"""What users give."""
NOTES = ("arguments", "origins")
"""The other entries of a plan: the arguments of ``build``, and the origins of values."""

AUTO = "auto"
TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
STAGE, CLIPPING = "zero_optimization.stage", "gradient_clipping"
_EXAMPLE = 'config={"zero_optimization": {"stage": 1}}, or config="ds_config.json"'
_PIPELINE = {
    "use_reentrant": "so that integers and booleans may cross stages",
    "pipe_partitioned": "tensors cross stages whole",
    "grad_partitioned": "gradients cross stages whole",
}
_PIPELINE_KEYS = {*_PIPELINE, "stages", "partition", "seed_layers", "activation_checkpoint_interval"}
_TRAINER = "the default of transformers' TrainingArguments"
_TRAINER_PARAMS: dict[str, Any] = {
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
}
RATES = "scheduler.params.warmup_max_lr"
"""``"auto"`` here stays in the plan where a factory makes the optimizer: it becomes that optimizer's learning rates."""

_OWN = frozenset({"adagrad", "adam", "adamw", "lamb", "lion", "muon", "muadam", "muadamw", "musgd"})
"""Optimizers that DeepSpeed makes itself, whatever the case of their letters; others are torch.optim's."""
_ELEMENTWISE = frozenset(
    {"adagrad", "adam", "adamw", "lion", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
_TESTED_WITH_ZERO = frozenset({"adagrad", "adam", "adamw", "lion"})


def filled(schedule: Schedule, options: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the options of the dialect; given its own result, it returns the same; pure.

    Args:
        schedule: to build.
        options: as the user gave them to ``build``, with the arguments of ``build``; or as an earlier call made them.

    Returns:
        ``config``: DeepSpeed's configuration, whole; ``batch_axes``; ``arguments``: those of ``build``;
        ``origins``: key of a value that was filled in -> why.

    Raises:
        BuildError: an unknown option or key, a bad value, or one that contradicts the schedule.
    """
    for name in sorted(set(options) - {*OPTIONS, *NOTES}):
        raise BuildError(
            f"target 'deepspeed' has no option {name!r}; it has {', '.join(OPTIONS)}",
            hint=f'what DeepSpeed itself takes goes into config={{"{name}": ...}}',
        )
    axes = checked_axes(options.get("batch_axes"))
    values, source = _read(options.get("config"))
    config = Options(values, source, options.get("origins"))
    _check_kinds(config)
    facts = ScheduleFacts.of(schedule, {**options, "batch_axes": axes})
    _fill_auto(config, facts)
    _fill_sizes(config, facts)
    _fill_clipping(config, facts)
    _fill_zero(config, facts)
    _fill_pipeline(config, facts)
    _fill_optimizer(config, facts)
    for danger in DANGERS:
        if danger.is_wrong(config, facts, schedule):
            config.refuse(danger.key, f"is {config.get(danger.key)!r}: {danger.why}", danger.hint)
    for key, value in (
        ("sequence_parallel_size", 1),
        ("data_parallel_size", facts.dp),
        ("tensor_parallel.autotp_size", facts.tp),
    ):
        if config.get(key, 0) not in (0, value):
            problem = f"is {config.get(key)!r}, but {value} by the mesh {facts.mesh}"
            config.refuse(key, f"{problem}; DeepSpeed splits nothing itself here")
    for key in ("sequence_parallel_size", "data_parallel_size"):
        config.leave_out(key, f"the mesh {facts.mesh} says it")
    let_deepspeed_read(config, facts.device, without=TOTAL)
    config.leave_out("tensor_parallel", "the steps of the schedule split the model")
    config.check("DeepSpeed")
    made = {"config": config.values, "batch_axes": axes, "origins": config.origins}
    return made | ({"arguments": dict(options["arguments"])} if options.get("arguments") else {})


def _read(config: Any) -> tuple[Mapping[str, Any], str]:
    """The configuration, and its name for messages.

    Raises:
        BuildError: it is neither a dictionary nor the path of a JSON file with one.
    """
    source = "config"
    if isinstance(config, (str, os.PathLike)):
        source = os.fspath(config)
        config = _loaded(source)
    if not isinstance(config or {}, Mapping):
        raise BuildError(
            f"{source} must be a dictionary, or the path of a DeepSpeed JSON file with one (got {config!r})",
            hint=_EXAMPLE,
        )
    return config or {}, source


def _loaded(file: str) -> Any:
    try:
        with open(file, encoding="utf-8") as stream:
            return json.load(stream)
    except OSError as error:
        why = error.strerror or str(error)
        raise BuildError(f"cannot read the DeepSpeed configuration {file!r}: {why}", hint=_EXAMPLE) from error
    except ValueError as error:
        raise BuildError(f"the DeepSpeed configuration {file!r} is not JSON: {error}") from error


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("zero_optimization", "optimizer", "optimizer.params", "scheduler", "scheduler.params", "pipeline"),
        (lambda value: isinstance(value, Mapping), "must be an object, {...}"),
    ),
    **dict.fromkeys(("optimizer.type", "scheduler.type"), (lambda value: isinstance(value, str), "must be a name")),
    **dict.fromkeys(
        (TOTAL, MICRO, STEPS), (lambda value: type(value) is int and value > 0, "must be a positive integer")
    ),
    CLIPPING: (lambda value: type(value) in (int, float) and value >= 0, "must be a number, where 0 does not clip"),
    STAGE: (lambda value: type(value) is int and 0 <= value < 4, "must be 0, 1, 2 or 3"),
}
"""What is computed with here; the kinds of all other values are left to DeepSpeed."""


def _check_kinds(config: Options) -> None:
    """
    Raises:
        BuildError: a value is of another kind than what is computed with it.
    """
    for key, (is_right, kind) in _KINDS.items():
        value, section = config.get(key), key.removesuffix(".type")
        is_missing = value is None and section != key and isinstance(config.get(section), Mapping)
        if is_missing or not (value in (None, AUTO) or is_right(value)):
            config.refuse(key, f"{kind} (got {value!r})")
    config.check("DeepSpeed")


# -- what the schedule and ``build`` decide ------------------------------------------------------------------------


def _fill_auto(config: Options, facts: ScheduleFacts) -> None:
    """Resolve ``"auto"``, as configurations for transformers' Trainer have it, and yield to a factory."""
    for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16")):
        if config.get(f"{name}.enabled") == AUTO:
            found = ", ".join(sorted(facts.dtypes)) or "no parameters"
            config.fill(f"{name}.enabled", facts.dtypes == {dtype}, f"the model is in {found}")
    for key in (TOTAL, MICRO, STEPS):
        if config.get(key) == AUTO:
            config.leave_out(key, "'auto'")  # it is filled in below
    for name, value in dict(config.get("zero_optimization", {})).items():
        if value == AUTO:
            config.leave_out(f"zero_optimization.{name}", "'auto' is DeepSpeed's default here")
    for section, is_given in (("optimizer", facts.has_optimizer), ("scheduler", facts.has_lr_scheduler)):
        if not is_given or config.get(section) is None:
            continue
        argument = "build(optimizer=...)" if section == "optimizer" else "build(lr_scheduler=...)"
        if all(value == AUTO for value in config.get(f"{section}.params", {}).values()):
            config.leave_out(section, f"{argument} makes it, and all params here are 'auto'")
        else:
            made = config.get(f"{section}.type")
            config.refuse(section, f"is {made!r}, and {argument} makes another one", "give one of the two")
    if facts.has_optimizer is False and config.get("optimizer") is None and config.get("scheduler") is not None:
        config.leave_out("scheduler", "without an optimizer the engine only evaluates")
    for section in ("optimizer", "scheduler"):
        for name, value in dict(config.get(f"{section}.params", {})).items():
            if value == AUTO:
                _fill_param(config, f"{section}.params.{name}")


def _fill_param(config: Options, key: str) -> None:
    if key in _TRAINER_PARAMS:
        config.fill(key, copy.copy(_TRAINER_PARAMS[key]), f"{_TRAINER}, for 'auto'")
    elif key == "scheduler.params.warmup_num_steps":
        config.fill(key, 1, f"{_TRAINER} is 0, and DeepSpeed takes 1 at least")
    elif key == RATES and config.get("optimizer") is None:
        config.origins[key] = "the learning rates of the optimizer that build(optimizer=...) makes"
    elif key == RATES and config.get("optimizer.params.lr") is not None:
        config.fill(key, config.get("optimizer.params.lr"), "as 'optimizer.params.lr'")
    else:
        config.refuse(key, "is 'auto', and has no default", "give a value, or leave the key out")


def _fill_sizes(config: Options, facts: ScheduleFacts) -> None:
    """Fill in those of batch size, micro-batch size and accumulation that are missing."""
    total, micro = config.get(TOTAL), config.get(MICRO)
    if total is not None and micro is not None and config.get(STEPS) is None and facts.accumulate is None:
        how = f"{TOTAL} {total} / ({MICRO} {micro} x {facts.dp} replicas)"
        config.fill(STEPS, _divided(config, total, micro * facts.dp, how), how)
    steps = facts.micro_batches(config, STEPS)
    if micro is None and total is not None:
        how = f"{TOTAL} {total} / ({STEPS} {steps} x {facts.dp} replicas)"
        micro = config.fill(MICRO, _divided(config, total, steps * facts.dp, how), how)
    elif micro is None and facts.samples is not None and facts.samples % steps == 0:
        how = f"{facts.samples} samples in the example inputs / {steps}"
        micro = config.fill(MICRO, facts.samples // steps, how)
    elif micro is None:
        micro = config.fill(MICRO, 1, "DeepSpeed only counts samples with it")
    whole = micro * steps * facts.dp
    if total is None:
        config.fill(TOTAL, whole, f"{micro} x {steps} x {facts.dp} replicas")
    elif total != whole:
        config.refuse(
            TOTAL,
            f"is {total}, but {MICRO} {micro} x {STEPS} {steps} x {facts.dp} replicas (dp of the mesh {facts.mesh}) "
            f"is {whole}",
            f'"{TOTAL}": {whole}, or leave one of the three out',
        )


def _divided(config: Options, number: int, divisor: int, how: str) -> int:
    if number % divisor:
        multiple = max(1, round(number / divisor)) * divisor
        config.refuse(TOTAL, f"is not divisible: {how} is {number / divisor:g}", f"a multiple of {divisor}: {multiple}")
        config.check("DeepSpeed")
    return number // divisor


def _fill_clipping(config: Options, facts: ScheduleFacts) -> None:
    if config.get(CLIPPING) == AUTO:
        config.leave_out(CLIPPING, "'auto'")
        if facts.max_grad_norm is None:
            config.fill(CLIPPING, 1.0, f"{_TRAINER}, for 'auto'")
    if facts.max_grad_norm is not None:
        config.own(CLIPPING, float(facts.max_grad_norm), f"build(max_grad_norm={facts.max_grad_norm})", "say it once")
    config.default(CLIPPING, 0.0, "no max_grad_norm: nothing is clipped (DeepSpeed's default is 1.0)")


def _fill_zero(config: Options, facts: ScheduleFacts) -> None:
    if facts.pp > 1:
        config.default(STAGE, 1, "with a pipeline; ZeRO-1 is the most that one runs with")
    elif _low(config):
        config.default(STAGE, 1, f"with {_low(config)}; without ZeRO, DeepSpeed trains it wrongly")
    stage = config.default(STAGE, 0, "DeepSpeed's default")
    if not _trains(config, facts) and stage in (1, 2):
        why = f"instead of {stage}: without an optimizer the engine only evaluates, and nothing is partitioned"
        config.fill(STAGE, 0, why)


def _fill_pipeline(config: Options, facts: ScheduleFacts) -> None:
    if facts.pp == 1:
        config.leave_out("pipeline", f"the mesh {facts.mesh} has one rank along 'pp'")
        return
    config.refuse_unknown("pipeline", config.get("pipeline", {}), _PIPELINE_KEYS, "DeepSpeed")
    for name, why in _PIPELINE.items():
        if config.default(f"pipeline.{name}", False, why):
            config.refuse(f"pipeline.{name}", f"must be false: {why}")
    for name, values in (("stages", (facts.pp, AUTO)), ("partition", ("best", AUTO)), ("seed_layers", (False,))):
        value = config.get(f"pipeline.{name}", values[0])
        if value not in values:
            config.refuse(f"pipeline.{name}", f"is {value!r}, but the schedule decides the stages: {facts.mesh}")


def _fill_optimizer(config: Options, facts: ScheduleFacts) -> None:
    name, params = optimizer_name(config), config.get("optimizer.params", {})
    offloads = config.get("zero_optimization.offload_optimizer.device", "none") != "none"
    if name in ("adam", "adamw") and facts.device == "cpu" and not offloads and "torch_adam" not in params:
        config.fill("optimizer.params.torch_adam", True, "DeepSpeed's own Adam would be compiled on a CPU")
        why = "the default of DeepSpeed's own Adam; torch's is 0.01"
        config.default("optimizer.params.weight_decay", 0.0, why)
    if config.get(STAGE) and name not in _TESTED_WITH_ZERO:
        which = "all but Adam, AdamW and Adagrad of torch" if name is None else repr(name)
        config.default("zero_allow_untested_optimizer", True, f"DeepSpeed asks for it with ZeRO and {which}")
    if offloads and name is None:
        why = "a factory makes the optimizer whose state is offloaded"
        config.default("zero_force_ds_cpu_optimizer", False, why)


def optimizer_name(config: Options) -> str | None:
    """The optimizer's name as DeepSpeed takes it, e.g. ``"adamw"`` or ``"SGD"``; None without a section."""
    name = config.get("optimizer.type")
    return name.lower() if isinstance(name, str) and name.lower() in _OWN else name


def _trains(config: Options, facts: ScheduleFacts) -> bool:
    return facts.has_optimizer is not False or config.get("optimizer") is not None


def _low(config: Options) -> str:
    """The section of the lower precision that is on; ``""`` in float32."""
    return next((name for name in ("fp16", "bf16", "bfloat16") if config.get(f"{name}.enabled")), "")


# -- what is known to train wrongly --------------------------------------------------------------------------------


class Danger(NamedTuple):
    """A value with which DeepSpeed trains wrongly here, or silently does nothing.

    Args:
        key: of the value.
        is_wrong: of the configuration, the facts and the schedule.
        why: the reason, after ``"'key' of config is value: "``.
        hint: what to do.
    """

    key: str
    is_wrong: Callable[[Options, ScheduleFacts, Schedule], object]
    why: str
    hint: str = "leave it out"


def _is_sharded(config: Options, facts: ScheduleFacts) -> bool:
    """Whether ranks step shards of a parameter: by a step, by ZeRO, or in DeepSpeed's pipelines in bf16."""
    return bool(facts.split) or config.get(STAGE) > 0 or (facts.pp > 1 and bool(_low(config)))


def _is_captured(record: Record) -> bool:
    """Whether a step replays kernels of a GPU at fixed addresses."""
    name, arguments = record.primitive.name, vars(record.primitive)
    graphs = dict(arguments.get("options") or ()).get("triton.cudagraphs")
    by_mode = name == "fusion.compile" and (graphs or arguments.get("mode") in ("reduce-overhead", "max-autotune"))
    return name == "fusion.cudagraphify" or bool(by_mode)


def _if(key: str, value: Any, why: str) -> Danger:
    return Danger(key, lambda config, *_: config.get(key) == value, why)


_ZERO_1 = '"zero_optimization": {"stage": 1}'
_REWRITES = "DeepSpeed would rewrite modules that the schedule has changed"
DANGERS = (
    Danger(
        STAGE,
        lambda config, facts, _: facts.pp > 1 and config.get(STAGE) > 1,
        "a pipeline accumulates gradients in place, and ZeRO-2 and ZeRO-3 partition them away",
        _ZERO_1,
    ),
    Danger(
        STAGE,
        lambda config, facts, _: config.get(STAGE) == 0 and _low(config) == "fp16" and _trains(config, facts),
        "with fp16, DeepSpeed without ZeRO divides gradients by the scale of a loss that was not scaled",
        _ZERO_1,
    ),
    Danger(
        STAGE,
        lambda config, facts, _: (
            config.get(STAGE) == 0 and _low(config) not in ("", "fp16") and facts.pp == 1 and _trains(config, facts)
        ),
        "with bf16, DeepSpeed without ZeRO steps the optimizer once when it is made, which decays the weights",
        _ZERO_1,
    ),
    Danger(
        STAGE,
        lambda config, _, schedule: config.get(STAGE) == 3 and any(map(_is_captured, schedule.records)),
        "ZeRO-3 moves parameters in memory in each call, and a step of the schedule replays kernels on fixed addresses",
        '"zero_optimization": {"stage": 2}, or undo cudagraphify() or compile(mode="reduce-overhead")',
    ),
    _if("gradient_allreduce_op", "sum", "replicas train as one process does: gradients are averaged"),
    _if("managed_gradient_accumulation", False, "train_step counts on DeepSpeed for the boundaries of accumulation"),
    _if("data_efficiency.enabled", True, "DeepSpeed samples batches by its own loader, and train_step takes yours"),
    _if("compile.deepcompile", True, _REWRITES),
    _if("expert_parallel.enabled", True, _REWRITES),
    _if("hybrid_engine.enabled", True, _REWRITES),
    Danger(
        "torch_autocast.enabled",
        lambda config, facts, _: facts.pp > 1 and config.get("torch_autocast.enabled"),
        "in a pipeline, the dtypes of P2P messages would differ between ranks",
        '"bf16": {"enabled": true}',
    ),
    Danger(
        "optimizer.type",
        lambda config, *_: (optimizer_name(config) or "").lower() == "lbfgs",
        "its step() requires a closure, which DeepSpeed does not give it",
        '"type": "AdamW"',
    ),
    Danger(
        "optimizer.type",
        lambda config, facts, _: optimizer_name(config) == "muon" and facts.split,
        "it is not element-wise, and a step splits parameters over mesh_dim 'tp'",
        '"type": "AdamW"',
    ),
    Danger(
        "optimizer.type",
        lambda config, facts, _: (
            optimizer_name(config) not in {None, "muon", *_ELEMENTWISE} and _is_sharded(config, facts)
        ),
        "it is not known to be element-wise, and ranks step shards of parameters, by ZeRO or by steps of the schedule",
        '"type": "AdamW"',
    ),
)


class Unverified(NamedTuple):
    """A setting that no test of this plugin has trained with: it wants a GPU, files, or several machines.

    Args:
        key: of the value.
        is_set: of the value.
        unsaved: the state that ``engine.save`` cannot express by the reference model's names; ``""``: it can.
    """

    key: str
    is_set: Callable[[Any], bool]
    unsaved: str


MUON = "the groups that DeepSpeed makes for Muon"
_NVME, _PARTITIONS = "state in files (offloading to nvme)", "the partitions of ZeRO++"
UNVERIFIED = (
    Unverified("zero_optimization.offload_optimizer.device", lambda value: value == "nvme", _NVME),
    Unverified("zero_optimization.offload_param.device", lambda value: value == "nvme", _NVME),
    Unverified("zero_optimization.offload_optimizer.super_offload", bool, "the state of SuperOffload"),
    Unverified("zero_optimization.zenflow", lambda _: True, "the state of ZenFlow"),
    Unverified("zero_optimization.zero_hpz_partition_size", lambda value: value != 1, _PARTITIONS),
    Unverified("zero_optimization.zero_quantized_weights", bool, _PARTITIONS),
    Unverified("zero_optimization.zero_quantized_nontrainable_weights", bool, _PARTITIONS),
    Unverified("zero_optimization.zero_quantized_gradients", bool, ""),
    Unverified("optimizer.type", lambda value: value.lower() == "muon", MUON),
)


def unverified(config: Options) -> Iterator[Unverified]:
    """The settings of a configuration that no test has trained with."""
    return (one for one in UNVERIFIED if config.get(one.key) is not None and one.is_set(config.get(one.key)))


# -- the lines of the plan -----------------------------------------------------------------------------------------

_ZERO = {
    0: "without ZeRO: every replica holds parameters, gradients and optimizer state whole",
    1: "ZeRO-1: replicas partition the optimizer state",
    2: "ZeRO-2: replicas partition optimizer state and gradients",
    3: "ZeRO-3: replicas partition optimizer state, gradients and parameters",
}


def steps_of(schedule: Schedule, options: Mapping[str, Any]) -> Iterator[str]:
    """List the lines of the plan: features, the topology, the filled-in configuration.

    Args:
        schedule: to build.
        options: as :func:`filled` made them.
    """
    config, facts = Options(options["config"], "config", options["origins"]), ScheduleFacts.of(schedule, options)
    origins, mesh = options["origins"], schedule.mesh
    yield f"the scheduled {type(schedule.model).__name__}, {len(schedule.records)} steps applied"
    over = f" over mesh_dim 'dp' ({facts.dp} ranks)" if facts.dp > 1 else ", one replica"
    yield f"{_ZERO[config.get(STAGE)]}{over}"
    if facts.tp > 1:
        yield f"collectives over mesh_dim 'tp' ({facts.tp} ranks), as the steps say; DeepSpeed is told the groups"
    yield from _of_training(config, facts)
    if facts.pp > 1:
        yield from boundaries(schedule, lambda: slapo_core.stages(schedule, full_output=facts.has_loss))
    if mesh is not None and mesh.world_size > 1:
        yield f"ranks: {topology(mesh)}"
    for one in unverified(config):
        shown = json.dumps(config.get(one.key), default=str)
        yield f"not verified: '{one.key}' {shown} is passed on; no test has compared it with the reference model"
    yield "the configuration that DeepSpeed is given:"
    for key, value in config.leaves():
        why = f"  (filled in: {origins[key]})" if key in origins else ""
        yield f"  {key}: {json.dumps(value, default=str)}{why}"
    for key, why in sorted(origins.items()):
        if why.startswith("left out"):
            yield f"  {key} is {why}"


def _of_training(config: Options, facts: ScheduleFacts) -> Iterator[str]:
    micro, steps, largest = config.get(MICRO), config.get(STEPS), config.get(CLIPPING)
    how = f"through {facts.pp} ranks along mesh_dim 'pp', 1F1B" if facts.pp > 1 else "one after the other"
    replicas = f" on each of {facts.dp} replicas" if facts.dp > 1 else ""
    if steps > 1 or facts.pp > 1:
        yield f"a step: {steps} micro-batches{replicas}, {how}; by the configuration of {micro} samples each"
    else:
        yield f"a step: one batch{replicas}; by the configuration of {micro} samples"
    if config.get("optimizer") is not None:
        yield f"optimizer: {config.get('optimizer.type')}, of the configuration"
    elif facts.has_optimizer is False:
        yield "no optimizer: it only evaluates"
    else:
        yield f"optimizer: that of the factory given to build{'' if facts.has_optimizer else ', if any'}"
    yield f"gradients are clipped to a norm of {largest:g} over all ranks" if largest else "gradients are not clipped"
