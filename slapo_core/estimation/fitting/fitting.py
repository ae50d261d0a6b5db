"""`fit`: choose what to checkpoint (rematerialise), so that a training step stays within a number of bytes.

Activation checkpointing trades memory for computing a module's forward a second time (Chen et al., "Training Deep Nets
with Sublinear Memory Cost", 2016; Griewank and Walther, "Revolve", 2000). Which modules to choose for a budget is a
knapsack over time: "Checkmate" (Jain et al., 2020) states it as an integer program over single operations, and torch's
own planner for selective activation checkpointing as one over modules. Here the modules are the repeated blocks of
a model, and the oracle is `estimate`: a training step, played without memory.

1. Two steps are played, with no unit checkpointed and with all. They are parted where the forward or backward pass of
   a unit begins or ends (watching.py); of each part the most bytes held and the FLOPs are known, and for which units
   activations wait for their backward pass. Differences say what checkpointing a unit frees, what is held while it is
   computed again, and what that costs.
2. So the peak for any set is the largest of affine functions of the set (peaks.py): nothing is assumed about where the
   peak is, nor that units are alike.
3. Of units that are alike the first ones go first; over numbers of each class of units all combinations are looked at
   (candidates.py), and of those the best chain is taken in which peaks rise, costs fall and the number of units does
   not grow (ladder.py). Choosing from one chain is what makes the answers monotone in the target.
4. The chain is walked down, from one step above the set that should fit, until an estimate of just that set confirms
   that it does. Every target meets the same sets in the same order, so that what fits one target is met, or passed on
   the way up, by all larger ones: answers stay monotone even where the model of step 2 is wrong.

Pipeline stages share no units, so each has a chain of its own, and the chains are walked together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import ArgumentError, SealedError
from slapo_core.estimation.fitting.chain import chain_of
from slapo_core.estimation.fitting.estimates import Oracle
from slapo_core.estimation.fitting.refusing import nothing_fits
from slapo_core.estimation.fitting.result import Fit, Point
from slapo_core.estimation.fitting.units import structure_of, units_of
from slapo_core.primitives.checkpoint import Checkpoint
from slapo_core.schedule.location import caller_location
from slapo_core.spec.device import DeviceSpec
from slapo_core.spec.mesh import Mesh
from slapo_core.spec.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from slapo_core.estimation.fitting.ladder import Rung
    from slapo_core.estimation.fitting.watching import Profile
    from slapo_core.estimation.results import Estimate
    from slapo_core.schedule.schedule import Schedule

__all__ = ["fit"]

_NEAR = 1.01  # a set whose predicted peak is this much above the target is still asked for: the model may be too high


def fit(
    sch: Schedule,
    memory: int | str,
    example_inputs: Any = None,
    *,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    mesh: Mapping[str, int] | Mesh | None = None,
    offload: bool = False,
    layers: str | Sequence[str] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    device: DeviceSpec | None = None,
    timeout: float = 600.0,
    **config: Any,
) -> Fit:
    """Checkpoint as little as it takes for a training step to stay within ``memory`` on every rank, by the estimate.

    The steps are ordinary ``.checkpoint()`` steps, last in the schedule: ``sch.undo(to=...)`` takes them back. What is
    checkpointed already stays so. With more memory never more modules are checkpointed, and never more is computed
    again.

    Args:
        sch: the schedule.
        memory: bytes, or e.g. ``"70GiB"``: the peak of a training step, all that :class:`slapo_core.estimation.Memory`
            counts. The allocator's own loss (fragmentation) and the runtime's buffers come on top: leave them room.
        example_inputs: one batch; default: those of the schedule.
        optimizer: as for :func:`slapo_core.build`; None for none.
        mesh: sizes; default: the schedule's own.
        offload: there is no primitive that moves activations to the host: True is refused.
        layers: what may be checkpointed, paths or globs: ``"encoder.layer.*"``. Default: the repeated blocks.
        loss: as for :func:`slapo_core.build`.
        device: whose time is saved; None counts floating-point operations instead.
        timeout: seconds for each kind of rank, at each estimate.
        config: ``accumulate``, and options of target ``"torch"``, as for :func:`slapo_core.estimate`.

    Raises:
        FitError: nothing fits; it says what the least peak is, and what holds it.
        ArgumentError: a number that is none, ``offload=True``, nothing that could be checkpointed.
        PathError: a path or glob of ``layers`` matches nothing.
    """
    _require_schedule(sch)
    target = parse_bytes(memory)
    for name in ("rank", "observer"):
        if name in config:
            raise ArgumentError(f"fit takes no {name}: it keeps every kind of rank within memory", hint="leave it out")
    if offload:
        raise ArgumentError(
            "offload=True: no installed primitive moves activations to the host",
            hint='leave it out; target="deepspeed" offloads the optimiser\'s state: its option zero_optimization',
        )
    if sch.is_sealed:
        raise SealedError(
            "cannot fit: the schedule was built or sealed before",
            hint="fit before build(), or create a new schedule of a fresh model",
        )
    own = mesh if mesh is not None else sch.mesh
    sizes = own.sizes if isinstance(own, Mesh) else own
    batch = sch.example_inputs if example_inputs is None else example_inputs
    if batch is None:
        raise ArgumentError(
            "fit needs one batch to train on: none was given, and the schedule has no example_inputs",
            hint="sch.fit('70GiB', {'input_ids': ids, 'labels': ids}, optimizer=...)",
        )
    units = units_of(sch, layers)
    asked = {"mesh": sizes, "optimizer": optimizer, "loss": loss, "device": device, "timeout": timeout, **config}
    oracle = Oracle(sch, batch, units, asked)
    before = oracle.of(())
    if before.memory.total <= target:
        return Fit((), target, before, before, estimates=oracle.played)
    if not units:
        raise nothing_fits(target, before, before, units)
    chain = chain_for(sch, units, oracle.profiles(()), oracle.profiles(units), by_time=device is not None)
    confirmed: dict[int, Estimate] = {len(chain) - 1: before}
    chosen = _walk(chain, target, lambda rung: oracle.of(_paths(rung, units)), confirmed)
    if chosen is None:
        least = min(confirmed.values(), key=lambda one: one.memory.total)
        raise nothing_fits(target, before, least, units)
    paths = _paths(chain[chosen], units)
    _checkpoint(sch, paths, f"fit(memory={format_bytes(target)!r})")
    curve = tuple(
        Point(
            _paths(rung, units),
            round(rung.peak),
            confirmed[number].memory.total if number in confirmed else None,
            round(rung.flops),
            rung.seconds if device is not None else None,
        )
        for number, rung in enumerate(chain)
    )
    return Fit(paths, target, confirmed[chosen], before, curve, oracle.played)


def _require_schedule(sch: object) -> None:
    from slapo_core.schedule.schedule import Schedule

    if not isinstance(sch, Schedule):
        raise ArgumentError(
            f"fit takes a schedule (got {type(sch).__name__})",
            hint="slapo_core.fit(slapo_core.create_schedule(model), '70GiB', batch)",
        )


def chain_for(
    sch: Schedule, units: Sequence[str], none: Sequence[Profile], all_: Sequence[Profile], *, by_time: bool
) -> list[Rung]:
    """What there is to choose from; see :func:`~slapo_core.estimation.fitting.chain.chain_of`."""
    return chain_of([structure_of(sch.tree.node(path).module) for path in units], none, all_, by_time=by_time)


def _walk(
    chain: Sequence[Rung], target: int, ask: Callable[[Rung], Estimate], confirmed: dict[int, Estimate]
) -> int | None:
    """The number of the highest rung, from one above what should fit, that an estimate says fits."""
    fitting = [number for number, rung in enumerate(chain) if rung.peak <= target]
    start = fitting[-1] if fitting else 0
    if start + 1 < len(chain) and chain[start + 1].peak <= _NEAR * target:
        start += 1
    for number in range(start, -1, -1):
        if number not in confirmed:
            confirmed[number] = ask(chain[number])
        if confirmed[number].memory.total <= target:
            return number
    return None


def _paths(rung: Rung, units: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(units[number] for number in rung.units)


def _checkpoint(schedule: Schedule, paths: Sequence[str], why: str) -> None:
    """All of them, or none."""
    before = len(schedule.records)
    location = f"{caller_location()}, {why}"
    try:
        for path in paths:
            schedule.apply_at(schedule.tree.node(path), Checkpoint(), location=location)
    except BaseException:
        schedule.undo(to=before)
        raise
