"""Check that several ranks train as one process, decide together, and find diverged replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slapo_core.errors import BuildError, WeightsError
from slapo_core.layout import MESH_DIMS
from slapo_testing.bench import SEED
from slapo_testing.check import CheckError, NotApplicable
from slapo_testing.dialects.bench import DialectBench, Training, differences, evaluate_in_plain_torch, train
from slapo_testing.dialects.launch import (
    MeshTraining,
    Part,
    Refusal,
    checkpoint_of,
    clipping_norm,
    meshes,
    on_ranks,
    unsupported_dim,
)

_REPLICAS = "average the gradients over mesh.group('dp') before context.clip_gradients(), which is a collective too"
_SPLIT = "leave collectives to the schedule's steps, clipping to context.clip_gradients(), names to context.state"
_TOGETHER = "let context.make_optimizer() call the factory; with context.together('making ...'): what else may fail"


def unsupported_mesh_is_refused(bench: DialectBench) -> None:
    """A mesh dimension that is not in supports is a BuildError that names it, before anything is touched."""
    supports = bench.dialect.supports
    if not isinstance(supports, frozenset) or supports - set(MESH_DIMS):
        raise CheckError(
            "supports is not a set of mesh dimensions",
            required=f"a frozenset of {', '.join(MESH_DIMS)}",
            got=repr(supports),
            hint='supports = frozenset({"dp"}), or frozenset() for one process',
        )
    mesh_dim = unsupported_dim(bench)
    if mesh_dim is None:
        raise NotApplicable("the dialect supports every mesh dimension")
    refusals = on_ranks(bench, Part("unsupported", ((mesh_dim, 2),)))
    for rank, refusal in enumerate(refusals):
        _require_refusal(refusal, rank, "BuildError", names=f"'{mesh_dim}'", what=f"a mesh with {mesh_dim}=2")


def replicas_train_as_one_process(bench: DialectBench) -> None:
    """Replicas, each with its share of every batch, take the steps of one process with the whole batch."""
    for part in _trained(bench, split=False):
        _compare(bench, part, hint=_REPLICAS)


def split_model_trains_as_one_process(bench: DialectBench) -> None:
    """A model that is split over ranks takes the steps of the plain model; its state is the reference model's."""
    for part in _trained(bench, split=True):
        _compare(bench, part, hint=_SPLIT)


def failure_on_one_rank_ends_the_build_on_all(bench: DialectBench) -> None:
    """An optimizer's factory that raises on one rank ends the build on every rank, and the others name that rank."""
    refusals = on_ranks(bench, _first_mesh(bench, "fault"))
    for rank, refusal in enumerate(refusals):
        if not refusal.error or refusal.unusable or refusal.left or (rank != 1 and "rank 1" not in refusal.text):
            _raise_for(refusal, rank, "an optimizer that cannot be made on rank 1", "an error that names rank 1")


def other_options_on_a_rank_are_refused(bench: DialectBench) -> None:
    """Ranks that build with different options are told so, all of them, before anything is touched."""
    part = _first_mesh(bench, "other_options")
    schedule, dialect = bench.schedule(steps=True), bench.dialect()
    try:
        defaults = dialect.plan(schedule, {}).config
    except BuildError as error:
        raise NotApplicable(f"there is nothing else to build with: {error.message}") from error
    if defaults == dialect.plan(schedule, dict(bench.case.config)).config:
        raise NotApplicable("the case has no config= that differs from the defaults")
    for rank, refusal in enumerate(on_ranks(bench, part)):
        _require_refusal(refusal, rank, "RankMismatchError", names="option", what="another option on rank 1")


def _trained(bench: DialectBench, *, split: bool) -> Iterator[Part]:
    chosen, reasons = [], []
    for words, mesh in meshes(bench).items():
        if isinstance(mesh, str):
            if ("dp" in words) is not split:
                reasons.append(mesh)
        elif any(size > 1 for mesh_dim, size in mesh.items() if mesh_dim != "dp") is split:
            chosen.append(Part("train", tuple(mesh.items())))
    if not chosen:
        raise NotApplicable("; ".join(reasons) or "none of the case's meshes= is of this sort")
    yield from chosen


def _first_mesh(bench: DialectBench, name: str) -> Part:
    usable = [mesh for mesh in meshes(bench).values() if not isinstance(mesh, str)]
    if not usable:
        raise NotApplicable("; ".join(map(str, meshes(bench).values())) or "the case has no meshes=")
    return Part(name, tuple(usable[0].items()))


def _compare(bench: DialectBench, part: Part, *, hint: str) -> None:
    results: list[MeshTraining] = on_ranks(bench, part)
    batches, last = bench.batches(4), bench.case.optimizers[-1]
    begun = bench.train_in_plain_torch(batches[:2], optimizer=last)
    whole = bench.train_in_plain_torch(batches, optimizer=last)
    resumed = Training(whole.losses[2:], (), whole.state)
    expected = {
        "clipped training": bench.train_in_plain_torch(batches[:3], max_grad_norm=clipping_norm(bench, batches)),
        "training": begun,
        "evaluation": Training([_evaluated(bench, begun, batches[2])], (), {}),
        "training from a checkpoint of one process": resumed,
    }
    got = {
        "clipped training": [result.clipped for result in results],
        "training": [result.begun for result in results],
        "evaluation": [Training([result.evaluated], (), {}) for result in results],
        "training from a checkpoint of one process": [result.resumed for result in results],
    }
    for what, plain in expected.items():
        for rank, own in enumerate(_with_losses_of_all(got[what], part)):
            under = f"on the mesh {part.mesh}, rank {rank} ({what})"
            bench.require_same(plain.named(), own.named(), under=under, hint=hint)
    _require_names(results, begun)
    _require_initial_values(bench, results, part)
    engine = bench.engine(bench.schedule(bench.model(seed=SEED + 99)), optimizer=last)
    engine.load(checkpoint_of(bench, part))
    under = f"resumed by one process from a checkpoint of the mesh {part.mesh}"
    bench.require_same(resumed.named(), train(engine, batches[2:], first=2).named(), under=under, hint=hint)


