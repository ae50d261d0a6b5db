"""Check that ranks train as one process, fail together, and detect diverged replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slapo_core.errors import BuildError, WeightsError
from slapo_core.layout import MESH_DIMS
from slapo_testing.bench import SEED
from slapo_testing.check import CheckError, NotApplicable
from slapo_testing.dialects.bench import DialectBench, Training, evaluate_in_plain_torch, require_equal, train
from slapo_testing.dialects.launch import (
    MeshTraining,
    RankTask,
    Refusal,
    checkpoint_of,
    clipping_norm,
    meshes,
    on_ranks,
    unsupported_dim,
)

_REPLICAS = "average the gradients over mesh.group('dp') before context.clip_gradients(), which is a collective too"
_SPLIT = "leave collectives to the schedule's steps, clipping to context.clip_gradients(), names to context.state"
_TOGETHER = "call context.make_optimizer(); use context.together('making ...') around other calls that may fail"


def unsupported_mesh_is_refused(bench: DialectBench) -> None:
    """An unsupported mesh dimension is a BuildError that names it, before any change."""
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
    refusals = on_ranks(bench, RankTask("unsupported", ((mesh_dim, 2),)))
    for rank, refusal in enumerate(refusals):
        _require_refusal(refusal, rank, "BuildError", names=f"'{mesh_dim}'", what=f"a mesh with {mesh_dim}=2")


def replicas_train_as_one_process(bench: DialectBench) -> None:
    """Replicas with shares of each batch train as one process with the full batch."""
    for task in _trained(bench, split=False):
        _compare(bench, task, hint=_REPLICAS)


def split_model_trains_as_one_process(bench: DialectBench) -> None:
    """A model split over ranks trains as the plain model, with the reference model's state dict."""
    for task in _trained(bench, split=True):
        _compare(bench, task, hint=_SPLIT)


def failure_on_one_rank_ends_the_build_on_all(bench: DialectBench) -> None:
    """The error of an optimizer factory on one rank ends the build on all ranks, which name the rank."""
    refusals = on_ranks(bench, _first_mesh(bench, "fault"))
    for rank, refusal in enumerate(refusals):
        if not refusal.error or refusal.unusable or refusal.left or (rank != 1 and "rank 1" not in refusal.text):
            _raise_for(refusal, rank, "a failing optimizer factory on rank 1", "an error that names rank 1")


def other_options_on_a_rank_are_refused(bench: DialectBench) -> None:
    """Different options on ranks are refused on all ranks, before any change."""
    task = _first_mesh(bench, "other_options")
    schedule, dialect = bench.schedule(steps=True), bench.dialect()
    try:
        defaults = dialect.plan(schedule, {}).config
    except BuildError as error:
        raise NotApplicable(f"there are no other options to build with: {error.message}") from error
    if defaults == dialect.plan(schedule, dict(bench.case.config)).config:
        raise NotApplicable("the case has no config= that differs from the defaults")
    for rank, refusal in enumerate(on_ranks(bench, task)):
        _require_refusal(refusal, rank, "RankMismatchError", names="option", what="another option on rank 1")


def _trained(bench: DialectBench, *, split: bool) -> Iterator[RankTask]:
    chosen, reasons = [], []
    for words, mesh in meshes(bench).items():
        if isinstance(mesh, str):
            if ("dp" in words) is not split:
                reasons.append(mesh)
        elif any(size > 1 for mesh_dim, size in mesh.items() if mesh_dim != "dp") is split:
            chosen.append(RankTask("train", tuple(mesh.items())))
    if not chosen:
        raise NotApplicable("; ".join(reasons) or "none of the case's meshes= applies")
    yield from chosen


def _first_mesh(bench: DialectBench, name: str) -> RankTask:
    usable = [mesh for mesh in meshes(bench).values() if not isinstance(mesh, str)]
    if not usable:
        raise NotApplicable("; ".join(map(str, meshes(bench).values())) or "the case has no meshes=")
    return RankTask(name, tuple(usable[0].items()))


def _compare(bench: DialectBench, task: RankTask, *, hint: str) -> None:
    results: list[MeshTraining] = on_ranks(bench, task)
    batches, last = bench.batches(4), bench.case.optimizers[-1]
    begun = bench.train_in_plain_torch(batches[:2], optimizer=last)
    full = bench.train_in_plain_torch(batches, optimizer=last)
    resumed = Training(full.losses[2:], (), full.state)
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
        for rank, own in enumerate(_with_losses_of_all(got[what], task)):
            under = f"on the mesh {task.mesh}, rank {rank} ({what})"
            bench.require_same(plain.named(), own.named(), under=under, hint=hint)
    _require_names(results, begun)
    _require_initial_values(bench, results, task)
    engine = bench.engine(bench.schedule(bench.model(seed=SEED + 99)), optimizer=last)
    engine.load(checkpoint_of(bench, task))
    under = f"resumed by one process from a checkpoint of the mesh {task.mesh}"
    bench.require_same(resumed.named(), train(engine, batches[2:], first=2).named(), under=under, hint=hint)


