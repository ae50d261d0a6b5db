"""What must be refused is refused before anything is touched, with the way out."""

from __future__ import annotations

from slapo_core.errors import PreconditionError
from slapo_core.spec.primitive import Primitive
from slapo_core.testing.bench import Bench, prepare
from slapo_core.testing.case import Case
from slapo_core.testing.check import CheckError, NotApplicable
from slapo_core.testing.snapshot import ModelSnapshot, listed

__all__ = ["rejected_cases_change_nothing"]


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
        bench.schedule.apply_at(bench.node_at(path), primitive)
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
