"""Check builds: entry points, plans, members of the engine, failures."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.dialect import BuildArguments, Dialect, Engine, Plan
from slapo_core.errors import BuildError, OptimizerError, SlapoError, WeightsError
from slapo_core.plugins import current_registry
from slapo_testing.bench import ScheduleSnapshot, seeded
from slapo_testing.check import CheckError, NotApplicable
from slapo_testing.checks.atomicity import InjectedFault
from slapo_testing.checks.declarations import require_entry_point, require_light_import
from slapo_testing.dialects.bench import (
    DialectBench,
    differences,
    evaluate_in_plain_torch,
    process_group_of_one,
    refusal,
    require_usable,
)
from slapo_testing.dialects.case import DialectCase
from slapo_testing.snapshot import listed

if TYPE_CHECKING:
    from slapo_core import Schedule


def entry_point_agrees(case: DialectCase) -> None:
    """The entry point of the dialect's name loads this class."""
    require_entry_point(_class(case), "dialects")


def light_import(case: DialectCase) -> None:
    """The module imports in a new process silently, without frameworks and side effects."""
    require_light_import(_class(case))


def _class(case: DialectCase) -> type[Dialect]:
    if not isinstance(case.target, str):
        return case.target
    cls: type[Dialect] = current_registry().load(case.target, "dialects")
    return cls


_UNKNOWN = "no_such_option"


def plan_changes_nothing(bench: DialectBench) -> None:
    """check(), options() and plan() change nothing and use no RNG."""
    schedule, config = bench.schedule(steps=True), dict(bench.case.config)
    before = ScheduleSnapshot(schedule)
    with seeded():
        random = torch.get_rng_state()
        violations = list(bench.dialect().check(schedule) or ())
        bench.dialect().plan(schedule, bench.dialect().options(config, BuildArguments()))
        lines = before.differences()
        if not torch.equal(random, torch.get_rng_state()):
            lines.append("torch's RNG state: advanced")
    if config != dict(bench.case.config):
        lines.append(f"the options given: {dict(bench.case.config)!r} -> {config!r}")
    if lines:
        raise CheckError(
            "check(), options() or plan() changes its arguments",
            required="no changes, so that a refusal leaves the schedule unchanged",
            got=listed(lines),
            hint="move every change into build()",
        )
    if violations:
        raise CheckError(
            "check() refuses the case's own schedule",
            required="no violation",
            got="; ".join(map(str, violations)),
            hint="give the case a model= and schedule= that the runtime supports",
        )


def plan_is_the_same_again(bench: DialectBench) -> None:
    """Equal options give equal plans, with all defaults, and one line for each action."""
    schedule, config = bench.schedule(steps=True), bench.case.config
    plan = _plan(bench, schedule, config)
    lines = [repr(step) for step in plan.steps if not isinstance(step, str) or not step.strip() or "\n" in step]
    if plan.target != bench.dialect.name or not isinstance(plan.steps, tuple) or not plan.steps or lines:
        raise CheckError(
            "the plan has no list of actions",
            required=f"target '{bench.dialect.name}', and a tuple of lines",
            got=f"target {plan.target!r}, steps {plan.steps!r}",
            hint='return Plan(self.name, ("wrap the model in ...",), {...})',
        )
    for what, options in (("a second time", config), ("with the plan's config", plan.config)):
        again = _plan(bench, schedule, options)
        if again != plan:
            raise CheckError(
                f"plan() is not deterministic: called {what}, it returned a different plan",
                required=repr(plan),
                got=repr(again),
                hint="compute the plan from schedule and options only; put all options, with defaults, into the plan's "
                "config",
            )
    try:
        defaults = _plan(bench, schedule, {}).config
    except BuildError:
        defaults = plan.config  # an option without a default
    missing = [name for name in config if name not in plan.config or name not in defaults]
    if missing:
        raise CheckError(
            f"the config of the plan lacks option {', '.join(map(repr, missing))}",
            required="a config with all options, also with defaults",
            got=f"{dict(plan.config)!r}; without arguments {dict(defaults)!r}",
            hint="Plan(self.name, steps, {**defaults, **config}): ranks compare it",
        )


def unknown_option_is_refused(bench: DialectBench) -> None:
    """An unknown option is a BuildError that names it, and the schedule stays usable."""
    _require_refusal(bench, {**bench.case.config, _UNKNOWN: 1}, names=[_UNKNOWN], listed_in="")


def bad_options_are_refused(bench: DialectBench) -> None:
    """Each value of rejects= is a BuildError that names an option, and the schedule stays usable."""
    if not bench.case.rejects:
        raise NotApplicable("the case has no rejects=[...]: options that must be refused")
    for options in bench.case.rejects:
        _require_refusal(bench, options, names=list(options), listed_in=" of rejects=")


