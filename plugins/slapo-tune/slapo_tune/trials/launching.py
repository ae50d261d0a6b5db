"""`Trials`: runs jobs, each in processes of its own, through the guard."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from slapo_tune.errors import StudyError
from slapo_tune.study import Study
from slapo_tune.trials import job as files
from slapo_tune.trials.job import Ended, Job
from slapo_tune.trials.judging import Outcome, judge
from slapo_tune.trials.outputs import TAIL
from slapo_tune.trials.rank import is_in_trial
from slapo_tune.trials.sending import packed

__all__ = ["Trials", "accelerator_of", "libraries"]

_LEAVING = 15.0  # seconds for the guard to end everything
_ATTEMPTS = 3
_SLACK = 420.0  # seconds beyond a job's own after which the guard is given up


class Trials:
    """The processes of a study's trials; a context manager.

    Args:
        study: its functions are sent by name.

    Raises:
        StudyError: a function cannot be sent; or this process is itself a rank of a trial.
    """

    def __init__(self, study: Study) -> None:
        if is_in_trial():
            raise StudyError(
                "a trial imported the script, and the script started a search again",
                hint="write `if __name__ == '__main__':` above the call of tune, and indent the call",
            )
        self._study = study
        self.payload = packed(study.functions())
        self._preload = libraries(study)
        self._home: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._heard = b""
        self._jobs = 0

    def __enter__(self) -> Trials:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def run(
        self,
        task: str,
        point: Mapping[str, Any],
        mesh: Mapping[str, int] | None,
        *,
        output: Path,
        timeout: float,
        ranks: int = 1,
        **settings: Any,
    ) -> Outcome:
        """Run one job to its end.

        Args:
            task: ``"check"``, ``"try"`` or ``"verify"``.
            point: what is tried.
            mesh: of the point.
            output: the file for what the ranks print.
            timeout: seconds.
            ranks: how many processes.
            settings: what else the task is told; plain.

        Raises:
            StudyError: the ranks cannot import the study's functions.
        """
        if self._guard is None or self._guard.poll() is not None:
            self._stop()
            self._start()
        assert self._home is not None
        directory = self._home / f"job-{self._jobs}"
        self._jobs += 1
        directory.mkdir()
        output.parent.mkdir(exist_ok=True)
        told: dict[str, Any] = {"point": dict(point), "mesh": None if mesh is None else dict(mesh), "timeout": timeout}
        told |= {"study": _plain(self._study), "seed": self._study.seed, "accelerator": accelerator_of(self._study)}
        job = Job(
            str(directory),
            str(self._home / "payload"),
            task,
            ranks,
            timeout,
            str(output.absolute()),
            told | settings,
            dict(os.environ),
        )
        try:
            before = time.monotonic()
            ended = self._ask(job)
            if ended is None:
                return Outcome("crash", "the guard of the trial's processes ended", seconds=time.monotonic() - before)
            said = [files.read(files.result(directory, rank)) for rank in range(ranks)]
            traces = [_text(files.trace(directory, rank)) for rank in range(ranks)]
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        outcome = judge(
            ended, said, traces, _text(output)[-TAIL:], timeout=timeout, data_parts=_data_parts(mesh, ranks)
        )
        if outcome.phase == "prepare" and outcome.status == "crash":
            raise StudyError(f"the processes of a trial cannot be prepared: {outcome.reason}")
        return outcome

    def _ask(self, job: Job) -> Ended | None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(json.dumps(job.as_json()).encode() + b"\n")
            self._guard.stdin.flush()
        except BrokenPipeError:
            return None
        heard = self._hear(job.timeout + _SLACK)
        return None if heard is None else Ended.of(heard["ended"])

    def _hear(self, timeout: float) -> dict[str, Any] | None:
        """What the guard says next; None if it has ended, or says nothing."""
        assert self._guard is not None
        assert self._guard.stdout is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._guard.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._stop()
                    return None
                data = os.read(self._guard.stdout.fileno(), 1 << 16)
                if not data:
                    return None
                self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return dict(json.loads(line))

    def _start(self) -> None:
        """Start the guard; more than once, where it is killed at that.

        Raises:
            StudyError: it does not start.
        """
        for _ in range(_ATTEMPTS):
            self._home = Path(tempfile.mkdtemp(prefix="slapo-tune-"))
            Path(self._home, "payload").write_bytes(self.payload)
            errors = Path(self._home, "guard.txt")
            with errors.open("wb") as file:
                self._guard = subprocess.Popen(
                    [sys.executable, "-m", "slapo_tune.trials.guard", str(self._home), *self._preload],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    start_new_session=True,
                )
            self._heard = b""
            if self._hear(_SLACK) is not None:
                return
            said = _text(errors)
            self._stop()
        raise StudyError(f"the guard of the trials' processes does not start\n{said}")

    def _stop(self) -> None:
        """Let the guard end everything, by closing what it listens to."""
        guard, self._guard = self._guard, None
        if guard is not None:
            for stream in (guard.stdin, guard.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
            try:
                guard.wait(_LEAVING)
            except subprocess.TimeoutExpired:
                guard.kill()
                guard.wait()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None


def accelerator_of(study: Study) -> str:
    """``"cuda"`` or ``"cpu"``: what trials run on, here."""
    if study.accelerator is not None:
        return study.accelerator
    import torch

    return "cuda" if torch.cuda.device_count() >= study.world_size else "cpu"


def _plain(study: Study) -> dict[str, Any]:
    """What ranks are told of a study beside its functions."""
    names = ("world_size", "target", "memory", "timeout", "warmup", "steps", "seed", "accelerator")
    return {name: getattr(study, name) for name in names}


def _data_parts(mesh: Mapping[str, int] | None, ranks: int) -> Sequence[Any]:
    """By rank, its place along the dimensions in which ranks see other samples."""
    from slapo_core.spec.mesh import DATA_DIMS, Mesh

    if mesh is None:
        return [0] * ranks
    places = [Mesh(mesh, rank=rank) for rank in range(ranks)]
    return [tuple(place.rank(mesh_dim) for mesh_dim in DATA_DIMS) for place in places]


def libraries(study: Study) -> list[str]:
    """Installed modules that the functions' own modules use, which each rank would import by itself.

    The user's own are not among them: they may do anything when they are imported.
    """
    installed = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib"))
    names: dict[str, None] = {}
    for function in study.functions().values():
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        for value in vars(module).values() if module is not None else ():
            name = getattr(value, "__name__" if type(value) is type(sys) else "__module__", None)
            file = getattr(sys.modules.get(name if isinstance(name, str) else ""), "__file__", None)
            if isinstance(name, str) and file and os.path.realpath(file).startswith(installed):
                names.setdefault(name)
    return sorted(names)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
