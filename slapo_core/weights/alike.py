"""What several ranks hold alike: which tensors, and which parts of an optimizer's state, are copies on which ranks.

A rank holds the whole of a tensor along every mesh dimension that its layout does not split: tensor-parallel ranks a
layer norm, and replicas (``dp``) everything that no runtime partitions over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.ranks.facts import describe
from slapo_core.spec.mesh import DATA_DIMS
from slapo_core.weights.in_place import InPlace, TorchOptimizer, optimizer_storage, sharded_over

if TYPE_CHECKING:
    from slapo_core.spec.state import LiveTensor
    from slapo_core.spec.storage import OptimizerStorage, TensorStorage
    from slapo_core.weights.correspondence import Correspondence

__all__ = ["Replica", "Stored", "optimizer_replicas", "replicas_of"]

_Among = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Stored:
    """A tensor that a runtime keeps elsewhere.

    Args:
        read: gives it, with a collective where ranks hold parts of it.
        write: takes another value.
    """

    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Replica:
    """Something on this rank that other ranks must hold bit for bit.

    Args:
        name: for messages and to find its copies, e.g. ``"encoder.layer.0.output.LayerNorm.weight"``.
        value: this rank's copy, a tensor; or a text that stands for a value of another kind; None where whatever the
            other ranks have is right.
        over: the mesh dimensions along which the ranks hold copies, e.g. ``("dp", "tp")``; each larger than 1.
        among: for one of them, the places along it that hold a copy, where not all do: ``(("pp", (0, 3)),)``.
        is_made: whether it is made of another one, so that it is right when that is.
    """

    name: str
    value: torch.Tensor | Stored | str | None
    over: tuple[str, ...]
    among: _Among = ()
    is_made: bool = False


def replicas_of(correspondence: Correspondence, storage: TensorStorage | None = None) -> list[Replica]:
    """Every tensor of a scheduled model of which other ranks hold copies, in registration order.

    Parameters are copies along every mesh dimension that does not split them: a piece of a split one has its copies
    along ``dp``, and one that several stages use along ``pp``. Buffers are so too, but for the
    dimensions along which ranks see other samples: running statistics are each replica's own there, and the first one's
    count. What no state dict holds is left out where a step added it.

    Args:
        correspondence: of the model.
        storage: where a runtime keeps them. What it partitions is no copy along those dimensions; what the forward
            computes with instead is one, by itself.
    """
    found = []
    for live, over, among in _copied(correspondence):
        if storage is None and not sharded_over(live.tensor):
            found.append(Replica(live.name, live.tensor, over, among))
            continue
        keeper = storage or InPlace()
        rest = _without(over, keeper.partitioned(live))
        if rest:
            found.append(Replica(live.name, _stored(keeper, live), rest, _among(among, rest)))
        working = keeper.working(live)
        if working is not None:
            name = f"{live.name} in the forward" if rest else live.name
            found.append(Replica(name, working, over, among, is_made=True))
    return found


def optimizer_replicas(
    correspondence: Correspondence, optimizer: torch.optim.Optimizer | OptimizerStorage
) -> list[Replica]:
    """What an optimizer keeps of which other ranks hold copies: its state, as the parameters, and its settings."""
    mesh, storage = correspondence.mesh, optimizer_storage(optimizer)
    if mesh is None or mesh.is_dry or storage is None:
        return []
    copied = {id(live.tensor): (live, over, among) for live, over, among in _copied(correspondence)}
    found = []
    for parameter in (parameter for group in storage.param_groups for parameter in group["params"]):
        if id(parameter) not in copied:
            continue
        live, over, among = copied[id(parameter)]
        rest = _without(over, storage.partitioned(parameter))
        for key, value in storage.state(parameter).items():
            is_whole = not isinstance(value, torch.Tensor) or not value.is_meta
            if is_whole:
                found.append(Replica(f"{live.name}::{key}", _value(value), over, among))
            elif rest:
                moment = _stored_moment(storage, parameter, key)
                found.append(Replica(f"{live.name}::{key}", moment, rest, _among(among, rest)))
    everywhere = tuple(mesh_dim for mesh_dim, size in mesh.sizes.items() if size > 1)
    for number, group in enumerate(storage.param_groups):
        for key, value in group.items():
            if key != "params" and everywhere:
                setting = f"{key} of {storage.kind}" if number == 0 else f"{key} of group {number} of {storage.kind}"
                counts = bool(group["params"]) or isinstance(storage, TorchOptimizer)
                found.append(Replica(setting, _value(value) if counts else None, everywhere))
    return found


def _copied(correspondence: Correspondence) -> Iterator[tuple[LiveTensor, tuple[str, ...], _Among]]:
    """The tensors of which the schedule has copies on other ranks, along which dimensions, and among which ranks."""
    mesh = correspondence.mesh
    if mesh is None or mesh.is_dry:
        return
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
            yield live, over, tuple((mesh_dim, ranks) for mesh_dim, ranks in holders.items() if mesh_dim in over)


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
