"""Call the copies of a cut model stage by stage: what one stage does not send, the next one does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from slapo_core.errors import HookError, TraceError
from slapo_core.pipeline.binding import bound_call
from slapo_core.pipeline.calls import StagedCalls
from slapo_core.pipeline.staged import Staged
from slapo_core.schedule.copied import ScheduledCopy
from slapo_core.verification.inputs import Batch
from slapo_core.verification.passes import Caller

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Staging"]

T = TypeVar("T")


class Staging:
    """How the scheduled models of one verification are called.

    Attributes:
        last: the stages that were made last; None as long as no plugin has cut a model.
        refusals: class and text of the errors of plugins that were asked for stages, and of stages that are not as was
            said.
    """

    def __init__(self) -> None:
        self.last: Staged | None = None
        self.refusals: set[tuple[str, str]] = set()

    @property
    def is_needed(self) -> bool:
        """Whether a plugin has cut a model, or has refused to."""
        return self.last is not None or bool(self.refusals)

    def caller(self, schedule: Schedule, model: nn.Module) -> Caller:
        """What calls a copy of a schedule's model: at once where no plugin cuts it.

        Args:
            schedule: says where.
            model: a copy of its model.
        """
        calls = StagedCalls(ScheduledCopy(schedule, model))

        def call(batch: Batch) -> Callable[[], Any]:
            if not _may_be_cut(schedule):
                return lambda: model(*batch.args, **batch.kwargs)
            inputs = bound_call(model, batch.args, batch.kwargs)
            stages = self._noting_refusals(lambda: calls.of(inputs))
            if stages is None:
                return lambda: model(*batch.args, **batch.kwargs)
            self.last = stages
            return lambda: self._noting_refusals(lambda: stages.run(inputs))

        return call

    def _noting_refusals(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except (HookError, TraceError) as error:
            self.refusals.add((type(error).__name__, str(error)))
            raise


def _may_be_cut(schedule: Schedule) -> bool:
    """Whether an active plugin has the hook at all."""
    return schedule.hooks.has("slapo_partition")
