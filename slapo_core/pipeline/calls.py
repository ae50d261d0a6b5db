"""`StagedCalls`: the stages of one scheduled model, made once for every form of a batch and every mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import HookError
from slapo_core.pipeline.batch_form import BatchForm
from slapo_core.pipeline.staged import Staged, staged
from slapo_core.spec.pipeline import Extent, Value

if TYPE_CHECKING:
    from slapo_core.schedule.copied import ScheduledCopy
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Extents", "StagedCalls"]


class StagedCalls:
    """Asks the plugins for stages, and keeps them.

    Args:
        schedule: its model is in the mode in which it is to run whenever stages are asked for.
        outputs: see :func:`~slapo_core.pipeline.staged.staged`.
        batch_axes: likewise.
        extents: shared with others that are asked about the same model; None: its own.
    """

    def __init__(
        self,
        schedule: Schedule | ScheduledCopy,
        *,
        outputs: Sequence[str] | None = None,
        batch_axes: Mapping[str, int | None] | None = None,
        extents: Extents | None = None,
    ) -> None:
        self._schedule, self._outputs, self._batch_axes = schedule, outputs, batch_axes
        self._extents = extents if extents is not None else Extents()
        self._known: list[tuple[BatchForm, Staged | None]] = []

    def of(self, inputs: Mapping[str, Any]) -> Staged | None:
        """The stages for a call; None where no plugin cuts the model.

        Args:
            inputs: the arguments of the model's forward, by parameter.

        Raises:
            TraceError: it cannot be cut there.
            HookError: an answer of a plugin cannot be right, or contradicts that for a batch of another size.
        """
        form = BatchForm(inputs, [module.training for module in self._schedule.model.modules()])
        for known, stages in self._known:
            if known == form:
                return stages
        made = staged(self._schedule, inputs, outputs=self._outputs, batch_axes=self._batch_axes)
        if made is not None and not self._batch_axes:
            self._extents.add(form, made)
        self._known.append((form, made))
        return made


class Extents:
    """What was said of shapes with the number of samples left open, for batches that differ in nothing else."""

    def __init__(self) -> None:
        self._known: list[tuple[BatchForm, Mapping[str, Value]]] = []

    def add(self, form: BatchForm, made: Staged) -> None:
        """Hold what is said of a further form against what was said before.

        Raises:
            HookError: a value is said to have another shape.
        """
        for known, values in self._known:
            if known.is_like(form):
                for name, value in values.items():
                    again = made.partition.values.get(name)
                    if again is not None and not _agree(value.symbolic_shape, again.symbolic_shape):
                        raise HookError(
                            f"the answer of {made.partition_by} to slapo_partition cannot be right: with the batch "
                            f"left open '{name}' is {_shown(value)}, and {_shown(again)}",
                            plugin=made.partition_by,
                        )
        self._known.append((form, made.partition.values))


def _agree(one: tuple[int | Extent, ...] | None, other: tuple[int | Extent, ...] | None) -> bool:
    return one is None or other is None or one == other


def _shown(value: Value) -> str:
    return f"({', '.join(map(str, value.symbolic_shape or ()))}) where it is {value.shape}"
