"""Tensors that several ranks hold alike: which ones must agree, whether they do, and making them agree again.

A rank holds the whole of a tensor along every mesh dimension that its layout does not split: tensor-parallel ranks a
layer norm, and replicas (``dp``) everything. Nothing keeps such copies alike but that all of them are changed alike,
and what is read from them, a state dict, is the first one's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import RankMismatchError
from slapo_core.ranks.checksum import checksum
from slapo_core.ranks.facts import describe
from slapo_core.ranks.random_states import restore, torch_states
from slapo_core.ranks.world import World
from slapo_core.spec.mesh import DATA_DIMS
from slapo_core.weights.exchange import exchange_device, spread

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh
    from slapo_core.weights.correspondence import Correspondence

__all__ = [
    "Replica",
    "align_replicas",
    "check_replicas",
    "compare_all",
    "optimizer_replicas",
    "parted",
    "ranks_along",
    "replicas_of",
]

_SHOWN = 4  # names in a message
PARTED = (
    "ranks that hold copies must be given the same batch and the same seeds (torch.manual_seed), and be changed alike; "
    "engine.check_replicas() after each step finds the first one that parts them, and "
    "engine.check_replicas(repair=True) goes on with the first rank's values"
)


@dataclass(frozen=True)
class Replica:
    """Something on this rank that other ranks must hold bit for bit.

    Args:
        name: for messages and to find its copies, e.g. ``"encoder.layer.0.output.LayerNorm.weight"``.
        value: this rank's copy, a tensor; or a text that stands for a value of another kind.
        over: the mesh dimensions along which the ranks hold copies, e.g. ``("dp", "tp")``; each larger than 1.
        among: for one of them, the places along it that hold a copy, where not all do: ``(("pp", (0, 3)),)``.
    """

    name: str
    value: torch.Tensor | str
    over: tuple[str, ...]
    among: tuple[tuple[str, tuple[int, ...]], ...] = ()


def replicas_of(correspondence: Correspondence) -> list[Replica]:
    """Every tensor of a scheduled model of which other ranks hold copies, in registration order.

    Parameters are copies along every mesh dimension that does not split them: a piece of a split one has its copies
    along ``dp``, and one that several stages use along ``pp``. Buffers are so too, but for the
    dimensions along which ranks see other samples: running statistics are each replica's own there, and the first one's
    count. What no state dict holds is left out where a step added it.
    """
    mesh = correspondence.mesh
    if mesh is None or mesh.is_dry:
        return []
    found = []
    for live in correspondence.live():
        if not live.is_here:
            continue
        holders = correspondence.holders(live)
        apart = {mesh_dim for mesh_dim, _ in live.layout.shards()} | set(live.layout.partials())
        apart.update(mesh_dim for mesh_dim, ranks in holders.items() if len(ranks) == 1)
        if not live.is_parameter:
            apart.update(DATA_DIMS)
            if not live.is_persistent and not live.stands_for:
                continue
        over = tuple(mesh_dim for mesh_dim, size in mesh.sizes.items() if size > 1 and mesh_dim not in apart)
        if over:
            among = tuple((mesh_dim, ranks) for mesh_dim, ranks in holders.items() if mesh_dim in over)
            found.append(Replica(live.name, live.tensor, over, among))
    return found


def optimizer_replicas(correspondence: Correspondence, optimizer: torch.optim.Optimizer) -> list[Replica]:
    """What an optimiser keeps of which other ranks hold copies: its state, as the parameters, and its settings."""
    mesh, kind = correspondence.mesh, type(optimizer).__name__
    if mesh is None or mesh.is_dry:
        return []
    held = {id(replica.value): replica for replica in replicas_of(correspondence)}
    found = []
    for parameter, state in optimizer.state.items():
        if id(parameter) in held:
            one = held[id(parameter)]
            found += [Replica(f"{one.name}::{key}", _value(value), one.over, one.among) for key, value in state.items()]
    everywhere = tuple(mesh_dim for mesh_dim, size in mesh.sizes.items() if size > 1)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and everywhere:
                setting = f"{key} of {kind}" if number == 0 else f"{key} of group {number} of {kind}"
                found.append(Replica(setting, _value(value), everywhere))
    return found


def _value(value: Any) -> torch.Tensor | str:
    return value if isinstance(value, torch.Tensor) else describe(value)


def check_replicas(mesh: Mesh | None, replicas: Iterable[Replica], *, hint: str) -> None:
    """Hold the copies of every tensor against each other, by checksums: a collective over the mesh.

    Args:
        mesh: of the schedule.
        replicas: this rank's, from :func:`replicas_of`, or others of the same kind, such as an optimiser's state. One
            that a rank lacks differs from those that the others hold.
        hint: the way out.

    Raises:
        RankMismatchError: on every rank; it names the tensors that differ, the ranks, and what each of them holds.
    """
    if mesh is None or mesh.world_size == 1 or mesh.is_dry:
        return
    with World(mesh) as world:
        message = parted(world, mesh, replicas)
    if message is not None:
        raise RankMismatchError(message, hint=hint)


def compare_all(
    correspondence: Correspondence, optimizer: torch.optim.Optimizer | None, *, random: bool, repair: bool
) -> None:
    """As :func:`check_replicas`, for a whole model: its tensors, an optimiser's state, and where torch draws.

    Args:
        correspondence: of the model.
        optimizer: over its parameters; None compares none.
        random: whether tensor-parallel ranks must stand at the same random numbers.
        repair: give all ranks the first one's values, with a warning that says what differed.

    Raises:
        RankMismatchError: on every rank; with ``repair``, where a setting differs that is no tensor.
    """
    mesh = correspondence.mesh
    if mesh is None or mesh.world_size == 1 or mesh.is_dry:
        return
    replicas = replicas_of(correspondence)
    if optimizer is not None:
        replicas += optimizer_replicas(correspondence, optimizer)
    states = {}
    if random and mesh.size("tp") > 1:
        states = {device: torch.tensor(list(state), dtype=torch.uint8) for device, state in torch_states().items()}
        replicas += [Replica(f"torch's random state on {name}", state, ("tp",)) for name, state in states.items()]
    try:
        check_replicas(mesh, replicas, hint=PARTED)
    except RankMismatchError as error:
        if not repair:
            raise
        warnings.warn(f"{error.message}\nall ranks have the values of the first one now", stacklevel=5)
        align_replicas(mesh, replicas)
        restore({name: bytes(state.tolist()) for name, state in states.items()})
        check_replicas(mesh, replicas, hint="set it alike on every rank")


def parted(world: World, mesh: Mesh, replicas: Iterable[Replica]) -> str | None:
    """What :func:`check_replicas` says; None where all copies agree. The same on every rank."""
    own: dict[str, Replica] = {}
    with world.together("comparing what several ranks hold"):
        own.update((replica.name, replica) for replica in replicas)
        sums = {name: (replica.over, _key(replica.value), replica.among) for name, replica in own.items()}
    by_rank = dict(zip(world.ranks, world.gather(sums), strict=True))
    differing: dict[str, list[int]] = {}  # name -> the first ranks that hold different copies of it
    for name in dict.fromkeys(name for theirs in by_rank.values() for name in theirs):
        over, _, among = next(theirs[name] for theirs in by_rank.values() if name in theirs)
        for ranks in ranks_along(mesh, over, among):
            if len({by_rank[rank].get(name) for rank in ranks}) > 1:
                differing.setdefault(name, ranks)
    if not differing:
        return None
    first, *others = differing
    shown = describe_copy(own[first].value) if first in own else "(nothing)"
    described = dict(zip(world.ranks, world.gather(shown), strict=True))
    lines = [f"'{first}' is not the same on the ranks that hold copies of it:"]
    lines += [f"  rank {rank}: {described[rank]}" for rank in differing[first]]
    if others:
        named, rest = ", ".join(f"'{name}'" for name in others[:_SHOWN]), len(others) - _SHOWN
        lines.append(
            f"neither {'is' if len(others) == 1 else 'are'} {named}" + (f" and {rest} more" if rest > 0 else "")
        )
    return "\n".join(lines)


def _key(value: torch.Tensor | str) -> tuple[str, int | str]:
    return (str(value.dtype), checksum(value)) if isinstance(value, torch.Tensor) else ("", value)


def describe_copy(value: torch.Tensor | str) -> str:
    """Shape, type, norm and checksum: ``"(8,), torch.float32, norm 2.828427, checksum 9ae16a3b2f90404f"``."""
    if not isinstance(value, torch.Tensor):
        return value
    described = f"{tuple(value.shape)}, {value.dtype}"
    if value.is_floating_point() or value.is_complex():
        described += f", norm {float(torch.linalg.vector_norm(value.detach().cpu().double())):.7g}"
    return f"{described}, checksum {checksum(value):016x}"


@torch.no_grad()
def align_replicas(mesh: Mesh | None, replicas: Iterable[Replica]) -> None:
    """Give every copy the values of the first rank among its holders: a collective over the mesh.

    Args:
        mesh: of the schedule.
        replicas: as for :func:`check_replicas`; their tensors, in the same order on all ranks that hold copies.
    """
    if mesh is None or mesh.world_size == 1 or mesh.is_dry:
        return
    import torch.distributed as dist

    device = exchange_device(mesh)  # NCCL sends from GPUs only, and an optimiser counts its steps on the CPU
    for replica in sorted(replicas, key=lambda one: one.name):  # what a rank has none of comes at no other place
        if not isinstance(replica.value, torch.Tensor):
            continue
        value = replica.value.detach()
        value = value.to(device) if device.type == "cuda" else value
        value = value.clone(memory_format=torch.contiguous_format)
        among = dict(replica.among)
        for mesh_dim in replica.over:  # along each dimension from its first rank, so in the end from the first of all
            if mesh_dim in among:
                spread(value, mesh, mesh_dim, among[mesh_dim])
            else:
                dist.broadcast(value, group_src=0, group=mesh.group(mesh_dim))
        replica.value.copy_(value)


def ranks_along(mesh: Mesh, over: Sequence[str], among: Iterable[tuple[str, tuple[int, ...]]] = ()) -> list[list[int]]:
    """The global ranks that differ in nothing but their places along these mesh dimensions: ``[[0, 1], [2, 3]]``.

    Args:
        mesh: one that runs.
        over: the mesh dimensions.
        among: for some of them, the only places along it that count.
    """
    assert mesh.device_mesh is not None
    names = list(mesh.sizes)
    axes = [names.index(mesh_dim) for mesh_dim in over]
    grid = mesh.device_mesh.mesh
    for mesh_dim, places in among:
        grid = grid.index_select(names.index(mesh_dim), torch.tensor(places, device=grid.device))
    grid = grid.movedim(axes, list(range(-len(axes), 0)))
    length = 1
    for size in grid.shape[len(names) - len(axes) :]:
        length *= size
    return [sorted(row) for row in grid.reshape(-1, length).tolist()]
