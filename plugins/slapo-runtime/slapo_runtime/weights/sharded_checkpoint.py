"""Save and load checkpoints by rank, for runtimes with their own files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from slapo_core.errors import WeightsError
from slapo_core.layout import DATA_DIMS, Layout
from slapo_runtime.correspondence.storage import ShardedState, ShardSource, TensorShard, Window, blocks, window_of
from slapo_runtime.ranks.world import together
from slapo_runtime.weights.checkpoint_contents import (
    assign_loaded,
    collect_optimizer_state,
    packed_extra_states,
    prepare_loading,
    refuse_not_json,
)
from slapo_runtime.weights.module_state import as_json, resized, unpacked
from slapo_runtime.weights.sources import WeightsSource

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence.storage import LiveTensor, OptimizerStorage
    from slapo_runtime.weights.optimizer_state import OptimizerState
    from slapo_runtime.weights.state import ModelState


SHARDS_FORMAT = 1
Kind = Literal["weight", "added", "optimizer"]


def shards_of(
    state: ModelState, optimizer: torch.optim.Optimizer | OptimizerStorage | None, runtime: Mapping[str, Any]
) -> ShardedState:
    """Collect the shards of this rank; see :meth:`slapo_runtime.weights.state.ModelState.shards`."""
    differing = state.differing(optimizer)
    if differing is not None:
        raise differing
    with together(state.mesh, "saving the optimizer's state"):
        refuse_not_json(runtime)
    extra = packed_extra_states(state)
    moments = collect_optimizer_state(state, optimizer)
    if moments is not None:
        moments.merge()
    found = []
    for one in own_shards(state, moments):
        value = one.read().to("cpu", copy=True).contiguous()
        found.append(TensorShard(one.kind, one.name, one.shape, one.offset, value))
    return ShardedState(description_of(state, moments, extra, runtime), found)


def description_of(
    state: ModelState, moments: OptimizerState | None, extra: Mapping[str, str], runtime: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything of a checkpoint but the tensors, as JSON.

    Args:
        state: of the model.
        moments: of the optimizer, merged.
        extra: the modules' extra state, encoded.
        runtime: the further state of the runtime.
    """
    specs = state.correspondence.survey.specs.values()
    description: dict[str, Any] = {"format": SHARDS_FORMAT, "runtime": dict(runtime)}
    description["weights"] = {spec.keys[0]: list(spec.shape) for spec in specs if spec.keys}
    description["added"] = {live.name: list(live.layout.shape) for live in state.correspondence.added()}
    description |= {"extra": extra, "buffers": as_json(state.correspondence.survey.buffers), "optimizer": None}
    if state.correspondence.other_function:
        description["other_function"] = list(state.correspondence.other_function)
    if moments is not None:
        description["optimizer"] = {**moments.description(), "tensors": moments.shapes()}
    return description


def load_shards(
    state: ModelState,
    description: Mapping[str, Any],
    source: ShardSource,
    optimizer: torch.optim.Optimizer | OptimizerStorage | None,
    uses: Collection[str],
) -> dict[str, Any]:
    """Load shards: check and plan first, then read all at once."""
    moments = collect_optimizer_state(state, optimizer)
    with resized(state.correspondence, description.get("buffers", {})):
        return _load_shards(state, description, source, moments, uses)


def _load_shards(
    state: ModelState,
    description: Mapping[str, Any],
    source: ShardSource,
    moments: OptimizerState | None,
    uses: Collection[str],
) -> dict[str, Any]:
    wanted: list[TensorShard] = []
    kinds: tuple[Kind, ...] = ("weight", "added", "optimizer")
    weights, added, tensors = (_PlannedSource(source, kind, description, wanted) for kind in kinds)
    weights.extra = unpacked(description.get("extra", {}))
    about = dict(description.get("runtime") or {})
    with together(state.mesh, f"reading {source.label}"):
        if description.get("format") != SHARDS_FORMAT:
            raise WeightsError(
                f"{source.label} is in format {description.get('format')!r}; this slapo-core reads {SHARDS_FORMAT}",
                hint="pip install --upgrade slapo-core",
            )
        if moments is not None:
            moments.merge()
        arguments = (state, weights, added, moments, description["optimizer"], tensors, about, uses, source.label)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the second run repeats them
            prepare_loading(*arguments)
    source.read(wanted)
    with together(state.mesh, f"reading {source.label}"):
        for one in (weights, added, tensors):
            one.is_there = True
        loading = prepare_loading(*arguments)
        wanted.clear()
    assign_loaded(state, moments, loading, source.label)
    return about


