"""`tune`: the loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

import slapo_core
from slapo_core.spec.sampler import Point, Sampler, Trial
from slapo_tune.errors import LogError, StudyError
from slapo_tune.log.writing import LogFile
from slapo_tune.search.events import Event, Finished, Note, Started, Verified
from slapo_tune.search.predictions import Prediction, Predictions
from slapo_tune.search.pruning import Pruning, View
from slapo_tune.search.settings import header_of, require_trials, sampler_of
from slapo_tune.search.winner import Winner, best, prove, save
from slapo_tune.space.space import Space
from slapo_tune.study import Study
from slapo_tune.trials.launching import Trials
from slapo_tune.trials.outputs import output_file

__all__ = ["Result", "search", "tune"]


@dataclass(frozen=True)
class Result:
    """What a search found.

    Args:
        trials: all of them, oldest first.
        winner: the best schedule, verified and kept; None where no trial was ``"ok"``.
        ended: why the search ended: ``"space"`` (the sampler proposes nothing more), ``"trials"`` or ``"budget"``.
    """

    trials: tuple[Trial, ...]
    winner: Winner | None = None
    ended: str = "space"
    counts: Mapping[str, int] = field(init=False)
    """How many trials have which status."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", dict(Counter(trial.status for trial in self.trials)))

    @property
    def best(self) -> Trial | None:
        """The one with the largest value; None if no trial was ``"ok"``."""
        return _best(self.trials)


def tune(
    make_model: Callable[[], nn.Module],
    space: Any,
    schedule: Callable[[slapo_core.Schedule, Point], Any],
    evaluate: Any = None,
    *,
    tell: Callable[[Event], None] | None = None,
    **settings: Any,
) -> Result:
    """Search the best point of a space; a search that ended before goes on where it was.

    Args:
        make_model: see :class:`slapo_tune.Study`, as of all the others.
        space: what may be chosen.
        schedule: applies the steps of a point.
        evaluate: what is maximised.
        tell: called with what happens, in order; see :mod:`slapo_tune.search.events`.
        settings: the other arguments of :class:`slapo_tune.Study`.

    Raises:
        StudyError: an argument makes no sense, or a function cannot be sent to other processes.
        LogError: the log is of another study, in use, damaged, or cannot be written.
        SpaceError: the space has no point, or is none.
    """
    return search(Study(make_model, space, schedule, evaluate, **settings), tell=tell)


def search(study: Study, *, resume: bool | None = None, tell: Callable[[Event], None] | None = None) -> Result:
    """Run a study to its end.

    Args:
        study: what to search.
        resume: False refuses a log that has trials, True one that has none; None goes on where there is something.
        tell: called with what happens, in order.

    Raises:
        StudyError, LogError, SpaceError: see :func:`tune`.
        KeyboardInterrupt: nothing runs any more, and the log is whole: called again, the search goes on.
    """
    space = study.space if isinstance(study.space, Space) else Space(study.space)
    sampler = sampler_of(study)
    header = header_of(study, space, sampler)
    require_trials(Path(study.log), resume)
    trials = Trials(study)
    tell = tell or _nobody
    with LogFile(study.log, header) as log:
        for name, what in (("sources", "files of the study have"), ("versions", "versions of the packages have")):
            if log.log.header and log.log.header.get(name) != header[name]:
                tell(
                    Note(f"the {what} changed since the log {study.log} was begun: its trials may differ from new ones")
                )
        try:
            return _Search(study, space, sampler, log, trials, tell).run()
        except KeyboardInterrupt:
            tell(Note(f"interrupted; the log {study.log} is whole, and the same search goes on where it was"))
            raise


