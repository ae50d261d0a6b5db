"""Where each tensor lives along ``pp``: with the stages that use it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slapo_core.ranks.facts import RankFact, describe
from slapo_core.spec.placement import Placement

if TYPE_CHECKING:
    from slapo_core.spec.pipeline import Partition
    from slapo_core.weights.correspondence import Correspondence

__all__ = ["placed", "placement_facts"]

UNUSED = (0,)  # where a tensor lives that no stage uses


def placed(correspondence: Correspondence, partition: Partition, stage_ranks: Sequence[int]) -> Placement:
    """The placement of a model's tensors.

    Args:
        correspondence: of the scheduled model, as it is now.
        partition: its stages; their modules hold tensors of the scheduled model, the very same objects.
        stage_ranks: the rank along ``pp`` of each stage.

    """
    users: dict[int, set[int]] = {}
    for stage, rank in zip(partition.stages, stage_ranks, strict=True):
        for tensor in (*stage.module.parameters(), *stage.module.buffers()):
            users.setdefault(id(tensor), set()).add(rank)
    explained = {live.name for live, _ in correspondence.carried()}
    untouched: dict[str, tuple[int, ...]] = {}
    added: dict[str, tuple[int, ...]] = {}
    for live in correspondence.live():
        ranks = tuple(sorted(users.get(id(live.tensor), UNUSED)))
        untouched.update((name, ranks) for name in live.stands_for)
        if live.name not in explained:
            added[live.name] = ranks
    return Placement(untouched, added)


def placement_facts(
    partition: Partition, stage_ranks: Sequence[int], placement: Placement, boundaries: Sequence[Sequence[str]]
) -> Iterator[RankFact]:
    """What all ranks must agree about, before any of them gives up a tensor."""
    yield RankFact("the number of stages", str(len(partition.stages)))
    yield RankFact("the ranks along 'pp' that run the stages", describe(tuple(stage_ranks)))
    for stage in partition.stages:
        which = f"stage {stage.index}"
        yield RankFact(f"the module after which {which} ends", describe(stage.last))
        yield RankFact(f"the arguments of the model that {which} reads", describe(stage.inputs))
        yield RankFact(f"the values that {which} uses", describe(stage.uses))
        yield RankFact(f"the values that {which} makes", describe(stage.makes))
    for number, names in enumerate(boundaries):
        yield RankFact(f"what stage {number} sends to the next one", describe(tuple(names)))
    for name, value in partition.values.items():
        yield RankFact(
            f"the value '{name}'", f"{value.shape}, {value.dtype}" + (", a gradient" if value.requires_grad else "")
        )
    yield RankFact("the parameters that several stages use", describe({tie.name: tie.stages for tie in partition.ties}))
    for ranks in sorted({*placement.untouched.values(), *placement.added.values()}):
        names = [name for table in (placement.untouched, placement.added) for name in table if table[name] == ranks]
        digest = hashlib.sha256(repr(sorted(names)).encode()).hexdigest()[:8]
        yield RankFact(
            f"the tensors that live on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of 'pp'",
            f"{len(names)} of them, their names with digest {digest}",
        )
