"""`Staged`: the stages of a model with what passes between them, and the run of one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from slapo_core.errors import HookError
from slapo_core.pipeline.checking import check_liveness, check_partition, made_problems
from slapo_core.pipeline.sharing import SharedState, StateMark, held_by
from slapo_core.spec.pipeline import Liveness, Partition, Stage

if TYPE_CHECKING:
    from slapo_core.schedule.read_only import ScheduledCopy
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Staged", "needing", "staged"]


@dataclass(frozen=True)
class Staged:
    """The stages of a model for one form of a batch and one mode, and what passes between them.

    Args:
        partition: the stages.
        liveness: what each of them sends to the next.
        partition_by: the plugin that cut the model, e.g. ``"slapo-pipeline 0.1.0"``.
        liveness_by: the plugin that said what passes.
    """

    partition: Partition
    liveness: Liveness
    partition_by: str = "the caller"
    liveness_by: str = "the caller"

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """The model's output, by running the stages in turn; each gets only what it is sent.

        They are kept apart as processes are: a value that is said to carry no gradient carries none, and what a stage
        gets, from the batch or from another one, is its own: writing to it changes nothing elsewhere.

        Args:
            inputs: the arguments of the model's forward, by parameter.

        Raises:
            HookError: a stage makes something else than was said, or changes a tensor that others hold too.
        """
        own = [_copied({name: inputs[name] for name in stage.inputs if name in inputs}) for stage in self._stages]
        shared = SharedState(self._stages)
        pieces: dict[str, torch.Tensor] = {}
        received: dict[str, torch.Tensor] = {}
        for stage, given in zip(self._stages, own, strict=True):
            made = self._made(stage, given, {name: received[name] for name in stage.uses})
            self._refuse(stage, shared.changed())
            pieces.update((name, made[name]) for name in self.partition.output.pieces if name in made)
            there = {**received, **made}
            received = {name: self._sent(name, there[name]) for name in self.liveness.sent(stage.index)}
        return self.partition.output.assemble(pieces)

    @property
    def _stages(self) -> tuple[Stage, ...]:
        return self.partition.stages

    def _made(self, stage: Stage, given: dict[str, Any], values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            made = stage.module(given, values)
        except Exception as error:
            error.add_note(f"in {_place(stage)}, made by {self.partition_by}")
            raise
        self._refuse(stage, made_problems(made, stage, self.partition))
        return made  # type: ignore[no-any-return]

    def _refuse(self, stage: Stage, problems: Sequence[str]) -> None:
        if problems:
            raise HookError(
                f"{_place(stage)}, made by {self.partition_by}, is not as was said: {'; '.join(problems)}",
                plugin=self.partition_by,
            )

    def _sent(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.clone(memory_format=torch.contiguous_format)
        return own if self.partition.values[name].requires_grad else own.detach()


def staged(
    schedule: Schedule | ScheduledCopy,
    inputs: Mapping[str, Any],
    *,
    outputs: Sequence[str] | None = None,
    batch_axes: Mapping[str, int | None] | None = None,
) -> Staged | None:
    """Ask the plugins for the stages of a schedule; None if no plugin cuts it.

    Args:
        schedule: its model is in the mode that is asked for.
        inputs: the arguments of the model's forward, by parameter.
        outputs: pieces of the output that the last stage needs; None: all of them.
        batch_axes: as the hook `slapo_partition` says.

    Raises:
        TraceError: it cannot be cut there.
        HookError: an answer cannot be right, or there is one about the partition and none about liveness.
    """
    before = {name: StateMark(tensor) for name, tensor in held_by(schedule.model)}
    random = torch.get_rng_state()
    answer = schedule.hooks.single(
        "slapo_partition", schedule=schedule, inputs=inputs, batch_axes=dict(batch_axes or {})
    )
    if answer is None:
        return None
    plugin, partition = answer
    now = dict(held_by(schedule.model))
    changed = [f"'{name}'" for name, mark in before.items() if not mark.holds(now.get(name))]
    changed += ["the random state"] if not torch.equal(random, torch.get_rng_state()) else []
    if changed:
        raise HookError(
            f"{plugin} changes {', '.join(changed[:3])} while it makes the stages (slapo_partition)", plugin=plugin
        )
    check_partition(partition, plugin, model=schedule.model, inputs=inputs)
    needed = tuple(partition.output.pieces if outputs is None else outputs)
    return _with_liveness(schedule, Staged(partition, Liveness(()), plugin), needed)


def needing(schedule: Schedule | ScheduledCopy, found: Staged, outputs: Sequence[str]) -> Staged:
    """The same stages, with what passes between them if the last one needs other pieces of the output.

    Args:
        schedule: that they were asked for.
        found: the stages.
        outputs: pieces of the output that the last stage needs.

    Raises:
        HookError: as for :func:`staged`.
    """
    return _with_liveness(schedule, found, tuple(outputs))


def _with_liveness(schedule: Schedule | ScheduledCopy, found: Staged, needed: tuple[str, ...]) -> Staged:
    answer = schedule.hooks.single("slapo_liveness", partition=found.partition, outputs=needed)
    if answer is None:
        raise HookError(
            f"{found.partition_by} cut the model into stages, and no active plugin says what passes between them "
            "(slapo_liveness)",
            plugin=found.partition_by,
            hint='create_schedule(model, plugins=["slapo-pipeline"])',
        )
    plugin, liveness = answer
    check_liveness(liveness, found.partition, needed, plugin)
    return replace(found, liveness=liveness, liveness_by=plugin)


def _place(stage: Stage) -> str:
    return f"stage {stage.index}" + (f" (up to '{stage.last}')" if stage.last is not None else " (the last)")


def _copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, whose tensors another stage does not see."""
    known: dict[int, torch.Tensor] = {}  # what is one object in the batch stays one

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known.setdefault(id(leaf), leaf) if id(leaf) in known else known.setdefault(id(leaf), leaf.clone())

    return pytree.tree_map(own, inputs)  # type: ignore[no-any-return]
