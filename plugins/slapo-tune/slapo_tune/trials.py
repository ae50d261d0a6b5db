"""`Trials`: runs points on real ranks; whatever a trial does, it gets a status and the next one starts clean."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import pickletools
import resource
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psutil
import torch

import slapo_core as slapo
from slapo_core import RankFailedError
from slapo_core.layout import DATA_DIMS, Mesh
from slapo_runtime.launcher import MAIN_HINT, ServerEndedError, is_importing_script, preload_modules, run_ranks
from slapo_runtime.rank_process import make_importable
from slapo_tune.errors import StudyError
from slapo_tune.outcomes import Outcome, RaisedError, outcome_of_failure, outcome_of_results
from slapo_tune.study import Study
from slapo_tune.training import Run, on

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_tune.samplers import Point

KEPT = 256 * 1024
"""Bytes that are kept from the beginning and from the end of a trial's output."""

_LAUNCHES = 5  # attempts to start the ranks of a trial
_PATIENCE = 60.0  # seconds that killed processes get to end: a driver takes its time to free a GPU's memory
_MAIN = ("__main__", "__mp_main__")
_PLAIN = ("world_size", "target", "memory", "timeout", "warmup", "steps", "seed", "accelerator")
"""Fields of a study that ranks get besides its functions."""


def output_file(log: str | Path, number: int) -> Path:
    """Return the path of a trial's output: ``run.output/0003.txt`` next to ``run.jsonl``."""
    return Path(log).with_suffix(".output") / f"{number:04d}.txt"


def accelerator_of(study: Study) -> str:
    """Return ``"cuda"`` or ``"cpu"``: what trials run on, here.

    Raises:
        StudyError: the study wants more GPUs than there are.
    """
    count = torch.cuda.device_count()
    if study.accelerator == "cuda" and count < study.world_size:
        raise StudyError(f"{study.world_size} ranks need as many GPUs, and there are {count}", hint="accelerator='cpu'")
    return "cuda" if study.uses_cuda else "cpu"


class Trials:
    """Runs a study's points, each in processes of its own.

    Args:
        study: its functions are sent by name.

    Raises:
        StudyError: a function cannot be sent; or this process is itself a rank of a trial.
    """

    def __init__(self, study: Study) -> None:
        if is_importing_script():
            raise StudyError("a trial imported the script, and the script started a search again", hint=MAIN_HINT)
        self._study = study
        self.payload = packed(study.functions())
        preload_modules(*_libraries(study))

    def run(
        self,
        task: str,
        point: Mapping[str, Any],
        mesh: Mapping[str, int] | None,
        *,
        output: Path,
        timeout: float,
        ranks: int = 1,
        verify: bool = False,
    ) -> Outcome:
        """Run one job to its end.

        Args:
            task: ``"check"`` makes the schedule, without a process group; ``"try"`` measures; ``"verify"`` compares.
            point: of the trial.
            mesh: of the point.
            output: the file of the ranks' output.
            timeout: seconds.
            ranks: how many processes.
            verify: whether ``"verify"`` does so, or only gives the schedule's document.

        Raises:
            StudyError: the ranks cannot import the study's functions.
            LaunchError: the ranks cannot import the script, or the server that they are forked from keeps ending.
        """
        study, accelerator = self._study, accelerator_of(self._study)
        output.parent.mkdir(exist_ok=True)
        output.write_bytes(b"")
        backend = "" if task == "check" else "cpu:gloo,cuda:nccl" if accelerator == "cuda" else "gloo"
        before, kills = time.monotonic(), _kills_for_memory()
        with tempfile.TemporaryDirectory(prefix="slapo-tune-", ignore_cleanup_errors=True) as directory:
            job = _Job(
                task=task,
                payload=self.payload,
                point=dict(point),
                mesh=None if mesh is None else dict(mesh),
                study={name: getattr(study, name) for name in _PLAIN},
                accelerator=accelerator,
                timeout=timeout,
                process_memory=study.process_memory_limit if task == "try" else None,
                verify=verify,
                directory=directory,
                output=str(output.absolute()),
            )
            said: list[dict[str, Any]] = []
            failure = None
            try:
                said = _launched(job, ranks, timeout, backend)
            except RankFailedError as error:
                failure = error
            finally:
                left = _end_processes(directory)
            if left:
                raise StudyError(
                    f"trial processes {', '.join(map(str, left))} were killed and did not end within {_PATIENCE:g} s: "
                    "the next trial would lack the memory that they hold",
                    hint="look at them with `ps`, and resume the search when they are gone",
                )
        printed, killed = _cut(output), _kills_for_memory() > kills
        if failure is None:
            outcome = outcome_of_results(said, _data_parts(mesh, ranks))
        else:
            outcome = outcome_of_failure(failure, printed, timeout=timeout, killed_for_memory=killed)
        if outcome.phase == "prepare" and outcome.status == "crash":
            raise StudyError(f"the processes of a trial cannot be prepared: {outcome.reason}")
        return replace(outcome, seconds=time.monotonic() - before)


