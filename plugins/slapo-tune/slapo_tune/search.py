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
from slapo_tune.space import Space, describe
from slapo_tune.study import Study
from slapo_tune.trials import Trials, accelerator_of, output_file
from slapo_tune.winner import Winner, best, prove, save


@dataclass(frozen=True)
class Started:
    """A trial is about to run.

    Args:
        number: of the trial.
        point: of the trial.
        predicted: as in :class:`slapo_core.Trial`.
    """

    number: int
    point: Point
    predicted: Mapping[str, float]


@dataclass(frozen=True)
class Finished:
    """A trial has ended, or was pruned, and the log has it.

    Args:
        trial: with its status.
    """

    trial: Trial


@dataclass(frozen=True)
class Verified:
    """The best trial was verified.

    Args:
        trial: as it was before.
        right: whether the schedule agrees with the reference model; None if not known.
        reason: why not, or why that could not be found out.
    """

    trial: Trial
    right: bool | None
    reason: str = ""


@dataclass(frozen=True)
class Note:
    """Something that the user should know, and that ends nothing.

    Args:
        text: one sentence, e.g. that an incomplete line at the end of the log was cut off.
    """

    text: str


Event = Started | Finished | Verified | Note


def sampler_of(study: Study) -> Sampler:
    """Return the sampler that a study names.

    Raises:
        UnknownNameError: none of that name is installed.
        StudyError: it is not a sampler.
    """
    chosen: Any = study.sampler
    if isinstance(chosen, str):
        chosen = current_registry().load(chosen, "samplers")
    if isinstance(chosen, type) and issubclass(chosen, Sampler):
        chosen = chosen()
    if not isinstance(chosen, Sampler):
        raise StudyError(
            f"sampler must be the name of an installed one, or a slapo_core.Sampler (got {chosen!r})",
            hint='sampler="frontier"',
        )
    return chosen


def header_of(study: Study, space: Space, sampler: Sampler) -> dict[str, Any]:
    """Return the header that identifies a search in its log."""
    functions = {name: _named(function) for name, function in study.functions().items() if callable(function)}
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


