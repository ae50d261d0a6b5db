"""`Study`: everything that a search is made of; and the study of a file."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_runtime.sizes import parse_bytes
from slapo_tune.errors import LogError, StudyError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core import DeviceSpec, Sampler, Schedule
    from slapo_tune.report import Report
    from slapo_tune.samplers import Point, Trial
    from slapo_tune.search import Result
    from slapo_tune.space import Space
    from slapo_tune.training import Run


@dataclass(frozen=True)
class Study:
    """A search; a file for ``slapo tune run`` has one at its top level, named ``study``.

    Trials run in processes of their own, and get the functions by name: they are defined at the top level of a module,
    or are an argument of a ``Study`` there. Only ``mesh`` and ``space`` may be anything.

    Args:
        make_model: gives the model; called under ``torch.device("meta")``.
        space: is given :class:`~slapo_tune.space.Symbols`; its choices are the points.
        schedule: ``schedule(sch, p)`` applies the primitives of point ``p`` to the default schedule.
        evaluate: ``evaluate(run)`` on every rank of a trial; returns the value to maximize (samples per second); of the
            ranks' values the smallest counts. None trains on ``batch`` with ``optimizer`` by ``target``, and maximizes
            samples per second of all replicas.
        world_size: ranks of a trial.
        mesh: the mesh of a point, e.g. ``lambda p: {"dp": 4 // p["tp"], "tp": p["tp"]}``; None for one rank.
        batch: one replica's batch at a point, as ``train_step`` takes it; what the estimate, the verification and the
            default ``evaluate`` run on. Torch's seed is ``seed`` when it is called, on every rank.
        optimizer: as for ``slapo_core.build``.
        loss: as for ``slapo_core.build``.
        target: the dialect of the default ``evaluate``.
        options: further arguments of ``slapo_core.build`` in the default ``evaluate``, e.g. ``{"max_grad_norm": 1.0}``;
            or a function that gives those of a point, e.g. ``lambda p: {"accumulate": p["accumulate"]}``.
        memory: of a rank: bytes, or as in ``"70GiB"``; points that need more by the estimate are not started. None for
            no limit.
        process_memory: what a trial's process on the CPU may take beyond what it has before the model is made, kept by
            the kernel; more is ``"oom"``. Bytes, or as in ``"4GiB"``; None for no limit. Not on GPUs: it limits the
            address space, of which CUDA reserves more than the machine has memory.
        accelerator: ``"cpu"`` or ``"cuda"``; None for CUDA where there is a GPU for each rank, else the CPU.
        device: for predicting time; None predicts none.
        sampler: the name of an installed one, or a :class:`slapo_core.Sampler`.
        log: one line a trial is written there; predictions, outputs and the best schedule next to it.
        timeout: seconds of a trial.
        warmup: steps of the default ``evaluate`` before those that are measured; two at least are run, in the second
            of which the optimizer has its state.
        steps: those that are measured.
        trials: at most as many are started; None for as many as the sampler proposes.
        budget: seconds after which no further trial is started, those of earlier runs of the search included; None for
            no end.
        seed: of the sampler, and of the ranks' RNG state.
        verify: whether the best schedule is verified.
        predict: whether points are estimated before they are tried.

    Raises:
        StudyError: an argument makes no sense; with the corrected call.
    """

    make_model: Callable[[], nn.Module]
    space: Callable[[Any], Any] | Space
    schedule: Callable[[Schedule, Point], Any]
    evaluate: Callable[[Run], float] | None = None
    world_size: int = 1
    mesh: Callable[[Point], Mapping[str, int]] | None = None
    batch: Callable[[Point], Any] | None = None
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    target: str = "torch"
    options: Mapping[str, Any] | Callable[[Point], Mapping[str, Any]] = field(default_factory=dict)
    memory: int | str | None = None
    process_memory: int | str | None = None
    accelerator: str | None = None
    device: DeviceSpec | None = None
    sampler: str | Sampler | type[Sampler] = "frontier"
    log: str | Path = "study.jsonl"
    timeout: float = 300.0
    warmup: int = 2
    steps: int = 5
    trials: int | None = None
    budget: float | None = None
    seed: int = 0
    verify: bool = True
    predict: bool = True

    def __post_init__(self) -> None:
        for name in ("make_model", "schedule"):
            _check(callable(getattr(self, name)), name, "a function", getattr(self, name), f"{name}=my_function")
        for name in ("evaluate", "mesh", "batch", "optimizer", "loss"):
            value = getattr(self, name)
            _check(value is None or callable(value), name, "a function or None", value, f"{name}=my_function")
        for name, least in (("world_size", 1), ("warmup", 0), ("steps", 1), ("seed", 0)):
            value = getattr(self, name)
            fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
            _check(fits, name, f"an integer, at least {least}", value, f"{name}={max(least, 1)}")
        fits = self.trials is None or (type(self.trials) is int and self.trials >= 1)
        _check(fits, "trials", "an integer, at least 1, or None", self.trials, "trials=20")
        _check(_is_seconds(self.timeout), "timeout", "a positive number of seconds", self.timeout, "timeout=300")
        fits = self.budget is None or _is_seconds(self.budget)
        _check(fits, "budget", "a positive number of seconds, or None", self.budget, "budget=3600")
        _check(self.accelerator in (None, "cpu", "cuda"), "accelerator", "'cpu', 'cuda' or None", self.accelerator)
        if not callable(self.options):
            _check_options(self.options)
        for name in ("memory", "process_memory"):
            if getattr(self, name) is not None:
                parse_bytes(getattr(self, name), name=name)
        if self.process_memory is not None and self.uses_cuda:
            raise StudyError(
                f"process_memory={self.process_memory!r} limits the address space of trials, and CUDA reserves more of "
                'it than the machine has memory: every trial would end as "oom"',
                hint=f"memory={self.process_memory!r}, which estimates are held against (a trial that needs more than "
                "the GPU has is \"oom\" without any limit), or accelerator='cpu'",
            )
        if self.evaluate is None:
            calls = {"batch": "batch=lambda p: torch.randn(p['batch'], 64)", "optimizer": "optimizer=torch.optim.AdamW"}
            for name, call in calls.items():
                if getattr(self, name) is None:
                    raise StudyError(f"without evaluate= a study trains, and needs {name}=", hint=call)
        if self.memory is not None and not (self.predict and self.batch is not None):
            raise StudyError(
                f"memory={self.memory!r} is held against estimates, which need predict=True and batch=",
                hint="batch=lambda p: torch.randn(p['batch'], 64); or process_memory= on the CPU, kept by the kernel",
            )
        if self.memory is not None and self.target != "torch":
            from slapo_runtime.build import simulates

            if not simulates(self.target):
                raise StudyError(
                    f"memory={self.memory!r} is held against estimates, and what a training step of target "
                    f"{self.target!r} needs is not known",
                    hint='no limit: points that do not fit end as "oom"; or process_memory= on the CPU, kept '
                    "by the kernel",
                )
        if self.mesh is None and self.world_size > 1:
            raise StudyError(f"{self.world_size} ranks need a mesh", hint=f'mesh=lambda p: {{"dp": {self.world_size}}}')

    @property
    def uses_cuda(self) -> bool:
        """Return whether trials run on GPUs, here."""
        import torch

        return (self.accelerator or ("cuda" if torch.cuda.device_count() >= self.world_size else "cpu")) == "cuda"

    @property
    def memory_limit(self) -> int | None:
        """Return ``memory`` in bytes."""
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def process_memory_limit(self) -> int | None:
        """Return ``process_memory`` in bytes."""
        return None if self.process_memory is None else parse_bytes(self.process_memory, name="process_memory")

    def mesh_of(self, point: Point) -> dict[str, int] | None:
        """Return the mesh of a point; None for one rank without a mesh.

        Raises:
            StudyError: its size is another one than ``world_size``.
        """
        if self.mesh is None:
            return None
        mesh = self.mesh(point)
        if not isinstance(mesh, Mapping) or not all(type(size) is int and size >= 1 for size in mesh.values()):
            raise StudyError(f"the mesh must be sizes by dimension (got {mesh!r})", hint='mesh=lambda p: {"dp": 2}')
        size = math.prod(mesh.values())
        if size != self.world_size:
            raise StudyError(
                f"the mesh {dict(mesh)} has {size} ranks, and world_size is {self.world_size}",
                hint=f"s.require({size} == {self.world_size}, ...) in the space, or world_size={size}",
            )
        return dict(mesh)

    def options_of(self, point: Point) -> Mapping[str, Any]:
        """Return the options of a point.

        Raises:
            StudyError: the function gives something else.
        """
        if not callable(self.options):
            return self.options
        return _check_options(self.options(point))

    @property
    def unit(self) -> str:
        """Return the unit of the value: samples per second, of the default ``evaluate``."""
        return "samples/s" if self.evaluate is None else "(value)"

    def run(self, *, progress: bool = False, resume: bool | None = None) -> Result:
        """Search to the end; a search that ended before goes on where it was.

        Args:
            progress: show the trials on stderr: live on a terminal, one line a trial elsewhere.
            resume: False refuses a log that has trials, True one that has none; None goes on where there is something.

        Raises:
            StudyError, LogError, SpaceError: as :func:`slapo_tune.tune`.
            KeyboardInterrupt: nothing runs any more, and the log is whole: called again, the search goes on.
        """
        from slapo_tune.progress import Progress
        from slapo_tune.search import search

        with contextlib.suppress(OSError):  # the search says that the log cannot be written
            Path(self.log).parent.mkdir(parents=True, exist_ok=True)
        if not progress:
            return search(self, resume=resume)
        points, past = len(self.report().points), self._past()
        shown = Progress(unit=self.unit, points=points, limit=self.trials, timeout=self.timeout, trials=past)
        with shown:
            return search(self, resume=resume, tell=shown.tell)

    def report(self, trials: Sequence[Trial] | None = None) -> Report:
        """Return the tables of a search: ``print(study.report().summary())``, ``study.report().print()``.

        Args:
            trials: of the search; None takes those in the log.
        """
        from slapo_tune.report import Report
        from slapo_tune.space import Space

        space = Space.of(self.space)
        points, refused = list(islice(space.points(), _MANY)), list(islice(space.refused(), _MANY))
        return Report(points, self._past() if trials is None else trials, refused=refused, unit=self.unit)

    def plot(
        self,
        file: str | os.PathLike[str],
        *,
        axes: tuple[str, str] | None = None,
        title: str = "",
        trials: Sequence[Trial] | None = None,
    ) -> Path:
        """Plot the space with the path of the search, and predicted against measured values.

        Args:
            file: to write, ending in ``.png``.
            axes: the symbols on the axes of the space; None takes the two with the most candidates.
            title: of the picture.
            trials: of the search; None takes those in the log.

        Raises:
            ArgumentError: matplotlib is not installed; unknown symbols; the file cannot be written.
        """
        from slapo_tune.plots import write_picture

        found = self.report(trials)
        return write_picture(found.points, found.trials, Path(file), axes=axes, unit=self.unit, title=title)

    def _past(self) -> Sequence[Trial]:
        """The trials in the log; none where it cannot be read, which the search says."""
        from slapo_tune.log import read_log

        try:
            return read_log(self.log).trials if Path(self.log).exists() else ()
        except LogError:
            return ()

    def functions(self) -> dict[str, Any]:
        """Return what trials are sent, by the argument's name."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: own[name] for name in SENT}


_MANY = 100_000
"""Points of which tables and pictures are made; of a larger space, the first ones."""

SENT = ("make_model", "schedule", "evaluate", "batch", "optimizer", "loss", "options")
"""Arguments that trials are sent by name, because they hold functions; all others are plain."""


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _check(fits: bool, name: str, required: str, got: object, hint: str | None = None) -> None:
    if not fits:
        raise StudyError(f"{name} must be {required} (got {got!r})", hint=hint)


def _check_options(options: Any) -> Mapping[str, Any]:
    required = "a mapping, or a function of the point that gives one"
    _check(isinstance(options, Mapping), "options", required, options, "options={}")
    for name in ("target", "optimizer", "loss", "device"):
        if name in options:
            raise StudyError(f"options has {name!r}, which is an argument of its own", hint=f"{name}=")
    return options  # type: ignore[no-any-return]


def load_study(path: str | os.PathLike[str], name: str = "study") -> Study:
    """Load the study that a Python file has at its top level; the file is imported.

    Args:
        path: of the file. In a package (with an ``__init__.py``) it is imported as a part of it; otherwise its
            directory is added to the import path, as with ``python STUDY.py``.
        name: of the study.

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
    with contextlib.suppress(ImportError, ValueError):  # a parent that cannot be imported says so below
        found = importlib.util.find_spec(name)
    if found is None or found.origin is None or not os.path.samefile(found.origin, file):
        name = f"slapo_tune_study_{file.stem}"  # the name means another module
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
    except (Exception, SystemExit) as error:  # the user's file, which may end with sys.exit()
        sys.modules.pop(name, None)
        raise StudyError(
            f"{file} cannot be imported: {type(error).__name__}: {error}{_line(error, file)}",
            hint=f"python {file} shows the whole traceback",
        ) from error
    return module


def _line(error: BaseException, file: Path) -> str:
    """The last line of the file that was at work, where the message does not have it."""
    if isinstance(error, SyntaxError):
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
