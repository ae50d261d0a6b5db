"""The costs of a training step by block: seconds, saved activations, peaks, parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.internals import Internals
from slapo_core.observers import is_recording
from slapo_estimate.device import Link
from slapo_estimate.private import storage_id, tree_leaves
from slapo_estimate.reduced_model import block_of, places_of
from slapo_estimate.roofline import collective_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from slapo_core import Schedule
    from slapo_estimate.simulation import Trackers

BEFORE, AFTER = -1, -2
"""Regions of a step outside of blocks: before the first block, and after the last one."""

_BETWEEN = -3
"""Regions between two blocks of kind ``k`` are ``_BETWEEN - k``."""

_VOLUME = Link(bandwidth=1.0, latency=0.0)
"""A link whose seconds are bytes."""


@dataclass(frozen=True)
class RegionCosts:
    """The costs of one micro-batch in a block, or outside of the blocks. Bytes and seconds of one rank.

    Args:
        forward: seconds of the forward pass.
        backward: seconds of the backward pass, with recomputation.
        saved: bytes that the forward pass keeps for the backward pass.
        forward_peak: bytes in the forward pass, above those at its begin.
        backward_peak: bytes in the backward pass, above those saved until here; with gradients of the region's
            parameters.
        activation_peak: the same without gradients of parameters.
        parameters: bytes of parameters.
        trained: bytes of trained parameters.
        tensors: number of trained parameters.
        largest: bytes of the largest trained parameter.
        traffic: bytes that the rank sends in collectives.
        output: bytes of the tensors that a block returns.
        context: bytes of other tensors that a block is given: masks, positions.
        messages: number of them.
    """

    forward: float = 0.0
    backward: float = 0.0
    saved: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    activation_peak: int = 0
    parameters: int = 0
    trained: int = 0
    tensors: int = 0
    largest: int = 0
    traffic: int = 0
    output: int = 0
    context: int = 0
    messages: int = 0

    def joined(self, after: RegionCosts) -> RegionCosts:
        """Return the costs of this region followed by another one without peaks of its own."""
        return replace(
            self,
            forward=self.forward + after.forward,
            backward=self.backward + after.backward,
            saved=self.saved + after.saved,
            traffic=self.traffic + after.traffic,
        )

    def extrapolated(self, other: RegionCosts, factor: float) -> RegionCosts:
        """Return these costs and ``factor`` times their differences from other ones, of another number of samples."""
        fixed = ("parameters", "trained", "tensors", "largest", "messages")
        values = {}
        for name, own in vars(self).items():
            value = own if name in fixed else max(0, own + factor * (own - getattr(other, name)))
            values[name] = value if isinstance(own, float) else int(value)
        return RegionCosts(**values)


@dataclass(frozen=True)
class StepProfile:
    """The costs of a training step of one micro-batch, by region. Bytes and seconds of one rank.

    Args:
        samples: samples of the micro-batch.
        before: costs before the first block.
        after: costs after the last block, loss included.
        plain: costs of a block of each kind.
        checkpointed: costs of a checkpointed block of each kind; None for a kind of one block.
        inputs: bytes of the micro-batch.
        buffers: bytes of the model's buffers.
        state: bytes of the optimizer's state for each byte of a trained parameter.
        optimizer_bytes: seconds of the optimizer for each byte of a trained parameter.
        optimizer_tensors: seconds of the optimizer for each trained parameter.
        optimizer_peak: bytes of temporaries of the optimizer for each byte of the largest trained parameter.
        retained: bytes still in use after the backward pass, e.g. of the output.
        tied: bytes of parameters that are used both before and after the blocks.
    """

    samples: int
    before: RegionCosts
    after: RegionCosts
    plain: Mapping[int, RegionCosts]
    checkpointed: Mapping[int, RegionCosts | None]
    inputs: int = 0
    buffers: int = 0
    state: float = 0.0
    optimizer_bytes: float = 0.0
    optimizer_tensors: float = 0.0
    optimizer_peak: float = 0.0
    retained: int = 0
    tied: int = 0

    def at(self, samples: int, other: StepProfile) -> StepProfile:
        """Return the profile of another number of samples, on the line through this profile and another one."""
        factor = (samples - self.samples) / (self.samples - other.samples)
        return replace(
            self,
            samples=samples,
            before=self.before.extrapolated(other.before, factor),
            after=self.after.extrapolated(other.after, factor),
            plain={kind: own.extrapolated(other.plain[kind], factor) for kind, own in self.plain.items()},
            checkpointed={
                kind: None if own is None else own.extrapolated(other.checkpointed[kind] or own, factor)
                for kind, own in self.checkpointed.items()
            },
            inputs=int(self.inputs + factor * (self.inputs - other.inputs)),
            retained=int(self.retained + factor * (self.retained - other.retained)),
        )

    @property
    def seconds(self) -> float:
        """Seconds of a micro-batch in one plain block of each kind, and outside of the blocks."""
        regions = (self.before, self.after, *self.plain.values())
        return sum(each.forward + each.backward for each in regions)


@dataclass
class _Region:
    """The costs of a region so far, while a step runs."""

    forward: float = 0.0
    backward: float = 0.0
    forward_start: int = 0
    forward_most: int = 0
    saved: int = 0
    gradients: int = -1  # in use when its backward pass began
    most: int = 0
    activations: int = 0
    traffic: float = 0.0
    output: int = 0
    context: int = 0
    messages: int = 0

    def shared(self, times: int) -> RegionCosts:
        """Return the costs of one of ``times`` passes through this region."""
        return RegionCosts(
            self.forward / times, self.backward / times, self.saved // times, traffic=int(self.traffic / times)
        )


@dataclass(frozen=True)
class ProfileBlocks:
    """Make an observer of the costs by block; its result is a :class:`StepProfile`.

    Args:
        paths: paths of the blocks of a reduced model, in the order of their calls.
        kinds: the kind of each block.
        checkpointed: paths of the checkpointed ones.
        launch: seconds of the device's kernel launch.
        samples: samples of the micro-batch.
    """

    paths: tuple[str, ...]
    kinds: tuple[int, ...]
    checkpointed: tuple[str, ...]
    launch: float
    samples: int

    def __call__(self, schedule: Schedule, trackers: Trackers) -> _Profiler:
        return _Profiler(self, schedule, trackers)


class _Profiler:
    def __init__(self, asked: ProfileBlocks, schedule: Schedule, trackers: Trackers) -> None:
        self._asked, self._model, self._trackers = asked, schedule.model, trackers
        self._places = places_of(asked.paths)
        self._region_of: dict[str, int] = {}  # path of a module -> its block
        self._parameters: dict[int, nn.Parameter] = {}
        for number, path in enumerate(asked.paths):
            module = Internals(schedule).node(path).module
            module.register_forward_pre_hook(
                lambda _, args, kwargs, number=number: self._enter(number, (args, kwargs)), with_kwargs=True
            )
            module.register_forward_hook(lambda _, __, output, number=number: self._leave(number, output))
        self.begin()

    def begin(self) -> None:
        self._regions: dict[int, _Region] = {BEFORE: _Region(), AFTER: _Region()}
        self._used: dict[int, set[int]] = {}
        self._now, self._reached = BEFORE, len(self._asked.paths)
        self._clock = self._optimizer = 0.0
        self._live = self._optimizer_most = self._operations = 0
        self._parameters = {storage_id(one): one for one in self._model.parameters() if not one.is_meta}

    @property
    def _dynamic(self) -> int:
        memory = self._trackers.memory
        return memory.of("activations") + memory.of("temporaries")

    def _enter(self, number: int, given: Any) -> None:
        if self._trackers.position.step == "forward" and not is_recording():
            self._switch(number)
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and not leaf.requires_grad]
            sizes = {id(leaf): leaf.numel() * leaf.element_size() for leaf in tensors if leaf.dtype is not torch.int64}
            self._regions[number].context, self._regions[number].messages = sum(sizes.values()), len(sizes)

    def _leave(self, number: int, output: Any) -> None:
        if self._trackers.position.step == "forward" and not is_recording():
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
            self._regions[number].output = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
            self._switch(self._after(number))

    def _after(self, number: int) -> int:
        """Return the region after a block."""
        kinds = self._asked.kinds
        if number + 1 == len(kinds) or kinds[number] != kinds[number + 1]:
            return AFTER
        return _BETWEEN - kinds[number]

    def _switch(self, region: int) -> None:
        dynamic = self._dynamic
        before = self._regions[self._now]
        before.saved += dynamic - before.forward_start
        now = self._regions.setdefault(region, _Region())
        now.forward_start = dynamic
        self._now = region

    def on_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        trackers, step = self._trackers, self._trackers.position.step
        assert trackers.time is not None
        spent, self._clock = trackers.time.clock - self._clock, trackers.time.clock
        dynamic, memory = self._dynamic, trackers.memory
        if step == "optimizer":
            self._optimizer += spent
            self._operations += 1
            self._optimizer_most = max(self._optimizer_most, dynamic - self._live)
            return
        traffic = sum(
            collective_seconds(call.kind, call.bytes, call.ranks, _VOLUME) for call in trackers.communication.last
        )
        if step == "forward":
            region = self._regions[self._now]
            region.forward += spent
            region.traffic += traffic
            region.forward_most = max(region.forward_most, dynamic - region.forward_start)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    key = storage_id(leaf)
                    if key in self._parameters:
                        self._used.setdefault(key, set()).add(self._now)
            self._live = dynamic
            return
        if self._now != AFTER or self._regions[AFTER].gradients < 0:  # the first operation of the backward pass
            self._regions[AFTER].saved += self._live - self._regions[AFTER].forward_start
            self._now = AFTER
        region = self._regions[self._backward_region()]
        gradients = memory.of("gradients")
        if region.gradients < 0:
            region.gradients = gradients
        region.backward += spent
        region.traffic += traffic
        region.activations = max(region.activations, dynamic)
        region.most = max(region.most, dynamic + gradients - region.gradients)
        self._live = dynamic

    def _backward_region(self) -> int:
        path = self._trackers.position.module
        if path not in self._region_of:
            self._region_of[path] = block_of(path, self._places)
        number = self._region_of[path]
        if number >= 0:
            self._reached = min(self._reached, number)
            return number
        if self._reached == len(self._asked.paths):
            return AFTER
        return BEFORE if self._reached == 0 else self._after(self._reached - 1)

    def result(self) -> StepProfile:
        asked, trackers = self._asked, self._trackers
        own = self._own_parameters()
        saved = self._regions[BEFORE].saved
        costs = {BEFORE: self._costs(BEFORE, saved, own[BEFORE])}
        for number in range(len(asked.paths)):
            saved += self._regions.get(number, _Region()).saved
            costs[number] = self._costs(number, saved, own[number])
            between = self._regions.get(self._after(number))
            if between is not None and self._after(number) != AFTER:
                saved += between.saved
        saved += self._regions[AFTER].saved
        costs[AFTER] = self._costs(AFTER, saved, own[AFTER])
        plain: dict[int, RegionCosts] = {}
        checkpointed: dict[int, RegionCosts | None] = {}
        for number, kind in enumerate(asked.kinds):
            each = costs[number]
            if (gap := self._regions.get(_BETWEEN - kind)) is not None:
                times = asked.kinds.count(kind) - 1
                each = each.joined(gap.shared(times))
            (checkpointed if asked.paths[number] in asked.checkpointed else plain).setdefault(kind, each)
        trained = sum(each.trained for each in costs.values())
        tensors = sum(each.tensors for each in costs.values())
        largest = max((each.largest for each in costs.values()), default=0)
        launches = self._operations * asked.launch
        return StepProfile(
            asked.samples,
            costs[BEFORE],
            costs[AFTER],
            plain,
            {kind: checkpointed.get(kind) for kind in plain},
            trackers.memory.of("inputs"),
            trackers.memory.of("buffers"),
            trackers.memory.of("optimizer") / trained if trained else 0.0,
            max(0.0, self._optimizer - launches) / trained if trained else 0.0,
            launches / tensors if tensors else 0.0,
            self._optimizer_most / largest if largest else 0.0,
            self._live,
            sum(
                self._parameters[key].untyped_storage().nbytes()
                for key, regions in self._used.items()
                if {BEFORE, AFTER} <= regions
            ),
        )

    def _costs(self, number: int, saved: int, parameters: Sequence[nn.Parameter]) -> RegionCosts:
        """Return the costs of a region.

        Args:
            number: of the region.
            saved: bytes that the forward pass keeps until its end.
            parameters: of the region.
        """
        seen = self._regions.get(number, _Region())
        sizes = [(one.numel() * one.element_size(), one.requires_grad) for one in parameters]
        trained = [size for size, is_trained in sizes if is_trained]
        return RegionCosts(
            seen.forward,
            seen.backward,
            seen.saved,
            seen.forward_most,
            max(0, seen.most - saved),
            max(0, seen.activations - saved),
            sum(size for size, _ in sizes),
            sum(trained),
            len(trained),
            max(trained, default=0),
            int(seen.traffic),
            seen.output,
            seen.context,
            seen.messages,
        )

    def _own_parameters(self) -> dict[int, list[nn.Parameter]]:
        """Return the parameters of each region: by the module of a block, else by their first use."""
        found: dict[int, list[nn.Parameter]] = {BEFORE: [], AFTER: []}
        found.update((number, []) for number in range(len(self._asked.paths)))
        for name, one in self._model.named_parameters():
            if one.is_meta:
                continue
            number = block_of(name.rpartition(".")[0], self._places)
            used = self._used.get(storage_id(one), set())
            found[number if number >= 0 else AFTER if used == {AFTER} else BEFORE].append(one)
        return found
