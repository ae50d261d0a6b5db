"""Check that a refused, failed or undone primitive leaves the model bit-identical."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slapo_core import Node
from slapo_core.errors import PreconditionError
from slapo_core.internals import Internals
from slapo_core.primitive import Primitive, Violation
from slapo_testing.bench import Bench, prepare
from slapo_testing.case import Case
from slapo_testing.check import CheckError, NotApplicable
from slapo_testing.snapshot import ModelSnapshot, listed


def preconditions_mutate_nothing(case: Case) -> None:
    """Asking for the preconditions, accepted or not, changes nothing and gives the same answer twice."""
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
            f"the preconditions of {primitive} answer differently the second time",
            required=f"the same as the first time: {_shown(first)}",
            got=_shown(second),
            hint="compute the violations from the node and the fields alone; keep no state between calls",
        )
    lines = before.differences(bench.model)
    if not torch.equal(random, torch.get_rng_state()):
        lines.append("torch's random state: advanced")
    if lines:
        raise CheckError(
            f"the preconditions of {primitive} change the model",
            required="preconditions only look",
            got=listed(lines),
            hint="move every change into apply(), and make it through `edit`",
        )


def _violations(primitive: Primitive, node: Node) -> list[Violation]:
    return list(primitive.preconditions(node) or ())


def _shown(violations: list[Violation]) -> str:
    return "; ".join(map(str, violations)) or "no violation"


def rejected_cases_change_nothing(case: Case) -> None:
    """Every value of rejects= is refused by a precondition that has a hint, and the model stays bit-identical."""
    rejected = case.rejected()
    if not rejected:
        raise NotApplicable("the case has no rejects=[...]: values that must be refused")
    bench = prepare(case, mesh_size=2)
    for path, primitive in rejected:
        before = ModelSnapshot(bench.model)
        records = bench.schedule.records
        error = _precondition_error(bench, path, primitive)
        bare = [violation.message for violation in error.violations if not violation.hint]
        if bare:
            raise CheckError(
                f"{primitive} is refused without a way out",
                required="every violation has a hint: the corrected argument or call",
                got="; ".join(bare),
                hint='Violation("what, where, required, got", "the corrected call")',
            )
        lines = before.differences(bench.model)
        if lines or bench.schedule.records != records:
            raise CheckError(
                f"refusing {primitive} changed the model",
                required="a refused primitive leaves the model bit-identical",
                got=listed(lines) if lines else "another number of records",
                hint="preconditions only look; move every change into apply(), and make it through `edit`",
            )


def _precondition_error(bench: Bench, path: str, primitive: Primitive) -> PreconditionError:
    try:
        Internals(bench.schedule).apply(bench.node_at(path), primitive)
    except PreconditionError as error:
        return error
    except Exception as error:
        raise CheckError(
            f"{primitive} at {_where(path)} is refused too late",
            required="PreconditionError, before anything is touched",
            got=f"{type(error).__name__}: {error}",
            hint="yield a Violation from preconditions() for it; apply() must not have to find it out",
        ) from error
    raise CheckError(
        f"{primitive} at {_where(path)} is listed in rejects=, but was accepted",
        required="PreconditionError",
        got="it was applied",
        hint="yield a Violation from preconditions() for it, or take it out of rejects=",
    )


def _where(path: str) -> str:
    return f"'{path}'" if path else "the root"


class InjectedFault(Exception):  # noqa: N818 - raised into the primitive, never at a user
    """The fault that the check raises after an edit."""


def faults_roll_back(case: Case) -> None:
    """A fault after the first, second, ... edit leaves the model bit-identical."""
    edits = _count_edits(prepare(case, mesh_size=2))
    if not edits:
        raise NotApplicable("it makes no edit in this case, only a note: there is nothing to roll back")
    bench = prepare(case, mesh_size=2)
    before, records = ModelSnapshot(bench.model), bench.schedule.records
    layouts = dict(Internals(bench.schedule).tree.layouts)
    for number in range(1, edits + 1):
        place = f"a fault after edit {number} of {edits}"
        _fail_after(bench, number, place)
        lines = before.differences(bench.model)
        if Internals(bench.schedule).tree.layouts != layouts:
            lines.append("the layouts of the schedule: not those of before")
        if bench.schedule.records != records:
            lines.append("the records of the schedule: not those of before")
        if lines:
            raise CheckError(
                f"{place} leaves traces",
                required="the model is bit-identical to before",
                got=listed(lines),
                hint="make every change through `edit`, which knows how to take it back",
            )
    try:
        bench.apply()
    except Exception as error:
        raise CheckError(
            "it cannot be applied any more after faults that were rolled back",
            required="the primitive is applied as if nothing had happened",
            got=f"{type(error).__name__}: {error}",
            hint="keep no state outside of the model (e.g. a module-level set)",
        ) from error


def _count_edits(bench: Bench) -> int:
    counts = [0]
    Internals(bench.schedule).apply(bench.node, bench.primitive, after_edit=counts.append)
    return max(counts)


def _fail_after(bench: Bench, number: int, place: str) -> None:
    def fault(edits: int) -> None:
        if edits == number:
            raise InjectedFault(place)

    try:
        Internals(bench.schedule).apply(bench.node, bench.primitive, after_edit=fault)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, InjectedFault):
            cause = cause.__cause__
        if cause is None:
            raise CheckError(
                f"{place} comes out as another error, and its cause is lost",
                required="the error of an edit leaves apply() as it is, or chained: `raise ... from error`",
                got=f"{type(error).__name__}: {error}",
                hint="do not catch errors of `edit`",
            ) from error
        return
    raise CheckError(
        f"{place} is swallowed",
        required="the error of an edit leaves apply(), so that the step is rolled back",
        got="apply() returned as if the edit had worked",
        hint="do not catch errors of `edit`",
    )


def undo_is_exact(case: Case) -> None:
    """Undo gives back the reference model bit by bit, and redo the very same scheduled model."""
    bench = prepare(case, mesh_size=2)
    before, layouts = ModelSnapshot(bench.model), dict(Internals(bench.schedule).tree.layouts)
    steps = len(bench.schedule.records)
    bench.apply()
    bench.schedule.undo()
    _require_same_model(before, layouts, bench, "undo() does not give back the model of before")
    bench.apply()
    scheduled, new_layouts = ModelSnapshot(bench.model), dict(Internals(bench.schedule).tree.layouts)
    with bench.schedule.rewound(steps):
        _require_same_model(before, layouts, bench, "rewound() does not give back the model of before")
    _require_same_model(scheduled, new_layouts, bench, "redoing the step does not give back the scheduled model")
    bench.schedule.undo()
    _require_same_model(before, layouts, bench, "undo() after a redo does not give back the model of before")


def _require_same_model(expected: ModelSnapshot, layouts: Mapping[str, object], bench: Bench, violation: str) -> None:
    lines = expected.differences(bench.model)
    if Internals(bench.schedule).tree.layouts != layouts:
        lines.append("the layouts of the schedule: not those of before")
    if lines:
        raise CheckError(
            violation,
            required="the same objects with the same bits",
            got=listed(lines),
            hint="make every change through `edit`, which knows how to take it back",
        )
