"""Save and load checkpoints by the reference model's names: as one, or in the shards of each rank."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from slapo_core.errors import ArgumentError, BuildError, ReplicaError, WeightsError
from slapo_core.layout import DATA_DIMS, Layout, ShardRange
from slapo_runtime.consistency import restore, torch_states
from slapo_runtime.correspondence.storage import ShardedState, ShardSource, TensorShard, optimizer_storage
from slapo_runtime.weights.files import MANIFEST, SafetensorsSource, Source, Wider, Writer, checksums, located, placed
from slapo_runtime.weights.module_state import as_json, extra_states, packed, resized, unpacked
from slapo_runtime.weights.optimizer_state import OptimizerState
from slapo_runtime.world import World, together

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence.state import Loading, ModelState
    from slapo_runtime.correspondence.storage import LiveTensor, OptimizerStorage


FORMAT = 1
MODEL, ADDED, OPTIMIZER = "model.safetensors", "added.safetensors", "optimizer.safetensors"
TRAINED = "trained.safetensors"
ALL = (MODEL, TRAINED, ADDED, OPTIMIZER)
COUNTERS = "counters"  # the one name in what a runtime saves that may be left unused


def save_checkpoint(
    directory: str | os.PathLike[str],
    state: ModelState,
    optimizer: torch.optim.Optimizer | OptimizerStorage | None,
    runtime: Mapping[str, Any],
) -> None:
    """Save weights and optimizer state: a collective; the first rank writes.

    Raises:
        ReplicaError: replicas of a tensor or of the optimizer's state differ; the written checkpoint is complete,
            with the values of the first rank.
        RankMismatchError: the forward computes with other values than the runtime trains; nothing was written.
        BuildError: the optimizer or ``runtime`` holds something that has no place in a checkpoint, or writing failed;
            on every rank.
    """
    if not os.fspath(directory):
        raise ArgumentError("the directory of the checkpoint is empty", hint='engine.save("checkpoints/step-1000")')
    mesh = state.mesh
    differing = state.differing(optimizer)
    random = _random_states(mesh)
    with together(mesh, "saving the optimizer's state"):
        refuse_not_json(runtime)
    extra = _packed(state)
    moments = collected(state, optimizer)
    if moments is not None:
        moments.unite()
    writes = mesh is None or mesh.is_first_rank
    with contextlib.ExitStack() as stack:
        writer: Writer | None = None
        weights = state.whole(rank0_only=True, include_added=True, as_trained=True)
        with together(mesh, f"writing the checkpoint '{directory}'"):
            if writes:
                with writing(directory):
                    writer = stack.enter_context(Writer(Path(directory), ALL, last=MANIFEST))
                    for name, tensors in _files(state, weights).items():
                        writer.write(name, tensors)
        weights.clear()  # before the optimizer's state comes, of which there is twice as much
        tensors = moments.gather(wanted=writes) if moments is not None else {}
        with together(mesh, f"writing the checkpoint '{directory}'"):
            if writer is not None:
                with writing(directory):
                    writer.write(OPTIMIZER, tensors)
                    about: dict[str, Any] = {"optimizer": moments.description() if moments is not None else None}
                    about |= {"extra": extra, "buffers": as_json(state.correspondence.survey.buffers)}
                    if differing is not None:
                        about["replicas"] = differing.message
                    if runtime:
                        about["runtime"] = dict(runtime)
                    writer.finish(state.correspondence.tree.root, {"format": FORMAT, "random": random, **about})
    if differing is not None:
        raise as_written(differing, directory) from differing


@contextlib.contextmanager
def writing(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the file system into a BuildError.

    Raises:
        BuildError: a file or the directory cannot be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BuildError(f"'{os.fspath(directory)}' cannot be written: {type(error).__name__}: {error}") from error


def as_written(error: ReplicaError, directory: str | os.PathLike[str]) -> ReplicaError:
    """Add to an error that the first rank's values were written."""
    path = os.fspath(directory)
    text = f"{error.message}\n'{path}' was written with the values of the first rank"
    return ReplicaError(text, tensor=error.tensor, ranks=error.ranks, directory=path, hint=error.hint)