def _plan(bench: DialectBench, schedule: Schedule, config: Mapping[str, Any]) -> Plan:
    plan: Any = bench.dialect().plan(schedule, dict(config))
    if not isinstance(plan, Plan):
        raise CheckError(
            "plan() does not return a plan",
            required="a slapo_core.Plan",
            got=repr(plan),
            hint="return Plan(self.name, steps)",
        )
    return plan


def _require_refusal(bench: DialectBench, options: Mapping[str, Any], *, names: list[str], listed_in: str) -> None:
    schedule = bench.schedule(steps=True)
    before, shown = ScheduleSnapshot(schedule), ", ".join(f"{name}={value!r}" for name, value in options.items())
    hint = "in plan(): if bad: raise BuildError(f\"target '{self.name}' has no option 'x'; it has ...\")"
    try:
        # The options alone: the case's config must not override them.
        bench.build_with(schedule, options)
    except BuildError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, SlapoError):
            raise _other_error(shown, listed_in, error.__cause__, hint) from error
        if not any(name in str(error) for name in names):
            raise CheckError(
                f"the refusal of {shown} does not name the option",
                required=f"a message with the option's name: {' or '.join(names)}",
                got=str(error),
                hint=hint,
            ) from error
    except Exception as error:
        raise _other_error(shown, listed_in, error, hint) from error
    else:
        raise CheckError(f"{shown}{listed_in} was accepted", required="BuildError", got="an engine", hint=hint)
    require_usable(before, f"refusing {shown}")


def _other_error(shown: str, listed_in: str, error: BaseException, hint: str) -> CheckError:
    return CheckError(
        f"{shown}{listed_in} is refused by another error",
        required="BuildError",
        got=f"{type(error).__name__}: {error}",
        hint=hint,
    )


