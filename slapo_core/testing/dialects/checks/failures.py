"""A build that fails leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slapo_core.errors import BuildError, OptimizerError, WeightsError
from slapo_core.testing.check import CheckError
from slapo_core.testing.dialects.before import Before
from slapo_core.testing.dialects.bench import DialectBench

__all__ = ["failed_build_changes_nothing", "wrong_optimizer_is_refused"]


class InjectedFault(Exception):  # noqa: N818 - raised into the dialect, never at a user
    """The fault that the check raises from the optimizer's factory."""


def failed_build_changes_nothing(bench: DialectBench) -> None:
    """An optimizer's factory that raises ends the build with its error, and the schedule can be used on."""
    schedule = bench.schedule(steps=True)
    before = Before(schedule)
    _require_fault(bench, schedule)
    before.require("a build whose optimizer could not be made")
    schedule = bench.schedule(bench.meta_model(), steps=True)
    before = Before(schedule)
    with contextlib.suppress(WeightsError):  # of a model that cannot be initialized: it gets no further
        _require_fault(bench, schedule)
    _require_nothing_left(before)


def wrong_optimizer_is_refused(bench: DialectBench) -> None:
    """An optimizer of foreign parameters, of too few, or none at all is an OptimizerError; so is a bad norm refused."""
    first = bench.case.optimizers[0]
    foreign = nn.Parameter(torch.ones(3, dtype=bench.case.dtype))
    cases: dict[str, tuple[type[BuildError], dict[str, Any]]] = {
        "a factory that gives no optimizer": (OptimizerError, {"optimizer": lambda parameters: "none"}),
        "an optimizer that holds a foreign parameter": (OptimizerError, {"optimizer": _of(first, add=[foreign])}),
        "an optimizer that leaves out a parameter": (OptimizerError, {"optimizer": _of(first, leave_out=1)}),
        "max_grad_norm=-1.0": (BuildError, {"max_grad_norm": -1.0}),
    }
    for what, (expected, options) in cases.items():
        schedule = bench.schedule(steps=True)
        before = Before(schedule)
        cause: Exception | None = None
        try:
            bench.engine(schedule, **options)
        except expected:
            before.require(f"refusing {what}")
            continue
        except Exception as error:  # noqa: BLE001 - told below
            got, cause = f"{type(error).__name__}: {error}", error
        else:
            got = "an engine"
        raise CheckError(
            f"{what} is not refused",
            required=expected.__name__,
            got=got,
            hint="let request.make_optimizer() call the factory, and let its errors pass",
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
            "the error of the optimizer's factory is lost",
            required="the error itself, or chained: `raise ... from error`",
            got=f"{type(error).__name__}: {error}",
            hint="let errors of request.make_optimizer() pass",
        ) from error
    raise CheckError(
        "the error of the optimizer's factory is swallowed",
        required="the build fails with it",
        got="an engine",
        hint="call request.make_optimizer() in build(), and let its errors pass",
    )


def _require_nothing_left(before: Before) -> None:
    lines = before.differences()
    if lines:
        raise CheckError(
            "a build of a model on the meta device, whose optimizer could not be made, leaves traces",
            required="the tensors of before, without values",
            got="\n".join(lines[:3]),
            hint="change the model only after everything that can fail",
        )


def _of(factory: Any, *, add: list[nn.Parameter] | None = None, leave_out: int = 0) -> Callable[[Any], Any]:
    return lambda parameters: factory([*list(parameters)[leave_out:], *(add or [])])
