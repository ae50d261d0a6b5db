"""What came of a job: a status and its reason, of what the guard saw and what the ranks said."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slapo_tune.trials.guard import how
from slapo_tune.trials.job import Ended

__all__ = ["Outcome", "judge"]

_LOSS_APART = 0.02
"""How far, relatively, the losses of ranks with the same samples may be apart: rounding in half precision is less."""

_VALUES_APART = 0.5
"""How far, relatively, the values of ranks may be apart: each has its own clock, and waits for the others."""

_REFUSING = ("batch", "model", "schedule")
"""Phases in which an exception says that the point does not go."""


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Args:
        status: one of :data:`slapo_core.spec.sampler.STATUSES`.
        reason: the first cause; empty where the status is ``"ok"``.
        value: the smallest of the ranks', of a trial that is ``"ok"``.
        measured: of rank 0, but for the memory: that of the fullest rank.
        seconds: how long it took.
        phase: in which a rank raised; empty where none did.
        said: by rank 0, beside that.
    """

    status: str
    reason: str = ""
    value: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    phase: str = ""
    said: Mapping[str, Any] = field(default_factory=dict)


def judge(
    ended: Ended,
    said: Sequence[Mapping[str, Any] | None],
    traces: Sequence[str],
    printed: str,
    *,
    timeout: float,
    data_parts: Sequence[Any] = (),
) -> Outcome:
    """
    Args:
        ended: what the guard saw.
        said: by rank, what it wrote as its last; None of one that wrote nothing.
        traces: by rank, where it stood when it was asked, or ended by a signal.
        printed: the end of what the ranks printed.
        timeout: seconds of the job.
        data_parts: by rank, what tells which samples it saw; the losses of ranks that saw the same must agree.
    """
    seconds = ended.seconds
    found = _first_cause(ended, said, traces, printed)
    if found is not None:
        status, reason, phase = found
        return Outcome(status, reason, seconds=seconds, phase=phase)
    if ended.lost:
        killed = ended.killed_for_memory and "SIGKILL" in ended.lost
        return Outcome("oom" if killed else "crash", ended.lost, seconds=seconds)
    if ended.timed_out or ended.stopped:
        stood = "\n".join(_standing(rank, traces[rank]) for rank in ended.stopped)
        others = [str(rank) for rank in range(len(said)) if rank not in ended.stopped]
        done = f"; rank {', '.join(others)} had ended" if others else ""
        return Outcome("timeout", f"did not end within {timeout:g} s{done}\n{stood}".rstrip(), seconds=seconds)
    whole = [dict(one) for one in said if one is not None]
    if "value" not in whole[0]:
        return Outcome("ok", seconds=seconds, said=whole[0])
    wrong = _wrong(whole, data_parts)
    measured = _measured(whole)
    if wrong:
        return Outcome("wrong", wrong, measured=measured, seconds=seconds)
    value = min(one["value"] for one in whole)
    return Outcome("ok", value=value, measured=measured, seconds=seconds, said=whole[0])


def _first_cause(
    ended: Ended, said: Sequence[Mapping[str, Any] | None], traces: Sequence[str], printed: str
) -> tuple[str, str, str] | None:
    """What went wrong first on any rank that did not only lose another one."""
    causes: list[tuple[bool, float, str, str, str]] = []
    for rank, one in enumerate(said):
        if one is not None and one["outcome"] == "raised":
            status, reason = _raised(rank, one)
            causes.append((bool(one["lost"]) and status == "crash", one["at"], status, reason, one["phase"]))
        elif one is None and rank in ended.codes:
            code, at = ended.codes[rank]
            causes.append((False, at, *_died(ended, rank, code, traces[rank], printed), ""))
    if not causes:
        return None
    _, _, status, reason, phase = min(causes)
    return status, reason, phase


def _raised(rank: int, one: Mapping[str, Any]) -> tuple[str, str]:
    text = f"rank {rank}: {one['kind']}: {one['text']}"
    where = "".join(f"\n  at {line}" for line in one["where"])
    if one["no_memory"]:
        return "oom", text + where
    if one["differs"]:
        return "wrong", f"rank {rank}: {one['text']}"
    if one["kind"] == "NotFiniteError":
        return "wrong", f"rank {rank}: {one['text']}"
    if one["phase"] in _REFUSING:
        return "refused", f"{one['kind']}: {one['text']}" + where
    return "crash", text + where


def _died(ended: Ended, rank: int, code: int, trace: str, printed: str) -> tuple[str, str]:
    if code == 0:
        return "crash", f"rank {rank} ended with exit code 0, and without a result"
    if code == -signal.SIGKILL and ended.killed_for_memory:
        return "oom", f"rank {rank} was killed by the kernel, because memory had run out"
    if code == -signal.SIGABRT and "bad_alloc" in printed:
        return "oom", f"rank {rank} was ended by SIGABRT: std::bad_alloc"
    stood = _standing(rank, trace)
    last = printed.strip().splitlines()[-1:] if not stood else []
    more = f"\n{stood}" if stood else "".join(f"; the last that was printed: {line[:300]}" for line in last)
    return "crash", f"rank {rank} {how(code)}{more}"


def _standing(rank: int, trace: str) -> str:
    """The innermost lines of a traceback that faulthandler wrote."""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")][:4]
    return "\n".join([f"rank {rank} stood", *(f"  at {line}" for line in lines)]) if lines else ""


def _wrong(said: Sequence[Mapping[str, Any]], data_parts: Sequence[Any]) -> str:
    """What is wrong with what the ranks found, in words."""
    for rank, one in enumerate(said):
        if one["value"] is None:
            return f"rank {rank}: evaluate gave {one['was']}, and must give a finite number to maximise"
    values = [one["value"] for one in said]
    if max(values) - min(values) > _VALUES_APART * max(map(abs, values)):
        of = ", ".join(f"rank {rank} {value:g}" for rank, value in enumerate(values))
        return f"the ranks disagree about the value: {of}"
    first: dict[Any, int] = {}
    for rank, part in enumerate(data_parts):
        other = first.setdefault(part, rank)
        for name in ("loss", "last_loss"):
            one, two = said[other]["measured"].get(name), said[rank]["measured"].get(name)
            if one is not None and two is not None and not math.isclose(one, two, rel_tol=_LOSS_APART, abs_tol=1e-6):
                which = "first" if name == "loss" else "last"
                return f"ranks {other} and {rank} saw the same samples, and the {which} loss is {one:g} and {two:g}"
    return ""


def _measured(said: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    measured = dict(said[0]["measured"])
    memory = [one["measured"]["memory"] for one in said if "memory" in one["measured"]]
    return {**measured, "memory": max(memory)} if memory else measured
