"""`StudySettings`: the arguments of a study, checked; and their values at a point."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_runtime.sizes import parse_bytes
from slapo_tune.errors import StudyError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core import DeviceSpec, Sampler, Schedule
    from slapo_tune.samplers import Point
    from slapo_tune.space import Space
    from slapo_tune.training import Run


@dataclass(frozen=True)
class StudySettings:
    """The arguments of a :class:`~slapo_tune.study.Study`, which documents them."""

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
                f"process_memory={self.process_memory!r} limits the address space of trials, of which CUDA reserves "
                'more than the machine has memory: each trial would end as "oom"',
                hint=f"memory={self.process_memory!r}, a limit for estimates (a trial that needs more than the GPU has "
                "is \"oom\" without a limit); or accelerator='cpu'",
            )
        if self.evaluate is None:
            calls = {"batch": "batch=lambda p: torch.randn(p['batch'], 64)", "optimizer": "optimizer=torch.optim.AdamW"}
            for name, call in calls.items():
                if getattr(self, name) is None:
                    raise StudyError(f"a study without evaluate= needs {name}=", hint=call)
        if self.memory is not None and not (self.predict and self.batch is not None):
            raise StudyError(
                f"memory={self.memory!r} limits estimates, which require predict=True and batch=",
                hint="batch=lambda p: torch.randn(p['batch'], 64); or process_memory= on the CPU",
            )
        if self.memory is not None and self.target != "torch":
            from slapo_runtime.build import simulates

            if not simulates(self.target):
                raise StudyError(
                    f"memory={self.memory!r} limits estimates, which target {self.target!r} does not support",
                    hint='memory=None: points that do not fit end as "oom"; or process_memory= on the CPU, enforced by '
                    "the kernel",
                )
        if self.mesh is None and self.world_size > 1:
            raise StudyError(
                f"world_size={self.world_size} requires mesh=", hint=f'mesh=lambda p: {{"dp": {self.world_size}}}'
            )

    @property
    def uses_cuda(self) -> bool:
        """Return whether trials run on GPUs on this machine."""
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
            StudyError: invalid sizes, or another number of ranks than ``world_size``.
        """
        if self.mesh is None:
            return None
        mesh = self.mesh(point)
        if not isinstance(mesh, Mapping) or not all(type(size) is int and size >= 1 for size in mesh.values()):
            raise StudyError(f"mesh must return sizes by dimension (got {mesh!r})", hint='mesh=lambda p: {"dp": 2}')
        size = math.prod(mesh.values())
        if size != self.world_size:
            raise StudyError(
                f"the mesh must have world_size={self.world_size} ranks (got {dict(mesh)} with {size})",
                hint=f"s.require({size} == {self.world_size}, ...) in the space, or world_size={size}",
            )
        return dict(mesh)

    def options_of(self, point: Point) -> Mapping[str, Any]:
        """Return the options of a point.

        Raises:
            StudyError: not a mapping, or an argument of the study.
        """
        if not callable(self.options):
            return self.options
        return _check_options(self.options(point))

    @property
    def unit(self) -> str:
        """Return the unit of the value: samples per second for the default ``evaluate``."""
        return "samples/s" if self.evaluate is None else "(value)"

    def functions(self) -> dict[str, Any]:
        """Return the functions for trials by the names of their arguments."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: own[name] for name in SENT}


SENT = ("make_model", "schedule", "evaluate", "batch", "optimizer", "loss", "options")
"""Arguments with functions, which are sent to trials by name; all others are plain data."""


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _check(fits: bool, name: str, required: str, got: object, hint: str | None = None) -> None:
    if not fits:
        raise StudyError(f"{name} must be {required} (got {got!r})", hint=hint)


def _check_options(options: Any) -> Mapping[str, Any]:
    required = "a mapping, or a function of the point that returns a mapping"
    _check(isinstance(options, Mapping), "options", required, options, "options={}")
    for name in ("target", "optimizer", "loss", "device"):
        if name in options:
            raise StudyError(f"options has {name!r}, which is an argument of the study", hint=f"Study(..., {name}=...)")
    return options  # type: ignore[no-any-return]