def load_checkpoint(
    directory: str | os.PathLike[str],
    state: ModelState,
    optimizer: torch.optim.Optimizer | OptimizerStorage | None,
    uses: Collection[str],
) -> dict[str, Any]:
    """Load weights and optimizer state; every rank reads its own shards.

    Returns:
        the runtime's further state.

    Raises:
        WeightsError: the directory is not a complete checkpoint, or is of another model; nothing was changed.
        BuildError: the optimizer's state does not fit this optimizer; nothing was changed.
    """
    path = Path(directory)
    moments = collected(state, optimizer)
    label = f"the checkpoint '{path}'"
    with together(state.mesh, f"reading {label}"):
        manifest = _read_manifest(path)
        _check_sums(path, manifest.get("checksums", {}), state.mesh)
    with resized(state.correspondence, manifest.get("buffers", {})):
        with together(state.mesh, f"reading {label}"):
            weights: Source = _source(path, MODEL)
            if TRAINED in manifest["files"]:
                weights = Wider(weights, _source(path, TRAINED), state.correspondence.survey.keys)
            weights.extra = unpacked(manifest.get("extra", {}))
            added = _source(path, ADDED) if ADDED in manifest["files"] else None
            if moments is not None:
                moments.unite()
            tensors = _source(path, OPTIMIZER) if OPTIMIZER in manifest["files"] else None
            runtime = dict(manifest.get("runtime") or {})
            loading = prepared(state, weights, added, moments, manifest["optimizer"], tensors, runtime, uses, label)
        give(state, moments, loading, label)
    states = manifest.get("random", {}).get(_replica(state.mesh), {})
    restore({device: base64.b64decode(content) for device, content in states.items()})
    return runtime


def collected(state: ModelState, optimizer: torch.optim.Optimizer | OptimizerStorage | None) -> OptimizerState | None:
    """Collect an optimizer's state, not yet merged over ``pp``: a collective; None of None."""
    moments: OptimizerState | None = None
    with together(state.mesh, "looking at the optimizer's state"):
        storage = optimizer_storage(optimizer)
        if storage is not None:
            moments = OptimizerState(state, storage)
    if moments is not None:
        moments.meet()
    return moments


def prepared(
    state: ModelState,
    weights: Source,
    added: Source | None,
    moments: OptimizerState | None,
    about_optimizer: Mapping[str, Any] | None,
    tensors: Source | None,
    runtime: Mapping[str, Any],
    uses: Collection[str],
    label: str,
) -> Loading:
    """Check a checkpoint against the engine, and read this rank's shards, without changes.

    Args:
        state: of the model.
        weights: of the checkpoint.
        added: what replacements added.
        moments: of the engine's optimizer, united; None without one. It is prepared too.
        about_optimizer: the description of the checkpoint's optimizer; None without one.
        tensors: of its state.
        runtime: of the checkpoint.
        uses: what of it the engine makes use of.
        label: of the checkpoint, for messages.
    """
    loading = state.prepare(weights)
    for live, shard in _read_added(state, added):
        loading.take(live, shard)
    if moments is not None:
        if about_optimizer is None:
            raise BuildError(
                f"{label} holds no optimizer state, and this engine has an optimizer",
                hint="load the weights only: build(sch, weights=dir)",
            )
        moments.prepare(about_optimizer, tensors)
    unused = sorted(set(runtime) - set(uses) - {COUNTERS})
    if unused:
        warnings.warn(
            f"{label}: ignored, unknown to this engine: {', '.join(unused)}",
            stacklevel=6,
        )
    return loading


def give(state: ModelState, moments: OptimizerState | None, loading: Loading, label: str) -> None:
    """Assign the prepared values: a collective."""
    if moments is not None:  # first, because an optimizer may refuse what was read, and can be given back its own
        try:
            with together(state.mesh, f"giving the optimizer its state of {label}"):
                moments.load()
        except BaseException:
            moments.take_back()
            raise
    loading.assign()