def _evaluated(bench: DialectBench, training: Training, batch: Any) -> torch.Tensor:
    model = bench.model()
    model.load_state_dict(training.state)
    return evaluate_in_plain_torch(model, batch, bench.case.loss)[0]


def _with_losses_of_all(trainings: list[Training], part: Part) -> list[Training]:
    """The loss of a replica is that of its own samples: their mean is that of all."""
    if part.mesh.get("dp", 1) == 1:
        return trainings
    losses = [torch.stack(step).mean() for step in zip(*(one.losses for one in trainings), strict=True)]
    return [Training(losses, one.norms, one.state) for one in trainings]


def _require_names(results: list[MeshTraining], training: Training) -> None:
    for rank, result in enumerate(results):
        if result.rank0_only != (tuple(training.state) if rank == 0 else ()):
            raise CheckError(
                f"state_dict(rank0_only=True) gives {len(result.rank0_only)} tensors on rank {rank}",
                required="all of them on rank 0, none on the others",
                got=", ".join(result.rank0_only) or "no tensors",
                hint="return context.state.state_dict(rank0_only=rank0_only)",
            )


def _require_initial_values(bench: DialectBench, results: list[MeshTraining], part: Part) -> None:
    try:
        engine = bench.engine(bench.schedule(bench.meta_model(), steps=True), target="torch", seed=3)
    except WeightsError:
        return  # the model cannot be initialized; meta_model_is_given_its_values says so
    expected = engine.state_dict()
    for rank, result in enumerate(results):
        lines = differences(expected, result.initial, tolerance=0)
        if lines:
            raise CheckError(
                f"a model on the meta device gets other values on the mesh {part.mesh}, rank {rank}",
                required="the same initial values on every mesh, for the same seed",
                got="\n".join(lines[:3]),
                hint="leave the values to build(); with takes_tensors = True: for tensor in context.materialize(): ...",
            )


def _require_refusal(refusal: Refusal, rank: int, error: str, *, names: str, what: str) -> None:
    if error not in refusal.error or names not in refusal.text or refusal.left or refusal.unusable:
        _raise_for(refusal, rank, what, f"{error} that names {names}")


def _raise_for(refusal: Refusal, rank: int, what: str, required: str) -> None:
    got = f"{refusal.error[0]}: {refusal.text}" if refusal.error else "an engine"
    if refusal.left:
        got += f"\nleft behind: {'; '.join(refusal.left[:3])}"
    if refusal.unusable:
        got += f"\nbuilding again, as it should be: {refusal.unusable}"
    raise CheckError(
        f"{what} is not refused on rank {rank} as it must be",
        required=f"{required}, the model unchanged, and a second build that works",
        got=got,
        hint=_TOGETHER,
    )


def diverged_replicas_are_found(bench: DialectBench) -> None:
    """A copy that is changed on one rank is named by check_replicas() and save(), on all ranks, and can be repaired."""
    part = _first_mesh(bench, "diverged")
    results = on_ranks(bench, part)
    if not results[0][0]:
        raise NotApplicable(f"no parameter has copies on two ranks of the mesh {part.mesh}")
    for rank, (name, found) in enumerate(results):
        for call, text in found.items():
            # A runtime may keep a second value for the forward: 'up.weight in the forward'.
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
                    hint="check_replicas(repair=False): context.state.check_replicas(optimizer=self.optimizer, "
                    "repair=repair); save(directory): context.state.save(directory, optimizer=self.optimizer)",
                )


def another_batch_on_a_rank_is_refused(bench: DialectBench) -> None:
    """Tensor-parallel ranks that are given different batches in the first step are told so, all of them."""
    reasons, chosen = [], None
    for words, mesh in meshes(bench).items():
        if isinstance(mesh, str):
            reasons += [mesh] * ("tp" in words)
        elif mesh.get("tp", 1) > 1 and mesh.get("dp", 1) == 1:  # other replicas are not told, and would wait
            chosen = chosen or Part("other_batch", tuple(mesh.items()))
    if chosen is None:
        raise NotApplicable("; ".join(reasons) or "none of the case's meshes= splits over mesh_dim 'tp' alone")
    for rank, text in enumerate(on_ranks(bench, chosen)):
        if not text.startswith("RankMismatchError: ranks disagree about the batch"):
            raise CheckError(
                f"another batch on the last rank is not refused on rank {rank}",
                required="RankMismatchError before the model runs",
                got=text if text != "fine" else "a training step",
                hint="let context.compute_loss(batch) call the model; it compares the first batch",
            )