def _launched(job: _Job, ranks: int, timeout: float, backend: str) -> list[dict[str, Any]]:
    for _ in range(_LAUNCHES - 1):
        with contextlib.suppress(ServerEndedError):
            return run_ranks(run_job, job, world_size=ranks, timeout=timeout, backend=backend)
    return run_ranks(run_job, job, world_size=ranks, timeout=timeout, backend=backend)


# -- in the search ------------------------------------------------------------------------------------------


def packed(functions: Mapping[str, Any]) -> bytes:
    """Pickle a study's functions for other processes; :func:`opened` gives them back.

    Args:
        functions: by the name of a study's argument: functions, or what holds some. One that pickle cannot find by its
            name, e.g. a lambda, is found as the argument of a study at the top level of a module.

    Raises:
        StudyError: another process could not find a function; the argument is named.
    """
    data: dict[str, bytes] = {}
    for name, value in functions.items():
        try:
            data[name] = pickle.dumps(value)
        except Exception as error:  # pickle raises several kinds, and whatever __reduce__ raises
            argument = _argument_of_a_study(name, value)
            if argument is None:
                what = getattr(value, "__qualname__", type(value).__name__)
                raise StudyError(
                    f"{name}={what} cannot be sent to the processes of a trial: {error}",
                    hint=f"define it at the top level of a module, def {name}(...), and give it by that name",
                ) from error
            data[name] = pickle.dumps(argument)
    words = {word for each in data.values() for _, word, _ in pickletools.genops(each) if isinstance(word, str)}
    files = {word: getattr(sys.modules.get(word), "__file__", None) for word in sorted(words)}
    if "__main__" in words and files["__main__"] is None:
        raise StudyError(
            "the study is in an interactive session, which other processes cannot import",
            hint="save it as a file, e.g. study.py, and run `python study.py`",
        )
    origins = {name: os.path.abspath(file) for name, file in files.items() if file and name not in _MAIN}
    return pickle.dumps((origins, data))


def opened(payload: bytes) -> dict[str, Any]:
    """Return what :func:`packed` was given; imports its modules, by name or from their files."""
    origins, data = pickle.loads(payload)
    for name, file in origins.items():
        make_importable(name, file)
    return {name: pickle.loads(value) for name, value in data.items()}


@dataclass(frozen=True)
class _Argument:
    """The argument of a study, which is unpickled as its value."""

    module: str
    study: str
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _value_of, (self.module, self.study, self.name)


def _value_of(module: str, study: str, name: str) -> Any:
    return getattr(getattr(sys.modules[module], study), name)


def _argument_of_a_study(name: str, value: Any) -> _Argument | None:
    for module in list(sys.modules.values()):
        for attribute, own in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            if issubclass(type(own), Study) and getattr(own, name) is value:
                return _Argument(module.__name__, attribute, name)
    return None


def _libraries(study: Study) -> list[str]:
    """Return installed modules that the functions' own modules use, so that they are imported once for all ranks.

    The user's own are not among them: they may do anything when they are imported.
    """
    installed = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib"))
    names = set()
    for function in study.functions().values():
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        for value in vars(module).values() if module is not None else ():
            name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
            file = getattr(sys.modules.get(name if isinstance(name, str) else ""), "__file__", None)
            if isinstance(name, str) and file and os.path.realpath(file).startswith(installed):
                names.add(name)
    return sorted(names)


def _data_parts(mesh: Mapping[str, int] | None, ranks: int) -> list[Any]:
    """Return by rank its place along the dimensions in which ranks see other samples."""
    if mesh is None:
        return [0] * ranks
    places = [Mesh(mesh, rank=rank) for rank in range(ranks)]
    return [tuple(place.rank(mesh_dim) for mesh_dim in DATA_DIMS) for place in places]


