"""Save and load checkpoints by rank, for runtimes with their own files."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from slapo_core.errors import WeightsError
from slapo_core.layout import DATA_DIMS, Layout, ShardRange
from slapo_runtime.correspondence.storage import ShardedState, ShardSource, TensorShard, blocks
from slapo_runtime.ranks.world import together
from slapo_runtime.weights.checkpoint import (
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
    from slapo_runtime.correspondence.storage import OptimizerStorage
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
    writer = _ShardCollector(state.mesh)
    weights = {spec.keys[0]: list(spec.shape) for spec in state.correspondence.survey.specs.values() if spec.keys}
    added = state.correspondence.added()
    for kind, name, layout, value, holders in _weights(state):
        writer.add(kind, name, layout, value, holders)
    if moments is not None:
        for name, layout, read, holders in moments.shards():
            writer.add("optimizer", name, layout, read(), holders)
    description: dict[str, Any] = {"format": SHARDS_FORMAT, "weights": weights, "runtime": dict(runtime)}
    description["added"] = {live.name: list(live.layout.shape) for live in added}
    description |= {"extra": extra, "buffers": as_json(state.correspondence.survey.buffers), "optimizer": None}
    if moments is not None:
        description["optimizer"] = {**moments.description(), "tensors": moments.shapes()}
    return ShardedState(description, writer.shards)


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


_Found = tuple[Kind, str, Layout, torch.Tensor, Mapping[str, tuple[int, ...]]]


def _weights(state: ModelState) -> Iterator[_Found]:
    """Yield this rank's weights and added tensors, in the same order everywhere."""
    correspondence, survey = state.correspondence, state.correspondence.survey
    done = set()
    for live, spec in correspondence.carried():
        if spec.keys and spec.name not in done and live.is_local:
            done.add(spec.name)
            yield "weight", spec.keys[0], live.layout, state.storage.read(live), correspondence.holders(live)
    for live, specs in correspondence.translated():
        value = state.full(live)
        tensors = correspondence.translations.to_reference(live, value)
        for spec in (one for one in specs if one.keys):
            yield "weight", spec.keys[0], Layout(spec.name, spec.shape), tensors[spec.name], {}
    for name, value in state.dropped.items():
        yield "weight", survey.specs[name].keys[0], Layout(name, tuple(value.shape)), value, {}
    for live in correspondence.added():
        if live.is_local:
            yield "added", live.name, live.layout, state.storage.read(live), correspondence.holders(live)


class _ShardCollector:
    """Collect the shards that this rank writes; replicas write replicated tensors in turn.

    Args:
        mesh: of the schedule.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh
        self._number = 0
        self.shards: list[TensorShard] = []

    def add(
        self, kind: Kind, name: str, layout: Layout, value: torch.Tensor, holders: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Add a shard if this rank writes it: a collective for partial values."""
        partials = tuple((mesh_dim, one) for mesh_dim, one in layout.placements if one.is_partial())
        full = Layout(layout.origin, tuple(value.shape), partials).full(value, self._mesh)
        self._number += 1
        if not self._writes(layout, holders):
            return
        others = [part for part in layout.parts(self._mesh) if not self._is_first(part)]
        for at, offset, extent in blocks(layout, self._mesh):
            if any(at[part.axis] == part.start for part in others):
                continue  # its first rank writes it
            own = full.detach()[tuple(slice(begin, begin + size) for begin, size in zip(at, extent, strict=True))]
            copy = own.to("cpu", copy=True).contiguous()
            self.shards.append(TensorShard(kind, name, tuple(layout.shape), offset, copy))

    def _is_first(self, part: ShardRange) -> bool:
        return self._mesh is None or self._mesh.rank(part.mesh_dim) == part.places[0]

    def _writes(self, layout: Layout, holders: Mapping[str, tuple[int, ...]]) -> bool:
        mesh = self._mesh
        if mesh is None:
            return True
        split, rest = {mesh_dim for mesh_dim, _ in layout.shards()}, self._number
        for mesh_dim, size in mesh.sizes.items():
            everyone = layout.holders(mesh, mesh_dim) if mesh_dim in split else tuple(range(size))
            places = holders.get(mesh_dim, everyone)
            turn = 0
            if mesh_dim in DATA_DIMS:
                rest, turn = divmod(rest, len(places))
            if mesh.rank(mesh_dim) != places[turn]:
                return False
        return True


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
