"""What each rank of a mesh does for the checks."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from slapo_core.errors import WeightsError
from slapo_core.spec.mesh import Mesh
from slapo_core.testing.bench import seeded
from slapo_core.testing.dialects.before import Before
from slapo_core.testing.dialects.bench import DialectBench, open_bench
from slapo_core.testing.dialects.case import DialectCase
from slapo_core.testing.dialects.training import Training, train
from slapo_core.testing.sending import P2PMessage
from slapo_core.weights.correspondence import Correspondence
from slapo_core.weights.initializers import copy_on_meta
from slapo_core.weights.replicas import replicas_of

__all__ = ["MeshTraining", "Part", "Refusal", "clipping_norm", "run_parts"]

_PATIENCE = timedelta(seconds=60)  # for which a rank whose build has ended waits for the others


@dataclass(frozen=True)
class Part:
    """Something that all ranks do.

    Args:
        name: of a function in ``_DO``.
        sizes: of the mesh, e.g. ``(("dp", 2),)``.
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
    """What training came to on one rank.

    Args:
        clipped: three steps with the first optimizer and ``max_grad_norm``.
        begun: two steps with the last optimizer, which were then saved.
        evaluated: the loss of the third batch in evaluation mode after these.
        resumed: two more, from the checkpoint of one process.
        initial: the state dict of a model that was on the meta device; empty where it cannot be initialized.
        rank0_only: the names of ``state_dict(rank0_only=True)``.
    """

    clipped: Training
    begun: Training
    evaluated: torch.Tensor
    resumed: Training
    initial: dict[str, torch.Tensor]
    rank0_only: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """What a build that must fail came to on one rank.

    Args:
        error: the names of the error's class and its bases; empty where an engine was built.
        text: the error's.
        left: what was left behind, one line each.
        unusable: the error of building again, as it should be; empty where that went well.
    """

    error: tuple[str, ...] = ()
    text: str = ""
    left: tuple[str, ...] = ()
    unusable: str = ""


def run_parts(parcel: P2PMessage, tasks: Sequence[tuple[Part, str, str]]) -> list[Any]:
    """Do everything that this rank is told.

    Args:
        parcel: the fields of the case, and its batches.
        tasks: a part, the directory of a checkpoint that one process saved, and one to save to.
    """
    contents = parcel.unpack()
    model, batches = contents.pop("model"), contents.pop("batches")
    case = DialectCase(model=lambda: copy.deepcopy(model), batch=lambda: copy.deepcopy(batches[0]), **contents)
    with open_bench(case) as bench:
        return [_DO[part.name](bench, part.mesh, batches, own, others) for part, others, own in tasks]


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
    return MeshTraining(clipped, begun, evaluated, resumed, _initial(bench, sizes), names)


def _initial(bench: DialectBench, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    schedule = bench.schedule(copy_on_meta(bench.model()), steps=True, mesh=sizes)
    try:
        return bench.engine(schedule, seed=3).state_dict()
    except WeightsError:
        return {}


def clipping_norm(bench: DialectBench, batches: Sequence[Any]) -> float:
    """A norm that every gradient of three steps exceeds."""
    return 0.5 * min(map(float, bench.train_by_hand(batches[:3], max_grad_norm=1e6).norms))


def _share(batch: Any, mesh: Mesh) -> Any:
    """This replica's samples."""
    replicas, place = mesh.size("dp"), mesh.rank("dp")
    return tree_map_only(torch.Tensor, lambda tensor: tensor.chunk(replicas)[place] if tensor.dim() else tensor, batch)


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


def _parted(bench: DialectBench, sizes: dict[str, int], batches: list[Any], own: str, *_: Any) -> tuple[str, Any]:
    schedule = bench.schedule(steps=True, mesh=sizes)
    copies = [held.name for held in replicas_of(Correspondence.of(schedule)[0]) if isinstance(held.value, nn.Parameter)]
    mesh, engine = schedule.mesh, bench.engine(schedule)
    assert mesh is not None
    name = _on_last_and_another_rank(engine, copies)
    if name is None:
        return "", {}
    train(engine, [_share(batches[0], mesh)])
    with torch.no_grad():
        if mesh.global_rank == mesh.world_size - 1:
            engine.module.get_parameter(name).add_(1)
    found = {"check_replicas()": _said(engine.check_replicas), "save()": _said(lambda: engine.save(f"{own}-parted"))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that says what differed
        found["check_replicas(repair=True) again"] = _said(lambda: engine.check_replicas(repair=True))
    return name, {**found, "check_replicas() again": _said(engine.check_replicas)}


def _on_last_and_another_rank(engine: Any, names: Sequence[str]) -> str | None:
    """Of these parameters the first one whose copy the last rank can change: stages keep it elsewhere, perhaps."""
    import torch.distributed as dist

    held_here = {name for name, parameter in engine.module.named_parameters() if not parameter.is_meta}
    here = torch.tensor([name in held_here for name in names], dtype=torch.int64)
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
    return _said(lambda: engine.train_step(batch))


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is: the check judges
        return f"{type(error).__name__}: {error}"
    return "fine"


def _refusal(bench: DialectBench, schedule: Any, build: Callable[[Any], Any], *, again: bool = True) -> Refusal:
    import torch.distributed as dist

    before = Before(schedule)
    group = dist.new_group(timeout=_PATIENCE)
    try:
        build(schedule)
    except Exception as error:  # noqa: BLE001 - whatever it is: the check judges
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


_DO: dict[str, Callable[..., Any]] = {
    "train": _train,
    "unsupported": _unsupported,
    "other_options": _other_options,
    "fault": _fault,
    "parted": _parted,
    "other_batch": _other_batch,
}
