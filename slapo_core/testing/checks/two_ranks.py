"""The scheduled model computes what the reference model does, on two real processes."""

from __future__ import annotations

from typing import Any

from slapo_core.errors import RankFailedError, VerifyError
from slapo_core.ranks.launcher import run_ranks
from slapo_core.testing.bench import Bench, build_inputs, build_model, prepare
from slapo_core.testing.case import Case, made
from slapo_core.testing.check import CheckError
from slapo_core.testing.checks.one_rank import not_equivalent
from slapo_core.testing.sending import P2PMessage, pack

__all__ = ["forward_and_gradients_on_2_ranks"]

_TIMEOUT = 120.0  # seconds


def forward_and_gradients_on_2_ranks(case: Case) -> None:
    """On two gloo ranks, in the last mesh dimension or each for itself, outputs and gradients still agree."""
    try:
        run_ranks(_verify_on_rank, _pack(case), world_size=2, timeout=_TIMEOUT)
    except RankFailedError as error:
        if isinstance(error.__cause__, VerifyError):
            raise not_equivalent(case, f"on rank {error.first}: {error.__cause__}") from error
        raise CheckError(
            "it failed on two ranks",
            required="the model with this step runs forward and backward on two ranks",
            got=str(error),
            hint="the traceback of each rank is above; every rank must reach the same collectives in the same order",
        ) from error


def _verify_on_rank(parcel: P2PMessage) -> None:
    contents = parcel.unpack()
    model, batch = contents.pop("model"), contents.pop("inputs")
    case = Case(model=lambda: model, inputs=lambda: batch, **contents)
    from slapo_core.verification import verify

    bench: Bench = prepare(case, mesh_size=2)
    bench.apply()
    bench.apply_after()
    verify(bench.schedule, batch)


def _pack(case: Case) -> P2PMessage:
    contents: dict[str, Any] = {
        "primitive": case.value(),
        "model": build_model(case),
        "inputs": build_inputs(case),
        "path": case.path,
        "before": [(path, made(step)) for path, step in case.before],
        "after": [(path, made(step)) for path, step in case.after],
        "mesh": case.mesh,
    }
    return pack(contents)
