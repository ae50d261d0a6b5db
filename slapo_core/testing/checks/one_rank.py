"""The scheduled model computes what the reference model does, in this process."""

from __future__ import annotations

from slapo_core.errors import VerifyError
from slapo_core.testing.bench import build_inputs, prepare
from slapo_core.testing.case import Case
from slapo_core.testing.check import CheckError

__all__ = ["forward_and_gradients_on_1_rank", "not_equivalent"]


def forward_and_gradients_on_1_rank(case: Case) -> None:
    """Outputs and gradients stay within the declared equivalence, with one rank in every mesh dimension."""
    from slapo_core.verification import verify

    bench = prepare(case, mesh_size=1)
    bench.apply()
    bench.apply_after()
    try:
        verify(bench.schedule, build_inputs(case))
    except VerifyError as error:
        raise not_equivalent(case, str(error)) from error


def not_equivalent(case: Case, difference: str) -> CheckError:
    """The error for a model that computes something else than the reference model."""
    promise = case.value().equivalence
    return CheckError(
        "the scheduled model computes something else than the reference model",
        required=f"equivalence {promise}, as the primitive declares",
        got=difference,
        hint="correct apply(); or declare what it really promises, e.g. Equivalence.REORDERED or "
        "Equivalence.APPROXIMATE(rtol=...)",
    )
