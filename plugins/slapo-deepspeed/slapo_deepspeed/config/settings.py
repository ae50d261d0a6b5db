"""Complete the settings of the batch size, the optimizer, low precision and the scheduler."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from slapo_core import BuildError
from slapo_deepspeed.config.draft import AUTO, Draft


def leave_out_auto(draft: Draft) -> None:
    """Take out the values "auto" below ``zero_optimization``: sizes, which DeepSpeed has defaults for."""
    section = draft.config.get("zero_optimization", {})
    for key in [key for key, value in section.items() if value == AUTO]:
        draft.leave_out(f"zero_optimization.{key}", "'auto' is DeepSpeed's default here")


def fill_precision(draft: Draft) -> None:
    """``"enabled": "auto"`` becomes whether the parameters of the model are of that type.

    Raises:
        BuildError: bf16 and fp16 are enabled at once.
    """
    if "bf16" in draft.config and "bfloat16" in draft.config:
        raise BuildError(
            f"{draft.source.of('bf16')} and its old name {draft.source.of('bfloat16')} are both given; DeepSpeed reads "
            "the first alone",
            hint="leave out 'bfloat16'",
        )
    for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16")):
        section = draft.config.get(name)
        if isinstance(section, dict) and section.get("enabled") == AUTO:
            found = ", ".join(sorted(draft.facts.dtypes)) or "no parameters"
            draft.fill(f"{name}.enabled", draft.facts.dtypes == {dtype}, f"the model is in {found}")
            for key in [key for key, value in section.items() if value == AUTO]:
                draft.leave_out(f"{name}.{key}", "'auto' is DeepSpeed's default here")


def fill_scheduler(draft: Draft) -> None:
    """A scheduler without params gets none; one that cannot be made is refused.

    Raises:
        BuildError: the scheduler is unknown, or has no optimizer to schedule.
    """
    if "scheduler" not in draft.config:
        return
    source, name = draft.source, draft.get("scheduler.type")
    if "optimizer" not in draft.config and draft.facts.has_optimizer is False:
        raise BuildError(
            f"{source.of('scheduler')} is {name!r}, but the engine has no optimizer and only evaluates",
            hint='"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, or optimizer= of build',
        )
    if not isinstance(name, str):
        raise BuildError(
            f"{source.of('scheduler.type')} must name a scheduler (got {name!r})",
            hint='"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}',
        )
    params: Any = draft.get("scheduler.params")
    if params is None:
        params = draft.fill("scheduler.params", {}, "all defaults")
    if not isinstance(params, dict):
        raise BuildError(f"{source.of('scheduler.params')} must be an object, {{...}} (got {params!r})")


def nearest(name: str, known: list[str]) -> str:
    """`` did you mean ...?``, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def fill_batch(draft: Draft) -> None:
    """Fill in the missing ones of the three.

    Raises:
        BuildError: a number that cannot be meant, or they contradict each other, ``accumulate``, or the replicas.
    """
    facts = draft.facts
    total, micro, steps = (_given(draft, key) for key in (_TOTAL, _MICRO, _STEPS))
    if facts.accumulate is not None and steps is not None and steps != facts.accumulate:
        raise BuildError(
            f"{draft.source.of(_STEPS)} is {steps}, but build(accumulate={facts.accumulate})",
            hint="say it once: they are the same number",
        )
    if steps is None:
        steps = _steps(draft, total, micro)
    if micro is None:
        micro = _micro(draft, total, steps)
    whole = micro * steps * facts.dp
    if total is not None and total != whole:
        raise BuildError(
            f"{draft.source.of(_TOTAL)} is {total}, but {_MICRO} {micro} x {_STEPS} {steps} x {facts.dp} replicas "
            f"(dp of the mesh {facts.mesh}) is {whole}",
            hint=f'"{_TOTAL}": {whole}, or leave one of the three out',
        )
    if total is None:
        draft.fill(_TOTAL, whole, f"{micro} x {steps} x {facts.dp} replicas")


def _steps(draft: Draft, total: int | None, micro: int | None) -> int:
    facts = draft.facts
    if facts.accumulate is not None:
        return int(draft.fill(_STEPS, facts.accumulate, f"accumulate={facts.accumulate}"))
    if total is not None and micro is not None:
        how = f"{_TOTAL} {total} / ({_MICRO} {micro} x {facts.dp} replicas)"
        return int(draft.fill(_STEPS, _whole(draft, total, micro * facts.dp, how), how))
    if facts.pp > 1:
        return int(draft.fill(_STEPS, facts.pp, f"one micro-batch for each of {facts.pp} ranks of the pipeline"))
    return int(draft.fill(_STEPS, 1, "nothing is accumulated"))


