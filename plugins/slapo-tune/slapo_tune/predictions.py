"""Predictions of points by estimates, cached in a file next to the log."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import slapo_core
from slapo_tune.errors import LogError
from slapo_tune.log import as_line, from_line
from slapo_tune.plain_data import encode
from slapo_tune.samplers import Point
from slapo_tune.settings import StudySettings
from slapo_tune.trials import unpack_functions


@dataclass(frozen=True)
class Prediction:
    """The estimate of a point.

    Args:
        memory: bytes of the fullest rank; None without an estimate.
        time: seconds of a step; None without a device.
        problem: why the estimate failed; empty otherwise.
    """

    memory: int | None = None
    time: float | None = None
    problem: str = ""

    def numbers(self) -> dict[str, float]:
        """Return the prediction field of a trial."""
        found = {"memory": self.memory, "time": self.time}
        return {name: value for name, value in found.items() if value is not None}


class Predictions:
    """Estimates of the points of a study.

    Args:
        study: the study.
        payload: its functions, packed for other processes.
        file: the cache; estimates of other functions or versions are discarded.

    Raises:
        LogError: the file is not readable and writable.
    """

    def __init__(self, study: StudySettings, payload: bytes, file: Path) -> None:
        self._study = study
        self._payload = payload
        self._file = file
        self._cache: dict[str, Prediction] = {}
        versions = {name: version(name) for name in ("slapo-core", "torch")}
        self._header = {"slapo_tune_predictions": 1, "sources": sources(study), "of": versions, "seed": study.seed}
        self._header |= {"world_size": study.world_size, "device": study.device and str(study.device)}
        options = (
            study.options.__qualname__ if callable(study.options) else repr(sorted(_relevant(study.options).items()))
        )
        self._header |= {"target": study.target, "options": options}
        try:
            self._read()
        except OSError as error:
            raise LogError(
                f"the cache of predictions {file} cannot be used: {error.strerror}", hint="give another log="
            ) from error

    def of(self, point: Point) -> Prediction:
        """Return the estimate of a point, cached."""
        if self._study.batch is None or not self._study.predict:
            return Prediction()
        key = _key(point)
        if key not in self._cache:
            self._cache[key] = self._estimate(point)
            record = {"point": encode(point), **vars(self._cache[key])}
            with self._file.open("ab") as file:
                file.write(as_line(record))
        return self._cache[key]

    def _estimate(self, point: Point) -> Prediction:
        study = self._study
        try:
            estimate = slapo_core.estimate_functions(
                partial(_call, self._payload, "make_model"),
                partial(_call, self._payload, "schedule"),
                _batch(study, point),
                arguments=(dict(point),),
                mesh=study.mesh_of(point),
                optimizer=None if study.optimizer is None else partial(_call, self._payload, "optimizer"),
                loss=None if study.loss is None else partial(_call, self._payload, "loss"),
                device=study.device,
                target=study.target,
                timeout=max(600.0, study.timeout),
                **_options(study, point),
            )
        except Exception as error:  # noqa: BLE001 - the user's functions run in it
            return Prediction(problem=f"{type(error).__name__}: {error}"[:2000])
        return Prediction(estimate.memory.total, estimate.time)

    def _read(self) -> None:
        """Read the cache; skip damaged lines."""
        lines = self._file.read_bytes().split(b"\n") if self._file.exists() else []
        try:
            fits = bool(lines) and from_line(lines[0]) == from_line(as_line(self._header))
        except ValueError:
            fits = False
        if not fits:
            self._file.write_bytes(as_line(self._header))
            return
        for line in lines[1:]:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # estimated again
                record = from_line(line)
                self._cache[_key(record.pop("point"))] = Prediction(**record)
        if not self._file.read_bytes().endswith(b"\n"):
            with self._file.open("ab") as file:
                file.write(b"\n")


def sources(study: StudySettings) -> str:
    """Hash the files of the study's functions."""
    digest = hashlib.sha256()
    names = {getattr(function, "__module__", None) for function in study.functions().values()}
    for name in sorted(str(name) for name in names if name is not None):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and os.path.exists(file):
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


_WITHOUT_EFFECT = ("lr_scheduler", "loss_weight", "seed", "weights")
"""Arguments of ``slapo_core.build`` without effect on the memory of a step."""


def _relevant(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that affect an estimate."""
    return {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}


_FOLLOWED = (
    "accumulate",
    "batch_axes",
    "bucket_cap_mb",
    "data_parallel",
    "fp32",
    "max_grad_norm",
    "precision",
    "reshard_after_forward",
)
"""Options of target ``"torch"`` without a pipeline that estimates follow."""


def _options(study: StudySettings, point: Point) -> dict[str, Any]:
    """Return the options of the estimate of a point."""
    given = _relevant(study.options_of(point))
    if study.target != "torch":
        return given
    if (study.mesh_of(point) or {}).get("pp", 1) == 1:  # further options are DistributedDataParallel's
        return {name: value for name, value in given.items() if name in _FOLLOWED}
    return {name: value for name, value in given.items() if name not in ("elementwise", "max_grad_norm")}


def _key(point: Mapping[str, Any]) -> str:
    return json.dumps(encode(point))


def _call(payload: bytes, name: str, *arguments: Any) -> Any:
    return unpack_functions(payload)[name](*arguments)


def _batch(study: StudySettings, point: Point) -> Any:
    """Make the batch with the RNG state of the ranks."""
    assert study.batch is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(study.seed)
        return study.batch(point)
