"""Give the scheduled model its values: real tensors stay, meta tensors are read from weights or initialised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from slapo_core.tree.edit import TreeEdit
from slapo_core.weights.initialise import Initialiser, cannot_initialise, initialising
from slapo_core.weights.reference import Reference, check_names, read_tensor
from slapo_core.weights.sources import Source
from slapo_core.weights.survey import LiveTensor, TensorSpec, live_tensors, survey

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Materialisation", "materialise"]


@dataclass
class Materialisation:
    """What was done to the model; it can be taken back until the schedule is sealed."""

    reference: Reference
    edit: TreeEdit
    overwritten: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def take_back(self) -> None:
        with torch.no_grad():
            for tensor, before in self.overwritten:
                tensor.copy_(before)
        self.overwritten.clear()
        self.edit.rollback()


def materialise(
    schedule: Schedule, source: Source | None, *, device: torch.device | None = None, seed: int = 0
) -> Materialisation:
    """Fill the model, each rank its own pieces only.

    The largest thing in memory beside the local pieces is one full tensor at a time, and what waits for a plugin to
    make a tensor of it.

    Args:
        schedule: not sealed.
        source: weights with the untouched model's names, for every tensor of its state dict; None initialises what is
            on the meta device.
        device: where the tensors shall be; None leaves real ones where they are and puts the others beside them, or on
            the mesh's device type.
        seed: mixed into the seed of every tensor that is initialised.

    Raises:
        WeightsError: the weights do not fit, or a meta tensor cannot be initialised; the model is as before.
    """
    surveyed, untouched = survey(schedule)
    reference = Reference(schedule.tree, surveyed, schedule.hooks)
    names = check_names(surveyed, source) if source is not None else {}
    target = device or _usual_device(schedule, reference)
    carried = list(reference.carried())
    real_before = {id(live.tensor) for live in reference.live() if not live.tensor.is_meta}
    pieces = _Pieces(schedule, reference, source, names, untouched, seed)
    pieces.collect(carried, reference.translated(), reference.dropped())
    done = Materialisation(reference, TreeEdit(schedule.tree))
    reference.kept = pieces.kept
    try:
        _install(schedule, done, pieces, target, device)
        if source is not None:
            _overwrite(done, source, names, real_before)
    except BaseException:
        done.take_back()
        raise
    return done


@dataclass(eq=False)
class _Waiting:
    """A live meta tensor, made by a plugin of the untouched tensors ``origins``, and those that are there."""

    live: LiveTensor
    origins: list[str]
    parts: dict[str, torch.Tensor] = field(default_factory=dict)


class _Pieces:
    """Local values for live meta tensors, and full values of what the schedule dropped."""

    def __init__(
        self,
        schedule: Schedule,
        reference: Reference,
        source: Source | None,
        names: dict[str, str],
        untouched: dict[str, torch.Tensor],
        seed: int,
    ) -> None:
        self.schedule, self.reference, self.source, self.names = schedule, reference, source, names
        self.untouched, self.seed = untouched, seed
        self.local: dict[str, torch.Tensor] = {}  # live name -> value
        self.kept: dict[str, torch.Tensor] = {}
        self._to_keep: list[str] = []
        self._waiting: list[_Waiting] = []
        self._failed: list[str] = []

    def collect(
        self,
        carried: list[tuple[LiveTensor, TensorSpec]],
        translated: list[tuple[LiveTensor, tuple[TensorSpec, ...]]],
        dropped: list[TensorSpec],
    ) -> None:
        self._to_keep = [spec.name for spec in dropped]
        self._waiting = [
            _Waiting(live, [spec.name for spec in specs]) for live, specs in translated if live.tensor.is_meta
        ]
        wanted: dict[str, list[LiveTensor]] = {}
        for live, spec in carried:
            if live.tensor.is_meta:
                wanted.setdefault(spec.name, []).append(live)
        to_initialise: dict[str, list[LiveTensor]] = {}
        specs = self.reference.survey.specs
        awaited = [origin for item in self._waiting for origin in item.origins]
        for origin in dict.fromkeys([*wanted, *awaited, *self._to_keep]):
            lives = wanted.get(origin, [])
            if self.source is not None and origin in self.names:
                self._read(origin, lives)
            elif self.untouched[origin].is_meta:
                to_initialise[origin] = lives
            else:
                self._take(origin, self.untouched[origin].detach(), lives)
            self._translate()
        if to_initialise:
            with self.schedule.untouched():
                with initialising(self.schedule.tree, self.schedule.hooks, seed=self.seed) as initialiser:
                    for origin, lives in to_initialise.items():
                        self._initialise(initialiser, origin, specs[origin].shape, lives)
            self._translate()  # only here: plugins are asked about nodes of the scheduled model
        added = [
            live
            for live in self._live_meta()
            if live.name not in self.local and self.reference.survey.spec_of(live.layout) is None
        ]
        if added:
            with initialising(self.schedule.tree, self.schedule.hooks, seed=self.seed) as initialiser:
                for live in added:
                    self._initialise(initialiser, live.name, live.layout.shape, [live])
        if self._failed:
            raise cannot_initialise(self._failed)

    def _live_meta(self) -> list[LiveTensor]:
        return [live for live in live_tensors(self.schedule.tree) if live.tensor.is_meta]

    def _initialise(self, initialiser: Initialiser, name: str, shape: tuple[int, ...], lives: list[LiveTensor]) -> None:
        full = initialiser.value(name, tuple(shape))
        if full is None:
            self._failed.append(name)
        else:
            self._take(name, full, lives)

    def _take(self, origin: str, full: torch.Tensor, lives: list[LiveTensor]) -> None:
        for live in lives:
            self.local[live.name] = live.layout.local(full, self.schedule.mesh)
        if origin in self._to_keep:
            self.kept[origin] = full.to("cpu", copy=True)
        self._hand_over(origin, full)

    def _hand_over(self, origin: str, full: torch.Tensor) -> None:
        for item in self._waiting:
            if origin in item.origins:
                item.parts[origin] = full

    def _translate(self) -> None:
        """Make the values of tensors that stand for untouched ones in another form, where all of these are there."""
        for item in [item for item in self._waiting if len(item.parts) == len(item.origins)]:
            whole = self.reference.translations.from_reference(item.live, item.parts)
            self.local[item.live.name] = item.live.layout.local(whole, self.schedule.mesh)
            self._waiting.remove(item)

    def _read(self, origin: str, lives: list[LiveTensor]) -> None:
        assert self.source is not None
        if origin in self._to_keep or any(origin in item.origins for item in self._waiting):
            full = read_tensor(self.source, self.names[origin], self.reference.survey.specs[origin])
            if origin in self._to_keep:
                self.kept[origin] = full
            self._hand_over(origin, full)
        for live in lives:
            self.local[live.name] = self.source.read(self.names[origin], live.layout, self.schedule.mesh)


def _install(
    schedule: Schedule, done: Materialisation, pieces: _Pieces, target: torch.device, device: torch.device | None
) -> None:
    for live in live_tensors(schedule.tree):
        if live.tensor.is_meta:
            value = pieces.local[live.name].to(target, live.tensor.dtype)
        elif device is not None and live.tensor.device != device:
            value = live.tensor.detach().to(device)
        else:
            continue
        node = schedule.tree.node(live.path)
        if live.is_parameter:
            done.edit.set_parameter(node, live.own_name, value)
        else:
            done.edit.set_buffer(node, live.own_name, value)


def _overwrite(done: Materialisation, source: Source, names: dict[str, str], real_before: set[int]) -> None:
    """Copy the weights into tensors that had values already."""
    moved = {id(new): id(old) for old, new in _replaced(done.edit)}
    reference = done.reference
    pieces: list[tuple[LiveTensor, Callable[[], torch.Tensor]]] = [
        (live, partial(source.read, names[spec.name], live.layout, reference.mesh))
        for live, spec in reference.carried()
        if spec.keys
    ]
    pieces += [
        (live, partial(reference.read_translated, source, names, live, specs)) for live, specs in reference.translated()
    ]
    for live, read in pieces:
        if moved.get(id(live.tensor), id(live.tensor)) in real_before:
            piece = read()
            with torch.no_grad():
                done.overwritten.append((live.tensor, live.tensor.detach().clone()))
                live.tensor.copy_(piece)


def _replaced(edit: TreeEdit) -> list[tuple[object, object]]:
    return [(entry.old, entry.new) for entry in edit.entries]  # type: ignore[attr-defined]


def _usual_device(schedule: Schedule, reference: Reference) -> torch.device:
    for live, _ in reference.carried():
        if not live.tensor.is_meta:
            return live.tensor.device
    mesh = schedule.mesh.device_mesh if schedule.mesh is not None else None
    if mesh is not None and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
