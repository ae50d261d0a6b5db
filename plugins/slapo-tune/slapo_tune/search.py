"""`tune`: the search loop, its events, and pruning by predictions."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

import slapo_core
from slapo_core.plugins import current_registry
from slapo_runtime.sizes import format_bytes
from slapo_tune.errors import LogError, StudyError
from slapo_tune.log import LogFile, parse
from slapo_tune.predictions import Prediction, Predictions, sources
from slapo_tune.report import best_trial
from slapo_tune.samplers import Point, Sampler, Trial
from slapo_tune.samplers.program import margin
from slapo_tune.settings import StudySettings
from slapo_tune.space import Space, describe
from slapo_tune.trials import TrialRunner, accelerator_of, output_file
from slapo_tune.winner import Winner, save, saved_winner, verify_winner


@dataclass(frozen=True)
class Started:
    """A trial is about to run.

    Args:
        number: number of the trial.
        point: point of the trial.
        predicted: as in :class:`slapo_core.Trial`.
    """

    number: int
    point: Point
    predicted: Mapping[str, float]


@dataclass(frozen=True)
class Finished:
    """A trial has ended or was pruned, and is in the log.

    Args:
        trial: the trial, with its status.
    """

    trial: Trial


@dataclass(frozen=True)
class Verified:
    """The best trial was verified.

    Args:
        trial: the trial before verification.
        right: whether the schedule agrees with the reference model; None if not verified.
        reason: why it is wrong or not verified.
    """

    trial: Trial
    right: bool | None
    reason: str = ""


@dataclass(frozen=True)
class Note:
    """A notice for the user; the search goes on.

    Args:
        text: one sentence, e.g. that an incomplete line at the end of the log was removed.
    """

    text: str


Event = Started | Finished | Verified | Note


def sampler_of(study: StudySettings) -> Sampler:
    """Return the sampler of a study.

    Raises:
        UnknownNameError: the name is not installed.
        StudyError: not a sampler.
    """
    chosen: Any = study.sampler
    if isinstance(chosen, str):
        chosen = current_registry().load(chosen, "samplers")
    if isinstance(chosen, type) and issubclass(chosen, Sampler):
        chosen = chosen()
    if not isinstance(chosen, Sampler):
        raise StudyError(
            f"sampler must be the name of an installed sampler or a slapo_core.Sampler (got {chosen!r})",
            hint='sampler="frontier"',
        )
    return chosen


def header_of(study: StudySettings, space: Space, sampler: Sampler) -> dict[str, Any]:
    """Return the header that identifies a search in its log."""
    functions = {name: _function_name(function) for name, function in study.functions().items() if callable(function)}
    return {
        "fingerprint": space.fingerprint(),
        "described": describe(space),
        **functions,
        "sampler": sampler.name,
        "seed": study.seed,
        "world_size": study.world_size,
        "target": study.target,
        "memory": study.memory_limit,
        "process_memory": study.process_memory_limit,
        "accelerator": accelerator_of(study),
        "warmup": study.warmup,
        "steps": study.steps,
        "timeout": study.timeout,
        "sources": sources(study),
        "versions": {name: version(name) for name in ("slapo-core", "slapo-tune", "torch")},
        "started": time.time(),
    }


def _function_name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def require_trials(log: Path, resume: bool | None) -> None:
    """Require that a log has trials, or has none.

    Args:
        log: path of the log.
        resume: whether trials are required or forbidden; None allows both.

    Raises:
        LogError: a log with trials if forbidden, or without if required.
    """
    if resume is None:
        return
    has_some = log.is_file() and bool(parse(log.read_bytes(), log).trials)
    if resume and not has_some:
        raise LogError(f"cannot resume: the log {log} has no trials", hint="slapo tune run STUDY.py")
    if not resume and has_some:
        raise LogError(f"the log {log} already has trials", hint="slapo tune resume STUDY.py, or give another log=")


_PATIENCE = 120.0  # minimum seconds for making a schedule


@dataclass(frozen=True)
class _View:
    """The search space for samplers."""

    space: Space
    predictions: Predictions
    memory: int | None

    def points(self) -> Iterable[Point]:
        return self.space.points()

    def draw(self, pick: Callable[[str, tuple[object, ...]], int]) -> Point | None:
        return self.space.draw(pick)

    def predicted_memory(self, point: Point) -> int | None:
        return self.predictions.of(point).memory


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        trials: all trials, oldest first.
        winner: the best schedule, verified and saved; None if no trial was ``"ok"``.
        ended: why the search ended: ``"space"`` (the sampler proposes nothing more), ``"trials"`` or ``"budget"``.
        seconds: seconds of this run for ``"trials"``, ``"predictions"`` (and for making schedules before trials) and
            ``"verification"``.
    """

    trials: tuple[Trial, ...]
    winner: Winner | None = None
    ended: str = "space"
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    counts: Mapping[str, int] = field(init=False)
    """Number of trials by status."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", dict(Counter(trial.status for trial in self.trials)))

    @property
    def best(self) -> Trial | None:
        """Return the trial with the largest value; None if no trial was ``"ok"``."""
        return best_trial(self.trials)


def tune(
    make_model: Callable[[], nn.Module],
    space: Any,
    schedule: Callable[[slapo_core.Schedule, Point], Any],
    evaluate: Any = None,
    *,
    tell: Callable[[Event], None] | None = None,
    **settings: Any,
) -> SearchResult:
    """Search the best point of a space, or resume a search from its log.

    Args:
        make_model: see :class:`slapo_tune.Study`, also for the other arguments.
        space: the space function.
        schedule: applies the steps of a point.
        evaluate: returns the value to maximize.
        tell: called with each event in order; see :mod:`slapo_tune.search`.
        settings: the other arguments of :class:`slapo_tune.Study`.

    Raises:
        StudyError: an argument has a wrong value, or a function cannot be sent to other processes.
        LogError: the log is of another study, in use, damaged, or not writable.
        SpaceError: the space is invalid or has no points.
    """
    return search(StudySettings(make_model, space, schedule, evaluate, **settings), tell=tell)


def search(
    study: StudySettings, *, resume: bool | None = None, tell: Callable[[Event], None] | None = None
) -> SearchResult:
    """Run a study to its end.

    Args:
        study: the study.
        resume: False refuses a log with trials, True a log without; None resumes if there are trials.
        tell: called with each event in order.

    Raises:
        StudyError, LogError, SpaceError: see :func:`tune`.
        KeyboardInterrupt: all trials have ended and the log is complete: another call resumes the search.
    """
    space = Space.of(study.space)
    sampler = sampler_of(study)
    header = header_of(study, space, sampler)
    require_trials(Path(study.log), resume)
    trials = TrialRunner(study)
    tell = tell or _ignore
    with LogFile(study.log, header) as log:
        for name, what in (("sources", "files of the study"), ("versions", "versions of the packages")):
            if log.log.header and log.log.header.get(name) != header[name]:
                tell(Note(f"the {what} changed since the start of the log {study.log}: new trials may differ"))
        try:
            predictions = Predictions(study, trials.payload, Path(study.log).with_suffix(".predictions.jsonl"))
            return _SearchLoop(study, space, sampler, log, trials, predictions, tell).run()
        except KeyboardInterrupt:
            tell(Note(f"interrupted: the log {study.log} is complete, and the same search resumes from it"))
            raise


PARTS = ("trials", "predictions", "verification")
"""Parts of a search by which time is counted."""


@dataclass
class _SearchLoop:
    study: StudySettings
    space: Space
    sampler: Sampler
    log: LogFile
    trials: TrialRunner
    predictions: Predictions
    tell: Callable[[Event], None]
    history: list[Trial] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def run(self) -> SearchResult:
        before = time.monotonic()
        self.history = list(self.log.log.trials)
        spent = sum(trial.seconds for trial in self.history)
        if self.log.repaired:
            self.tell(Note(self.log.repaired))
        if self.log.log.running is not None:
            number, point = self.log.log.running
            self.tell(Note(f"trial {number} was running when the search ended and runs again: {dict(point)}"))
        outputs = output_file(self.study.log, 0).parent
        try:
            outputs.mkdir(exist_ok=True)
        except OSError as error:
            raise LogError(f"the output of trials cannot be written to {outputs}: {error.strerror}") from error
        view = _View(self.space, self.predictions, self.study.memory_limit)
        while not (ended := self._is_over(spent + time.monotonic() - before)):
            proposed = self.sampler.suggest(view, tuple(self.history), self.study.seed)
            if proposed is None:
                ended = "space"
                break
            self._try(proposed)
        winner = self._winner()
        return SearchResult(tuple(self.history), winner, ended, self.seconds)

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        before = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] += time.monotonic() - before

    def _is_over(self, seconds: float) -> str:
        started = sum(trial.status not in ("refused", "over_memory") for trial in self.history)
        if self.study.trials is not None and started >= self.study.trials:
            return "trials"
        if self.study.budget is not None and seconds >= self.study.budget:
            return "budget"
        return ""

    def _try(self, point: Point) -> None:
        proposal = f"sampler {self.sampler.name!r} proposes {dict(point)}"
        if any(trial.point == point for trial in self.history):
            raise StudyError(f"{proposal}, which was already tried: correct the sampler")
        if point not in self.space:
            raise StudyError(f"{proposal}, which is not a point of the space: correct the sampler")
        number, before = len(self.history), time.monotonic()
        with self._timed("predictions"):
            status, reason = self._refusal(point)
            prediction = Prediction() if status else self.predictions.of(point)
        if not status:
            status, reason = self._excess(prediction)
        if status:
            trial = Trial(number, point, status, reason=reason, predicted=prediction.numbers())
            self._ended(replace(trial, seconds=time.monotonic() - before))
            return
        if prediction.problem:
            self.tell(Note(f"trial {number} starts without an estimate: {prediction.problem}"))
        with self._timed("trials"):
            trial = self._measured(number, point, prediction)
        self._ended(trial)

    def _refusal(self, point: Point) -> tuple[str, str]:
        """Return status and reason of a point whose schedule cannot be made; otherwise empty.

        Raises:
            StudyError: make_model raises at all points.
        """
        of_point: dict[str, Callable[[Point], Any]] = {"mesh": self.study.mesh_of, "options": self.study.options_of}
        for name, function in of_point.items():
            try:
                function(point)
            except Exception as error:  # noqa: BLE001 - the user's function refuses the point
                return "refused", f"{name}: {type(error).__name__}: {error}"
        mesh = self.study.mesh_of(point)
        timeout, output = max(_PATIENCE, self.study.timeout), output_file(self.study.log, 0).with_name("checks.txt")
        outcome = self.trials.run("check", point, mesh, output=output, timeout=timeout)
        if outcome.status in ("crash", "oom"):  # again: the process may have been killed for another reason
            outcome = self.trials.run("check", point, mesh, output=output, timeout=timeout)
        if outcome.phase == "model" and outcome.status == "refused":
            raise StudyError(f"make_model() raises, at all points:\n  {outcome.reason}")
        if outcome.status == "ok":
            return "", ""
        if outcome.status == "refused":
            return "refused", outcome.reason
        return outcome.status, f"while making the schedule, before the trial: {outcome.reason}"

    def _excess(self, prediction: Prediction) -> tuple[str, str]:
        """Return status and reason of a point that does not fit; otherwise empty."""
        memory = self.study.memory_limit
        if memory is None or prediction.memory is None:
            return "", ""
        factor = margin(self.history, memory)
        if prediction.memory * factor <= memory:
            return "", ""
        learned = f", times {factor:.3g} by measurements," if factor != 1.0 else ""
        return "over_memory", f"{format_bytes(prediction.memory)}{learned} of {format_bytes(memory)}"

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
        )
        found = (outcome.status, outcome.value, outcome.reason, prediction.numbers(), outcome.measured, outcome.seconds)
        return Trial(number, point, *found)

    def _ended(self, trial: Trial) -> None:
        self.log.ended(trial)
        self.history.append(trial)
        self.tell(Finished(trial))

    def _winner(self) -> Winner | None:
        """Verify the best trial; if it is wrong, the next best one."""
        while (trial := best_trial(self.history)) is not None:
            saved = saved_winner(self.study.log, trial)
            verifiable = self.study.verify and self.study.batch is not None
            if saved is not None and (saved.right or not verifiable):
                if saved.right and self.log.log.verified != saved.number:
                    self.log.verified(saved.number, right=True)
                return saved
            with self._timed("verification"):
                winner = verify_winner(self.study, trial, trials=self.trials)
            self.tell(Verified(trial, winner.right, winner.reason))
            if winner.right is not False:
                save(winner, self.study.log)
                self.log.verified(trial.number, right=winner.right, reason=winner.reason)
                return winner
            self.log.verified(trial.number, right=False, reason=winner.reason)
            self.history[trial.number] = replace(trial, status="wrong", value=None, reason=winner.reason)
        return None


def _ignore(event: Event) -> None:
    """Ignore the event."""