def _packed(state: ModelState) -> dict[str, str]:
    """What modules keep by ``get_extra_state``, encoded: a collective."""
    extra = extra_states(state.correspondence, compare=state.is_spread)
    with together(state.mesh, "saving the modules' extra state"):
        return packed(extra)


def _files(state: ModelState, weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Split the weights by file: in the model's own types, in wider trained types, and added ones."""
    survey = state.correspondence.survey
    own, trained = {}, {}
    for key, name in survey.keys.items():
        value, dtype = weights[key], survey.specs[name].dtype
        if state.kept is not None and value.dtype != dtype:
            if torch.promote_types(value.dtype, dtype) != dtype:
                trained[name] = value
            value = value.to(dtype)
        own[key] = value
    return {MODEL: own, TRAINED: trained, ADDED: {name: one for name, one in weights.items() if name not in own}}


def _replica(mesh: Mesh | None) -> str:
    return str(mesh.rank("dp") if mesh is not None else 0)


def _random_states(mesh: Mesh | None) -> dict[str, dict[str, str]]:
    """Gather the RNG states of each replica's first rank: a collective."""
    own = {device: base64.b64encode(content).decode() for device, content in torch_states().items()}
    with World(mesh) as world:
        by_replica: dict[str, dict[str, str]] = {}
        for replica, states in world.gather((_replica(mesh), own)):
            by_replica.setdefault(replica, states)
    return by_replica


def _check_sums(path: Path, sums: Mapping[str, Sequence[int]], mesh: Mesh | None) -> None:
    """Refuse damaged files by their checksums; every rank reads its share of the chunks."""
    ranks = [0] if mesh is None or mesh.device_mesh is None else sorted(mesh.device_mesh.mesh.flatten().tolist())
    place = ranks.index(mesh.global_rank) if mesh is not None and len(ranks) > 1 else 0
    for name, expected in sums.items():
        own = range(place, len(expected), len(ranks))
        for number, found in zip(own, checksums(located(path, name, last=MANIFEST), own), strict=True):
            if found != expected[number]:
                raise WeightsError(
                    f"{path / name} is damaged: the checksum of its part {number + 1} of {len(expected)} differs from "
                    f"that in {MANIFEST}",
                    hint="load another checkpoint, or copy this one again",
                )


def refuse_not_json(runtime: Mapping[str, Any]) -> None:
    try:
        json.dumps(runtime, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BuildError(f"the runtime's state must be JSON-serializable: {error}") from error


def _source(directory: Path, name: str) -> SafetensorsSource:
    return SafetensorsSource(located(directory, name, last=MANIFEST))


def _read_added(state: ModelState, added: Source | None) -> list[tuple[LiveTensor, torch.Tensor]]:
    shapes = added.shapes() if added is not None else {}
    live = {tensor.name: tensor for tensor in state.correspondence.added()}
    fitting = [name for name, tensor in live.items() if shapes.get(name) == tuple(tensor.layout.shape)]
    for names, what in (
        (set(live) - set(fitting), "not in the checkpoint: they keep their values"),
        (set(shapes) - set(fitting), "in the checkpoint, but not in this schedule"),
    ):
        if names:
            warnings.warn(f"tensors added by replacements, {what}: {', '.join(sorted(names))}", stacklevel=4)
    if added is None:
        return []
    own = [live[name] for name in fitting if live[name].is_local]
    return [(one, added.read(one.name, one.layout, state.mesh)) for one in own]


def _read_manifest(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        manifest: dict[str, Any] = json.loads(located(path, MANIFEST, last=MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or {"format", "id", "files", "optimizer"} - set(manifest):
            raise ValueError("it lacks entries")
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"'{path}' is not a checkpoint written by engine.save(): {MANIFEST}: {error}",
            hint="plain weights are loaded with build(sch, weights=dir)",
        ) from error
    if not isinstance(manifest["format"], int) or manifest["format"] > FORMAT:
        raise WeightsError(
            f"the checkpoint '{path}' is in format {manifest['format']!r}; this slapo-core reads up to {FORMAT}",
            hint="pip install --upgrade slapo-core",
        )
    for name in {MODEL, *(name for name in ALL if name in manifest["files"])}:
        try:
            with safe_open(located(path, name, last=MANIFEST), framework="pt") as handle:
                identifier = (handle.metadata() or {}).get("slapo_checkpoint")
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path / name} cannot be read as safetensors: {error}") from error
        if identifier != manifest["id"]:
            raise WeightsError(
                f"the files in '{path}' are of two different saves ({name} does not belong to {MANIFEST})",
                hint="load an earlier checkpoint, or the weights alone with build(sch, weights=dir)",
            )
    return manifest


SHARDS_FORMAT = 1
Kind = Literal["weight", "added", "optimizer"]


def shards_of(
    state: ModelState, optimizer: torch.optim.Optimizer | OptimizerStorage | None, runtime: Mapping[str, Any]
) -> ShardedState:
    """Collect the shards of this rank; see :meth:`slapo_runtime.correspondence.state.ModelState.shards`."""
    differing = state.differing(optimizer)
    if differing is not None:
        raise differing
    with together(state.mesh, "saving the optimizer's state"):
        refuse_not_json(runtime)
    extra = _packed(state)
    moments = collected(state, optimizer)
    if moments is not None:
        moments.unite()
    writer = _Writer(state.mesh)
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
    """Load shards: a first run checks and plans them, then all are read at once."""
    moments = collected(state, optimizer)
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
            moments.unite()
        arguments = (state, weights, added, moments, description["optimizer"], tensors, about, uses, source.label)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come with the second run
            prepared(*arguments)
    source.read(wanted)
    with together(state.mesh, f"reading {source.label}"):
        for one in (weights, added, tensors):
            one.is_there = True
        loading = prepared(*arguments)
        wanted.clear()
    give(state, moments, loading, source.label)
    return about


_Found = tuple[Kind, str, Layout, torch.Tensor, Mapping[str, tuple[int, ...]]]


def _weights(state: ModelState) -> Iterator[_Found]:
    """Yield this rank's weights and added tensors, in the same order on all ranks of a collective."""
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


class _Writer:
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
        """Add this rank's shard of a tensor if this rank writes it: a collective for partial values."""
        partials = tuple((mesh_dim, one) for mesh_dim, one in layout.placements if one.is_partial())
        whole = Layout(layout.origin, tuple(value.shape), partials).full(value, self._mesh)
        self._number += 1
        if not self._writes(layout, holders):
            return
        others = [part for part in layout.parts(self._mesh) if not self._is_first(part)]
        for at, offset, extent in _blocks(layout, self._mesh):
            if any(at[part.axis] == part.start for part in others):
                continue  # its first holder writes it
            own = whole.detach()[tuple(slice(begin, begin + size) for begin, size in zip(at, extent, strict=True))]
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


class _PlannedSource(Source):
    """One kind of tensors in a sharded checkpoint: collects the wanted shards, then gives their values.

    Args:
        source: of shards.
        kind: of tensors.
        description: of the checkpoint.
        wanted: to add to.
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
            for at, offset, extent in _blocks(layout, mesh):
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
            raise WeightsError(f"{self.label} lacks '{name}', which its description has") from None


def _blocks(layout: Layout, mesh: Mesh | None) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Yield the rectangles of this rank's shard: start in the shard, start in the full tensor, extent.

    What lies in the padding is left out.
    """
    for ranges in itertools.product(*(placed(axis) for axis in layout.segments(mesh))):
        extent = tuple(
            max(0, min(start + length, size) - start)
            for (_, start, length), size in zip(ranges, layout.shape, strict=True)
        )
        if math.prod(extent):
            yield tuple(at for at, _, _ in ranges), tuple(start for _, start, _ in ranges), extent
