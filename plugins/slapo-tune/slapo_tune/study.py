"""`Study`: a search with its results, and the study of a file."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from slapo_tune.errors import LogError, StudyError
from slapo_tune.log import read_log
from slapo_tune.plots import write_picture
from slapo_tune.progress import Progress
from slapo_tune.report import StudyReport
from slapo_tune.samplers import Trial
from slapo_tune.search import SearchResult, search
from slapo_tune.settings import StudySettings
from slapo_tune.space import Space

_MANY = 100_000
"""Maximum number of points of tables and plots; the first ones of a larger space."""


class Study(StudySettings):
    """A search; a file for ``slapo tune run`` has one at its top level, named ``study``.

    Trials run in processes of their own, to which functions are sent by name: define them at the top level of a module,
    or as an argument of a ``Study`` there. ``mesh`` and ``space`` may be any function.

    Args:
        make_model: returns the model; called under ``torch.device("meta")``.
        space: the space function of :class:`~slapo_tune.space.Symbols`, whose choices are the points.
        schedule: ``schedule(sch, p)`` applies the primitives of point ``p`` to the default schedule.
        evaluate: ``evaluate(run)`` on each rank of a trial returns the value to maximize (samples per second); the
            smallest value over ranks is used. None trains on ``batch`` with ``optimizer`` by ``target``, and maximizes
            samples per second of all replicas.
        world_size: ranks of a trial.
        mesh: the mesh of a point, e.g. ``lambda p: {"dp": 4 // p["tp"], "tp": p["tp"]}``; None for one rank.
        batch: one replica's batch at a point, as ``train_step`` takes it; for the estimate, the verification and the
            default ``evaluate``. Torch's seed is ``seed`` at the call, on each rank.
        optimizer: as for ``slapo_core.build``.
        loss: as for ``slapo_core.build``.
        target: the dialect of the default ``evaluate``.
        options: further arguments of ``slapo_core.build`` in the default ``evaluate``, e.g. ``{"max_grad_norm": 1.0}``;
            or a function of the point that returns them, e.g. ``lambda p: {"accumulate": p["accumulate"]}``.
        memory: limit of a rank's estimated memory: bytes, or e.g. ``"70GiB"``; points over it are not started. None for
            no limit.
        process_memory: limit of a trial's process on the CPU, beyond its memory before the model; enforced by the
            kernel, with status ``"oom"``. Bytes, or e.g. ``"4GiB"``; None for no limit. Not on GPUs: it limits the
            address space, of which CUDA reserves more than the machine has memory.
        accelerator: ``"cpu"`` or ``"cuda"``; None for CUDA if there is a GPU for each rank, else the CPU.
        device: by which time is predicted; None predicts no time.
        sampler: the name of an installed sampler, or a :class:`slapo_core.Sampler`.
        log: file with one line for each trial; predictions, outputs and the best schedule are written next to it.
        timeout: seconds of a trial.
        warmup: steps of the default ``evaluate`` before the measured ones; at least two run, because the optimizer has
            its state from the second step on.
        steps: number of measured steps.
        trials: maximum number of started trials; None for as many as the sampler proposes.
        budget: seconds after which no further trial starts, with earlier runs of the search; None for no limit.
        seed: seed of the sampler, and of the ranks' RNG state.
        verify: whether the best schedule is verified.
        predict: whether points are estimated before their trials.

    Raises:
        StudyError: an argument has a wrong value; with the corrected call.
    """

    def run(self, *, progress: bool = False, resume: bool | None = None) -> SearchResult:
        """Run the search to its end, or resume it from its log.

        Args:
            progress: show the trials on stderr: live on a terminal, one line for each trial elsewhere.
            resume: False refuses a log with trials, True a log without; None resumes if there are trials.

        Raises:
            StudyError, LogError, SpaceError: see :func:`slapo_tune.tune`.
            KeyboardInterrupt: all trials have ended and the log is complete: another call resumes the search.
        """
        with contextlib.suppress(OSError):  # reported by the search
            Path(self.log).parent.mkdir(parents=True, exist_ok=True)
        if not progress:
            return search(self, resume=resume)
        past = self.report()
        with Progress(
            unit=self.unit, points=len(past.points), limit=self.trials, timeout=self.timeout, trials=past.trials
        ) as shown:
            return search(self, resume=resume, tell=shown.tell)

    def report(self, trials: Sequence[Trial] | None = None) -> StudyReport:
        """Return the tables of a search: ``print(study.report().summary())``, ``study.report().print()``.

        Args:
            trials: trials of the search; None reads the log.
        """
        space = Space.of(self.space)
        points, refused = list(islice(space.points(), _MANY)), list(islice(space.refused(), _MANY))
        return StudyReport(points, self._past() if trials is None else trials, refused=refused, unit=self.unit)

    def plot(
        self,
        file: str | os.PathLike[str],
        *,
        axes: tuple[str, str] | None = None,
        title: str = "",
        trials: Sequence[Trial] | None = None,
    ) -> Path:
        """Plot the space with the trials, and predictions against measurements.

        Args:
            file: the file to write, e.g. ``search.png``.
            axes: the symbols on the axes of the space; None takes the two with the most candidates.
            title: title of the plot.
            trials: trials of the search; None reads the log.

        Raises:
            ArgumentError: matplotlib is not installed; unknown symbols; the file cannot be written.
        """
        found = self.report(trials)
        return write_picture(found.points, found.trials, Path(file), axes=axes, unit=self.unit, title=title)

    def _past(self) -> Sequence[Trial]:
        """Return the trials in the log; none if unreadable, which the search reports."""
        try:
            return read_log(self.log).trials if Path(self.log).exists() else ()
        except LogError:
            return ()


def load_study(path: str | os.PathLike[str], name: str = "study") -> Study:
    """Import a Python file and return the study at its top level.

    Args:
        path: path of the file. In a package (with an ``__init__.py``) it is imported as a module of the package;
            otherwise its directory is added to the import path, as by ``python STUDY.py``.
        name: name of the study.

    Raises:
        StudyError: the file does not exist, has no such study, or raises.
    """
    file = Path(path).absolute()
    if not file.is_file():
        raise StudyError(f"file not found: {path}", hint="slapo tune run STUDY.py")
    if file.suffix != ".py":
        raise StudyError(f"{path} is not a Python file", hint="slapo tune run STUDY.py")
    module = _imported(file)
    study = getattr(module, name, None)
    if study is None:
        others = [other for other, value in vars(module).items() if isinstance(value, Study)]
        hint = f"{name} = {others[0]}" if others else f"{name} = slapo_tune.Study(make_model, space, schedule, ...)"
        raise StudyError(f"{path} has no {name!r} at its top level", hint=hint)
    if not isinstance(study, Study):
        raise StudyError(
            f"{name!r} of {path} is not a slapo_tune.Study (got {type(study).__name__})",
            hint=f"{name} = slapo_tune.Study(make_model, space, schedule, ...)",
        )
    return study


def _imported(file: Path) -> object:
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    name = ".".join(parts)
    found = None
    with contextlib.suppress(ImportError, ValueError):  # reported below
        found = importlib.util.find_spec(name)
    if found is None or found.origin is None or not os.path.samefile(found.origin, file):
        name = f"slapo_tune_study_{file.stem}"  # the name is another module's
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    try:
        if "." in name:
            return importlib.import_module(name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may call sys.exit()
        sys.modules.pop(name, None)
        raise StudyError(
            f"{file} cannot be imported: {type(error).__name__}: {error}{_line(error, file)}",
            hint=f"python {file} shows the full traceback",
        ) from error
    return module


def _line(error: BaseException, file: Path) -> str:
    """Return the last line of the file on the traceback, unless the message has it."""
    if isinstance(error, SyntaxError):
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
