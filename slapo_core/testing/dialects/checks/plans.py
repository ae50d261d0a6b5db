"""A plan is made without touching anything, and a bad option is refused there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError, SlapoError
from slapo_core.spec.dialect import BuildArguments, Plan
from slapo_core.testing.bench import seeded
from slapo_core.testing.check import CheckError, NotApplicable
from slapo_core.testing.dialects.before import Before
from slapo_core.testing.dialects.bench import DialectBench
from slapo_core.testing.snapshot import listed

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["bad_options_are_refused", "plan_changes_nothing", "plan_is_the_same_again", "unknown_option_is_refused"]

_UNKNOWN = "no_such_option"


def plan_changes_nothing(bench: DialectBench) -> None:
    """Asking for the plan, and whether the schedule can be run, changes nothing and draws no random number."""
    schedule, config = bench.schedule(steps=True), dict(bench.case.config)
    before = Before(schedule)
    with seeded():
        random = torch.get_rng_state()
        violations = list(bench.dialect().check(schedule) or ())
        bench.dialect().plan(schedule, bench.dialect().options(config, BuildArguments()))
        lines = before.differences()
        if not torch.equal(random, torch.get_rng_state()):
            lines.append("torch's random state: advanced")
    if config != dict(bench.case.config):
        lines.append(f"the options given: {dict(bench.case.config)!r} -> {config!r}")
    if lines:
        raise CheckError(
            "check(), options() or plan() changes what it is given",
            required="they only look: a refusal leaves everything as it was",
            got=listed(lines),
            hint="move every change into build()",
        )
    if violations:
        raise CheckError(
            "check() refuses the case's own schedule",
            required="no violation",
            got="; ".join(map(str, violations)),
            hint="give the case a model= and schedule= that the runtime can run",
        )


def plan_is_the_same_again(bench: DialectBench) -> None:
    """The same options give an equal plan, with every default filled in, and one line for each thing to be done."""
    schedule, config = bench.schedule(steps=True), bench.case.config
    plan = _plan(bench, schedule, config)
    lines = [repr(step) for step in plan.steps if not isinstance(step, str) or not step.strip() or "\n" in step]
    if plan.target != bench.dialect.name or not isinstance(plan.steps, tuple) or not plan.steps or lines:
        raise CheckError(
            "the plan does not say what will be done",
            required=f"target '{bench.dialect.name}', and a tuple of lines of text",
            got=f"target {plan.target!r}, steps {plan.steps!r}",
            hint='return Plan(self.name, ("wrap the model in ...",), {...})',
        )
    for what, options in (("for the second time", config), ("with its own config", plan.config)):
        again = _plan(bench, schedule, options)
        if again != plan:
            raise CheckError(
                f"asked {what}, the dialect plans something else",
                required=repr(plan),
                got=repr(again),
                hint="compute the plan from the schedule and the options alone; put the options, with defaults filled "
                "in, into the plan's config",
            )
    try:
        defaults = _plan(bench, schedule, {}).config
    except BuildError:
        defaults = plan.config  # an option without a default
    missing = [name for name in config if name not in plan.config or name not in defaults]
    if missing:
        raise CheckError(
            f"the plan does not tell option {', '.join(map(repr, missing))}",
            required="a config that holds every option, the defaults of those that were not given",
            got=f"{dict(plan.config)!r}; without options given {dict(defaults)!r}",
            hint="Plan(self.name, steps, {**defaults, **config}): ranks compare it",
        )


def unknown_option_is_refused(bench: DialectBench) -> None:
    """An option that the dialect does not have is a BuildError that names it, and the schedule can be used on."""
    _require_refusal(bench, {**bench.case.config, _UNKNOWN: 1}, names=[_UNKNOWN], listed_in="")


def bad_options_are_refused(bench: DialectBench) -> None:
    """Every value of rejects= is a BuildError that names an option of it, and the schedule can be used on."""
    if not bench.case.rejects:
        raise NotApplicable("the case has no rejects=[...]: options that must be refused")
    for options in bench.case.rejects:
        _require_refusal(bench, options, names=list(options), listed_in=" of rejects=")


def _plan(bench: DialectBench, schedule: Schedule, config: Mapping[str, Any]) -> Plan:
    plan: Any = bench.dialect().plan(schedule, dict(config))
    if not isinstance(plan, Plan):
        raise CheckError(
            "plan() gives no plan", required="a slapo_core.Plan", got=repr(plan), hint="return Plan(self.name, steps)"
        )
    return plan


def _require_refusal(bench: DialectBench, options: Mapping[str, Any], *, names: list[str], listed_in: str) -> None:
    schedule = bench.schedule(steps=True)
    before, shown = Before(schedule), ", ".join(f"{name}={value!r}" for name, value in options.items())
    hint = "in plan(): if bad: raise BuildError(f\"target '{self.name}' has no option 'x'; it has ...\")"
    try:
        # The options alone: what the case's config gives to the same names must not hide them.
        bench.build_with(schedule, options)
    except BuildError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, SlapoError):
            raise _other_error(shown, listed_in, error.__cause__, hint) from error
        if not any(name in str(error) for name in names):
            raise CheckError(
                f"the refusal of {shown} does not say what is wrong",
                required=f"a message with the name of the option: {' or '.join(names)}",
                got=str(error),
                hint=hint,
            ) from error
    except Exception as error:
        raise _other_error(shown, listed_in, error, hint) from error
    else:
        raise CheckError(f"{shown}{listed_in} was accepted", required="BuildError", got="an engine", hint=hint)
    before.require(f"refusing {shown}")


def _other_error(shown: str, listed_in: str, error: BaseException, hint: str) -> CheckError:
    return CheckError(
        f"{shown}{listed_in} is refused by another error",
        required="BuildError",
        got=f"{type(error).__name__}: {error}",
        hint=hint,
    )