@dataclass(frozen=True)
class OwnShard:
    """A rectangle of a full tensor that this rank writes, not read yet.

    Args:
        kind: as of :class:`slapo_runtime.correspondence.storage.TensorShard`.
        name: of the full tensor.
        shape: of the full tensor.
        offset: of the rectangle in it.
        read: returns its elements, on any device, perhaps as a view; valid until the next rectangle.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def own_shards(state: ModelState, moments: OptimizerState | None) -> Iterator[OwnShard]:
    """Yield the rectangles that this rank writes, one after the other.

    Every element of every tensor is in one rectangle of exactly one rank: replicas write replicated tensors in turn. To
    go on is a collective, where a runtime partitions tensors, and for partial values: every rank goes on to the end.
    """
    mesh = state.mesh
    for number, tensor in enumerate(_local_tensors(state, moments), start=1):
        partials = tuple((mesh_dim, one) for mesh_dim, one in tensor.layout.placements if one.is_partial())
        held: list[torch.Tensor] = []
        if tensor.is_collective or partials:
            value = tensor.read()
            held.append(Layout(tensor.layout.origin, tuple(value.shape), partials).full(value, mesh))
            del value
        if _writes(tensor, number, mesh):
            for offset, own in _rectangles(tensor, mesh):
                yield OwnShard(
                    tensor.kind, tensor.name, tuple(tensor.layout.shape), offset, partial(_cut, held, tensor.read, own)
                )
        held.clear()  # before the next tensor is read


@dataclass(frozen=True)
class _LocalTensor:
    """A tensor of this rank.

    Args:
        kind: of it.
        name: of the full tensor.
        layout: of this rank's shard.
        read: returns this rank's shard, or its window.
        holders: the ranks along mesh dimensions that have it, where not all do.
        is_collective: whether reading it is a collective.
        window: of a DTensor.
        apart: the mesh dimensions over which windows differ.
    """

    kind: Kind
    name: str
    layout: Layout
    read: Callable[[], torch.Tensor]
    holders: Mapping[str, tuple[int, ...]]
    is_collective: bool = False
    window: Window | None = None
    apart: tuple[str, ...] = ()


def _local_tensors(state: ModelState, moments: OptimizerState | None) -> Iterator[_LocalTensor]:
    """Yield this rank's weights, added tensors and optimizer state, in the same order everywhere."""
    correspondence, survey, storage = state.correspondence, state.correspondence.survey, state.storage

    def of(kind: Kind, name: str, live: LiveTensor) -> _LocalTensor:
        held = live.tensor if state.kept is None else None
        partitioned = storage.partitioned(live)
        return _local(
            kind, name, live.layout, partial(storage.read, live), correspondence.holders(live), partitioned, held
        )

    def _local(
        kind: Kind,
        name: str,
        layout: Layout,
        read: Callable[[], torch.Tensor],
        holders: Mapping[str, tuple[int, ...]],
        partitioned: tuple[str, ...],
        held: torch.Tensor | None,
    ) -> _LocalTensor:
        window = window_of(held, state.mesh) if held is not None else None
        if held is None or window is None:
            return _LocalTensor(kind, name, layout, read, holders, is_collective=bool(partitioned))
        rows: Any = held
        return _LocalTensor(kind, name, layout, rows.detach().to_local, holders, window=window, apart=partitioned)

    done = set()
    for live, spec in correspondence.carried():
        if spec.keys and spec.name not in done and live.is_local:
            done.add(spec.name)
            yield of("weight", spec.keys[0], live)
    for live, specs in correspondence.translated():
        tensors = dict(correspondence.translations.to_reference(live, state.full(live)))
        for spec in (one for one in specs if one.keys):
            layout = Layout(spec.name, spec.shape)
            yield _LocalTensor("weight", spec.keys[0], layout, partial(tensors.pop, spec.name), {}, is_collective=True)
    for name, value in state.dropped.items():
        layout = Layout(name, tuple(value.shape))
        yield _LocalTensor("weight", survey.specs[name].keys[0], layout, value.detach, {})
    for live in correspondence.added():
        if live.is_local:
            yield of("added", live.name, live)
    for name, one, holders in moments.shards() if moments is not None else ():
        yield _local("optimizer", name, one.layout, one.read, holders, one.partitioned, one.held)