def _evaluated(bench: DialectBench, training: Training, batch: Any) -> torch.Tensor:
    model = bench.model()
    model.load_state_dict(training.state)
    return evaluate_in_plain_torch(model, batch, bench.case.loss)[0]


def _with_losses_of_all(trainings: list[Training], task: RankTask) -> list[Training]:
    """Average the losses of replicas, which are means of their own samples."""
    if task.mesh.get("dp", 1) == 1:
        return trainings
    losses = [torch.stack(step).mean() for step in zip(*(one.losses for one in trainings), strict=True)]
    return [Training(losses, one.norms, one.state) for one in trainings]


def _require_names(results: list[MeshTraining], training: Training) -> None:
    for rank, result in enumerate(results):
        if result.rank0_only != (tuple(training.state) if rank == 0 else ()):
            raise CheckError(
                f"state_dict(rank0_only=True) returns {len(result.rank0_only)} tensors on rank {rank}",
                required="all tensors on rank 0, none on other ranks",
                got=", ".join(result.rank0_only) or "no tensors",
                hint="return context.state.state_dict(rank0_only=rank0_only)",
            )


def _require_initial_values(bench: DialectBench, results: list[MeshTraining], task: RankTask) -> None:
    try:
        engine = bench.engine(bench.schedule(bench.meta_model(), steps=True), target="torch", seed=3)
    except WeightsError:
        return  # the model cannot be initialized, as meta_model_is_given_its_values reports
    expected = engine.state_dict()
    for rank, result in enumerate(results):
        require_equal(
            expected,
            result.initial,
            f"a model on the meta device gets other values on the mesh {task.mesh}, rank {rank}",
            required="equal initial values on all meshes, for equal seeds",
            hint="leave the values to build(); with takes_tensors = True: for tensor in context.materialize(): ...",
        )


def _require_refusal(refusal: Refusal, rank: int, error: str, *, names: str, what: str) -> None:
    if error not in refusal.error or names not in refusal.text or refusal.left or refusal.unusable:
        _raise_for(refusal, rank, what, f"{error} that names {names}")


def _raise_for(refusal: Refusal, rank: int, what: str, required: str) -> None:
    got = f"{refusal.error[0]}: {refusal.text}" if refusal.error else "an engine"
    if refusal.left:
        got += f"\nchanged: {'; '.join(refusal.left[:3])}"
    if refusal.unusable:
        got += f"\na second, correct build: {refusal.unusable}"
    raise CheckError(
        f"{what} is not refused correctly on rank {rank}",
        required=f"{required}, an unchanged model, and a second build that succeeds",
        got=got,
        hint=_TOGETHER,
    )


def diverged_replicas_are_found(bench: DialectBench) -> None:
    """check_replicas() and save() name a replica changed on one rank, on all ranks, and can repair it."""
    task = _first_mesh(bench, "diverged")
    results = on_ranks(bench, task)
    if not results[0][0]:
        raise NotApplicable(f"no parameter has replicas on two ranks of the mesh {task.mesh}")
    for rank, (name, found) in enumerate(results):
        for call, text in found.items():
            # A runtime may have a second value for the forward: 'up.weight in the forward'.
            kinds = ("ReplicaError: replicas of ", "RankMismatchError: ")
            starts = [f"{kind}'{name}{end}" for kind in kinds for end in ("'", " ")]
            named = text.startswith(tuple(starts))
            wrong = text != "fine" if "again" in call else not named
            if wrong:
                raise CheckError(
                    f"{call} does not name '{name}' on rank {rank}, which was changed on the last rank"
                    if "again" not in call
                    else f"{call} fails on rank {rank} after check_replicas(repair=True)",
                    required=f"RankMismatchError that names '{name}'" if "again" not in call else "no error",
                    got=text if text != "fine" else "no error",
                    hint="check_replicas(repair=False): context.state.check_replicas(optimizer=self.optimizer, "
                    "repair=repair); save(directory): context.state.save(directory, optimizer=self.optimizer)",
                )


def another_batch_on_a_rank_is_refused(bench: DialectBench) -> None:
    """Different batches of tensor-parallel ranks in the first step are refused on all ranks."""
    reasons, chosen = [], None
    for words, mesh in meshes(bench).items():
        if isinstance(mesh, str):
            reasons += [mesh] * ("tp" in words)
        elif mesh.get("tp", 1) > 1 and mesh.get("dp", 1) == 1:  # other replicas would wait
            chosen = chosen or RankTask("other_batch", tuple(mesh.items()))
    if chosen is None:
        raise NotApplicable("; ".join(reasons) or "none of the case's meshes= splits over mesh_dim 'tp' alone")
    for rank, text in enumerate(on_ranks(bench, chosen)):
        if not text.startswith("RankMismatchError: ranks disagree about the batch"):
            raise CheckError(
                f"another batch on the last rank is not refused on rank {rank}",
                required="RankMismatchError before the forward",
                got=text if text != "fine" else "a training step",
                hint="call context.compute_loss(batch), which compares the first batch",
            )
