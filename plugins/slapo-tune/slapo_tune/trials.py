"""`TrialRunner`: run each point in fresh processes, and classify the outcome."""

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
from slapo_tune.settings import StudySettings
from slapo_tune.training import Run, to_device

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_tune.samplers import Point

KEPT = 256 * 1024
"""Bytes that are kept of the beginning and of the end of a trial's output."""

_LAUNCHES = 5  # attempts to start the ranks of a trial
_PATIENCE = 60.0  # seconds for killed processes to end: a driver frees a GPU's memory slowly
_MAIN = ("__main__", "__mp_main__")
_PLAIN = ("world_size", "target", "memory", "timeout", "warmup", "steps", "seed", "accelerator")
"""Fields of a study for ranks, besides its functions."""


def output_file(log: str | Path, number: int) -> Path:
    """Return the path of a trial's output: ``run.output/0003.txt`` next to ``run.jsonl``."""
    return Path(log).with_suffix(".output") / f"{number:04d}.txt"


def accelerator_of(study: StudySettings) -> str:
    """Return the device type of trials on this machine, ``"cuda"`` or ``"cpu"``.

    Raises:
        StudyError: fewer GPUs than ranks.
    """
    count = torch.cuda.device_count()
    if study.accelerator == "cuda" and count < study.world_size:
        raise StudyError(
            f"accelerator='cuda' needs {study.world_size} GPUs for {study.world_size} ranks (got {count})",
            hint="accelerator='cpu'",
        )
    return "cuda" if study.uses_cuda else "cpu"


class TrialRunner:
    """Run a study's points, each in processes of its own.

    Args:
        study: the study, whose functions are sent by name.

    Raises:
        StudyError: a function cannot be sent; or this process is a rank of a trial.
    """

    def __init__(self, study: StudySettings) -> None:
        if is_importing_script():
            raise StudyError("the script started a search while a trial imported it", hint=MAIN_HINT)
        self._study = study
        self.payload = pack_functions(study.functions())
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
            point: point of the trial.
            mesh: mesh of the point.
            output: file of the ranks' output.
            timeout: seconds.
            ranks: number of processes.
            verify: whether ``"verify"`` compares, or only returns the schedule's document.

        Raises:
            StudyError: the ranks cannot import the study's functions.
            LaunchError: the ranks cannot import the script, or their fork server keeps ending.
        """
        study, accelerator = self._study, accelerator_of(self._study)
        output.parent.mkdir(exist_ok=True)
        output.write_bytes(b"")
        backend = "" if task == "check" else "cpu:gloo,cuda:nccl" if accelerator == "cuda" else "gloo"
        before, kills = time.monotonic(), _kills_for_memory()
        with tempfile.TemporaryDirectory(prefix="slapo-tune-", ignore_cleanup_errors=True) as directory:
            job = _TrialJob(
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
            results: list[dict[str, Any]] = []
            failure = None
            try:
                results = _launched(job, ranks, timeout, backend)
            except RankFailedError as error:
                failure = error
            finally:
                left = _end_processes(directory)
            if left:
                raise StudyError(
                    f"trial processes {', '.join(map(str, left))} did not end within {_PATIENCE:g} s after SIGKILL: "
                    "the next trial would lack their memory",
                    hint=f"ps -p {','.join(map(str, left))}; resume the search when they have ended",
                )
        printed, killed = _shorten(output), _kills_for_memory() > kills
        if failure is None:
            outcome = outcome_of_results(results, _data_parts(mesh, ranks))
        else:
            outcome = outcome_of_failure(failure, printed, timeout=timeout, killed_for_memory=killed)
        if outcome.phase == "prepare" and outcome.status == "crash":
            raise StudyError(f"the processes of a trial failed before the trial: {outcome.reason}")
        return replace(outcome, seconds=time.monotonic() - before)


def _launched(job: _TrialJob, ranks: int, timeout: float, backend: str) -> list[dict[str, Any]]:
    for _ in range(_LAUNCHES - 1):
        with contextlib.suppress(ServerEndedError):
            return run_ranks(run_job, job, world_size=ranks, timeout=timeout, backend=backend)
    return run_ranks(run_job, job, world_size=ranks, timeout=timeout, backend=backend)


# -- in the search ------------------------------------------------------------------------------------------


def pack_functions(functions: Mapping[str, Any]) -> bytes:
    """Pickle a study's functions for other processes; :func:`unpack_functions` reverses it.

    Args:
        functions: name of a study's argument -> functions, or values with functions. A function without an importable
            name, e.g. a lambda, is found as the argument of a study at the top level of a module.

    Raises:
        StudyError: a function cannot be found by another process.
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
                    hint=f"def {name}(...) at the top level of a module, and {name}={name}",
                ) from error
            data[name] = pickle.dumps(argument)
    words = {word for each in data.values() for _, word, _ in pickletools.genops(each) if isinstance(word, str)}
    files = {word: getattr(sys.modules.get(word), "__file__", None) for word in sorted(words)}
    if "__main__" in words and files["__main__"] is None:
        raise StudyError(
            "other processes cannot import the study of an interactive session",
            hint="save it as a file, e.g. study.py, and run `python study.py`",
        )
    origins = {name: os.path.abspath(file) for name, file in files.items() if file and name not in _MAIN}
    return pickle.dumps((origins, data))


def unpack_functions(payload: bytes) -> dict[str, Any]:
    """Return the functions of :func:`pack_functions`; imports their modules, by name or from files."""
    origins, data = pickle.loads(payload)
    for name, file in origins.items():
        make_importable(name, file)
    return {name: pickle.loads(value) for name, value in data.items()}