def _micro(draft: Draft, total: int | None, steps: int) -> int:
    facts = draft.facts
    if total is not None:
        how = f"{_TOTAL} {total} / ({_STEPS} {steps} x {facts.dp} replicas)"
        return int(draft.fill(_MICRO, _whole(draft, total, steps * facts.dp, how), how))
    if facts.samples is not None and facts.samples % steps == 0:
        how = f"{facts.samples} samples in the example inputs / {steps}"
        return int(draft.fill(_MICRO, facts.samples // steps, how))
    return int(draft.fill(_MICRO, 1, "DeepSpeed only counts samples with it"))


def _whole(draft: Draft, number: int, divisor: int, how: str) -> int:
    if number % divisor:
        raise BuildError(
            f"{draft.source.of(_TOTAL)} does not divide: {how} is {number / divisor:g}",
            hint=f"a multiple of {divisor}, e.g. {max(1, round(number / divisor)) * divisor}",
        )
    return number // divisor


def _given(draft: Draft, key: str) -> int | None:
    value: Any = draft.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise BuildError(f"{draft.source.of(key)} must be a positive whole number (got {value!r})", hint=f'"{key}": 1')
    return value


_OWN = ("adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")
"""Those that DeepSpeed makes itself, whatever the case of their letters; others are torch.optim's."""

_BY_ELEMENT = frozenset(
    {"adagrad", "adam", "adamw", "lion", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
_FUSED_ONLY = frozenset({"bias_correction", "set_grad_none"})
"""Params that DeepSpeed's own Adam has, and torch's has not."""

_MUP = frozenset({"muadam", "muadamw", "musgd"})


def optimizer_name(config: Mapping[str, Any]) -> str | None:
    """The name as DeepSpeed takes it, e.g. ``"adamw"`` or ``"SGD"``; None without one."""
    section = config.get("optimizer")
    name = section.get("type") if isinstance(section, Mapping) else None
    return (name.lower() if name.lower() in _OWN else name) if isinstance(name, str) else None


def check_optimizer(draft: Draft) -> None:
    """Refuse what DeepSpeed would refuse after the ranks have met, or would run wrongly; fill in its settings.

    Raises:
        BuildError: two optimizers, an unknown one, or one that cannot update shards; each with its place.
    """
    config, source, facts = draft.config, draft.source, draft.facts
    if "optimizer" not in config:
        return
    given = draft.get("optimizer.type")
    if facts.has_optimizer:
        raise BuildError(
            f"two optimizers: {source.of('optimizer')} is {given!r}, and build(optimizer=...) is a factory",
            hint='leave out "optimizer" of the configuration, or optimizer= of build',
        )
    name = optimizer_name(config)
    if name is None:
        raise BuildError(
            f"{source.of('optimizer.type')} must name an optimizer (got {given!r})",
            hint='"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}',
        )
    _refuse_unknown(draft, name)
    _refuse_shards(draft, name)
    _check_params(draft, name)
    if name in ("adam", "adamw") and facts.device == "cpu":
        _fill_adam_of_torch(draft)


def _fill_adam_of_torch(draft: Draft) -> None:
    """Use torch's Adam instead of DeepSpeed's, which would be compiled; the update is the same."""
    params = draft.get("optimizer.params") or {}
    offloads = draft.get("zero_optimization.offload_optimizer.device") not in (None, "none")
    if offloads or "torch_adam" in params or _FUSED_ONLY & set(params):
        return
    draft.fill("optimizer.params.torch_adam", True, "DeepSpeed's own Adam would be compiled on a CPU")
    if "weight_decay" not in params:
        draft.fill("optimizer.params.weight_decay", 0.0, "the default of DeepSpeed's own Adam; torch's is 0.01")


def _refuse_unknown(draft: Draft, name: str) -> None:
    import torch

    place = draft.source.of("optimizer.type")
    if name in _MUP:
        raise BuildError(
            f"{place} is {name!r}, which reads what mup has put on the parameters of the reference model; steps make "
            "parameters without it",
            hint="optimizer=lambda params: ... of build",
        )
    if name == "muon":
        raise BuildError(
            f"{place} is 'Muon': DeepSpeed sorts the parameters into groups of its own for it, which this target "
            "cannot save and load",
            hint='"type": "AdamW"',
        )
    if name in _OWN:
        return
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        known = [*_OWN, *(one for one in dir(torch.optim) if one[:1].isupper() and one != "Optimizer")]
        close = difflib.get_close_matches(name.lower(), [one.lower() for one in known], n=1)
        shown = next((one for one in known if close and one.lower() == close[0]), None)
        raise BuildError(
            f"{place} is {name!r}, which is not an optimizer of DeepSpeed 0.19 or torch.optim"
            + (f"; did you mean {shown!r}?" if shown else "")
        )
    if kind is torch.optim.LBFGS:
        raise BuildError(f"{place} is 'LBFGS', which runs the model several times a step; DeepSpeed runs it once")


def _refuse_shards(draft: Draft, name: str) -> None:
    """A parameter's update must not depend on more of it than a rank holds."""
    if name in _BY_ELEMENT:
        return
    place, facts = draft.source.of("optimizer.type"), draft.facts
    if facts.split:
        raise BuildError(
            f"{place} is {name!r}, which does not treat the elements of a parameter one by one, and '{facts.split[0]}' "
            f"is split over mesh_dim 'tp' ({facts.tp} ranks): each would treat its shard as the full parameter",
            hint='"type": "AdamW"',
        )
    stage = draft.get("zero_optimization.stage") or 0
    low = any(draft.get(f"{kind}.enabled") for kind in ("bf16", "bfloat16"))
    if not stage and facts.pp > 1 and low:
        raise BuildError(
            f"{place} is {name!r}, which does not treat the elements of a parameter one by one, and in a pipeline in "
            "bf16 DeepSpeed gives each rank shards of them, without ZeRO too",
            hint='"type": "AdamW"',
        )
    if stage:
        raise BuildError(
            f"{place} is {name!r}, which does not treat the elements of a parameter one by one, and ZeRO-{stage} "
            "gives each rank shards of them",
            hint='"type": "AdamW", or "zero_optimization": {"stage": 0}',
        )


def _check_params(draft: Draft, name: str) -> None:
    params: Any = draft.get("optimizer.params")
    if params is None:
        return
    if not isinstance(params, Mapping):
        raise BuildError(f"{draft.source.of('optimizer.params')} must be an object, {{...}} (got {params!r})")
    if "max_grad_norm" in params:
        raise BuildError(
            f"{draft.source.of('optimizer.params.max_grad_norm')}: DeepSpeed clips by 'gradient_clipping'",
            hint=f'"gradient_clipping": {params["max_grad_norm"]}, or max_grad_norm= of build',
        )
