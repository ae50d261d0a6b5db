"""A primitive that fails at any point inside leaves nothing behind."""

from __future__ import annotations

from slapo_core.testing.bench import Bench, prepare
from slapo_core.testing.case import Case
from slapo_core.testing.check import CheckError, NotApplicable
from slapo_core.testing.snapshot import ModelSnapshot, listed

__all__ = ["faults_roll_back"]


class InjectedFault(Exception):  # noqa: N818 - raised into the primitive, never at a user
    """The fault that the check raises after an edit."""


def faults_roll_back(case: Case) -> None:
    """A fault after the first, second, ... edit leaves the model bit-identical."""
    edits = _count_edits(prepare(case, mesh_size=2))
    if not edits:
        raise NotApplicable("it makes no edit in this case, only a note: there is nothing to roll back")
    bench = prepare(case, mesh_size=2)
    before, records = ModelSnapshot(bench.model), bench.schedule.records
    layouts = dict(bench.schedule.tree.layouts)
    for number in range(1, edits + 1):
        place = f"a fault after edit {number} of {edits}"
        _fail_after(bench, number, place)
        lines = before.differences(bench.model)
        if bench.schedule.tree.layouts != layouts:
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
            hint="keep no state outside of the model, such as a module-level set of what was done",
        ) from error


def _count_edits(bench: Bench) -> int:
    counts = [0]
    bench.schedule.apply_at(bench.node, bench.primitive, after_edit=counts.append)
    return max(counts)


def _fail_after(bench: Bench, number: int, place: str) -> None:
    def fault(edits: int) -> None:
        if edits == number:
            raise InjectedFault(place)

    try:
        bench.schedule.apply_at(bench.node, bench.primitive, after_edit=fault)
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
