"""Which points are not started: a step refuses them, or they do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from slapo_core.spec.sampler import Point, Trial
from slapo_core.spec.sizes import format_bytes
from slapo_tune.errors import StudyError
from slapo_tune.samplers.replaying import margin
from slapo_tune.search.predictions import Prediction, Predictions
from slapo_tune.space.space import Space
from slapo_tune.study import Study
from slapo_tune.trials.launching import Trials

__all__ = ["Pruning", "View"]


_PATIENCE = 120.0  # seconds at least for making a schedule, however short trials are


class View:
    """The space as a sampler sees it.

    Args:
        space: of the study.
        predictions: of its points.
        memory: the limit of a rank in bytes.
    """

    def __init__(self, space: Space, predictions: Predictions, memory: int | None) -> None:
        self._space = space
        self._predictions = predictions
        self._memory = memory

    @property
    def memory(self) -> int | None:
        return self._memory

    def points(self) -> Iterable[Point]:
        return self._space.points()

    def draw(self, pick: Callable[[str, tuple[object, ...]], int]) -> Point | None:
        return self._space.draw(pick)

    def predicted_memory(self, point: Point) -> int | None:
        return self._predictions.of(point).memory


class Pruning:
    """Decides before a trial is started.

    Args:
        study: whose points.
        trials: runs the schedule of a point, on one process without tensors.
        predictions: of the points.
        output: where that process prints to.
    """

    def __init__(self, study: Study, trials: Trials, predictions: Predictions, output: Path) -> None:
        self._study = study
        self._trials = trials
        self._predictions = predictions
        self._output = output

    def __call__(self, point: Point, history: Sequence[Trial]) -> tuple[str, str, Prediction]:
        """Status and reason of a point that is not started, both empty for one that is; and what is predicted.

        Args:
            point: what was proposed.
            history: the trials so far.

        Raises:
            StudyError: the study cannot be run at any point.
        """
        refusal = self._refusal(point)
        if refusal is not None:
            return *refusal, Prediction()
        prediction = self._predictions.of(point)
        memory = self._study.memory_limit
        if memory is None or prediction.memory is None:
            return "", "", prediction
        factor = margin(history, memory)
        if prediction.memory * factor <= memory:
            return "", "", prediction
        learned = f", times {factor:.3g} by what was measured so far," if factor != 1.0 else ""
        return "over_memory", f"{format_bytes(prediction.memory)}{learned} of {format_bytes(memory)}", prediction

    def _refusal(self, point: Point) -> tuple[str, str] | None:
        try:
            mesh = self._study.mesh_of(point)
        except Exception as error:  # noqa: BLE001 - the user's function: the point is refused, and the reason shown
            return "refused", f"mesh: {type(error).__name__}: {error}"
        timeout = max(_PATIENCE, self._study.timeout)
        outcome = self._trials.run("check", point, mesh, output=self._output, timeout=timeout)
        if outcome.status in ("crash", "oom"):  # once more: its process may have been killed for no fault of the point
            outcome = self._trials.run("check", point, mesh, output=self._output, timeout=timeout)
        if outcome.phase == "model" and outcome.status == "refused":
            raise StudyError(f"make_model, which is the same at every point, raises\n  {outcome.reason}")
        if outcome.status == "ok":
            return None
        if outcome.status == "refused":
            return "refused", outcome.reason
        return outcome.status, f"while its schedule was made, before it was started: {outcome.reason}"
