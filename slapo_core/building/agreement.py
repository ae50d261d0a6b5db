"""Do all ranks build the same? Compared before anything is changed, because what differs here hangs or drifts later."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.ranks.facts import RankFact, describe, describe_tensor
from slapo_core.ranks.random_states import first_of, restore, torch_states
from slapo_core.schedule.consistency import SAME_SCRIPT, schedule_facts
from slapo_core.weights.replicas import ranks_along

if TYPE_CHECKING:
    from slapo_core.building.arguments import Arguments
    from slapo_core.ranks.world import World
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.dialect import Plan
    from slapo_core.spec.mesh import Mesh
    from slapo_core.weights.sources import Source

__all__ = ["agree", "build_facts", "drawing_alike", "weights_facts"]

_SAME_WEIGHTS = {
    "those of the model": "call torch.manual_seed(0) on every rank before the model is made, or pass weights=",
    "a mapping": 'give every rank the same weights=, or the files they came from: weights="dir/with/safetensors"',
    "a path": "give every rank a copy of the same files",
}
_LOG = logging.getLogger("slapo_core.building")


def agree(
    world: World,
    schedule: Schedule,
    arguments: Arguments,
    plan: Plan,
    source: Source | None,
    untouched: Mapping[str, torch.Tensor],
) -> None:
    """Compare the schedule, the arguments of ``build`` and the weights over all ranks.

    Args:
        world: the ranks of the schedule's mesh.
        schedule: every rank's own, like all that follows.
        arguments: what the user gave to ``build``.
        plan: the dialect's, with its options after defaults were filled in.
        source: what the weights given were opened as; None without any.
        untouched: the tensors of the reference model by name.

    Raises:
        RankMismatchError: on every rank; it names the first difference and the ranks.
    """
    world.agree(chain(schedule_facts(schedule), build_facts(schedule, arguments, plan)), hint=SAME_SCRIPT)
    tensors = arguments.weights if isinstance(arguments.weights, Mapping) else untouched if source is None else None
    world.agree(weights_facts(tensors, source), hint=_SAME_WEIGHTS[_kind(arguments.weights)])


def build_facts(schedule: Schedule, arguments: Arguments, plan: Plan) -> Iterator[RankFact]:
    """The arguments of ``build``, and then the dialect's options, of which any may decide what ranks wait for.

    The arguments come first: a dialect fills in options by them, and what the user wrote is what is named.
    """
    yield RankFact("the target of build", plan.target)
    optimizer, device = arguments.optimizer, arguments.device
    yield RankFact("the optimizer given to build", "none" if optimizer is None else describe(optimizer))
    yield RankFact("the loss given to build", "none" if arguments.loss is None else "a function")
    yield RankFact("the weights given to build", _kind(arguments.weights))
    yield RankFact("max_grad_norm given to build", describe(arguments.max_grad_norm))
    yield RankFact("accumulate given to build", describe(arguments.accumulate))
    yield RankFact("the seed given to build", describe(arguments.seed))
    tensors = [*schedule.model.parameters(), *schedule.model.buffers()]
    devices = {torch.device(device).type} if device is not None else {tensor.device.type for tensor in tensors}
    yield RankFact("the device of the model", ", ".join(sorted(devices)) or "none")
    for name in sorted(set(plan.config) - set(plan.notes)):
        for key, value in _flat(plan.config[name]):
            where = f", in {key}" if key else ""
            yield RankFact(f"option '{name}' of target '{plan.target}'{where}", describe(value))


def weights_facts(tensors: Mapping[str, torch.Tensor] | None, source: Source | None) -> Iterator[RankFact]:
    """Every tensor that the model gets its values from: with a checksum, or of files its shape alone."""
    if tensors is not None:
        for name, tensor in tensors.items():
            yield RankFact(f"the weights '{name}'", describe_tensor(tensor))
    elif source is not None:
        for name, shape in source.shapes().items():
            yield RankFact(f"the weights '{name}'", describe(tuple(shape)))


def _flat(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested mappings, by keys with dots: ``("zero_optimization.stage", 1)``.

    In their order: what a user wrote comes before what a dialect filled in because of it.
    """
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for name in value:
            key = repr(name) if "." in name else name
            yield from _flat(value[name], f"{before}.{key}" if before else key)
    else:
        yield before, value


@contextlib.contextmanager
def drawing_alike(world: World, mesh: Mesh | None) -> Iterator[None]:
    """Give the tensor-parallel ranks of a replica one random state, that of the first of them.

    They drop the same elements of what they all hold from then on, whatever each of them was seeded with. Replicas
    (``dp``) go on drawing as they did. If the block fails, every rank has its own state again.
    """
    if mesh is None or world.is_alone or mesh.size("tp") == 1:
        yield
        return
    own = torch_states()
    by_rank = dict(zip(world.ranks, world.gather(own), strict=True))
    row = next(ranks for ranks in ranks_along(mesh, ("tp",)) if world.rank in ranks)
    states, differing = first_of(by_rank, row)
    if differing:
        restore(states)
        _LOG.info(
            "torch's random state on %s was another one on each of the ranks %s; it is rank %d's on all of them now",
            " and ".join(differing),
            ", ".join(map(str, row)),
            row[0],
        )
    try:
        yield
    except BaseException:
        if differing:
            restore(own)
        raise


def _kind(weights: Any) -> str:
    return "those of the model" if weights is None else "a mapping" if isinstance(weights, Mapping) else "a path"
