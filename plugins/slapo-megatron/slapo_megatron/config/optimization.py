"""Complete the settings of the optimizer, the replicas, the precision and the scheduler."""

from __future__ import annotations

import math
from typing import Any

from slapo_core import BuildError
from slapo_megatron.config.draft import Draft

_OPTIMIZER, _DDP = "optimizer_config", "ddp_config"
_OF = {
    "adam": ("adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay"),
    "sgd": ("sgd_momentum",),
}
_OWN = ("optimizer", "weight_decay", "apply_wd_to_qk_layernorm", "min_lr", *_OF["adam"], *_OF["sgd"])
"""Settings of the optimizer that Megatron makes."""

_AT_LEAST_0 = ("lr", "min_lr", "weight_decay", "adam_eps", "sgd_momentum", "clip_grad", "min_loss_scale")
_BELOW_1 = ("adam_beta1", "adam_beta2")
_POSITIVE = ("loss_scale", "initial_loss_scale", "loss_scale_window", "hysteresis")


def fill_optimizer(draft: Draft) -> None:
    """Complete the options of Megatron's own optimizer, or those that a factory leaves open.

    Raises:
        BuildError: a value that cannot be meant, or one that would do nothing.
    """
    _check_ranges(draft)
    own = [name for name in _OWN if draft.given(_OPTIMIZER, name)]
    rate = draft.options[_OPTIMIZER].get("lr")
    if draft.facts.has_optimizer:
        for name in [*(["lr"] if rate is not None else []), *own]:
            raise BuildError(
                f"two optimizers: {draft.place(_OPTIMIZER, name)} is {draft.get(_OPTIMIZER, name)!r}, and "
                "build(optimizer=...) is a factory, which says it",
                hint=f"leave {name!r} out, or optimizer= of build",
            )
        return
    if rate is None:
        if own and draft.facts.has_optimizer is False:
            raise BuildError(
                f"{draft.place(_OPTIMIZER, own[0])} is {draft.get(_OPTIMIZER, own[0])!r}, but no rate is given: "
                "the engine only evaluates",
                hint=f'{_OPTIMIZER}={{"lr": 1e-4, ...}}, or optimizer= of build',
            )
        return
    kind = draft.get(_OPTIMIZER, "optimizer")
    if kind not in _OF:
        raise BuildError(
            f"{draft.place(_OPTIMIZER, 'optimizer')} must be 'adam' or 'sgd' (got {kind!r}): others need whole "
            "parameters, or keep state that cannot be read back into the reference layout",
            hint='optimizer=lambda params: ... of build, or "optimizer": "adam"',
        )
    for other, names in _OF.items():
        for name in names:
            if other != kind and draft.given(_OPTIMIZER, name):
                raise BuildError(
                    f"{draft.place(_OPTIMIZER, name)} is {draft.get(_OPTIMIZER, name)}, but the optimizer is {kind!r}",
                    hint=f'leave it out, or "optimizer": "{other}"',
                )
    if draft.get(_OPTIMIZER, "min_lr") is None:
        draft.fill(_OPTIMIZER, "min_lr", 0.0, "without it Megatron's scheduler ends at None")
    if draft.get(_OPTIMIZER, "min_lr") > rate:
        raise BuildError(
            f"{draft.place(_OPTIMIZER, 'min_lr')} is {draft.get(_OPTIMIZER, 'min_lr')}, above 'lr', {rate}",
            hint=f'"min_lr": {rate / 10:g}',
        )


