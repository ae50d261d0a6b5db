"""Run tasks of checks on the ranks of a mesh, in few launches."""

from __future__ import annotations

import copy
import functools
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slapo_core.errors import RankFailedError, WeightsError
from slapo_core.layout import MESH_DIMS, Mesh
from slapo_runtime.correspondence import Correspondence
from slapo_runtime.correspondence.storage import sharded_over
from slapo_runtime.initialization.initializers import copy_on_meta
from slapo_runtime.launcher import preload_modules, run_ranks
from slapo_runtime.replicas import replicas_of
from slapo_testing.bench import seeded
from slapo_testing.check import CheckError
from slapo_testing.device import backend_for, is_shared, move
from slapo_testing.dialects.bench import DialectBench, ScheduleSnapshot, Training, open_bench, train
from slapo_testing.dialects.case import DialectCase, regression_steps
from slapo_testing.pickled import Pickled, pack
from slapo_testing.private import tree_map_only

_PATIENCE = timedelta(seconds=60)  # for which a rank waits for the builds of others


@dataclass(frozen=True)
class RankTask:
    """A task of all ranks of a mesh.

    Args:
        name: name of a function in ``_TASKS``.
        sizes: sizes of the mesh, e.g. ``(("dp", 2),)``.
    """

    name: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.values())


@dataclass(frozen=True)
class MeshTraining:
    """The results of training on one rank.

    Args:
        clipped: three steps with the first optimizer and ``max_grad_norm``.
        begun: two steps with the last optimizer, then saved.
        evaluated: loss of the third batch in evaluation mode after these steps.
        resumed: two further steps, from the checkpoint of one process.
        initial: state dict of a model built from the meta device; empty if the model cannot be initialized.
        rank0_only: names of ``state_dict(rank0_only=True)``.
    """

    clipped: Training
    begun: Training
    evaluated: torch.Tensor
    resumed: Training
    initial: dict[str, torch.Tensor]
    rank0_only: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """The outcome on one rank of a build that must fail.

    Args:
        error: names of the error's class and its bases; empty if an engine was built.
        text: text of the error.
        left: changes to the schedule and its model, one line each.
        unusable: error of a second, correct build; empty if it succeeded.
    """

    error: tuple[str, ...] = ()
    text: str = ""
    left: tuple[str, ...] = ()
    unusable: str = ""


def run_tasks(pickled: Pickled, tasks: Sequence[tuple[RankTask, str, str]]) -> list[Any]:
    """Run tasks on this rank.

    Args:
        pickled: the fields of the case, and its batches.
        tasks: a task, the directory of a checkpoint of one process, and a directory to save to.
    """
    contents = pickled.unpack()
    model, batches = contents.pop("model"), contents.pop("batches")
    case = DialectCase(model=lambda: copy.deepcopy(model), batch=lambda: copy.deepcopy(batches[0]), **contents)
    with open_bench(case) as bench:
        batches = move(batches, bench.device)
        return [_TASKS[task.name](bench, task.mesh, batches, own, others) for task, others, own in tasks]


def _train(bench: DialectBench, sizes: dict[str, int], batches: list[Any], own: str, others: str) -> MeshTraining:
    def engine_for(optimizer: Any, **options: Any) -> Any:
        return bench.engine(bench.schedule(steps=True, mesh=sizes), optimizer=optimizer, **options)

    first, last = bench.case.optimizers[0], bench.case.optimizers[-1]
    mesh = bench.schedule(mesh=sizes).mesh
    assert mesh is not None
    shares = [_share(batch, mesh) for batch in batches]
    clipped = train(engine_for(first, max_grad_norm=clipping_norm(bench, batches)), shares[:3])
    engine = engine_for(last)
    begun = train(engine, shares[:2])
    with seeded():
        evaluated = engine.eval_step(shares[2]).loss
    names = tuple(engine.state_dict(rank0_only=True))
    engine.save(own)
    engine = engine_for(last)
    engine.load(others)
    resumed = train(engine, shares[2:], first=2)
    return MeshTraining(clipped.cpu(), begun.cpu(), evaluated.cpu(), resumed.cpu(), _initial(bench, sizes), names)


