"""Predict a training step on a mesh from the costs of its blocks.

One profile of a micro-batch (:mod:`slapo_estimate.block_profile`) gives the step of any number of blocks, replicas,
stages and micro-batches: no further simulation. The rules follow the simulated engines (:mod:`training_step`,
:mod:`pipeline_step`), whose numbers the tests compare.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_estimate.block_profile import RegionCosts, StepProfile
from slapo_estimate.fit import fewest
from slapo_estimate.roofline import collective_seconds, link_of
from slapo_runtime.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from slapo_estimate.device import DeviceSpec, Link

_BUCKET = 25 * 2**20
"""Bytes of a bucket of gradients; the default of target "torch"."""


@dataclass(frozen=True)
class Layout:
    """How a step is divided over ranks.

    Args:
        tp: ranks along ``tp``.
        pp: ranks along ``pp``.
        dp: ranks along ``dp``.
        shards: whether replicas hold shards (``data_parallel="fsdp"``).
        microbatches: micro-batches of a replica's step.
    """

    tp: int
    pp: int
    dp: int
    shards: bool
    microbatches: int

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh, outermost first, without dimensions of one rank."""
        return {name: size for name in ("dp", "pp", "tp") if (size := getattr(self, name)) > 1}

    @property
    def options(self) -> dict[str, object]:
        """The options of ``build``."""
        options: dict[str, object] = {"data_parallel": "fsdp"} if self.shards else {}
        if self.microbatches > 1 or self.pp > 1:
            options["microbatches" if self.pp > 1 else "accumulate"] = self.microbatches
        return options


@dataclass(frozen=True)
class Prediction:
    """A predicted step. Bytes and seconds.

    Args:
        time: seconds of a step, of the slowest rank.
        memory: bytes of the fullest rank.
        traffic: bytes that the busiest rank sends.
        cuts: numbers of the blocks after which the model is cut into stages.
        checkpointed: numbers of the checkpointed blocks.
    """

    time: float
    memory: int
    traffic: int
    cuts: tuple[int, ...]
    checkpointed: tuple[int, ...]


def predict(
    profile: StepProfile, kinds: Sequence[int], layout: Layout, device: DeviceSpec, memory: int | None
) -> Prediction | None:
    """Predict a step with the fewest checkpointed blocks that fit.

    Args:
        profile: costs of a micro-batch on the ranks along ``tp``.
        kinds: the kind of each block of the model.
        layout: how the step is divided.
        device: the device.
        memory: bytes of a rank; None checkpoints nothing.

    Returns:
        the prediction; None if nothing fits.
    """
    cuts = balanced_cuts(profile, kinds, layout.pp)
    edges = [0, *(cut + 1 for cut in cuts), len(kinds)]
    stages = [range(begin, end) for begin, end in itertools.pairwise(edges)]
    able = [[number for number in stage if profile.checkpointed[kinds[number]] is not None] for stage in stages]

    def stage_of(index: int, count: int) -> _Stage:
        chosen = set(able[index][:count])
        blocks = [_block(profile, kinds[number], number in chosen) for number in stages[index]]
        return _Stage(profile, blocks, index, layout, device)

    counts: Sequence[int] | None = [0] * len(stages)
    if memory is not None:
        sizes = [len(each) for each in able]
        counts = fewest(sizes, lambda tried: [stage_of(i, n).memory() for i, n in enumerate(tried)], memory)
    if counts is None:
        return None
    made = [stage_of(index, count) for index, count in enumerate(counts)]
    times = [stage.seconds() for stage in made]
    busy = sum(times)
    share = 1 / layout.microbatches if layout.pp > 1 else 0.0
    return Prediction(
        max(time + share * (busy - time) for time in times),
        max(stage.memory() for stage in made),
        max(stage.traffic() for stage in made),
        cuts,
        tuple(number for each, count in zip(able, counts, strict=True) for number in each[:count]),
    )