def fill_clipping(draft: Draft) -> None:
    """``clip_grad`` is ``max_grad_norm``; else Megatron's default where an ``optimizer_config`` is given, else nothing.

    Raises:
        BuildError: both are given, and differ.
    """
    asked, given = draft.facts.max_grad_norm, draft.options[_OPTIMIZER].get("clip_grad")
    if given is None and asked is not None:
        draft.fill(_OPTIMIZER, "clip_grad", float(asked), f"max_grad_norm={asked}")
    elif given is None and draft.has_optimizer_config:
        why = 'OptimizerConfig\'s default; "clip_grad": 0.0 does not clip'
        draft.fill(_OPTIMIZER, "clip_grad", draft.get(_OPTIMIZER, "clip_grad"), why)
    elif given is None:
        draft.fill(_OPTIMIZER, "clip_grad", 0.0, "neither optimizer_config nor max_grad_norm: nothing is clipped")
    elif asked is not None and given is not None and float(given) != float(asked):
        raise BuildError(
            f"{draft.place(_OPTIMIZER, 'clip_grad')} is {given}, but build(max_grad_norm={asked})",
            hint="say it once: they are the same number",
        )


def fill_replicas(draft: Draft) -> None:
    """Complete the partitioning and communication of replicas: equal in both configurations.

    Raises:
        BuildError: they contradict each other, or a setting needs another one.
    """
    for name in ("use_distributed_optimizer", "overlap_param_gather"):
        said = {option: draft.options[option][name] for option in (_OPTIMIZER, _DDP) if draft.given(option, name)}
        if len(set(said.values())) > 1:
            raise BuildError(
                f"{draft.place(_OPTIMIZER, name)} is {said[_OPTIMIZER]}, but {draft.place(_DDP, name)} is {said[_DDP]}",
                hint="say it once: they are the same",
            )
        for missing in {_OPTIMIZER, _DDP} - set(said) if said else ():
            given = next(iter(said))
            draft.fill(missing, name, said[given], draft.place(given, name))
    for name, needed in (
        ("overlap_param_gather", "use_distributed_optimizer"),
        ("overlap_param_gather", "overlap_grad_reduce"),
        ("align_param_gather", "overlap_param_gather"),
        ("bucket_size", "overlap_grad_reduce"),
        ("num_buckets", "overlap_grad_reduce"),
    ):
        if draft.get(_DDP, name) and not draft.get(_DDP, needed):
            raise BuildError(
                f"{draft.place(_DDP, name)} is {draft.get(_DDP, name)}, which does nothing without {needed}",
                hint=f'{_DDP}={{"{name}": {draft.get(_DDP, name)}, "{needed}": True}}',
            )
    if draft.get(_DDP, "average_in_collective") and draft.facts.device == "cpu":
        raise BuildError(
            f"{draft.place(_DDP, 'average_in_collective')} is True, but gloo, which CPUs use, has no average",
            hint="leave it out",
        )
    for name in ("bucket_size", "num_buckets"):
        size = draft.get(_DDP, name)
        if size is not None and size < 1:
            raise BuildError(f"{draft.place(_DDP, name)} must be positive (got {size})", hint="leave it out")
    if not draft.may_train:
        for name in ("use_distributed_optimizer", "overlap_param_gather", "overlap_grad_reduce", "align_param_gather"):
            for option in (_OPTIMIZER, _DDP):
                if draft.options[option].get(name):
                    draft.fill(option, name, False, "instead of True: without an optimizer the engine only evaluates")


def _check_ranges(draft: Draft) -> None:
    for name in (*_AT_LEAST_0, *_BELOW_1, *_POSITIVE):
        value = draft.options[_OPTIMIZER].get(name)
        if value is None:
            continue
        low_is_right = value > 0 if name in _POSITIVE else value >= 0
        if not low_is_right or (name in _BELOW_1 and value >= 1) or math.isinf(value):
            wanted = "positive" if name in _POSITIVE else "from 0 to below 1" if name in _BELOW_1 else "0 or more"
            raise BuildError(f"{draft.place(_OPTIMIZER, name)} must be {wanted} (got {value})")


