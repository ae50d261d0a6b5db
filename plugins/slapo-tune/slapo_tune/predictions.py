"""Predictions of points by the estimate; cached in a file next to the log."""

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
from slapo_tune.samplers import Point
from slapo_tune.space import encode
from slapo_tune.study import Study
from slapo_tune.trials import opened


@dataclass(frozen=True)
class Prediction:
    """The estimate of a point.

    Args:
        memory: bytes of the fullest rank; None where nothing could be estimated.
        time: seconds of a step; None without a device.
        problem: why nothing could be estimated; empty where it could.
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
        study: whose functions the estimates are of.
        payload: these functions, packed for other processes.
        file: where estimates are kept; those of other functions, or of other versions, are not used.

    Raises:
        LogError: the file cannot be read and written.
    """

    def __init__(self, study: Study, payload: bytes, file: Path) -> None:
        self._study = study
        self._payload = payload
        self._file = file
        self._kept: dict[str, Prediction] = {}
        versions = {name: version(name) for name in ("slapo-core", "torch")}
        self._header = {"slapo_tune_predictions": 1, "sources": sources(study), "of": versions, "seed": study.seed}
        self._header |= {"world_size": study.world_size, "device": study.device and str(study.device)}
        options = study.options.__qualname__ if callable(study.options) else repr(sorted(_given(study.options).items()))
        self._header |= {"target": study.target, "options": options}
        try:
            self._read()
        except OSError as error:
            raise LogError(
                f"the predictions {file} cannot be kept: {error.strerror}", hint="give another log="
            ) from error

    def of(self, point: Point) -> Prediction:
        """Return the estimate of a point; run it if it is not cached."""
        if self._study.batch is None or not self._study.predict:
            return Prediction()
        key = _key(point)
        if key not in self._kept:
            self._kept[key] = self._estimate(point)
            record = {"point": encode(point), **vars(self._kept[key])}
            with self._file.open("ab") as file:
                file.write(as_line(record))
        return self._kept[key]

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
        except Exception as error:  # noqa: BLE001 - the user's functions run in it: their exceptions are reported
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
                self._kept[_key(record.pop("point"))] = Prediction(**record)
        if not self._file.read_bytes().endswith(b"\n"):
            with self._file.open("ab") as file:
                file.write(b"\n")


def sources(study: Study) -> str:
    """Hash the files that the study's functions are in: it changes when they are edited."""
    digest = hashlib.sha256()
    names = {getattr(function, "__module__", None) for function in study.functions().values()}
    for name in sorted(str(name) for name in names if name is not None):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and os.path.exists(file):
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


_WITHOUT_EFFECT = ("lr_scheduler", "loss_weight", "seed", "weights")
"""Arguments of ``slapo_core.build`` that a step needs no memory for."""


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that matter to an estimate."""
    return {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}


def _options(study: Study, point: Point) -> dict[str, Any]:
    """The options by which the estimated step of a point runs."""
    given = _given(study.options_of(point))
    if study.target != "torch":
        return given
    if (study.mesh_of(point) or {}).get("pp", 1) == 1:  # the others are DistributedDataParallel's
        return {name: value for name, value in given.items() if name == "accumulate"}
    return {name: value for name, value in given.items() if name not in ("elementwise", "max_grad_norm")}


def _key(point: Mapping[str, Any]) -> str:
    return json.dumps(encode(point))


def _call(payload: bytes, name: str, *arguments: Any) -> Any:
    return opened(payload)[name](*arguments)


def _batch(study: Study, point: Point) -> Any:
    """As ranks draw it."""
    assert study.batch is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(study.seed)
        return study.batch(point)
