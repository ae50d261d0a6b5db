"""`tune`: the loop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slapo_core.spec.sampler import Trial
from slapo_core.testing import run_ranks
from slapo_tune.samplers.exhaustive import Exhaustive
from slapo_tune.space.space import Space
from slapo_tune.study import Study
from slapo_tune.trials.child import try_point

__all__ = ["Result", "tune"]


@dataclass(frozen=True)
class Result:
    """What a search found.

    Args:
        trials: all of them, oldest first.
    """

    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        """The one with the largest value; None if no trial was ``"ok"``."""
        fine = [trial for trial in self.trials if trial.value is not None]
        return max(fine, key=lambda trial: trial.value or 0.0) if fine else None


def tune(make_model: Any, space: Any, schedule: Any, evaluate: Any = None, **settings: Any) -> Result:
    """Search the best point of a space; the arguments are those of :class:`slapo_tune.Study`."""
    return search(Study(make_model, space, schedule, evaluate, **settings))


def search(study: Study) -> Result:
    """Run a study to its end."""
    points = _Known(Space(study.space))
    history: list[Trial] = []
    sampler = Exhaustive()
    while (point := sampler.suggest(points, history, study.seed)) is not None:
        before = time.monotonic()
        results = run_ranks(try_point, study, point, world_size=study.world_size, timeout=study.timeout)
        value, measured = results[0]
        trial = Trial(len(history), point, "ok", value, measured=measured, seconds=time.monotonic() - before)
        history.append(trial)
        with Path(study.log).open("a") as log:
            log.write(json.dumps(asdict(trial)) + "\n")
            log.flush()
            os.fsync(log.fileno())
    return Result(tuple(history))


class _Known:
    """The space, as a sampler sees it."""

    memory = None

    def __init__(self, space: Space) -> None:
        self._space = space

    def points(self) -> Iterator[dict[str, Any]]:
        return self._space.points()

    def draw(self, pick: Callable[[str, tuple[Any, ...]], int]) -> dict[str, Any] | None:
        return self._space.draw(pick)

    def predicted_memory(self, point: Any) -> int | None:
        return None