_OPTIMIZER, _MODEL = "optimizer_config", "model_parallel_config"
_HALF = {"bf16": "bfloat16", "fp16": "float16"}
_DYNAMIC = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def fill_precision(draft: Draft) -> None:
    """``bf16`` and ``fp16`` are given once for all configurations; default: the model's dtype.

    Raises:
        BuildError: they contradict each other, or the model; or fp16 has no scale.
    """
    for name in _HALF:
        _fill_half(draft, name)
    if all(draft.get(_OPTIMIZER, name) for name in _HALF):
        raise BuildError(
            "bf16 and fp16 are both True, of optimizer_config, model_parallel_config, or the types of the model's "
            f"parameters ({', '.join(sorted(draft.facts.dtypes))})",
            hint='optimizer_config={"bf16": True}',
        )
    other = draft.facts.dtypes - {"float32", "bfloat16", "float16"}
    if other and draft.may_train:
        raise BuildError(
            f"Megatron's optimizers train float32, bfloat16 and float16, and the model has parameters in "
            f"{', '.join(sorted(other))}",
            hint='model.float() before create_schedule, or target="torch"',
        )
    _fill_types(draft)
    _check_scale(draft)
    if draft.get(_OPTIMIZER, "bf16") and not draft.given("ddp_config", "grad_reduce_in_fp32"):
        draft.fill("ddp_config", "grad_reduce_in_fp32", True, "with bf16, as Megatron-LM has it")


def _fill_half(draft: Draft, name: str) -> None:
    said = {option: draft.options[option][name] for option in (_OPTIMIZER, _MODEL) if draft.given(option, name)}
    if len(set(said.values())) > 1:
        raise BuildError(
            f"{draft.place(_OPTIMIZER, name)} is {said[_OPTIMIZER]}, but {draft.place(_MODEL, name)} is {said[_MODEL]}",
            hint="say it once: they are the same",
        )
    dtype = _HALF[name]
    is_half = dtype in draft.facts.dtypes
    if not said:
        if is_half:
            draft.fill(_OPTIMIZER, name, True, f"the model is in {dtype}")
            draft.fill(_MODEL, name, True, f"the model is in {dtype}")
        return
    option, value = next(iter(said.items()))
    if is_half and not value:
        raise BuildError(
            f"{draft.place(option, name)} is False, but the model has parameters in {dtype}, which Megatron trains by "
            "main parameters in float32",
            hint=f'{_OPTIMIZER}={{"{name}": True}}, or model.float() before create_schedule',
        )
    for missing in {_OPTIMIZER, _MODEL} - set(said):
        draft.fill(missing, name, value, f"{draft.place(option, name)}")


def _fill_types(draft: Draft) -> None:
    import torch

    half = next((dtype for name, dtype in _HALF.items() if draft.get(_OPTIMIZER, name)), None)
    types = draft.facts.dtypes
    dtype = getattr(torch, half or (next(iter(types)) if len(types) == 1 else "float32"))
    why = f"with {next(name for name, one in _HALF.items() if one == half)}" if half else "that of the parameters"
    for option in (_OPTIMIZER, _MODEL):
        _agree(draft, option, "params_dtype", dtype, why)
    if draft.facts.sizes["pp"] > 1:
        _agree(draft, _MODEL, "pipeline_dtype", dtype, "as params_dtype")


def _agree(draft: Draft, option: str, name: str, value: Any, why: str) -> None:
    if not draft.given(option, name):
        draft.fill(option, name, value, why)
    elif draft.options[option][name] != value:
        raise BuildError(
            f"{draft.place(option, name)} is {draft.options[option][name]}, but the parameters are in {value} ({why})",
            hint="leave it out",
        )


def _check_scale(draft: Draft) -> None:
    dynamic = [name for name in _DYNAMIC if draft.given(_OPTIMIZER, name)]
    fixed = draft.options[_OPTIMIZER].get("loss_scale")
    if not draft.get(_OPTIMIZER, "fp16"):
        for name in [*(["loss_scale"] if fixed is not None else []), *dynamic]:
            raise BuildError(
                f"{draft.place(_OPTIMIZER, name)} is {draft.get(_OPTIMIZER, name)}, but only fp16 scales the loss",
                hint=f'leave it out, or {_OPTIMIZER}={{"fp16": True}}',
            )
        return
    if fixed is not None and dynamic:
        raise BuildError(
            f"{draft.place(_OPTIMIZER, 'loss_scale')} is {fixed}, a fixed scale, but {dynamic[0]!r} is given",
            hint="leave one of them out",
        )
    if fixed is None and "initial_loss_scale" not in dynamic and draft.may_train:
        raise BuildError(
            "fp16 needs its scale of the loss: Megatron would begin at 2**32, and leave out step after step until it "
            "is small enough",
            hint=f'{_OPTIMIZER}={{"fp16": True, "initial_loss_scale": 2.0**16, "min_loss_scale": 1.0, '
            '"loss_scale_window": 1000, "hysteresis": 2}, or "loss_scale": 1024.0 for a fixed one',
        )