def balanced_cuts(profile: StepProfile, kinds: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return the blocks after which a model is cut, so that the slowest stage is as fast as possible.

    Args:
        profile: costs of a micro-batch.
        kinds: the kind of each block.
        stages: number of stages, at most that of blocks.
    """
    costs = [profile.plain[kind].forward + profile.plain[kind].backward for kind in kinds]
    costs[0] += profile.before.forward + profile.before.backward
    costs[-1] += profile.after.forward + profile.after.backward
    # Best largest cost of the first n blocks in some stages, and where the last of these stages begins.
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [(sums[number], 0) for number in range(len(costs) + 1)]
    begins = []
    for stage in range(1, stages):
        slowest = [
            [(max(best[begin][0], total - sums[begin]), begin) for begin in range(stage, end)]
            for end, total in enumerate(sums)
        ]
        best = [min(each, default=(math.inf, 0)) for each in slowest]
        begins.append([begin for _, begin in best])
    cuts: list[int] = []
    end = len(costs)
    for begin_of in reversed(begins):
        end = begin_of[end]
        cuts.append(end - 1)
    return tuple(reversed(cuts))


def _block(profile: StepProfile, kind: int, is_checkpointed: bool) -> RegionCosts:
    costs = profile.checkpointed[kind] if is_checkpointed else profile.plain[kind]
    assert costs is not None
    return costs


class _Stage:
    """One pipeline rank's part of a step.

    Args:
        profile: costs of a micro-batch.
        blocks: costs of the stage's blocks.
        index: number of the stage.
        layout: how the step is divided.
        device: the device.
    """

    def __init__(
        self, profile: StepProfile, blocks: list[RegionCosts], index: int, layout: Layout, device: DeviceSpec
    ) -> None:
        self._profile, self._blocks, self._layout, self._device = profile, blocks, layout, device
        self._is_first, self._is_last = index == 0, index == layout.pp - 1
        self._in_flight = min(layout.pp - index, layout.microbatches)
        self._before = profile.before if self._is_first else RegionCosts(saved=blocks[0].output + blocks[0].context)
        self._after = profile.after if self._is_last else RegionCosts()
        tied = profile.tied if self._is_last and not self._is_first else 0
        self._outside = self._before.parameters + self._after.parameters + tied
        self._trained_outside = self._before.trained + self._after.trained + tied
        self._regions = [self._before, *blocks, self._after]
        self._shards = layout.dp if layout.shards else 1

    @property
    def _parameters(self) -> int:
        return self._outside + sum(block.parameters for block in self._blocks)

    @property
    def _trained(self) -> int:
        return self._trained_outside + sum(block.trained for block in self._blocks)

    def memory(self) -> int:
        """Return the bytes at the peak of a step."""
        profile, layout, shards = self._profile, self._layout, self._shards
        trained = self._trained
        saved = sum(region.saved for region in self._regions)
        static = self._parameters / shards + trained / shards * profile.state + profile.buffers
        static += profile.inputs * layout.microbatches
        keeps_full = shards > 1 and (layout.pp > 1 or layout.microbatches > 1)  # gradients are reduced once
        persists = layout.microbatches > 1 or (layout.dp > 1 and shards == 1)
        held = trained if persists and (shards == 1 or keeps_full) else 0
        if layout.microbatches > 1 and layout.dp > 1 and shards == 1 and layout.pp == 1:
            static += trained  # buckets beside gradients that are not exchanged yet
        if shards > 1 and layout.pp > 1:
            static += self._parameters  # gathered once
        live = static + held + (self._in_flight - 1) * saved
        last_step = 0.0 if held else trained / shards  # gradients live until the next backward pass
        peak, gradients = live, 0.0
        gathers = shards > 1 and layout.pp == 1
        if gathers:
            live += self._outside
        for region in self._regions:
            unit = region.parameters if gathers and region is not self._before and region is not self._after else 0
            peak = max(peak, live + last_step + region.forward_peak + 2 * unit)
            live += region.saved
        for number, region in reversed(list(enumerate(self._regions))):
            own = region.activation_peak if held else region.backward_peak
            units = reductions = 0
            if gathers:
                following = self._regions[number - 1].parameters if number > 1 else 0
                if 0 < number < len(self._regions) - 1:
                    units, reductions = region.parameters + following, region.trained
                own = region.backward_peak
            peak = max(peak, live + own + gradients + units + reductions)
            live -= region.saved
            gradients += 0 if held else region.trained / shards
        kept = profile.retained if self._is_last else 0
        largest = max((region.largest for region in self._regions), default=0)
        after = static + max(held, trained / shards) + kept + largest / shards * profile.optimizer_peak
        return int(max(peak, after))

    def seconds(self) -> float:
        """Return the seconds of a step without waiting for other stages."""
        profile, layout = self._profile, self._layout
        if self._shards > 1 and layout.pp == 1:
            busy = self._sharded_passes()
        else:
            forward = sum(region.forward for region in self._regions)
            backward = sum(region.backward for region in self._regions)
            busy = layout.microbatches * (forward + backward)
            if layout.pp > 1:
                busy += self._messages()
            if layout.dp > 1:
                busy += self._exchange()
        tensors = sum(region.tensors for region in self._regions)
        added = 3 * self._trained / self._device.bandwidth + tensors * self._device.launch  # to earlier gradients
        busy += (layout.microbatches - 1) * added
        return busy + self._trained / self._shards * profile.optimizer_bytes + tensors * profile.optimizer_tensors

    def _messages(self) -> float:
        _, link = link_of(self._device, "pp")
        block = self._blocks[0]
        sides = (not self._is_first) + (not self._is_last)
        hidden = collective_seconds("send", block.output, 2, link) + self._device.launch
        context = block.messages * (link.latency + self._device.launch) + block.context / link.bandwidth
        return sides * self._layout.microbatches * (2 * hidden + context)

    def _exchange(self) -> float:
        """Return the seconds that replicas exchange gradients or parameters after the passes."""
        _, link = link_of(self._device, "dp")
        ranks, launch, bandwidth = self._layout.dp, self._device.launch, self._device.bandwidth
        if self._shards > 1:
            sizes = [self._outside, *(block.parameters for block in self._blocks)]
            trained = [self._trained_outside, *(block.trained for block in self._blocks)]
            gather = sum(collective_seconds("all_gather", size // ranks, ranks, link) for size in sizes)
            reduce = sum(collective_seconds("reduce_scatter", size, ranks, link) for size in trained)
            copies = 2 * (sum(sizes) + sum(trained)) / bandwidth
            return gather + reduce + copies + 4 * len(sizes) * launch
        tensors = sum(region.tensors for region in self._regions)
        copies = 2 * self._trained / bandwidth + tensors * launch
        if self._layout.pp > 1:
            buckets = max(1, math.ceil(self._trained / _BUCKET))
            return copies + buckets * collective_seconds("all_reduce", self._trained // buckets, ranks, link)
        return copies + self._exposed(ranks, link)

    def _exposed(self, ranks: int, link: Link) -> float:
        """Return the seconds of all-reduces after the backward pass, which begin as buckets are full.

        On a CPU they take the cores that compute, and overlap nothing.
        """
        clock = free = pending = 0.0
        for region in reversed(self._regions):
            clock += region.backward if self._device.type != "cpu" else 0.0
            pending += region.trained
            full = int(pending // max(_BUCKET, region.largest)) if region.trained else 0
            for _ in range(full):
                free = max(clock, free) + collective_seconds("all_reduce", int(pending / full), ranks, link)
            pending = 0.0 if full else pending
        if pending:
            free = max(clock, free) + collective_seconds("all_reduce", int(pending), ranks, link)
        return max(0.0, free - clock)

    def _sharded_passes(self) -> float:
        """Return the seconds of the passes whose parameters are gathered by unit."""
        _, link = link_of(self._device, "dp")
        ranks, launch, bandwidth = self._layout.dp, self._device.launch, self._device.bandwidth
        clock, free, overlaps = 0.0, 0.0, self._device.type != "cpu"

        def sent(kind: str, size: int, ready: float) -> float:
            """Return when a message has arrived; on a CPU it takes the cores that compute."""
            nonlocal clock, free
            begin = max(ready, free) if overlaps else clock
            free = begin + collective_seconds(kind, size, ranks, link)
            clock = clock if overlaps else free
            return free

        copy = 2 / bandwidth
        for number in range(self._layout.microbatches):
            is_last = number == self._layout.microbatches - 1
            there = sent("all_gather", self._outside // ranks, clock)
            clock = ready = max(clock, there) + copy * self._outside + 2 * launch + self._before.forward
            for block in self._blocks:
                there = sent("all_gather", block.parameters // ranks, ready)
                clock = ready = max(clock, there)
                clock += copy * block.parameters + 2 * launch + block.forward
            clock = ready = max(clock + self._after.forward, free)
            order = list(reversed(self._blocks))
            there = sent("all_gather", order[0].parameters // ranks, ready)
            clock += self._after.backward
            for block, following in zip(order, [*order[1:], None], strict=True):
                clock = ready = max(clock, there)
                if following is not None:  # gathered while this unit computes
                    there = sent("all_gather", following.parameters // ranks, ready)
                clock += copy * block.parameters + 2 * launch + block.backward
                if is_last:
                    clock += copy * block.trained + 2 * launch
                    sent("reduce_scatter", block.trained, clock)
            clock += self._before.backward
            if is_last:
                clock += copy * self._trained_outside + 2 * launch
                sent("reduce_scatter", self._trained_outside, clock)
            clock = max(clock, free)
        return clock

    def traffic(self) -> int:
        """Return the bytes that the rank sends in a step."""
        layout, ranks = self._layout, self._layout.dp
        sent = layout.microbatches * sum(region.traffic for region in self._regions)
        if layout.pp > 1:
            block = self._blocks[0]
            sent += layout.microbatches * block.output * ((not self._is_first) + (not self._is_last))
            sent += layout.microbatches * block.context * (not self._is_last)
        if ranks > 1:
            share = (ranks - 1) / ranks
            gathers = 1 if layout.pp > 1 else 2 * layout.microbatches
            sent += int(share * self._trained) if self._shards > 1 else int(2 * share * self._trained)
            sent += int(gathers * share * self._parameters) if self._shards > 1 else 0
        return sent


def memory_limit(memory: int | str | None, device: DeviceSpec) -> int | None:
    """Return a limit in bytes; by default 90 % of the device's memory, None if that is unknown.

    Raises:
        ArgumentError: an invalid size.
    """
    if memory is not None:
        return parse_bytes(memory)
    return None if device.memory is None else int(0.9 * device.memory)


def text_of_bytes(size: int) -> str:
    """Format a size in bytes."""
    return format_bytes(size)
