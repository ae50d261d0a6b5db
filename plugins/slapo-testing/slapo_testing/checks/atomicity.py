"""Check that a refused, failed or undone primitive leaves the model bit-identical."""

from __future__ import annotations

import torch

from slapo_core import Node
from slapo_core.errors import PreconditionError, place
from slapo_core.internals import Internals
from slapo_core.primitive import Primitive, Violation
from slapo_testing.bench import Bench, ScheduleSnapshot, prepare
from slapo_testing.case import Case
from slapo_testing.check import CheckError, NotApplicable
from slapo_testing.snapshot import ModelSnapshot, listed


def preconditions_mutate_nothing(case: Case) -> None:
    """Preconditions change nothing and give equal results twice, for accepted and refused values."""
    bench = prepare(case, mesh_size=2)
    _ask(bench, case.path, bench.primitive)
    for path, primitive in case.rejected():
        _ask(bench, path, primitive)


def _ask(bench: Bench, path: str, primitive: Primitive) -> None:
    node = bench.node_at(path)
    before, random = ModelSnapshot(bench.model), torch.get_rng_state()
    try:
        primitive = bench.bound(path, primitive)
    except PreconditionError as error:
        first = second = list(error.violations)
    else:
        first = _violations(primitive, node)
        second = _violations(primitive, node)
    if first != second:
        raise CheckError(
            f"the preconditions of {primitive} are not deterministic",
            required=f"the result of the first call: {_shown(first)}",
            got=_shown(second),
            hint="compute the violations from the node and the fields alone; keep no state between calls",
        )
    lines = before.differences(bench.model)
    if not torch.equal(random, torch.get_rng_state()):
        lines.append("torch's RNG state: advanced")
    if lines:
        raise CheckError(
            f"the preconditions of {primitive} change the model",
            required="preconditions do not change the model",
            got=listed(lines),
            hint="move every change into apply(), and make it through `edit`",
        )


def _violations(primitive: Primitive, node: Node) -> list[Violation]:
    return list(primitive.preconditions(node) or ())


def _shown(violations: list[Violation]) -> str:
    return "; ".join(map(str, violations)) or "no violation"


def rejected_cases_change_nothing(case: Case) -> None:
    """Preconditions refuse each value of rejects= with a hint, and the model stays bit-identical."""
    rejected = case.rejected()
    if not rejected:
        raise NotApplicable("the case has no rejects=[...]: values that must be refused")
    bench = prepare(case, mesh_size=2)
    for path, primitive in rejected:
        before = ScheduleSnapshot(bench.schedule)
        error = _precondition_error(bench, path, primitive)
        bare = [violation.message for violation in error.violations if not violation.hint]
        if bare:
            raise CheckError(
                f"{primitive} is refused without a hint",
                required="a hint for each violation: the corrected argument or call",
                got="; ".join(bare),
                hint='Violation("what, where, required, got", "the corrected call")',
            )
        lines = before.differences()
        if lines:
            raise CheckError(
                f"refusing {primitive} changed the model",
                required="a refused primitive leaves the model bit-identical",
                got=listed(lines),
                hint="move every change into apply(), and make it through `edit`",
            )


def _precondition_error(bench: Bench, path: str, primitive: Primitive) -> PreconditionError:
    try:
        Internals(bench.schedule).apply(bench.node_at(path), primitive)
    except PreconditionError as error:
        return error
    except Exception as error:
        raise CheckError(
            f"{primitive} at {_where(path)} is refused after the preconditions",
            required="PreconditionError, before any change",
            got=f"{type(error).__name__}: {error}",
            hint="yield a Violation from preconditions() instead of an error in apply()",
        ) from error
    raise CheckError(
        f"{primitive} at {_where(path)} of rejects= is accepted",
        required="PreconditionError",
        got="it was applied",
        hint="yield a Violation from preconditions(), or remove the value from rejects=",
    )


def _where(path: str) -> str:
    return place(path)


class InjectedFault(Exception):  # noqa: N818 - raised into the primitive, never at a user
    """A fault that the check raises after an edit."""


def faults_roll_back(case: Case) -> None:
    """A fault after the first, second, ... edit leaves the model bit-identical."""
    edits = _count_edits(prepare(case, mesh_size=2))
    if not edits:
        raise NotApplicable("the primitive makes no edit in this case: there is nothing to roll back")
    bench = prepare(case, mesh_size=2)
    before = ScheduleSnapshot(bench.schedule)
    for number in range(1, edits + 1):
        fault = f"a fault after edit {number} of {edits}"
        _fail_after(bench, number, fault)
        _require_none(before.differences(), f"{fault} is not rolled back")
    try:
        bench.apply()
    except Exception as error:
        raise CheckError(
            "the primitive cannot be applied after faults that were rolled back",
            required="apply() succeeds after a rollback",
            got=f"{type(error).__name__}: {error}",
            hint="keep no state outside of the model (e.g. a module-level set)",
        ) from error


def _count_edits(bench: Bench) -> int:
    counts = [0]
    Internals(bench.schedule).apply(bench.node, bench.primitive, after_edit=counts.append)
    return max(counts)


def _fail_after(bench: Bench, number: int, what: str) -> None:
    def fault(edits: int) -> None:
        if edits == number:
            raise InjectedFault(what)

    try:
        Internals(bench.schedule).apply(bench.node, bench.primitive, after_edit=fault)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, InjectedFault):
            cause = cause.__cause__
        if cause is None:
            raise CheckError(
                f"{what} becomes another error without its cause",
                required="apply() raises the error of an edit, or chains it: `raise ... from error`",
                got=f"{type(error).__name__}: {error}",
                hint="do not catch errors of `edit`",
            ) from error
        return
    raise CheckError(
        f"{what}: the error of `edit` is swallowed",
        required="apply() raises the error of an edit, so that the step is rolled back",
        got="apply() returned without an error",
        hint="do not catch errors of `edit`",
    )


def undo_is_exact(case: Case) -> None:
    """Undo restores the model bit by bit, and redo restores the scheduled model."""
    bench = prepare(case, mesh_size=2)
    before = ScheduleSnapshot(bench.schedule)
    steps = len(bench.schedule.records)
    bench.apply()
    bench.schedule.undo()
    _require_none(before.model_differences(), "undo() does not restore the model")
    bench.apply()
    scheduled = ScheduleSnapshot(bench.schedule)
    with bench.schedule.rewound(steps):
        _require_none(before.model_differences(), "rewound() does not restore the model")
    _require_none(scheduled.model_differences(), "redo does not restore the scheduled model")
    bench.schedule.undo()
    _require_none(before.model_differences(), "undo() after redo does not restore the model")


def _require_none(differences: list[str], violation: str) -> None:
    """Require that a snapshot has no differences."""
    if differences:
        raise CheckError(
            violation,
            required="the same objects with the same bits",
            got=listed(differences),
            hint="make every change through `edit`, which can undo it",
        )
