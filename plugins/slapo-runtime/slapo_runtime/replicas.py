"""Compare replicas between ranks, and repair them.

A tensor has replicas along every mesh dimension that its layout does not shard: a layer norm on tensor-parallel ranks,
every tensor on data-parallel ranks (``dp``). Replicas stay equal only because every rank makes the same changes; a
state dict has the first rank's values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from slapo_core.errors import RankMismatchError, ReplicaError, warn_user
from slapo_core.internals import describe
from slapo_core.layout import DATA_DIMS, ShardRange
from slapo_runtime.correspondence.storage import (
    InPlace,
    LiveTensor,
    OptimizerStorage,
    TensorStorage,
    TorchOptimizer,
    is_distributed,
    optimizer_storage,
)
from slapo_runtime.ranks.checksums import checksum
from slapo_runtime.ranks.consistency import restore, torch_states
from slapo_runtime.ranks.exchange import exchange_device, spread
from slapo_runtime.ranks.world import World, ranks_along

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence import Correspondence

_Among = tuple[tuple[str, tuple[int, ...]], ...]
_Copied = tuple[LiveTensor, tuple[str, ...], _Among, ShardRange | None]


@dataclass(frozen=True)
class Stored:
    """A tensor in the storage of a runtime.

    Args:
        read: returns it; a collective where ranks hold shards of it.
        write: replaces its value.
    """

    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Replica:
    """A value on this rank that must equal other ranks' to the last bit.

    Args:
        name: the same on all ranks, e.g. ``"encoder.layer.0.output.LayerNorm.weight"``.
        value: this rank's: a tensor, or a description of another value; None accepts any value of the other ranks.
        over: the mesh dimensions of the replicas, e.g. ``("dp", "tp")``; each larger than 1.
        among: for one of them, the coordinates with a replica, if not all have one: ``(("pp", (0, 3)),)``.
        is_made: whether it is computed from another replica, and so correct when that one is.
    """

    name: str
    value: torch.Tensor | Stored | str | None
    over: tuple[str, ...]
    among: _Among = ()
    is_made: bool = False


def replicas_of(correspondence: Correspondence, storage: TensorStorage | None = None) -> list[Replica]:
    """List the replicated tensors of a scheduled model, in registration order.

    Parameters have replicas along every mesh dimension that does not split them: a shard along ``dp``, a tied
    parameter along ``pp``. So have buffers, except along dimensions with different samples, where running statistics
    differ, and the first rank's are saved. Non-persistent tensors that a step added are left out.

    Args:
        correspondence: of the model.
        storage: of a runtime. Partitioned tensors are not replicas along their dimensions; the forward's copies are.
    """
    found = []
    for live, over, among, part in _copied(correspondence):
        own = _named(live, part)
        if storage is None and not is_distributed(live.tensor):
            found.append(Replica(own, _part(live.tensor, part), over, among))
            continue
        keeper = storage or InPlace()
        rest = _without(over, keeper.partitioned(live))
        if rest:
            found.append(Replica(own, _stored_part(_stored(keeper, live), part), rest, _among(among, rest)))
        working = keeper.working(live)
        if working is not None:
            name = f"{own} in the forward" if rest else own
            found.append(Replica(name, _part(working, part), over, among, is_made=True))
    return found


def optimizer_replicas(
    correspondence: Correspondence, optimizer: torch.optim.Optimizer | OptimizerStorage
) -> list[Replica]:
    """List the replicated state and settings of an optimizer."""
    mesh, storage = correspondence.mesh, optimizer_storage(optimizer)
    if mesh is None or mesh.is_abstract or storage is None:
        return []
    copied: dict[int, list[_Copied]] = {}
    for one in _copied(correspondence):
        copied.setdefault(id(one[0].tensor), []).append(one)
    found = []
    parameters = [parameter for group in storage.param_groups for parameter in group["params"]]
    for parameter, one in [(each, one) for each in parameters for one in copied.get(id(each), ())]:
        live, over, among, part = one
        rest, own = _without(over, storage.partitioned(parameter)), _named(live, part)
        for key, value in storage.state(parameter).items():
            if part is not None and (not isinstance(value, torch.Tensor) or value.shape != parameter.shape):
                continue  # not element by element
            is_full = not isinstance(value, torch.Tensor) or not value.is_meta
            if is_full:
                found.append(Replica(f"{own}::{key}", _part(_value(value), part), over, among))
            elif rest:
                moment = _stored_part(_stored_moment(storage, parameter, key), part)
                found.append(Replica(f"{own}::{key}", moment, rest, _among(among, rest)))
    everywhere = tuple(mesh_dim for mesh_dim, size in mesh.sizes.items() if size > 1)
    for number, group in enumerate(storage.param_groups):
        for key, value in group.items():
            if key != "params" and everywhere:
                setting = f"{key} of {storage.kind}" if number == 0 else f"{key} of group {number} of {storage.kind}"
                counts = bool(group["params"]) or isinstance(storage, TorchOptimizer)
                found.append(Replica(setting, _value(value) if counts else None, everywhere))
    return found


def _copied(correspondence: Correspondence) -> Iterator[_Copied]:
    """Yield replicated tensors or parts, with their mesh dimensions and ranks."""
    mesh = correspondence.mesh
    if mesh is None or mesh.is_abstract:
        return
    for live in correspondence.live():
        if not live.is_local:
            continue
        holders = correspondence.holders(live)
        split = {dim: live.layout.holders(mesh, dim) for dim, _ in live.layout.shards()}
        holders |= {dim: ranks for dim, ranks in split.items() if len(ranks) < mesh.size(dim)}
        apart = set(live.layout.partials())
        apart.update(mesh_dim for mesh_dim, ranks in holders.items() if len(ranks) == 1)
        if not live.is_parameter:
            apart.update(DATA_DIMS)
            if not live.is_persistent and not live.reference_names:
                continue
        over = tuple(mesh_dim for mesh_dim, size in mesh.sizes.items() if size > 1 and mesh_dim not in apart)
        if over:
            among = tuple((mesh_dim, ranks) for mesh_dim, ranks in holders.items() if mesh_dim in over)
            yield live, over, among, None
        for part in live.layout.parts(mesh):
            if len(part.places) > 1:
                yield live, (part.mesh_dim,), ((part.mesh_dim, part.places),), part


def _named(live: LiveTensor, part: ShardRange | None) -> str:
    if part is None:
        return live.name
    return f"{live.name}[{':, ' * part.axis}{part.start}:{part.start + part.length}]"


def _part(value: Any, part: ShardRange | None) -> Any:
    return value if part is None else part.of(value.detach())


def _stored_part(stored: Stored, part: ShardRange | None) -> Stored:
    if part is None:
        return stored

    def write(value: torch.Tensor) -> None:
        full = stored.read().detach().clone()
        part.of(full).copy_(value)
        stored.write(full)

    return Stored(lambda: part.of(stored.read()), write)


def _without(over: tuple[str, ...], partitioned: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(mesh_dim for mesh_dim in over if mesh_dim not in partitioned)


def _among(among: _Among, over: tuple[str, ...]) -> _Among:
    return tuple((mesh_dim, ranks) for mesh_dim, ranks in among if mesh_dim in over)


def _stored(storage: TensorStorage, live: LiveTensor) -> Stored:
    return Stored(lambda: storage.read(live), lambda value: storage.loading(live, value)())


def _stored_moment(storage: OptimizerStorage, parameter: torch.Tensor, key: str) -> Stored:
    return Stored(lambda: storage.read(parameter, key), lambda value: storage.write(parameter, key, value))


def _value(value: Any) -> torch.Tensor | str:
    return value if isinstance(value, torch.Tensor) else describe(value)


T = TypeVar("T")

_SHOWN = 4  # names in a message
_CAUSES = (
    "slapo.verify(sch, batch), before training, finds a missing reduction, e.g. "
    'sync("bwd_post", "all_reduce"); else give the ranks of a replica the same batches and seeds (torch.manual_seed), '
    "and make the same changes on all of them"
)
DIVERGED = (
    f"{_CAUSES}; engine.check_replicas() after each step finds the first step that diverges; "
    "engine.check_replicas(repair=True) continues with the first rank's values"
)
DIVERGED_LIVE = (
    f"{_CAUSES}: slapo.clip_grad_norm_(sch, max_norm), not torch's, which scales the gradients of each rank by "
    "its own norm; slapo.state_dict(sch) after each step finds the first step that diverges"
)
IN_PLACE = (
    "engine.load_state_dict(state) changes the main copies; engine.check_replicas(repair=True) restores the forward's"
)


def check_replicas(mesh: Mesh | None, replicas: Iterable[Replica], *, hint: str) -> None:
    """Compare the replicas of every tensor by checksums: a collective over the mesh.

    Args:
        mesh: of the schedule.
        replicas: this rank's, from :func:`replicas_of` or :func:`optimizer_replicas`. A missing one differs from the
            other ranks' replicas.
        hint: for the error.

    Raises:
        ReplicaError: on every rank, with the differing tensors, the ranks, and their values.
    """
    if mesh is None or mesh.world_size == 1 or mesh.is_abstract:
        return
    with World(mesh) as world:
        error = divergence(world, mesh, replicas, hint=hint)
    if error is not None:
        raise error


def compare_all(
    correspondence: Correspondence,
    optimizer: torch.optim.Optimizer | OptimizerStorage | None,
    *,
    storage: TensorStorage | None = None,
    random: bool,
    repair: bool,
    hint: str = DIVERGED,
) -> None:
    """Compare the replicas of a model, of an optimizer's state, and torch's RNG states.

    Args:
        correspondence: of the model.
        optimizer: over its parameters; None compares none.
        storage: of a runtime.
        random: whether the RNG states of tensor-parallel ranks are compared, too.
        repair: give all ranks the first one's values, with a warning about the differences.
        hint: for the error.

    Raises:
        ReplicaError: on every rank; with ``repair``, if a setting other than a tensor differs.
    """
    mesh = correspondence.mesh
    if storage is not None:
        message = stale(correspondence, storage)
        if message is not None:
            if not repair:
                raise RankMismatchError(message, hint=IN_PLACE)
            warn_user(f"{message}\nrestored from the main copies")
            renew(correspondence, storage)
    if mesh is None or mesh.world_size == 1 or mesh.is_abstract:
        return
    replicas = replicas_of(correspondence, storage)
    if optimizer is not None:
        replicas += optimizer_replicas(correspondence, optimizer)
    states = {}
    if random and mesh.size("tp") > 1:
        states = {device: torch.tensor(list(state), dtype=torch.uint8) for device, state in torch_states().items()}
        replicas += [Replica(f"torch's RNG state on {name}", state, ("tp",)) for name, state in states.items()]
    try:
        check_replicas(mesh, replicas, hint=hint)
    except ReplicaError as error:
        if not repair:
            raise
        warn_user(f"{error.message}\nall ranks have the first rank's values now")
        align_replicas(mesh, replicas)
        if storage is not None:
            renew(correspondence, storage)
        restore({name: bytes(state.tolist()) for name, state in states.items()})
        check_replicas(mesh, replicas, hint="set it to the same value on every rank")


def stale(correspondence: Correspondence, storage: TensorStorage) -> str | None:
    """Describe parameters that differ from their main copies; None if all match."""
    own = [live.name for live in correspondence.live() if live.is_local and not storage.is_current(live)]
    with World(correspondence.mesh) as world:
        by_rank = dict(zip(world.ranks, world.gather(own), strict=True))
    names = list(dict.fromkeys(name for theirs in by_rank.values() for name in theirs))
    if not names:
        return None
    ranks = [str(rank) for rank, theirs in by_rank.items() if names[0] in theirs]
    more = f" ({len(names) - 1} more parameters do not match either)" if names[1:] else ""
    return (
        f"'{names[0]}' no longer matches its main copy on rank{'s' if ranks[1:] else ''} {', '.join(ranks)}: it was "
        f"modified in place, and the next optimizer step will overwrite it{more}"
    )


def renew(correspondence: Correspondence, storage: TensorStorage) -> None:
    """Write the main copies to the forward's parameters: a collective for partitioned ones."""
    for live in correspondence.live():
        if live.is_local and (storage.working(live) is not None or storage.partitioned(live)):
            storage.loading(live, storage.read(live).clone())()


