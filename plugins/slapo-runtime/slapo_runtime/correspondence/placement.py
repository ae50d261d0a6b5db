"""Place tensors on the pipeline ranks of the stages that use them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from slapo_core.internals import describe
from slapo_runtime.correspondence.storage import Placement
from slapo_runtime.ranks.facts import RankFact

if TYPE_CHECKING:
    from slapo_runtime.correspondence.tensors import Correspondence
    from slapo_runtime.stages.partition import Partition

UNUSED = (0,)  # the ranks of a tensor that no stage uses


def placement_of(correspondence: Correspondence, partition: Partition, stage_ranks: Sequence[int]) -> Placement:
    """Place a model's tensors on pipeline ranks.

    Args:
        correspondence: of the scheduled model.
        partition: its stages; their modules hold the same tensor objects as the scheduled model.
        stage_ranks: the rank along ``pp`` of each stage.
    """
    users: dict[int, set[int]] = {}
    for stage, rank in zip(partition.stages, stage_ranks, strict=True):
        for tensor in (*stage.module.parameters(), *stage.module.buffers()):
            users.setdefault(id(tensor), set()).add(rank)
    explained = {live.name for live, _ in correspondence.carried()}
    reference: dict[str, tuple[int, ...]] = {}
    added: dict[str, tuple[int, ...]] = {}
    for live in correspondence.live():
        ranks = tuple(sorted(users.get(id(live.tensor), UNUSED)))
        reference.update((name, ranks) for name in live.reference_names)
        if live.name not in explained:
            added[live.name] = ranks
    modules = dict(_running(correspondence, partition, stage_ranks, reference))
    return Placement(reference, added, modules)


def _running(
    correspondence: Correspondence,
    partition: Partition,
    stage_ranks: Sequence[int],
    reference: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the ranks of modules with extra state, by stages or tensors."""
    users: dict[int, set[int]] = {}
    for stage, rank in zip(partition.stages, stage_ranks, strict=True):
        for module in stage.module.modules():
            users.setdefault(id(module), set()).add(rank)
    for key in correspondence.survey.not_tensors:
        path = key.rpartition(".")[0]
        own = correspondence.tree.index.modules.get(path)
        within = {rank for name, ranks in reference.items() if name.startswith(f"{path}.") for rank in ranks}
        yield path, tuple(sorted(users.get(id(own)) or within or UNUSED))


def placement_facts(
    partition: Partition, stage_ranks: Sequence[int], placement: Placement, boundaries: Sequence[Sequence[str]]
) -> Iterator[RankFact]:
    """Describe the placement, for comparison across ranks before tensors are released."""
    yield RankFact("the number of stages", str(len(partition.stages)))
    yield RankFact("the ranks along 'pp' that run the stages", describe(tuple(stage_ranks)))
    for stage in partition.stages:
        which = f"stage {stage.index}"
        yield RankFact(f"the module after which {which} ends", describe(stage.last))
        yield RankFact(f"the arguments of the model that {which} reads", describe(stage.inputs))
        yield RankFact(f"the values that {which} uses", describe(stage.uses))
        yield RankFact(f"the values that {which} makes", describe(stage.makes))
    for number, names in enumerate(boundaries):
        yield RankFact(f"the values that stage {number} sends to the next stage", describe(tuple(names)))
    for name, value in partition.values.items():
        yield RankFact(
            f"the value '{name}'", f"{value.shape}, {value.dtype}" + (", a gradient" if value.requires_grad else "")
        )
    yield RankFact("the parameters that several stages use", describe({tie.name: tie.stages for tie in partition.ties}))
    for ranks in sorted({*placement.reference.values(), *placement.added.values()}):
        names = [name for table in (placement.reference, placement.added) for name in table if table[name] == ranks]
        digest = hashlib.sha256(repr(sorted(names)).encode()).hexdigest()[:8]
        yield RankFact(
            f"the tensors on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of 'pp'",
            f"{len(names)}, names with digest {digest}",
        )
