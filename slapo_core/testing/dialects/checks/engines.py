"""An engine has everything that users call, at the same paths, and says when it cannot do it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from slapo_core.errors import BuildError
from slapo_core.spec.engine import Engine
from slapo_core.testing.check import CheckError
from slapo_core.testing.dialects.bench import DialectBench, process_group_of_one
from slapo_core.testing.dialects.training import differences, evaluate_by_hand

__all__ = [
    "closed_engine_says_so",
    "engine_has_every_member",
    "module_keeps_the_paths",
    "without_optimizer_it_only_evaluates",
]


def engine_has_every_member(bench: DialectBench) -> None:
    """The engine has every member of slapo_core.Engine, and its methods take what that says."""
    engine: Any = bench.engine(bench.schedule(steps=True))
    methods = {name: value for name, value in vars(Engine).items() if inspect.isfunction(value) and name[0] != "_"}
    missing = [name for name in ("module", *methods) if not hasattr(engine, name)]
    if missing:
        raise CheckError(
            f"the engine has no {', '.join(missing)}",
            required="every member of slapo_core.Engine",
            got=f"a {type(engine).__name__} without {', '.join(missing)}",
            hint="request.state has state_dict, load_state_dict, save and load; slapo_core.spec.engine says the rest",
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
            f"{name}() of the engine cannot be called as every engine's is",
            required=f"{name}{inspect.signature(getattr(Engine, name))}",
            got=f"{name}{signature}: {error}",
            hint="take the arguments that slapo_core.spec.engine documents",
        ) from error


def module_keeps_the_paths(bench: DialectBench) -> None:
    """engine.module is the scheduled model: every path of the reference model leads to a module."""
    untouched, schedule = bench.model(), bench.schedule(steps=True)
    module = bench.engine(schedule).module
    present = {path for path, _ in module.named_modules(remove_duplicate=False)}
    lost = [path for path, _ in untouched.named_modules(remove_duplicate=False) if path not in present]
    if lost or module is not schedule.model:
        raise CheckError(
            "the module of the engine is not the scheduled model",
            required="schedule.model itself, with the reference model's paths",
            got=f"no {', '.join(map(repr, lost[:5]))}" if lost else f"another {type(module).__name__}",
            hint="keep a wrapper of the runtime on an attribute of its own; module = request.schedule.model",
        )


def without_optimizer_it_only_evaluates(bench: DialectBench) -> None:
    """Without an optimizer the engine evaluates, and training is a BuildError with the corrected call."""
    (batch,) = bench.batches(1)
    engine = bench.evaluator(bench.schedule(steps=True))
    expected, _ = evaluate_by_hand(bench.model(), batch, bench.case.loss)
    got = engine.eval_step(batch).loss
    lines = differences({"the loss": expected}, {"the loss": got}, tolerance=bench.case.allowed)
    if lines:
        raise CheckError(
            "an engine without an optimizer evaluates something else than the plain model",
            required="the loss of the plain model in evaluation mode",
            got=lines[0],
            hint="eval_step needs no optimizer",
        )
    error = _refusal(lambda: engine.train_step(batch), "train_step() of an engine without an optimizer")
    if "optimizer=" not in str(error):
        raise CheckError(
            "training without an optimizer is refused without a way out",
            required="a hint with the corrected call: build(sch, ..., optimizer=...)",
            got=str(error),
            hint='raise BuildError("this engine cannot train: ...", hint="build(sch, optimizer=...)")',
        )


def closed_engine_says_so(bench: DialectBench) -> None:
    """After close() steps are refused in words, closing again does nothing, and the caller's process group stays."""
    import torch.distributed as dist

    (batch,) = bench.batches(1)
    with process_group_of_one():
        engine = bench.engine(bench.schedule(steps=True))
        engine.train_step(batch)
        engine.close()
        engine.close()
        gone = not dist.is_initialized()
    if gone:
        raise CheckError(
            "close() ends the process group of the caller",
            required="torch.distributed is initialized as before",
            got="torch.distributed is not initialized",
            hint="destroy only the groups that the dialect made itself",
        )
    for step in ("train_step", "eval_step"):
        error = _refusal(lambda step=step: getattr(engine, step)(batch), f"{step}() of a closed engine")  # type: ignore[misc]
        if "closed" not in str(error):
            raise CheckError(
                f"{step}() does not say that the engine is closed",
                required="a BuildError that says so",
                got=str(error),
                hint='raise BuildError("the engine is closed")',
            )


def _refusal(call: Callable[[], Any], what: str) -> BuildError:
    try:
        call()
    except BuildError as error:
        return error
    except Exception as error:
        raise CheckError(
            f"{what} fails with another error",
            required="BuildError, in words that say what to do",
            got=f"{type(error).__name__}: {error}",
            hint="ask before anything is done, and raise BuildError",
        ) from error
    raise CheckError(f"{what} is not refused", required="BuildError", got="a result", hint="raise BuildError")
