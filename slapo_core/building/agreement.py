"""Do all ranks build the same? Compared before anything is changed, because what differs here hangs or drifts later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.ranks.checksum import checksum
from slapo_core.ranks.facts import RankFact, describe, describe_tensor
from slapo_core.schedule.agreement import SAME_SCRIPT, schedule_facts

if TYPE_CHECKING:
    from slapo_core.building.arguments import Arguments
    from slapo_core.ranks.world import World
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.dialect import Plan
    from slapo_core.weights.sources import Source

__all__ = ["agree", "build_facts", "random_facts", "weights_facts"]

_SAME_WEIGHTS = {
    "those of the model": "call torch.manual_seed(0) on every rank before the model is made, or pass weights=",
    "a mapping": 'give every rank the same weights=, or the files they came from: weights="dir/with/safetensors"',
    "a path": "give every rank a copy of the same files",
}
_SAME_SEED = "torch.manual_seed(0) on every rank that shares a replica (same dp rank), before build"


def agree(
    world: World,
    schedule: Schedule,
    arguments: Arguments,
    plan: Plan,
    source: Source | None,
    untouched: Mapping[str, torch.Tensor],
) -> None:
    """Compare the schedule, the arguments of ``build``, the weights and torch's random state over all ranks.

    Args:
        world: the ranks of the schedule's mesh.
        schedule: every rank's own, like all that follows.
        arguments: what the user gave to ``build``.
        plan: the dialect's, with its options after defaults were filled in.
        source: what the weights given were opened as; None without any.
        untouched: the tensors of the untouched model by name.

    Raises:
        RankMismatchError: on every rank; it names the first difference and the ranks.
    """
    world.agree(chain(schedule_facts(schedule), build_facts(schedule, arguments, plan)), hint=SAME_SCRIPT)
    tensors = arguments.weights if isinstance(arguments.weights, Mapping) else untouched if source is None else None
    world.agree(weights_facts(tensors, source), hint=_SAME_WEIGHTS[_kind(arguments.weights)])
    world.agree(random_facts(), hint=_SAME_SEED)


def build_facts(schedule: Schedule, arguments: Arguments, plan: Plan) -> Iterator[RankFact]:
    """The arguments of ``build``, and the dialect's options, of which any may decide what ranks wait for."""
    yield RankFact("the target of build", plan.target)
    for name in sorted(plan.config):
        yield RankFact(f"option '{name}' of target '{plan.target}'", describe(plan.config[name]))
    optimizer, device = arguments.optimizer, arguments.device
    yield RankFact("the optimizer given to build", "none" if optimizer is None else describe(optimizer))
    yield RankFact("the loss given to build", "none" if arguments.loss is None else "a function")
    yield RankFact("the weights given to build", _kind(arguments.weights))
    yield RankFact("max_grad_norm given to build", describe(arguments.max_grad_norm))
    yield RankFact("the seed given to build", describe(arguments.seed))
    tensors = [*schedule.model.parameters(), *schedule.model.buffers()]
    devices = {torch.device(device).type} if device is not None else {tensor.device.type for tensor in tensors}
    yield RankFact("the device of the model", ", ".join(sorted(devices)) or "none")


def weights_facts(tensors: Mapping[str, torch.Tensor] | None, source: Source | None) -> Iterator[RankFact]:
    """Every tensor that the model gets its values from: with a checksum, or of files its shape alone."""
    if tensors is not None:
        for name, tensor in tensors.items():
            yield RankFact(f"the weights '{name}'", describe_tensor(tensor))
    elif source is not None:
        for name, shape in source.shapes().items():
            yield RankFact(f"the weights '{name}'", describe(tuple(shape)))


def random_facts() -> Iterator[RankFact]:
    """Where torch's random numbers stand: tensor-parallel ranks drop the same elements of what they all hold."""
    yield _random("CPU", torch.initial_seed(), torch.get_rng_state())
    if torch.cuda.is_initialized():
        yield _random("GPU", torch.cuda.initial_seed(), torch.cuda.get_rng_state())
    else:
        yield RankFact("torch's random state on the GPU", None, over="tp")


def _random(device: str, seed: int, state: torch.Tensor) -> RankFact:
    return RankFact(f"torch's random state on the {device}", f"seed {seed}, checksum {checksum(state):016x}", over="tp")


def _kind(weights: Any) -> str:
    return "those of the model" if weights is None else "a mapping" if isinstance(weights, Mapping) else "a path"