def _writes(tensor: _LocalTensor, number: int, mesh: Mesh | None) -> bool:
    """Return whether this rank writes its shard of the tensor with a number; replicas take turns."""
    if mesh is None:
        return True
    split, rest = {mesh_dim for mesh_dim, _ in tensor.layout.shards()}, number
    for mesh_dim, size in mesh.sizes.items():
        if mesh_dim in tensor.apart:
            continue
        everyone = tensor.layout.holders(mesh, mesh_dim) if mesh_dim in split else tuple(range(size))
        places = tensor.holders.get(mesh_dim, everyone)
        turn = 0
        if mesh_dim in DATA_DIMS:
            rest, turn = divmod(rest, len(places))
        if mesh.rank(mesh_dim) != places[turn]:
            return False
    return True


def _rectangles(tensor: _LocalTensor, mesh: Mesh | None) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield offset in the full tensor and place in the shard of each rectangle that this rank writes."""
    layout = tensor.layout
    if not math.prod(layout.shape):
        yield (0,) * len(layout.shape), ()
        return
    first = [0] * len(layout.shape) if tensor.window is None else tensor.window.offset
    others = [part for part in layout.parts(mesh) if mesh is not None and mesh.rank(part.mesh_dim) != part.places[0]]
    for at, offset, extent in blocks(layout, mesh, tensor.window):
        if any(part.start <= at[part.axis] + first[part.axis] < part.start + part.length for part in others):
            continue  # its first rank writes it
        yield offset, tuple(slice(begin, begin + size) for begin, size in zip(at, extent, strict=True))


def _cut(held: list[torch.Tensor], read: Callable[[], torch.Tensor], own: tuple[slice, ...]) -> torch.Tensor:
    return (held[0] if held else read()).detach()[own]


class _PlannedSource(WeightsSource):
    """Collect the wanted shards of one kind, then give their values.

    Args:
        source: of shards.
        kind: of tensors.
        description: of the checkpoint.
        wanted: the list for the collected shards.
    """

    def __init__(
        self, source: ShardSource, kind: Kind, description: Mapping[str, Any], wanted: list[TensorShard]
    ) -> None:
        self._source, self._kind, self._wanted = source, kind, wanted
        about = description.get("optimizer") or {}
        shapes = {"weight": "weights", "added": "added"}
        found = about.get("tensors", {}) if kind == "optimizer" else description.get(shapes[kind], {})
        self._shapes = {name: tuple(shape) for name, shape in found.items()}
        self._read: dict[tuple[str, Any], list[tuple[tuple[slice, ...], TensorShard]]] = {}
        self.is_there = False

    @property
    def label(self) -> str:
        return self._source.label

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, layout: Layout, mesh: Mesh | None) -> torch.Tensor:
        like = self._like(name)
        value = torch.zeros(layout.local_shape(mesh), dtype=like.dtype)
        if not layout.holds_values(mesh):
            return value
        key = (name, tuple(map(tuple, layout.segments(mesh))))
        if key not in self._read and not self.is_there:
            self._read[key] = []
            for at, offset, extent in blocks(layout, mesh):
                shard = TensorShard(self._kind, name, self._shapes[name], offset, torch.zeros(extent, dtype=like.dtype))
                own = tuple(slice(begin, begin + size) for begin, size in zip(at, extent, strict=True))
                self._read[key].append((own, shard))
                self._wanted.append(shard)
        if self.is_there:
            for own, shard in self._read[key]:
                value[own] = shard.value
        return value

    def _like(self, name: str) -> torch.Tensor:
        try:
            return self._source.like(self._kind, name)
        except KeyError:
            raise WeightsError(f"{self.label} lacks '{name}' of its description") from None
