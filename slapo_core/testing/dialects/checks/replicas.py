"""Ranks that hold copies are kept alike: what parts them is told."""

from __future__ import annotations

from slapo_core.testing.check import CheckError, NotApplicable
from slapo_core.testing.dialects.bench import DialectBench
from slapo_core.testing.dialects.launch import meshes, on_ranks
from slapo_core.testing.dialects.parts import Part

__all__ = ["another_batch_on_a_rank_is_refused", "parted_replicas_are_found"]


def parted_replicas_are_found(bench: DialectBench) -> None:
    """A copy that is changed on one rank is named by check_replicas() and save(), on all ranks, and can be repaired."""
    usable = [mesh for mesh in meshes(bench).values() if not isinstance(mesh, str)]
    if not usable:
        raise NotApplicable("; ".join(map(str, meshes(bench).values())) or "the case has no meshes=")
    results = on_ranks(bench, Part("parted", tuple(usable[0].items())))
    if not results[0][0]:
        raise NotApplicable(f"no parameter has copies on two ranks of the mesh {dict(usable[0])}")
    for rank, (name, found) in enumerate(results):
        for call, text in found.items():
            # A runtime may keep a value for the forward beside that of its optimizer: 'up.weight in the forward'.
            kinds = ("ReplicaError: replicas of ", "RankMismatchError: ")
            starts = [f"{kind}'{name}{end}" for kind in kinds for end in ("'", " ")]
            named = text.startswith(tuple(starts))
            wrong = text != "fine" if "again" in call else not named
            if wrong:
                raise CheckError(
                    f"{call} does not tell on rank {rank} that '{name}' was changed on the last rank"
                    if "again" not in call
                    else f"{call} on rank {rank} does not work after check_replicas(repair=True)",
                    required=f"RankMismatchError that names '{name}'" if "again" not in call else "no error",
                    got=text if text != "fine" else "no error",
                    hint="check_replicas(repair=False): request.state.check_replicas(optimizer=self.optimizer, "
                    "repair=repair); save(directory): request.state.save(directory, optimizer=self.optimizer)",
                )


def another_batch_on_a_rank_is_refused(bench: DialectBench) -> None:
    """Tensor-parallel ranks that are given different batches in the first step are told so, all of them."""
    reasons, chosen = [], None
    for words, mesh in meshes(bench).items():
        if isinstance(mesh, str):
            reasons += [mesh] * ("tp" in words)
        elif mesh.get("tp", 1) > 1:
            chosen = chosen or Part("other_batch", tuple(mesh.items()))
    if chosen is None:
        raise NotApplicable("; ".join(reasons) or "none of the case's meshes= splits over mesh_dim 'tp'")
    for rank, text in enumerate(on_ranks(bench, chosen)):
        if not text.startswith("RankMismatchError: ranks disagree about the batch"):
            raise CheckError(
                f"another batch on the last rank is not refused on rank {rank}",
                required="RankMismatchError before the model runs",
                got=text if text != "fine" else "a training step",
                hint="let request.compute_loss(batch) call the model; it compares the first batch",
            )