def _named(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def require_trials(log: Path, resume: bool | None) -> None:
    """Compare the log with the arguments.

    Args:
        log: its path.
        resume: whether there have to be trials, or must not be; None allows both.

    Raises:
        LogError: the log has trials and should have none, or the other way round.
    """
    if resume is None:
        return
    has_some = log.is_file() and bool(parse(log.read_bytes(), log).trials)
    if resume and not has_some:
        raise LogError(f"there is nothing to go on with: the log {log} has no trial", hint="slapo tune run STUDY.py")
    if not resume and has_some:
        raise LogError(f"the log {log} has trials already", hint="slapo tune resume STUDY.py, or give another log=")


_PATIENCE = 120.0  # seconds at least for making a schedule, however short trials are


@dataclass(frozen=True)
class _View:
    """The space as a sampler sees it."""

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
class Result:
    """The result of a search.

    Args:
        trials: all of them, oldest first.
        winner: the best schedule, verified and kept; None where no trial was ``"ok"``.
        ended: why the search ended: ``"space"`` (the sampler proposes nothing more), ``"trials"`` or ``"budget"``.
        seconds: what this run of the search spent on ``"trials"``, ``"predictions"`` (and on making schedules before a
            trial is started) and ``"verification"``.
    """

    trials: tuple[Trial, ...]
    winner: Winner | None = None
    ended: str = "space"
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    counts: Mapping[str, int] = field(init=False)
    """How many trials have which status."""

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
) -> Result:
    """Search the best point of a space; a search that ended before goes on where it was.

    Args:
        make_model: see :class:`slapo_tune.Study`, as of all the others.
        space: what may be chosen.
        schedule: applies the steps of a point.
        evaluate: returns the value to maximize.
        tell: called with what happens, in order; see :mod:`slapo_tune.search`.
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
    space = Space.of(study.space)
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
            predictions = Predictions(study, trials.payload, Path(study.log).with_suffix(".predictions.jsonl"))
            return _Search(study, space, sampler, log, trials, predictions, tell).run()
        except KeyboardInterrupt:
            tell(Note(f"interrupted; the log {study.log} is whole, and the same search goes on where it was"))
            raise


PARTS = ("trials", "predictions", "verification")
"""What a search spends time on."""


@dataclass
class _Search:
    study: Study
    space: Space
    sampler: Sampler
    log: LogFile
    trials: Trials
    predictions: Predictions
    tell: Callable[[Event], None]
    history: list[Trial] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def run(self) -> Result:
        before = time.monotonic()
        self.history = list(self.log.log.trials)
        spent = sum(trial.seconds for trial in self.history)
        if self.log.repaired:
            self.tell(Note(self.log.repaired))
        if self.log.log.running is not None:
            number, point = self.log.log.running
            self.tell(Note(f"trial {number} was running when the search ended, and runs again: {dict(point)}"))
        outputs = output_file(self.study.log, 0).parent
        try:
            outputs.mkdir(exist_ok=True)
        except OSError as error:
            raise LogError(f"what trials print cannot be kept in {outputs}: {error.strerror}") from error
        view = _View(self.space, self.predictions, self.study.memory_limit)
        while not (ended := self._is_over(spent + time.monotonic() - before)):
            proposed = self.sampler.suggest(view, tuple(self.history), self.study.seed)
            if proposed is None:
                ended = "space"
                break
            self._try(proposed)
        winner = self._winner()
        return Result(tuple(self.history), winner, ended, self.seconds)

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
        proposal = f"the sampler {self.sampler.name!r} proposes {dict(point)}"
        if any(trial.point == point for trial in self.history):
            raise StudyError(f"{proposal}, which the history has: this is a fault of the sampler")
        if point not in self.space:
            raise StudyError(f"{proposal}, which the space does not have: this is a fault of the sampler")
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
            self.tell(Note(f"trial {number} is started without an estimate: {prediction.problem}"))
        with self._timed("trials"):
            trial = self._measured(number, point, prediction)
        self._ended(trial)

    def _refusal(self, point: Point) -> tuple[str, str]:
        """Return the status and the reason of a point whose schedule cannot be made; both empty where it can.

        Raises:
            StudyError: the study cannot be run at any point.
        """
        of_point: dict[str, Callable[[Point], Any]] = {"mesh": self.study.mesh_of, "options": self.study.options_of}
        for name, function in of_point.items():
            try:
                function(point)
            except Exception as error:  # noqa: BLE001 - the user's function: the point is refused, and the reason shown
                return "refused", f"{name}: {type(error).__name__}: {error}"
        mesh = self.study.mesh_of(point)
        timeout, output = max(_PATIENCE, self.study.timeout), output_file(self.study.log, 0).with_name("checks.txt")
        outcome = self.trials.run("check", point, mesh, output=output, timeout=timeout)
        if outcome.status in ("crash", "oom"):  # once more: its process may have been killed for no fault of the point
            outcome = self.trials.run("check", point, mesh, output=output, timeout=timeout)
        if outcome.phase == "model" and outcome.status == "refused":
            raise StudyError(f"make_model, which is the same at every point, raises\n  {outcome.reason}")
        if outcome.status == "ok":
            return "", ""
        if outcome.status == "refused":
            return "refused", outcome.reason
        return outcome.status, f"while its schedule was made, before it was started: {outcome.reason}"

    def _excess(self, prediction: Prediction) -> tuple[str, str]:
        """Return the status and the reason of a point that does not fit; both empty where it does."""
        memory = self.study.memory_limit
        if memory is None or prediction.memory is None:
            return "", ""
        factor = margin(self.history, memory)
        if prediction.memory * factor <= memory:
            return "", ""
        learned = f", times {factor:.3g} by the measurements so far," if factor != 1.0 else ""
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
        """Verify the best trial; one that is wrong leaves its place to the next."""
        while (trial := best_trial(self.history)) is not None:
            kept = self._kept(trial)
            if kept is not None:
                if kept.right and self.log.log.verified != kept.number:
                    self.log.verified(kept.number, right=True)
                return kept
            with self._timed("verification"):
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


def _nobody(event: Event) -> None:
    """Ignore the event."""