def divergence(world: World, mesh: Mesh, replicas: Iterable[Replica], *, hint: str) -> ReplicaError | None:
    """Compare replicas as :func:`check_replicas` does; return its error, or None where all agree."""
    own: dict[str, Replica] = {}
    with world.together("comparing replicas"):
        own.update((replica.name, replica) for replica in replicas)
        keys = {name: _key(one.value) for name, one in own.items() if not isinstance(one.value, Stored)}
    for name, one in own.items():  # a collective of the runtime where ranks hold parts
        if isinstance(one.value, Stored):
            keys[name] = _key(one.value.read())
    sums = {name: (one.over, keys[name], one.among) for name, one in own.items()}
    by_rank = dict(zip(world.ranks, world.gather(sums), strict=True))
    differing: dict[str, list[int]] = {}  # name -> the first group of ranks with different replicas
    are_floats = True
    for name in dict.fromkeys(name for theirs in by_rank.values() for name in theirs):
        held = dict.fromkeys((theirs[name][0], theirs[name][2]) for theirs in by_rank.values() if name in theirs)
        for ranks in (ranks for over, among in held for ranks in ranks_along(mesh, over, among)):
            found = {by_rank[rank].get(name) for rank in ranks}
            if len({one for one in found if one is None or one[1] is not None}) > 1:
                differing.setdefault(name, ranks)
                kinds = {one[1][0] if one is not None and one[1] is not None else "" for one in found}
                are_floats = are_floats and len(kinds) == 1 and "float" in kinds.pop()
    if not differing:
        return None
    copies = [own[name] for name in sorted(differing) if name in own] if are_floats else []
    close = are_floats and all(map(all, world.gather([_is_close(one, mesh) for one in copies])))
    first, *others = differing
    shown = "(nothing)"
    if first in own:
        value = own[first].value
        shown = describe_copy(value.read() if isinstance(value, Stored) else value)
    described = dict(zip(world.ranks, world.gather(shown), strict=True))
    lines = [f"replicas of '{first}' differ between ranks:"]
    lines += [f"  rank {rank}: {described[rank]}" for rank in differing[first]]
    if others:
        named, rest = ", ".join(f"'{name}'" for name in others[:_SHOWN]), len(others) - _SHOWN
        lines.append(f"so do replicas of {named}" + (f" and {rest} more" if rest > 0 else ""))
    return ReplicaError("\n".join(lines), tensor=first, ranks=differing[first], within_rounding=close, hint=hint)