@dataclass(frozen=True)
class _Argument:
    """An argument of a study, unpickled as its value."""

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
            if issubclass(type(own), StudySettings) and getattr(own, name) is value:
                return _Argument(module.__name__, attribute, name)
    return None


def _libraries(study: StudySettings) -> list[str]:
    """Return installed modules that the study's modules use, to import them once for all ranks.

    The user's modules are left out: their import may have effects.
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
    """Return the coordinates of each rank along the dimensions that split samples."""
    if mesh is None:
        return [0] * ranks
    places = [Mesh(mesh, rank=rank) for rank in range(ranks)]
    return [tuple(place.rank(mesh_dim) for mesh_dim in DATA_DIMS) for place in places]


def _kills_for_memory() -> int:
    """Count the processes that the kernel killed because memory ran out; 0 if unknown."""
    group = ""
    with contextlib.suppress(OSError, IndexError):
        group = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].splitlines()[0]
    for file in (f"/sys/fs/cgroup{group}/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            lines = [line.split() for line in Path(file).read_text().splitlines()]
            return sum(int(line[1]) for line in lines if line[0] == "oom_kill")
    return 0


def _end_processes(directory: str) -> list[int]:
    """Kill processes that ranks started in other sessions, found by the trial's TMPDIR.

    The ranks have ended. The memory of a GPU is free when its process has ended: wait for that.

    Returns:
        the ids of processes that did not end.
    """
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == directory:
                process.kill()
                killed.append(process)
    patience = time.monotonic() + _PATIENCE
    while (killed := [process for process in killed if _is_running(process)]) and time.monotonic() < patience:
        time.sleep(0.01)
    return [process.pid for process in killed]


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process may have memory: a zombie has none."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _shorten(output: Path) -> str:
    """Remove the middle of a long output; return its end."""
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
class _TrialJob:
    """The arguments of each rank; see :meth:`TrialRunner.run`."""

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


def run_job(job: _TrialJob) -> dict[str, Any]:
    """Run a job on this rank.

    Raises:
        RaisedError: for each exception.
    """
    own, rank, phase = os.getpid(), int(os.environ["RANK"]), ["prepare"]
    _redirect(job)
    try:
        functions = unpack_functions(job.payload)
        if job.process_memory is not None:
            _limit_memory(job.process_memory)
        torch.manual_seed(job.study["seed"])
        device = "cpu" if job.task == "check" or job.accelerator == "cpu" else f"cuda:{rank}"
        return _TASKS[job.task](_Task(job, functions, rank, device, phase))
    except BaseException as error:  # noqa: BLE001 - SystemExit and the like too
        raise RaisedError.of(error, phase[0], rank) from None
    finally:
        if os.getpid() != own:
            os._exit(1)  # a process forked by the user's code, not the rank


def _redirect(job: _TrialJob) -> None:
    """Redirect output to the file, and let temporary files and shared memory end with the trial."""
    printed, nothing = os.open(job.output, os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(printed)
    with contextlib.suppress(PermissionError):  # the fork server was killed
        os.setpgid(0, os.getpgid(os.getppid()))
    # Outside of the rank's process group: it frees the rank's shared memory when the group was killed.
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
    """A job on one rank; ``phase[0]`` is the current phase, for the message of a failure."""

    job: _TrialJob
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
    """Make the schedule in one process, on an abstract mesh."""
    return {"steps": len(task.schedule(task.batch()).records)}


def _measure(task: _Task) -> dict[str, Any]:
    """Train, or call the study's ``evaluate``."""
    mesh = task.job.mesh
    study = StudySettings(
        **task.functions, space=_no_space, mesh=None if mesh is None else partial(_constant, mesh), **task.job.study
    )
    batch = task.batch()
    run = Run(study, task.job.point, task.schedule(batch), task.rank, to_device(batch, task.device), task.device)
    warnings.filterwarnings("ignore", message=".*was never verified")  # the best one is, after the search
    value = study.evaluate(run) if study.evaluate is not None else run.train()
    measured = {str(name): _plain(number)["value"] for name, number in run.measured.items()}
    return {
        **_plain(value),
        "measured": {name: math.nan if number is None else number for name, number in measured.items()},
    }


def _verify(task: _Task) -> dict[str, Any]:
    """Compare the schedule with the reference model; return its document."""
    batch = task.batch()
    schedule = task.schedule(batch)
    result: dict[str, Any] = {"document": None, "report": ""}
    task.phase[0] = "verify"
    if task.job.verify:
        result["report"] = str(slapo.verify(schedule, to_device(batch, task.device), timeout=task.job.timeout))
    try:
        result["document"] = schedule.document()  # marked as verified
    except slapo.SerializationError as error:
        result["no_document"] = str(error)
    return result


_TASKS: Mapping[str, Callable[[_Task], dict[str, Any]]] = {"check": _check, "try": _measure, "verify": _verify}


def _plain(value: Any) -> dict[str, Any]:
    """Return a finite number, or a description of any other value."""
    try:
        number = None if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements raises the last
        number = None
    if number is None or not math.isfinite(number):
        return {"value": None, "was": repr(value)[:200]}
    return {"value": number}


def _constant(mesh: dict[str, int], point: Point) -> dict[str, int]:
    return dict(mesh)


def _no_space(symbols: Any) -> None:
    raise RuntimeError("the ranks of a trial have no space, only a point")
