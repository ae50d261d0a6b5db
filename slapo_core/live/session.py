"""What is known about a live schedule's tensors, looked up once for as long as its steps stay the same."""

from __future__ import annotations

from slapo_core.errors import ArgumentError, SealedError
from slapo_core.schedule.schedule import Schedule
from slapo_core.weights.state import TensorState

__all__ = ["live_state"]


def live_state(schedule: Schedule, call: str) -> TensorState:
    """The state of a schedule's model: its values to and from the reference model's names and shapes.

    Args:
        schedule: not built.
        call: the function that was called, e.g. ``"clip_grad_norm_"``, for messages.

    Raises:
        ArgumentError: something else than a schedule, such as its model.
        SealedError: the schedule was built, or sealed before any of these functions was called; or it is taken back
            for the time of a ``with`` block.
        WeightsError: a tensor that nobody explains.
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"{call} takes the schedule (got {type(schedule).__name__})",
            hint=f"sch = slapo_core.create_schedule(model, mesh=...); slapo_core.{call}(sch, ...)",
        )
    kept = schedule.kept(call)
    state = kept.get(_KEY)
    if state is None:
        if schedule.is_sealed:
            raise SealedError(
                f"cannot call {call}: the schedule was built or sealed, and what its tensors stand for went to its "
                "engine",
                hint="of a built model: engine.state_dict(), engine.load_state_dict(), build(..., max_grad_norm=1.0); "
                f"of one that is trained without build: call {call} once before sch.seal()",
            )
        state = kept[_KEY] = TensorState.of(schedule)
    assert isinstance(state, TensorState)
    return state


_KEY = "slapo_core.live"
