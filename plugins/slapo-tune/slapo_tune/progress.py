"""Progress of a running search: live lines on a terminal, one line for each trial elsewhere."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from slapo_runtime.sizes import format_bytes
from slapo_tune.report import STARTED, best_trial, duration, number, point_words
from slapo_tune.samplers import Point, Trial
from slapo_tune.search import Event, Finished, Started, Verified

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live


class Progress:
    """Show a search; a context manager that restores the terminal.

    Args:
        unit: unit of the value.
        points: number of points of the space, as far as they are counted.
        limit: maximum number of started trials; None for no limit.
        timeout: seconds of a trial.
        trials: earlier trials, from the log.
        file: the output; default: stderr.
        clock: returns seconds.
    """

    def __init__(
        self,
        *,
        unit: str,
        points: int,
        limit: int | None,
        timeout: float,
        trials: Sequence[Trial] = (),
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unit = unit
        self._points = points
        self._limit = limit
        self._timeout = timeout
        self._trials = list(trials)
        self._file = file if file is not None else sys.stderr
        self._clock = clock
        self._running: tuple[int, Point, float] | None = None
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._file.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._file)
            self._live = Live(get_renderable=self._picture, console=console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, event: Event) -> None:
        """Show an event of the search."""
        if isinstance(event, Started):
            self.started(event.number, event.point)
        elif isinstance(event, Finished):
            self.finished(event.trial)
        elif isinstance(event, Verified):
            words = {True: "verified", False: "WRONG, trying the next best", None: "not verified"}
            self._print(f"trial {event.trial.number} {words[event.right]}{': ' * bool(event.reason)}{event.reason}")
        else:
            self._print(f"note: {event.text}")

    def started(self, number: int, point: Point) -> None:
        """Show the start of a trial."""
        self._running = (number, point, self._clock())

    def finished(self, trial: Trial) -> None:
        """Show the end of a trial that ran or was pruned."""
        before = best_trial(self._trials)
        self._trials.append(trial)
        self._running = None
        is_best = best_trial(self._trials) is trial and before is not trial
        self._print(self._line(trial, is_best=is_best))

    def left(self) -> float | None:
        """Return the maximum remaining seconds by the mean of earlier trials; None before the first one."""
        ran = [trial.seconds for trial in self._trials if trial.status in STARTED]
        if not ran:
            return None
        rest = max(0, self._points - len(self._trials))
        if self._limit is not None:
            rest = min(rest, max(0, self._limit - len(ran)))
        seconds = rest * statistics.mean(ran)
        return max(0.0, seconds - (self._clock() - self._running[2])) if self._running else seconds

    def _line(self, trial: Trial, *, is_best: bool) -> str:
        """Format a trial: ``trial 7 (8 of 24)  ok  312.4 samples/s  batch=32 tp=1  12 s  best so far``."""
        words = [f"trial {trial.number} ({len(self._trials)} of {self._points})", trial.status]
        if trial.value is not None:
            words.append(f"{number(trial.value)} {self._unit}")
        words.append(point_words(trial.point))
        if trial.status in STARTED:
            words.append(duration(trial.seconds))
        if trial.measured.get("memory"):
            words.append(format_bytes(int(trial.measured["memory"])))
        if is_best:
            words.append("best so far")
        if trial.reason:
            words.append(trial.reason.strip().splitlines()[0])
        left = self.left()
        if self._live is None and left:
            words.append(f"at most {duration(left)} left")
        return "  ".join(words)

    def _print(self, line: str) -> None:
        if self._live is None:
            print(line, file=self._file, flush=True)
        else:
            self._live.console.print(line, markup=False, highlight=False)

    def _picture(self) -> RenderableType:
        from rich.text import Text

        best = best_trial(self._trials)
        ended = Counter(trial.status for trial in self._trials)
        lines = [f"{len(self._trials)} of {self._points} points  " + "  ".join(f"{k} {v}" for k, v in ended.items())]
        if best is not None:
            lines.append(f"best  {number(best.value or 0.0)} {self._unit}  {point_words(best.point)}")
        if self._running is not None:
            which, point, since = self._running
            spent = f"{duration(self._clock() - since)} of {duration(self._timeout)} at most"
            lines.append(f"now   trial {which}  {point_words(point)}  {spent}")
        else:
            lines.append("now   checking and estimating points, or verifying the best one")
        left = self.left()
        if left:
            lines.append(f"left  {duration(left)} at most")
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