@dataclass
class _Search:
    study: Study
    space: Space
    sampler: Sampler
    log: LogFile
    trials: Trials
    tell: Callable[[Event], None]
    history: list[Trial] = field(default_factory=list)

    def run(self) -> Result:
        before = time.monotonic()
        self.history = list(self.log.log.trials)
        spent = sum(trial.seconds for trial in self.history)
        if self.log.repaired:
            self.tell(Note(self.log.repaired))
        if self.log.log.running is not None:
            number, point = self.log.log.running
            self.tell(Note(f"trial {number} was running when the search ended, and runs again: {dict(point)}"))
        predictions = Predictions(
            self.study, self.trials.payload, Path(self.study.log).with_suffix(".predictions.jsonl")
        )
        view = View(self.space, predictions, self.study.memory_limit)
        checks = output_file(self.study.log, 0).with_name("checks.txt")
        try:
            checks.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise LogError(f"what trials print cannot be kept in {checks.parent}: {error.strerror}") from error
        with self.trials:
            prune = Pruning(self.study, self.trials, predictions, checks)
            while True:
                ended = self._is_over(spent + time.monotonic() - before)
                if ended:
                    break
                proposed = self.sampler.suggest(view, tuple(self.history), self.study.seed)
                if proposed is None:
                    ended = "space"
                    break
                self._try(proposed, prune)
            winner = self._winner()
        return Result(tuple(self.history), winner, ended)

    def _is_over(self, seconds: float) -> str:
        started = sum(trial.status not in ("refused", "over_memory") for trial in self.history)
        if self.study.trials is not None and started >= self.study.trials:
            return "trials"
        if self.study.budget is not None and seconds >= self.study.budget:
            return "budget"
        return ""

    def _try(self, point: Point, prune: Pruning) -> None:
        proposal = f"the sampler {self.sampler.name!r} proposes {dict(point)}"
        if any(trial.point == point for trial in self.history):
            raise StudyError(f"{proposal}, which the history has: this is a fault of the sampler")
        if point not in self.space:
            raise StudyError(f"{proposal}, which the space does not have: this is a fault of the sampler")
        number, before = len(self.history), time.monotonic()
        status, reason, prediction = prune(point, self.history)
        if status:
            trial = Trial(number, point, status, reason=reason, predicted=prediction.numbers())
            self._ended(replace(trial, seconds=time.monotonic() - before))
            return
        if prediction.problem:
            self.tell(Note(f"trial {number} is started without an estimate: {prediction.problem}"))
        self._ended(self._measured(number, point, prediction))

    def _measured(self, number: int, point: Point, prediction: Prediction) -> Trial:
        study = self.study
        self.log.started(number, point)
        self.tell(Started(number, point, prediction.numbers()))
        outcome = self.trials.run(
            "try",
            point,
            study.mesh_of(point),
            output=output_file(study.log, number),
            timeout=study.timeout,
            ranks=study.world_size,
            process_memory=study.process_memory_limit,
        )
        return Trial(
            number,
            point,
            outcome.status,
            outcome.value,
            outcome.reason,
            prediction.numbers(),
            outcome.measured,
            outcome.seconds,
        )

    def _ended(self, trial: Trial) -> None:
        self.log.ended(trial)
        self.history.append(trial)
        self.tell(Finished(trial))

    def _winner(self) -> Winner | None:
        """Verify the best trial; one that is wrong leaves its place to the next."""
        while (trial := _best(self.history)) is not None:
            kept = self._kept(trial)
            if kept is not None:
                if kept.right and self.log.log.verified != kept.number:
                    self.log.verified(kept.number, right=True)
                return kept
            winner = prove(self.study, trial, trials=self.trials)
            self.tell(Verified(trial, winner.right, winner.reason))
            if winner.right is not False:
                save(winner, self.study.log)
                self.log.verified(trial.number, right=winner.right, reason=winner.reason)
                return winner
            self.log.verified(trial.number, right=False, reason=winner.reason)
            self.history[trial.number] = replace(trial, status="wrong", value=None, reason=winner.reason)
        return None

    def _kept(self, trial: Trial) -> Winner | None:
        """What an earlier run of this search has kept, if that is all that could be found out about this trial."""
        try:
            winner = best(self.study.log)
        except LogError:
            return None  # there is none yet, or it is gone
        is_it = (winner.number, winner.point, winner.value) == (trial.number, dict(trial.point), trial.value)
        verifiable = self.study.verify and self.study.batch is not None
        return winner if is_it and (winner.right or not verifiable) else None


def _best(trials: Any) -> Trial | None:
    fine = [trial for trial in trials if trial.value is not None]
    return max(fine, key=lambda trial: trial.value) if fine else None


def _nobody(event: Event) -> None:
    """Nobody is told."""
