"""Starts the ranks for the checks: in as few launches as can be, because starting processes is slow."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slapo_core.errors import RankFailedError
from slapo_core.ranks.launcher import preload_modules, run_ranks
from slapo_core.spec.mesh import MESH_DIMS, Mesh
from slapo_core.testing.check import CheckError
from slapo_core.testing.dialects.bench import DialectBench
from slapo_core.testing.dialects.case import DialectCase
from slapo_core.testing.dialects.models import regression_steps
from slapo_core.testing.dialects.parts import Part, run_parts
from slapo_core.testing.dialects.training import train
from slapo_core.testing.sending import pack

__all__ = ["checkpoint_of", "meshes", "on_ranks", "unsupported_dim"]

_TIMEOUT = 120.0  # seconds for everything that is launched at once
_STEPS_NEED = ("shard", "sync")  # the primitives that the default steps use on ``tp``


def meshes(bench: DialectBench) -> dict[str, Mapping[str, int] | str]:
    """The meshes to try, by the words for them; a text in the place of one says why it cannot be tried."""
    case = bench.case
    if case.meshes is not None:
        return {str(Mesh(mesh)): dict(mesh) for mesh in case.meshes}
    found: dict[str, Mapping[str, int] | str] = {}
    for mesh_dim in ("dp", "tp"):
        sizes = {mesh_dim: 2}
        why = _cannot(bench, mesh_dim)
        found[str(Mesh(sizes))] = sizes if why is None else why
    return found


def _cannot(bench: DialectBench, mesh_dim: str) -> str | None:
    if mesh_dim not in bench.dialect.supports:
        return f"the dialect does not support mesh_dim '{mesh_dim}'"
    if mesh_dim == "dp":
        return None
    if bench.case.steps is None:
        return f"the case has no schedule=, which splits its model over mesh_dim '{mesh_dim}'"
    known = bench.registry.bare_names("primitives")
    missing = [name for name in _STEPS_NEED if name not in known]
    if bench.case.steps is regression_steps and missing:
        return f"no installed plugin provides {' and '.join(missing)}: pip install slapo-tp"
    return None


def unsupported_dim(bench: DialectBench) -> str | None:
    """A mesh dimension that the dialect does not support."""
    return next((mesh_dim for mesh_dim in MESH_DIMS if mesh_dim not in bench.dialect.supports), None)


def on_ranks(bench: DialectBench, part: Part) -> list[Any]:
    """What every rank gave for a part.

    Raises:
        CheckError: a rank raised, died or did not end.
    """
    results = _results(bench.case)
    found = results.of_all(bench, part.world_size)
    try:
        return found[part] if found is not None else results.launch(bench, [part])[part]
    except RankFailedError as error:
        raise CheckError(
            f"it failed on the mesh {Mesh(part.mesh)}",
            required="every rank comes to the end",
            got=str(error),
            hint="the traceback of each rank is above; every rank must reach the same collectives in the same order",
        ) from error


def checkpoint_of(bench: DialectBench, part: Part) -> Path:
    """Where the ranks saved a checkpoint."""
    return _results(bench.case).path(part)


class _Results:
    """The results of one case, and the directory in which processes meet."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="slapo-dialect-")
        self._by_world_size: dict[int, dict[Part, list[Any]] | None] = {}

    def path(self, part: Part | None) -> Path:
        name = "one-process" if part is None else "-".join(f"{dim}{size}" for dim, size in part.sizes)
        return Path(self._directory.name) / name

    def of_all(self, bench: DialectBench, world_size: int) -> dict[Part, list[Any]] | None:
        """Every part with this many ranks, in one launch; None where that failed, so that each is to be tried alone."""
        if world_size not in self._by_world_size:
            parts = [part for part in _parts(bench) if part.world_size == world_size]
            try:
                self._by_world_size[world_size] = self.launch(bench, parts)
            except Exception:  # noqa: BLE001 - the part that it comes from raises it again
                self._by_world_size[world_size] = None
        return self._by_world_size[world_size]

    def launch(self, bench: DialectBench, parts: Sequence[Part]) -> dict[Part, list[Any]]:
        """Run these parts, one after the other, on one group of processes."""
        case, batches = bench.case, bench.batches(4)
        if any(part.name == "train" for part in parts) and not self.path(None).exists():
            engine = bench.engine(bench.schedule(steps=True), optimizer=case.optimizers[-1])
            train(engine, batches[:2])
            engine.save(self.path(None))
        parcel = pack(
            {
                "target": case.target,
                "config": dict(case.config),
                "model": bench.model(),
                "batches": batches,
                "loss": case.loss,
                "schedule": case.steps,
                "optimizers": tuple(case.optimizers),
                "dtype": case.dtype,
            }
        )
        preload_modules("torch._dynamo", run_parts.__module__)  # every optimizer imports the first, in seconds
        tasks = [(part, str(self.path(None)), str(self.path(part))) for part in parts]
        by_rank = run_ranks(run_parts, parcel, tasks, world_size=parts[0].world_size, timeout=_TIMEOUT)
        return dict(zip(parts, map(list, zip(*by_rank, strict=True)), strict=True))


@functools.lru_cache(maxsize=4)
def _results(case: DialectCase) -> _Results:
    return _Results()


def _parts(bench: DialectBench) -> list[Part]:
    usable = [tuple(mesh.items()) for mesh in meshes(bench).values() if not isinstance(mesh, str)]
    parts = [Part("train", sizes) for sizes in usable]
    mesh_dim = unsupported_dim(bench)
    if mesh_dim is not None:
        parts.append(Part("unsupported", ((mesh_dim, 2),)))
    for sizes in usable[:1]:
        parts += [Part("other_options", sizes), Part("fault", sizes), Part("parted", sizes)]
    parts += [Part("other_batch", sizes) for sizes in usable if dict(sizes).get("tp", 1) > 1][:1]
    return parts