_ROUNDINGS = 8  # of the largest element: kernels with another order of summation differ by less


@torch.no_grad()
def _is_close(replica: Replica, mesh: Mesh) -> bool:
    """Return whether a replica equals the first rank's within rounding: a collective."""
    first = _first(replica, mesh)
    held = replica.value
    assert isinstance(held, (torch.Tensor, Stored))
    own = (held.read() if isinstance(held, Stored) else held).detach().to(first.device)
    if not first.numel():
        return True
    allowed = _ROUNDINGS * torch.finfo(first.dtype).eps * float(first.abs().max())
    return float((own.double() - first.double()).abs().max()) <= allowed


def _key(value: torch.Tensor | str | None) -> tuple[str, int | str] | None:
    if value is None:
        return None
    return (f"{value.dtype} {tuple(value.shape)}", checksum(value)) if isinstance(value, torch.Tensor) else ("", value)


def describe_copy(value: torch.Tensor | str | None) -> str:
    """Return ``"(8,), torch.float32, norm 2.828427, checksum 9ae16a3b2f90404f"``."""
    if not isinstance(value, torch.Tensor):
        return value or "(anything)"
    described = f"{tuple(value.shape)}, {value.dtype}"
    if value.is_floating_point() or value.is_complex():
        wide = value.detach().cpu().to(torch.promote_types(value.dtype, torch.float64))
        described += f", norm {float(torch.linalg.vector_norm(wide)):.7g}"
    return f"{described}, checksum {checksum(value):016x}"


