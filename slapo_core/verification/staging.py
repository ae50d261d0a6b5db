"""Call the copies of a cut model stage by stage: what one stage does not send, the next one does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from slapo_core.errors import HookError, TraceError
from slapo_core.pipeline.apart import ApartCalls
from slapo_core.pipeline.binding import bound_call
from slapo_core.pipeline.calls import Answers, StagedCalls
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
        answers: which copies share.
    """

    def __init__(self) -> None:
        self.last: Staged | None = None
        self.refusals: set[tuple[str, str]] = set()
        self.answers = Answers()

    @property
    def is_needed(self) -> bool:
        """Whether a plugin has cut a model, or has refused to."""
        return self.last is not None or bool(self.refusals)

    def caller(self, schedule: Schedule, model: nn.Module, *, apart: bool = False) -> Caller:
        """What calls a copy of a schedule's model: in one piece where no active plugin can cut it.

        Args:
            schedule: says where.
            model: a copy of its model.
            apart: whether every stage gets modules of its own; that takes as many recordings as there are stages.
        """
        if not schedule.hooks.has("slapo_partition"):
            return Caller(model)
        return _ApartCaller(self, schedule, model) if apart else _StagedCaller(self, schedule, model)

    def noting_refusals(self, function: Callable[[], T]) -> T:
        """Call a function, and keep what it refuses."""
        try:
            return function()
        except (HookError, TraceError) as error:
            self.refusals.add((type(error).__name__, str(error)))
            raise


class _StagedCaller(Caller):
    def __init__(self, staging: Staging, schedule: Schedule, model: nn.Module) -> None:
        super().__init__(model)
        self._staging = staging
        self._calls: StagedCalls | ApartCalls = StagedCalls(ScheduledCopy(schedule, model), answers=staging.answers)

    def __call__(self, batch: Batch) -> Callable[[], Any]:
        inputs = bound_call(self.model, batch.args, batch.kwargs)
        stages = self._staging.noting_refusals(lambda: self._calls.of(inputs))
        if stages is None:
            return super().__call__(batch)
        self._staging.last = stages
        return lambda: self._staging.noting_refusals(lambda: self._run(stages, inputs))

    def _run(self, stages: Staged, inputs: dict[str, Any]) -> Any:
        return stages.run(inputs)


class _ApartCaller(_StagedCaller):
    def __init__(self, staging: Staging, schedule: Schedule, model: nn.Module) -> None:
        super().__init__(staging, schedule, model)
        self._calls: ApartCalls = ApartCalls(schedule, model, answers=staging.answers)

    def __call__(self, batch: Batch) -> Callable[[], Any]:
        known = len(self._calls.copies)
        run = super().__call__(batch)
        for made in self._calls.copies[known:]:
            self.add(made)
        return run

    def _run(self, stages: Staged, inputs: dict[str, Any]) -> Any:
        try:
            return stages.run(inputs)
        finally:
            self._calls.take_back(stages)
