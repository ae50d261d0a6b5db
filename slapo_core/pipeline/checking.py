"""Whether what two plugins answered about stages fits together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slapo_core.errors import HookError
from slapo_core.spec.pipeline import Liveness, Partition

__all__ = ["check_liveness", "check_partition"]


def check_partition(partition: Partition, plugin: str) -> None:
    """Refuse an answer to `slapo_partition` that contradicts itself.

    Args:
        partition: the answer.
        plugin: whose it is, e.g. ``"slapo-pipeline 0.1.0"``.

    Raises:
        HookError: every contradiction.
    """
    _refuse("slapo_partition", plugin, list(_of_partition(partition)))


def check_liveness(liveness: Liveness, partition: Partition, outputs: Sequence[str], plugin: str) -> None:
    """Refuse an answer to `slapo_liveness` that leaves a stage without what it reads, or sends what is not there.

    Args:
        liveness: the answer.
        partition: what it was asked about.
        outputs: pieces of the output that the last stage needs.
        plugin: whose answer it is.

    Raises:
        HookError: every contradiction.
    """
    _refuse("slapo_liveness", plugin, list(_of_liveness(liveness, partition, outputs)))


def _refuse(hook: str, plugin: str, problems: list[str]) -> None:
    if problems:
        raise HookError(f"the answer of {plugin} to {hook} cannot be right: {'; '.join(problems)}", plugin=plugin)


def _of_partition(partition: Partition) -> Iterator[str]:
    if [stage.index for stage in partition.stages] != list(range(len(partition.stages))):
        yield "the stages are not numbered from 0 in their order"
        return
    makers: dict[str, int] = {}
    for stage in partition.stages:
        for name in stage.makes:
            if name in makers:
                yield f"stages {makers[name]} and {stage.index} both make '{name}'"
            makers[name] = stage.index
    for name, value in partition.values.items():
        readers = tuple(stage.index for stage in partition.stages if name in stage.uses)
        if makers.get(name) != value.producer:
            yield f"'{name}' is said to be made by stage {value.producer}, which does not make it"
        if readers != value.consumers:
            yield f"'{name}' is said to be read by the stages {value.consumers}, and {readers} read it"
        if any(reader <= value.producer for reader in readers):
            yield f"'{name}' is read before stage {value.producer} has made it"
    known = set(partition.values)
    for stage in partition.stages:
        for name in (*stage.uses, *stage.makes):
            if name not in known:
                yield f"nothing is said about '{name}' of stage {stage.index}"
    for name in partition.output.pieces:
        if name not in known:
            yield f"nothing is said about the piece '{name}' of the output"


def _of_liveness(liveness: Liveness, partition: Partition, outputs: Sequence[str]) -> Iterator[str]:
    last = len(partition.stages) - 1
    if len(liveness.boundaries) != last:
        yield f"{len(partition.stages)} stages have {last} boundaries, and it names {len(liveness.boundaries)}"
        return
    for stage in partition.stages:
        there = {*liveness.received(stage.index), *stage.makes}
        for name in stage.uses:
            if name not in liveness.received(stage.index):
                yield f"stage {stage.index} reads '{name}', which it is not sent"
        for name in liveness.sent(stage.index):
            if name not in there:
                yield f"stage {stage.index} is to send '{name}', which it has not"
        if len(set(liveness.sent(stage.index))) != len(liveness.sent(stage.index)):
            yield f"stage {stage.index} sends a value twice"
    for name in outputs:
        if name not in {*liveness.received(last), *partition.stages[last].makes}:
            yield f"the last stage needs '{name}' for the loss, and it is not sent"