@torch.no_grad()
def align_replicas(mesh: Mesh | None, replicas: Iterable[Replica]) -> None:
    """Broadcast the values of each tensor's first holder: a collective over the mesh.

    Args:
        mesh: of the schedule.
        replicas: as for :func:`check_replicas`.
    """
    if mesh is None or mesh.world_size == 1 or mesh.is_abstract:
        return
    for replica in sorted(replicas, key=lambda one: one.name):  # in one order, also on ranks that lack some
        held = replica.value
        if replica.is_made or not isinstance(held, (torch.Tensor, Stored)):
            continue
        value = _first(replica, mesh)
        if isinstance(held, Stored):
            held.write(value)
        else:
            held.copy_(value)


def _first(replica: Replica, mesh: Mesh) -> torch.Tensor:
    """Broadcast the value of a tensor's first holder: a collective of its holders."""
    import torch.distributed as dist

    held = replica.value
    assert isinstance(held, (torch.Tensor, Stored))
    device = exchange_device(mesh)  # NCCL sends from GPUs only, and an optimizer counts its steps on the CPU
    value = (held.read() if isinstance(held, Stored) else held).detach()
    value = value.to(device) if device.type != "cpu" else value
    value = value.clone(memory_format=torch.contiguous_format)
    among = dict(replica.among)
    for mesh_dim in replica.over:  # from the first rank of each dimension, so finally from the first of all
        if mesh_dim in among:
            spread(value, mesh, mesh_dim, among[mesh_dim])
        else:
            dist.broadcast(value, group_src=0, group=mesh.group(mesh_dim))
    return value