def engine_has_every_member(bench: DialectBench) -> None:
    """The engine has all members of slapo_core.Engine, with their arguments."""
    engine: Any = bench.engine(bench.schedule(steps=True))
    methods = {name: value for name, value in vars(Engine).items() if inspect.isfunction(value) and name[0] != "_"}
    missing = [name for name in ("module", *methods) if not hasattr(engine, name)]
    if missing:
        raise CheckError(
            f"the engine lacks {', '.join(missing)}",
            required="all members of slapo_core.Engine",
            got=f"a {type(engine).__name__} without {', '.join(missing)}",
            hint="context.state has state_dict, load_state_dict, save and load; see slapo_core.Engine",
        )
    for name, declared in methods.items():
        parameters = list(inspect.signature(declared).parameters.values())[1:]
        positional = [parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
        keywords = {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        for given in ({}, keywords):
            _require_call(engine, name, [None] * len(positional), given)


def _require_call(engine: Any, name: str, positional: list[None], keywords: dict[str, None]) -> None:
    signature = inspect.signature(getattr(engine, name))
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise CheckError(
            f"{name}() of the engine has another signature",
            required=f"{name}{inspect.signature(getattr(Engine, name))}",
            got=f"{name}{signature}: {error}",
            hint="take the arguments of slapo_core.Engine",
        ) from error


def module_keeps_the_paths(bench: DialectBench) -> None:
    """engine.module is the scheduled model, with all paths of the reference model."""
    unchanged, schedule = bench.model(), bench.schedule(steps=True)
    module = bench.engine(schedule).module
    present = {path for path, _ in module.named_modules(remove_duplicate=False)}
    lost = [path for path, _ in unchanged.named_modules(remove_duplicate=False) if path not in present]
    if lost or module is not schedule.model:
        raise CheckError(
            "the module of the engine is not the scheduled model",
            required="schedule.model, with all paths of the reference model",
            got=f"no {', '.join(map(repr, lost[:5]))}" if lost else f"another {type(module).__name__}",
            hint="module = context.schedule.model; keep the runtime's wrapper in another attribute",
        )


def without_optimizer_it_only_evaluates(bench: DialectBench) -> None:
    """An engine without an optimizer evaluates; training is a BuildError with the corrected call."""
    (batch,) = bench.batches(1)
    engine = bench.evaluator(bench.schedule(steps=True))
    expected, _ = evaluate_in_plain_torch(bench.model(), batch, bench.case.loss)
    got = engine.eval_step(batch).loss
    lines = differences({"the loss": expected}, {"the loss": got}, tolerance=bench.case.allowed)
    if lines:
        raise CheckError(
            "evaluation without an optimizer differs from the plain model",
            required="the loss of the plain model in evaluation mode",
            got=lines[0],
            hint="eval_step needs no optimizer",
        )
    error = refusal(lambda: engine.train_step(batch), "train_step() of an engine without an optimizer")
    if "optimizer=" not in str(error):
        raise CheckError(
            "training without an optimizer is refused without a hint",
            required="a hint with the corrected call: build(sch, ..., optimizer=...)",
            got=str(error),
            hint='raise BuildError("this engine cannot train: ...", hint="build(sch, optimizer=...)")',
        )


def closed_engine_says_so(bench: DialectBench) -> None:
    """After close() steps are refused, close() has no effect, and the caller's process group stays."""
    import torch.distributed as dist

    (batch,) = bench.batches(1)
    with process_group_of_one(bench.device):
        engine = bench.engine(bench.schedule(steps=True))
        engine.train_step(batch)
        engine.close()
        engine.close()
        gone = not dist.is_initialized()
    if gone:
        raise CheckError(
            "close() destroys the caller's process group",
            required="torch.distributed stays initialized",
            got="torch.distributed is not initialized",
            hint="destroy only groups that the dialect made",
        )
    for step in ("train_step", "eval_step"):
        error = refusal(lambda step=step: getattr(engine, step)(batch), f"{step}() of a closed engine")  # type: ignore[misc]
        if "closed" not in str(error):
            raise CheckError(
                f"{step}() does not say that the engine is closed",
                required="a BuildError with the word 'closed'",
                got=str(error),
                hint='raise BuildError("the engine is closed")',
            )


def failed_build_changes_nothing(bench: DialectBench) -> None:
    """The error of an optimizer factory ends the build, and the schedule stays usable."""
    schedule = bench.schedule(steps=True)
    before = ScheduleSnapshot(schedule)
    _require_fault(bench, schedule)
    require_usable(before, "a build with a failing optimizer factory")
    schedule = bench.schedule(bench.meta_model(), steps=True)
    before = ScheduleSnapshot(schedule)
    with contextlib.suppress(WeightsError):  # the model cannot be initialized
        _require_fault(bench, schedule)
    _require_nothing_left(before)


def wrong_optimizer_is_refused(bench: DialectBench) -> None:
    """An optimizer with wrong parameters, or not an optimizer, is an OptimizerError; a negative norm is refused."""
    first = bench.case.optimizers[0]
    foreign = nn.Parameter(torch.ones(3, dtype=bench.case.dtype))
    cases: dict[str, tuple[type[BuildError], dict[str, Any]]] = {
        "a factory that does not return an optimizer": (OptimizerError, {"optimizer": lambda parameters: "none"}),
        "an optimizer with a foreign parameter": (OptimizerError, {"optimizer": _of(first, add=[foreign])}),
        "an optimizer without one of the parameters": (OptimizerError, {"optimizer": _of(first, leave_out=1)}),
        "max_grad_norm=-1.0": (BuildError, {"max_grad_norm": -1.0}),
    }
    for what, (expected, options) in cases.items():
        schedule = bench.schedule(steps=True)
        before = ScheduleSnapshot(schedule)
        cause: Exception | None = None
        try:
            bench.engine(schedule, **options)
        except expected:
            require_usable(before, f"refusing {what}")
            continue
        except Exception as error:  # noqa: BLE001 - reported below
            got, cause = f"{type(error).__name__}: {error}", error
        else:
            got = "an engine"
        raise CheckError(
            f"{what} is not refused",
            required=expected.__name__,
            got=got,
            hint="call context.make_optimizer(), and do not catch its errors",
        ) from cause


def _require_fault(bench: DialectBench, schedule: Any) -> None:
    def raising(parameters: Any) -> Any:
        raise InjectedFault("the optimizer cannot be made")

    try:
        bench.engine(schedule, optimizer=raising)
    except WeightsError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, InjectedFault):
            cause = cause.__cause__
        if cause is not None:
            return
        raise CheckError(
            "the error of the optimizer factory is lost",
            required="the error, or a chained one: `raise ... from error`",
            got=f"{type(error).__name__}: {error}",
            hint="do not catch errors of context.make_optimizer()",
        ) from error
    raise CheckError(
        "build() swallows the error raised by the optimizer factory",
        required="the build fails with this error",
        got="an engine",
        hint="call context.make_optimizer() in build(), and do not catch its errors",
    )


def _require_nothing_left(before: ScheduleSnapshot) -> None:
    lines = before.differences()
    if lines:
        raise CheckError(
            "a failed build changes a model on the meta device",
            required="the same tensors, on the meta device",
            got="\n".join(lines[:3]),
            hint="change the model only after everything that can fail",
        )


def _of(factory: Any, *, add: list[nn.Parameter] | None = None, leave_out: int = 0) -> Callable[[Any], Any]:
    return lambda parameters: factory([*list(parameters)[leave_out:], *(add or [])])