def _initial(bench: DialectBench, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    schedule = bench.schedule(copy_on_meta(bench.model()), steps=True, mesh=sizes)
    try:
        state = bench.engine(schedule, seed=3).state_dict()
    except WeightsError:
        return {}
    return {name: tensor.cpu() for name, tensor in state.items()}


def clipping_norm(bench: DialectBench, batches: Sequence[Any]) -> float:
    """Return a norm that all gradients of three steps exceed."""
    return 0.5 * min(map(float, bench.train_in_plain_torch(batches[:3], max_grad_norm=1e6).norms))


def _share(batch: Any, mesh: Mesh) -> Any:
    """Return this replica's samples."""
    replicas, own = mesh.size("dp"), mesh.rank("dp")
    return tree_map_only(torch.Tensor, lambda tensor: tensor.chunk(replicas)[own] if tensor.dim() else tensor, batch)


def _unsupported(bench: DialectBench, sizes: dict[str, int], *_: Any) -> Refusal:
    return _refusal(bench, bench.schedule(mesh=sizes), lambda schedule: bench.engine(schedule), again=False)


def _other_options(bench: DialectBench, sizes: dict[str, int], *_: Any) -> Refusal:
    def build(schedule: Any) -> Any:
        return bench.build_with(schedule, bench.case.config if schedule.mesh.global_rank == 0 else {})

    return _refusal(bench, bench.schedule(steps=True, mesh=sizes), build)


def _fault(bench: DialectBench, sizes: dict[str, int], *_: Any) -> Refusal:
    def build(schedule: Any) -> Any:
        def optimizer(parameters: Any) -> Any:
            if schedule.mesh.global_rank == 1:
                raise ValueError("no optimizer on this rank")
            return bench.case.optimizers[0](parameters)

        return bench.engine(schedule, optimizer=optimizer)

    return _refusal(bench, bench.schedule(steps=True, mesh=sizes), build)


def _diverged(bench: DialectBench, sizes: dict[str, int], batches: list[Any], own: str, *_: Any) -> tuple[str, Any]:
    schedule = bench.schedule(steps=True, mesh=sizes)
    copies = [held for held in replicas_of(Correspondence.of(schedule)[0]) if isinstance(held.value, nn.Parameter)]
    mesh, engine = schedule.mesh, bench.engine(schedule)
    assert mesh is not None
    here = dict(engine.module.named_parameters(remove_duplicate=False))  # of a pipeline, this rank's
    shards = {name: set(sharded_over(parameter)) for name, parameter in here.items()}
    still = [held.name for held in copies if set(held.over) - shards.get(held.name, set())]
    name = _on_last_and_another_rank(engine, still, bench.device)
    if name is None:
        return "", {}
    train(engine, [_share(batches[0], mesh)])
    with torch.no_grad():
        if mesh.global_rank == mesh.world_size - 1:
            engine.module.get_parameter(name).add_(1)
    found = {
        "check_replicas()": _outcome(engine.check_replicas),
        "save()": _outcome(lambda: engine.save(f"{own}-parted")),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the differing replicas
        found["check_replicas(repair=True) again"] = _outcome(lambda: engine.check_replicas(repair=True))
    return name, {**found, "check_replicas() again": _outcome(engine.check_replicas)}


def _on_last_and_another_rank(engine: Any, names: Sequence[str], device: torch.device) -> str | None:
    """Return the first of these parameters on the last rank and another one: stages may lack it."""
    import torch.distributed as dist

    held_here = {name for name, parameter in engine.module.named_parameters() if not parameter.is_meta}
    here = torch.tensor([name in held_here for name in names], dtype=torch.int64, device=device)
    everywhere = [torch.empty_like(here) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, here)
    count = torch.stack(everywhere).sum(0)
    return next(
        (name for name, last, held in zip(names, everywhere[-1], count, strict=True) if last and held > 1), None
    )


def _other_batch(bench: DialectBench, sizes: dict[str, int], batches: list[Any], *_: Any) -> str:
    schedule = bench.schedule(steps=True, mesh=sizes)
    mesh, engine = schedule.mesh, bench.engine(schedule)
    assert mesh is not None
    batch = _share(batches[mesh.global_rank == mesh.world_size - 1], mesh)
    return _outcome(lambda: engine.train_step(batch))


def _outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - judged by the check
        return f"{type(error).__name__}: {error}"
    return "fine"


def _refusal(bench: DialectBench, schedule: Any, build: Callable[[Any], Any], *, again: bool = True) -> Refusal:
    import torch.distributed as dist

    before = ScheduleSnapshot(schedule)
    group = dist.new_group(timeout=_PATIENCE, backend="gloo")
    try:
        build(schedule)
    except Exception as error:  # noqa: BLE001 - judged by the check
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        refusal = Refusal(kinds, str(error), tuple(before.differences()))
    else:
        refusal = Refusal()
    failed = torch.tensor(int(bool(refusal.error)), device="cpu")  # torch's collectives of objects need numpy
    dist.all_reduce(failed, op=dist.ReduceOp.MIN, group=group)
    if not again or not failed:
        return refusal
    unusable = ""
    try:
        bench.engine(schedule)
    except Exception as error:  # noqa: BLE001 - as above
        unusable = f"{type(error).__name__}: {error}"
    dist.barrier(group=group)
    return replace(refusal, unusable=unusable)


_TASKS: dict[str, Callable[..., Any]] = {
    "train": _train,
    "unsupported": _unsupported,
    "other_options": _other_options,
    "fault": _fault,
    "diverged": _diverged,
    "other_batch": _other_batch,
}


_TIMEOUT = 120.0  # seconds of a launch
_STEPS_NEED = ("shard", "sync")  # primitives of the default steps on ``tp``


def meshes(bench: DialectBench) -> dict[str, Mapping[str, int] | str]:
    """Return the meshes to try by name; or the reason why a mesh cannot be tried."""
    case = bench.case
    found: dict[str, Mapping[str, int] | str] = {}
    for mesh in case.meshes if case.meshes is not None else ({"dp": 2}, {"tp": 2}):
        why = _cannot_share(bench, mesh)
        if case.meshes is None:
            why = _cannot(bench, *mesh) or why
        found[str(Mesh(mesh))] = dict(mesh) if why is None else why
    return found


def _cannot_share(bench: DialectBench, mesh: Mapping[str, int]) -> str | None:
    """Return why the ranks of a mesh cannot share an accelerator; None if they can."""
    ranks = math.prod(mesh.values())
    if not is_shared(bench.device, ranks):
        return None
    needs = f"the {ranks} ranks of the mesh {Mesh(mesh)} need an accelerator each (device '{bench.device}')"
    if bench.case.device_per_rank:
        return needs
    return f"{needs}: gloo cannot send its tensors between stages" if mesh.get("pp", 1) > 1 else None


def _cannot(bench: DialectBench, mesh_dim: str) -> str | None:
    if mesh_dim not in bench.dialect.supports:
        return f"the dialect does not support mesh_dim '{mesh_dim}'"
    if mesh_dim == "dp":
        return None
    if bench.case.steps is None:
        return f"the case has no schedule= that splits its model over mesh_dim '{mesh_dim}'"
    known = bench.registry.bare_names("primitives")
    missing = [name for name in _STEPS_NEED if name not in known]
    if bench.case.steps is regression_steps and missing:
        return f"no installed plugin provides {' and '.join(missing)}: pip install slapo-tp"
    return None


def unsupported_dim(bench: DialectBench) -> str | None:
    """Return a mesh dimension that the dialect does not support; None if it supports all."""
    return next((mesh_dim for mesh_dim in MESH_DIMS if mesh_dim not in bench.dialect.supports), None)


def on_ranks(bench: DialectBench, task: RankTask) -> list[Any]:
    """Return the results of a task from all ranks.

    Raises:
        CheckError: a rank raised, died or did not end.
    """
    results = _results(bench.case)
    found = results.of_all(bench, task.world_size)
    try:
        return found[task] if found is not None else results.launch(bench, [task])[task]
    except RankFailedError as error:
        raise CheckError(
            f"it failed on the mesh {Mesh(task.mesh)}",
            required="all ranks finish",
            got=str(error),
            hint="the tracebacks of the ranks are above; all ranks must run the same collectives in the same order",
        ) from error


def checkpoint_of(bench: DialectBench, task: RankTask) -> Path:
    """Return the directory in which the ranks saved a checkpoint."""
    return _results(bench.case).path(task)


class _Results:
    """The results of one case, and the directory of its checkpoints."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="slapo-dialect-")
        self._by_world_size: dict[int, dict[RankTask, list[Any]] | None] = {}

    def path(self, task: RankTask | None) -> Path:
        name = "one-process" if task is None else "-".join(f"{dim}{size}" for dim, size in task.sizes)
        return Path(self._directory.name) / name

    def of_all(self, bench: DialectBench, world_size: int) -> dict[RankTask, list[Any]] | None:
        """Run all tasks of this world size in one launch; None if it failed."""
        if world_size not in self._by_world_size:
            tasks = [task for task in _tasks(bench) if task.world_size == world_size]
            try:
                self._by_world_size[world_size] = self.launch(bench, tasks)
            except Exception:  # noqa: BLE001 - its task raises it again
                self._by_world_size[world_size] = None
        return self._by_world_size[world_size]

    def launch(self, bench: DialectBench, tasks: Sequence[RankTask]) -> dict[RankTask, list[Any]]:
        """Run tasks in order on one group of processes."""
        case, batches = bench.case, bench.batches(4)
        if any(task.name == "train" for task in tasks) and not self.path(None).exists():
            engine = bench.engine(bench.schedule(steps=True), optimizer=case.optimizers[-1])
            train(engine, batches[:2])
            engine.save(self.path(None))
        pickled = pack(
            {
                "target": case.target,
                "config": dict(case.config),
                "model": bench.model().cpu(),  # each rank has a device of its own
                "batches": move(batches, torch.device("cpu")),
                "loss": case.loss,
                "schedule": case.steps,
                "optimizers": tuple(case.optimizers),
                "dtype": case.dtype,
                "device": case.device,
            }
        )
        preload_modules("torch._dynamo", run_tasks.__module__)  # optimizers import torch._dynamo, which takes seconds
        arguments = [(task, str(self.path(None)), str(self.path(task))) for task in tasks]
        ranks = tasks[0].world_size
        backend = backend_for(bench.device, ranks)
        by_rank = run_ranks(run_tasks, pickled, arguments, world_size=ranks, timeout=_TIMEOUT, backend=backend)
        return dict(zip(tasks, map(list, zip(*by_rank, strict=True)), strict=True))


@functools.lru_cache(maxsize=4)
def _results(case: DialectCase) -> _Results:
    return _Results()


def _tasks(bench: DialectBench) -> list[RankTask]:
    usable = [tuple(mesh.items()) for mesh in meshes(bench).values() if not isinstance(mesh, str)]
    tasks = [RankTask("train", sizes) for sizes in usable]
    mesh_dim = unsupported_dim(bench)
    if mesh_dim is not None:
        tasks.append(RankTask("unsupported", ((mesh_dim, 2),)))
    for sizes in usable[:1]:
        tasks += [RankTask("other_options", sizes), RankTask("fault", sizes), RankTask("diverged", sizes)]
    split = [sizes for sizes in usable if dict(sizes).get("tp", 1) > 1 and dict(sizes).get("dp", 1) == 1]
    tasks += [RankTask("other_batch", sizes) for sizes in split[:1]]
    return tasks
