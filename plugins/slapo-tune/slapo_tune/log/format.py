"""The lines of a log, as JSON that every reader understands."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from slapo_core.spec.sampler import STATUSES, Trial

__all__ = ["FORMAT", "as_line", "from_line", "is_start_of_header", "trial_from", "trial_line"]

FORMAT = 1
"""The version of the format; a header says ``{"slapo_tune_log": FORMAT, ...}``."""

_HEADER = '{"slapo_tune_log":'


def as_line(record: Mapping[str, Any]) -> bytes:
    """One line, with its end. JSON has no NaN and no infinity: they are written as ``{"float": "nan"}``."""
    return json.dumps(_safe(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def is_start_of_header(data: bytes) -> bool:
    """Whether these bytes are the beginning of a header, or its whole."""
    header = _HEADER.encode()
    return data[: len(header)] == header[: len(data)]


def from_line(line: bytes) -> dict[str, Any]:
    """
    Raises:
        ValueError: it is not one JSON object.
    """
    record = _restored(json.loads(line.decode()))
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def trial_line(trial: Trial) -> dict[str, Any]:
    """The record of a trial that has ended, or was pruned."""
    return {
        "event": "ended",
        "number": trial.number,
        "point": dict(trial.point),
        "status": trial.status,
        "value": trial.value,
        "reason": trial.reason,
        "predicted": dict(trial.predicted),
        "measured": dict(trial.measured),
        "seconds": trial.seconds,
    }


def trial_from(record: Mapping[str, Any]) -> Trial:
    """
    Raises:
        ValueError: a field is missing, or is not what a trial has there.
    """
    for name, kind in (("number", int), ("point", dict), ("reason", str), ("predicted", dict), ("measured", dict)):
        if not isinstance(record.get(name), kind) or isinstance(record[name], bool):
            raise ValueError(f"'{name}' is {record.get(name)!r}")
    if record.get("status") not in STATUSES:
        raise ValueError(f"'status' is {record.get('status')!r}")
    value = record.get("value")
    if (value is None) == (record["status"] == "ok") or not isinstance(value, (int, float, type(None))):
        raise ValueError(f"'value' is {value!r} and 'status' is {record['status']!r}")
    return Trial(
        number=record["number"],
        point=_tupled(record["point"]),
        status=record["status"],
        value=value,
        reason=record["reason"],
        predicted=record["predicted"],
        measured=record["measured"],
        seconds=float(record.get("seconds", 0.0)),
    )


def _safe(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {str(key): _safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_safe(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"float"} and isinstance(value["float"], str):
            return float(value["float"])
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value


def _tupled(value: Any) -> Any:
    """Choices are plain data without lists, so a list was a tuple."""
    if isinstance(value, dict):
        return {key: _tupled(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tupled(item) for item in value)
    return value