_SCHEDULER, _OPTIMIZER = "scheduler", "optimizer_config"
_STYLES = {
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "wd_incr_style": ("constant", "linear", "cosine"),
    "lr_wsd_decay_style": ("linear", "cosine", "exponential", "minus_sqrt"),
}
_EXAMPLE = 'scheduler={"lr_decay_style": "cosine", "lr_warmup_steps": 100, "lr_decay_steps": 10_000}'


def fill_scheduler(draft: Draft) -> None:
    """All arguments; none where Megatron makes no optimizer. Weight decay by groups acts through it alone.

    Raises:
        BuildError: there is nothing to schedule, an argument is missing, does nothing, or contradicts
            ``optimizer_config``.
    """
    given = draft.options[_SCHEDULER]
    rate = draft.options[_OPTIMIZER].get("lr")
    if rate is None:
        if given and (draft.facts.has_optimizer is not None):
            what = "a factory makes the optimizer" if draft.facts.has_optimizer else "the engine only evaluates"
            raise BuildError(
                f"{draft.place(_SCHEDULER, next(iter(given)))} is {next(iter(given.values()))!r}, but {what}: "
                "Megatron's scheduler sets rates and decays by optimizer_config",
                hint=f'{_OPTIMIZER}={{"lr": 1e-4}} without optimizer= of build, or a scheduler of torch\'s on '
                "engine.optimizer",
            )
        return
    for name, styles in _STYLES.items():
        if given.get(name) is not None and given[name] not in styles:
            raise BuildError(
                f"{draft.place(_SCHEDULER, name)} must be one of {', '.join(map(repr, styles))} (got {given[name]!r})"
            )
    _fill_rate(draft, given, rate)
    _fill_decay(draft, given)
    _try(draft)


def _fill_rate(draft: Draft, given: dict[str, Any], rate: float) -> None:
    _agree_with_optimizer(draft, "max_lr", rate, "lr")
    _agree_with_optimizer(draft, "min_lr", draft.get(_OPTIMIZER, "min_lr"), "min_lr")
    warmup = given.get("lr_warmup_steps", 0)
    _fill(draft, "lr_warmup_steps", 0, "no warm-up")
    if given.get("init_lr") and not warmup:
        raise BuildError(
            f"{draft.place(_SCHEDULER, 'init_lr')} is {given['init_lr']}, which does nothing without lr_warmup_steps",
            hint=_EXAMPLE,
        )
    _fill(draft, "init_lr", 0.0, "Megatron-LM's default")
    _fill(draft, "lr_decay_style", "constant", "nothing is said")
    style = given["lr_decay_style"]
    if style == "constant":
        if "min_lr" in draft.options[_OPTIMIZER] and f"{_OPTIMIZER}.min_lr" not in draft.origins and given["min_lr"]:
            raise BuildError(
                f"{draft.place(_OPTIMIZER, 'min_lr')} is {given['min_lr']}, which does nothing with a rate that stays "
                "the same",
                hint=_EXAMPLE,
            )
        _fill(draft, "lr_decay_steps", warmup + 1, "the rate stays the same")
    elif "lr_decay_steps" not in given:
        raise BuildError(
            f"{draft.place(_SCHEDULER, 'lr_decay_style')} is {style!r}, without lr_decay_steps", hint=_EXAMPLE
        )
    if warmup < 0 or given["lr_decay_steps"] <= warmup:
        raise BuildError(
            f"{draft.place(_SCHEDULER, 'lr_decay_steps')} is {given['lr_decay_steps']}, and must be more than "
            f"lr_warmup_steps, {warmup}, which must be 0 or more",
            hint=_EXAMPLE,
        )
    for name in ("wsd_decay_steps", "lr_wsd_decay_style"):
        if style == "WSD" and given.get(name) is None:
            raise BuildError(
                f"{draft.place(_SCHEDULER, 'lr_decay_style')} is 'WSD', without {name}",
                hint='scheduler={"lr_decay_style": "WSD", "lr_decay_steps": 10_000, "wsd_decay_steps": 1_000, '
                '"lr_wsd_decay_style": "linear"}',
            )
        if name == "wsd_decay_steps" and style == "WSD" and not 0 < given[name] <= given["lr_decay_steps"]:
            raise BuildError(
                f"{draft.place(_SCHEDULER, name)} is {given[name]}, and must be positive, and not more than "
                f"lr_decay_steps, {given['lr_decay_steps']}, at whose end they are"
            )
        if style != "WSD" and given.get(name) is not None:
            raise BuildError(f"{draft.place(_SCHEDULER, name)} is {given[name]!r}, but lr_decay_style is {style!r}")


