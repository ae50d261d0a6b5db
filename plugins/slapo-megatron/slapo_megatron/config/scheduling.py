"""The arguments of Megatron's ``OptimizerParamScheduler``, which decides every rate and decay."""

from __future__ import annotations

from typing import Any

from slapo_core import BuildError
from slapo_megatron.config.draft import Draft

__all__ = ["fill_scheduler"]

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
    _agree(draft, "max_lr", rate, "lr")
    _agree(draft, "min_lr", draft.get(_OPTIMIZER, "min_lr"), "min_lr")
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
        _agree(draft, "start_wd", decay, "weight_decay")
        _agree(draft, "end_wd", decay, "weight_decay")
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


def _agree(draft: Draft, name: str, value: float, of: str) -> None:
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
