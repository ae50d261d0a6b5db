"""The scheduled model computes what the untouched one does, on two real processes."""

from __future__ import annotations

import io
import os
import pickle
import sys
from typing import Any

from slapo_core.errors import RankFailedError, VerifyError
from slapo_core.ranks.launcher import run_ranks
from slapo_core.ranks.process import _make_importable
from slapo_core.testing.bench import Bench, build_inputs, build_model, prepare
from slapo_core.testing.case import Case, made
from slapo_core.testing.check import CheckError
from slapo_core.testing.checks.one_rank import not_equivalent

__all__ = ["forward_and_gradients_on_2_ranks"]

_TIMEOUT = 120.0  # seconds


def forward_and_gradients_on_2_ranks(case: Case) -> None:
    """On two gloo ranks, in the last mesh dimension or each for itself, outputs and gradients still agree."""
    payload, origins = _pack(case)
    try:
        run_ranks(_verify_on_rank, payload, origins, world_size=2, timeout=_TIMEOUT)
    except RankFailedError as error:
        if isinstance(error.__cause__, VerifyError):
            raise not_equivalent(case, f"on rank {error.first}: {error.__cause__}") from error
        raise CheckError(
            "it failed on two ranks",
            required="the model with this step runs forward and backward on two ranks",
            got=str(error),
            hint="the traceback of each rank is above; every rank must reach the same collectives in the same order",
        ) from error


def _verify_on_rank(payload: bytes, origins: list[tuple[str, str]]) -> None:
    for name, file in origins:
        _make_importable(name, file)
    contents = pickle.loads(payload)  # made by the parent of this very process
    model, batch = contents.pop("model"), contents.pop("inputs")
    case = Case(model=lambda: model, inputs=lambda: batch, **contents)
    from slapo_core.verification import verify

    bench: Bench = prepare(case, mesh_size=2)
    bench.apply()
    bench.apply_after()
    verify(bench.schedule, batch)


def _pack(case: Case) -> tuple[bytes, list[tuple[str, str]]]:
    """What the ranks need, and the files of the modules that it refers to: test files are not on ``sys.path``."""
    contents: dict[str, Any] = {
        "primitive": case.value(),
        "model": build_model(case),
        "inputs": build_inputs(case),
        "path": case.path,
        "before": [(path, made(step)) for path, step in case.before],
        "after": [(path, made(step)) for path, step in case.after],
        "mesh": case.mesh,
    }
    for field, value in contents.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise CheckError(
                f"the case's {field} cannot be sent to other processes",
                required="a model of classes defined at the top level of a module, without lambdas or inner functions",
                got=f"{type(error).__name__}: {error}",
                hint="move the class or function to the top level of a module; model= and inputs= themselves may be "
                "lambdas, because what they make is sent",
            ) from error
    buffer = io.BytesIO()
    pickler = _NamingPickler(buffer)
    pickler.dump(contents)
    return buffer.getvalue(), pickler.origins()


class _NamingPickler(pickle.Pickler):
    """Remembers the modules of the classes and functions that it names."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._modules: dict[str, None] = {}

    def reducer_override(self, value: Any) -> Any:
        # Called for every object that is not of a built-in type, classes and functions included.
        module = getattr(value if isinstance(value, type) else type(value), "__module__", None)
        for name in (module, getattr(value, "__module__", None)):
            if isinstance(name, str):
                self._modules.setdefault(name, None)
        return NotImplemented

    def origins(self) -> list[tuple[str, str]]:
        found = []
        for name in self._modules:
            file = getattr(sys.modules.get(name), "__file__", None)
            if name != "__main__" and file is not None and name.partition(".")[0] not in ("torch", "slapo_core"):
                found.append((name, os.path.abspath(file)))
        return found