def _fill_decay(draft: Draft, given: dict[str, Any]) -> None:
    decay = draft.get(_OPTIMIZER, "weight_decay")
    _fill(draft, "wd_incr_style", "constant", "nothing is said")
    if given["wd_incr_style"] == "constant":
        _agree_with_optimizer(draft, "start_wd", decay, "weight_decay")
        _agree_with_optimizer(draft, "end_wd", decay, "weight_decay")
        _fill(draft, "wd_incr_steps", 1, "the decay stays the same")
        return
    for name in ("start_wd", "end_wd", "wd_incr_steps"):
        if name not in given:
            raise BuildError(
                f"{draft.place(_SCHEDULER, 'wd_incr_style')} is {given['wd_incr_style']!r}, without {name}",
                hint='scheduler={"wd_incr_style": "linear", "wd_incr_steps": 10_000, "start_wd": 0.01, "end_wd": 0.1}',
            )
    if draft.given(_OPTIMIZER, "weight_decay") and decay not in (given["start_wd"], given["end_wd"]):
        raise BuildError(
            f"{draft.place(_OPTIMIZER, 'weight_decay')} is {decay}, but the scheduler goes from {given['start_wd']} to "
            f"{given['end_wd']}",
            hint="leave weight_decay out",
        )


def _agree_with_optimizer(draft: Draft, name: str, value: float, of: str) -> None:
    given = draft.options[_SCHEDULER].get(name)
    if given is None:
        draft.fill(_SCHEDULER, name, float(value), f"'{of}' of {_OPTIMIZER}")
    elif float(given) != float(value):
        said = "" if draft.given(_OPTIMIZER, of) else ", Megatron's default"
        raise BuildError(
            f"{draft.place(_SCHEDULER, name)} is {given}, but {draft.place(_OPTIMIZER, of)} is {value}{said}",
            hint=f'say it once: {_OPTIMIZER}={{"{of}": {given}}}',
        )


def _fill(draft: Draft, name: str, value: Any, why: str) -> None:
    if name not in draft.options[_SCHEDULER]:
        draft.fill(_SCHEDULER, name, value, why)


def _try(draft: Draft) -> None:
    """Megatron's own verdict, at every step where its rule changes."""
    from types import SimpleNamespace

    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    given = draft.options[_SCHEDULER]
    try:
        made = OptimizerParamScheduler(SimpleNamespace(param_groups=[]), **given)
        for steps in (0, 1, given["lr_warmup_steps"], given["lr_warmup_steps"] + 1, given["lr_decay_steps"]):
            for step in (steps, steps + 1):
                made.num_steps = step
                found = made.get_lr({}), made.get_wd({})
                if not all(isinstance(value, (int, float)) for value in found):
                    raise TypeError(f"the rate and the decay after {step} steps are {found}")
    except Exception as error:  # its checks raise assertions, and whatever a wrong value leads to
        raise BuildError(f"Megatron refuses scheduler: {type(error).__name__}: {error}") from error
