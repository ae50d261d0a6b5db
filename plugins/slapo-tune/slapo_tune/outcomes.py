"""Classify jobs by the ranks' results, exceptions and exit codes."""

from __future__ import annotations

import errno
import math
import re
import signal
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slapo_core import RankFailedError

_LOSS_APART = 0.02
"""Maximum relative difference of losses between ranks with the same samples: above fp16 rounding."""

_VALUES_APART = 0.5
"""Maximum relative difference of the ranks' values: each rank has its own clock and waits for the others."""

_REFUSING = ("batch", "model", "schedule")
"""Phases in which an exception refuses the point."""

_NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|cannot allocate memory|bad_alloc|out of memory"
    r"|(_STATUS_(\w+_)?|CUFFT_)ALLOC(ATION)?_FAILED"  # cuBLAS, cuDNN, cuSPARSE, cuSOLVER; cuDNN 9: DEVICE_ALLOCATION
    r"|failed to cuda (host )?[mc]alloc",  # NCCL
    re.I,
)
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|was aborted)|broken pipe", re.I)
_OURS = ("/slapo_tune/trials.py", "/slapo_tune/training.py", "/slapo_core/", "/torch/", "/importlib/", "<frozen ")
_FRAMES = 4
_LENGTH = 2000


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Args:
        status: one of :data:`slapo_tune.samplers.STATUSES`.
        reason: the first cause; empty if the status is ``"ok"``.
        value: the smallest value of the ranks; None unless a trial is ``"ok"``.
        measured: measurements of rank 0, with the memory of the fullest rank.
        seconds: duration.
        phase: phase in which a rank raised; empty without an exception.
        result: the result of rank 0.
    """

    status: str
    reason: str = ""
    value: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    phase: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)


class RaisedError(Exception):
    """An exception of a task on a rank, as plain data to send to the search.

    Args:
        status: status of the job, if this is the first cause.
        reason: the exception, with the user's lines that raised it.
        phase: phase of the task: ``"prepare"``, ``"batch"``, ``"model"``, ``"schedule"``, ``"run"`` or ``"verify"``.
        is_lost: whether it only reports the loss of another rank.
    """

    def __init__(self, status: str, reason: str, phase: str, is_lost: bool) -> None:
        super().__init__(status, reason, phase, is_lost)
        self.status, self.reason, self.phase, self.is_lost = status, reason, phase, is_lost

    @classmethod
    def of(cls, error: BaseException, phase: str, rank: int) -> RaisedError:
        """Describe an exception."""
        text, kind = _text(error)[:_LENGTH], type(error).__name__
        where = "".join(f"\n  at {line}" for line in _where(error))
        status, reason = "crash", f"rank {rank}: {kind}: {text}{where}"
        if any(map(_says_no_memory, _chain(error))):
            status = "oom"
        elif kind == "NotFiniteError" or any(type(link).__name__ == "VerifyError" for link in _chain(error)):
            status, reason = "wrong", f"rank {rank}: {text}"
        elif phase in _REFUSING:
            status, reason = "refused", f"{kind}: {text}{where}"
        return cls(status, reason, phase, status == "crash" and any(map(_says_lost, _chain(error))))


def outcome_of_failure(error: RankFailedError, printed: str, *, timeout: float, killed_for_memory: bool) -> Outcome:
    """Classify a job of which a rank raised, died or did not end.

    Args:
        error: error of the launcher.
        printed: the end of the ranks' output.
        timeout: seconds of the job.
        killed_for_memory: whether the kernel killed a process meanwhile because memory ran out.
    """
    causes = []
    for rank, text in error.failures.items():  # in order of their detection
        cause = error.causes.get(rank)
        if cause is None:
            cause = _death(rank, error.codes.get(rank), text, printed, killed_for_memory=killed_for_memory)
        causes.append(cause if isinstance(cause, RaisedError) else RaisedError.of(cause, "join", rank))
    if causes:
        first = min(causes, key=lambda cause: cause.is_lost)
        return Outcome(first.status, first.reason, phase=first.phase)
    stood = "\n".join(_standing(rank, trace) for rank, trace in error.ended.items())
    return Outcome("timeout", f"did not end within {timeout:g} s\n{stood}".rstrip())


def outcome_of_results(results: Sequence[Mapping[str, Any]], data_parts: Sequence[Any]) -> Outcome:
    """Classify the ranks' results.

    Args:
        results: results by rank.
        data_parts: identity of the samples by rank; the losses of ranks with equal samples must agree.
    """
    if "value" not in results[0]:
        return Outcome("ok", result=results[0])
    measured = dict(results[0]["measured"])
    memory = [one["measured"]["memory"] for one in results if "memory" in one["measured"]]
    measured |= {"memory": max(memory)} if memory else {}
    wrong = _wrong(results, data_parts)
    if wrong:
        return Outcome("wrong", wrong, measured=measured)
    return Outcome("ok", value=min(one["value"] for one in results), measured=measured, result=results[0])


def _death(rank: int, code: int | None, text: str, printed: str, *, killed_for_memory: bool) -> RaisedError:
    status, how = "crash", f"ended with exit code {code}{' and without a result' * (code == 0)}"
    if code is None:
        how = f"failed: {text}"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL and killed_for_memory:
        return RaisedError("oom", f"rank {rank} was killed by the kernel: out of memory", "", False)
    if code == -signal.SIGABRT and "bad_alloc" in printed:
        status, how = "oom", f"{how}: std::bad_alloc"
    stood = _standing(rank, text)
    last = printed.strip().splitlines()[-1:] if not stood else []
    more = f"\n{stood}" if stood else "".join(f"; last line of output: {line[:300]}" for line in last)
    return RaisedError(status, f"rank {rank} {how}{more}", "", False)


def _standing(rank: int, trace: str) -> str:
    """Return the innermost lines of the main thread in a traceback of faulthandler."""
    lines = [line.strip() for line in trace.rpartition("(most recent call first)")[2].splitlines()]
    where = [line for line in lines if line.startswith("File ")][:_FRAMES]
    return "\n".join([f"rank {rank} was", *(f"  at {line}" for line in where)]) if where else ""


def _wrong(results: Sequence[Mapping[str, Any]], data_parts: Sequence[Any]) -> str:
    """Describe the mistake in the ranks' results."""
    for rank, one in enumerate(results):
        if one["value"] is None:
            return f"rank {rank}: evaluate() must return a finite number to maximize (got {one['was']})"
    values = [one["value"] for one in results]
    if max(values) - min(values) > _VALUES_APART * max(map(abs, values)):
        of = ", ".join(f"rank {rank} {value:g}" for rank, value in enumerate(values))
        return f"evaluate() returned different values on the ranks: {of}"
    first: dict[Any, int] = {}
    for rank, part in enumerate(data_parts):
        other = first.setdefault(part, rank)
        for name, which in (("loss", "first"), ("last_loss", "last")):
            one, two = results[other]["measured"].get(name), results[rank]["measured"].get(name)
            if one is not None and two is not None and not math.isclose(one, two, rel_tol=_LOSS_APART, abs_tol=1e-6):
                return f"ranks {other} and {rank} have the same samples, but the {which} losses are {one:g} and {two:g}"
    return ""


def _where(error: BaseException) -> list[str]:
    """Return the innermost lines of the user's files, the innermost last; without any, of all files."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not any(part in frame.filename for part in _OURS)] or frames
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in theirs[-_FRAMES:]]


def _says_no_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(_text(error)) is not None


def _says_lost(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, ConnectionError)) and _LOST.search(_text(error)) is not None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as inner:  # noqa: BLE001 - __str__ of a user's class
        return f"(str() of this exception raised {type(inner).__name__})"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