def _kills_for_memory() -> int:
    """Count the processes that the kernel has killed for want of memory; 0 where that is unknown."""
    group = ""
    with contextlib.suppress(OSError, IndexError):
        group = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].splitlines()[0]
    for file in (f"/sys/fs/cgroup{group}/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            lines = [line.split() for line in Path(file).read_text().splitlines()]
            return sum(int(line[1]) for line in lines if line[0] == "oom_kill")
    return 0


def _end_processes(directory: str) -> list[int]:
    """Kill processes that ranks started in sessions of their own, found by the trial's temporary directory.

    The ranks themselves have ended. A GPU's memory is free once its process has: wait for that.

    Returns:
        the ids of processes that have not ended after all.
    """
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == directory:
                process.kill()
                killed.append(process)
    patience = time.monotonic() + _PATIENCE
    while (killed := [process for process in killed if _lives(process)]) and time.monotonic() < patience:
        time.sleep(0.01)
    return [process.pid for process in killed]


def _lives(process: psutil.Process) -> bool:
    """Return whether a process may hold memory: a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _cut(output: Path) -> str:
    """Leave out the middle of an output that is too long; return its end."""
    with contextlib.suppress(OSError), output.open("r+b") as file:  # the disk is full, or the file is gone
        left_out = file.seek(0, os.SEEK_END) - 2 * KEPT
        file.seek(max(0, left_out + KEPT))
        tail = file.read()
        if left_out > 0:
            file.truncate(KEPT)
            file.seek(KEPT)
            file.write(f"\n... {left_out} bytes left out ...\n".encode() + tail)
        return tail.decode(errors="replace")
    return ""


# -- on a rank ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What every rank is told; see :meth:`Trials.run`."""

    task: str
    payload: bytes
    point: dict[str, Any]
    mesh: dict[str, int] | None
    study: dict[str, Any]
    accelerator: str
    timeout: float
    process_memory: int | None
    verify: bool
    directory: str
    output: str


def run_job(job: _Job) -> dict[str, Any]:
    """Do a rank's part of a job.

    Raises:
        RaisedError: whatever was raised.
    """
    own, rank, phase = os.getpid(), int(os.environ["RANK"]), ["prepare"]
    _redirect(job)
    try:
        functions = opened(job.payload)
        if job.process_memory is not None:
            _limit_memory(job.process_memory)
        torch.manual_seed(job.study["seed"])
        device = "cpu" if job.task == "check" or job.accelerator == "cpu" else f"cuda:{rank}"
        return _TASKS[job.task](_Task(job, functions, rank, device, phase))
    except BaseException as error:  # noqa: BLE001 - SystemExit and the like too
        raise RaisedError.of(error, phase[0], rank) from None
    finally:
        if os.getpid() != own:
            os._exit(1)  # a process that the user's code forked came back as well: it is not the rank


def _redirect(job: _Job) -> None:
    """Print into the output, and have temporary files and shared memory that end with the trial."""
    printed, nothing = os.open(job.output, os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(printed)
    with contextlib.suppress(PermissionError):  # what this process was forked from was killed
        os.setpgid(0, os.getpgid(os.getppid()))
    # Outside of the rank's process group: when that has been killed, it gives back the rank's shared memory.
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    tracker.ensure_running()
    os.setpgrp()
    os.environ["TMPDIR"] = tempfile.tempdir = job.directory


def _limit_memory(limit: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))


@dataclass(frozen=True)
class _Task:
    """Run a job on one rank; the first item of ``phase`` names the present phase, for the message of a failure."""

    job: _Job
    functions: Mapping[str, Any]
    rank: int
    device: str
    phase: list[str]

    def batch(self) -> Any:
        self.phase[0] = "batch"
        make = self.functions["batch"]
        return None if make is None else make(self.job.point)

    def schedule(self, batch: Any) -> Schedule:
        self.phase[0] = "model"
        with torch.device("meta"):
            model = self.functions["make_model"]()
        schedule = slapo.create_schedule(model, mesh=self.job.mesh, example_inputs=batch)
        self.phase[0] = "schedule"
        self.functions["schedule"](schedule, self.job.point)
        self.phase[0] = "run"
        return schedule


def _check(task: _Task) -> dict[str, Any]:
    """Make the schedule on one process, with an abstract mesh."""
    return {"steps": len(task.schedule(task.batch()).records)}


def _measure(task: _Task) -> dict[str, Any]:
    """Train, or call the study's own ``evaluate``."""
    mesh = task.job.mesh
    study = Study(
        **task.functions, space=_no_space, mesh=None if mesh is None else partial(_given, mesh), **task.job.study
    )
    batch = task.batch()
    run = Run(study, task.job.point, task.schedule(batch), task.rank, on(batch, task.device), task.device)
    warnings.filterwarnings("ignore", message=".*was never verified")  # the best one is, after the search
    value = study.evaluate(run) if study.evaluate is not None else run.train()
    measured = {str(name): _plain(number)["value"] for name, number in run.measured.items()}
    return {
        **_plain(value),
        "measured": {name: math.nan if number is None else number for name, number in measured.items()},
    }


def _prove(task: _Task) -> dict[str, Any]:
    """Compare the schedule with the reference model; give the schedule as a document."""
    batch = task.batch()
    schedule = task.schedule(batch)
    said: dict[str, Any] = {"document": None, "report": ""}
    task.phase[0] = "verify"
    if task.job.verify:
        said["report"] = str(slapo.verify(schedule, on(batch, task.device), timeout=task.job.timeout))
    try:
        said["document"] = schedule.document()  # with the mark of the verification
    except slapo.SerializationError as error:
        said["no_document"] = str(error)
    return said


_TASKS: Mapping[str, Callable[[_Task], dict[str, Any]]] = {"check": _check, "try": _measure, "verify": _prove}


def _plain(value: Any) -> dict[str, Any]:
    """Return a finite number as it is; describe anything else."""
    try:
        number = None if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements raises the last
        number = None
    if number is None or not math.isfinite(number):
        return {"value": None, "was": repr(value)[:200]}
    return {"value": number}


def _given(mesh: dict[str, int], point: Point) -> dict[str, int]:
    return dict(mesh)


def _no_space(symbols: Any) -> None:
    raise RuntimeError("a trial has no space, only the point that it tries")
