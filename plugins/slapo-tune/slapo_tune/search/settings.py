"""What a search is made with: its sampler, and what its log says at the top."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

import slapo_core
from slapo_core import Sampler
from slapo_tune.errors import LogError, StudyError
from slapo_tune.log.reading import parse
from slapo_tune.search.predictions import sources
from slapo_tune.space.space import Space
from slapo_tune.space.table import describe, table
from slapo_tune.study import Study
from slapo_tune.trials.launching import accelerator_of

__all__ = ["header_of", "require_trials", "sampler_of"]


def sampler_of(study: Study) -> Sampler:
    """The sampler that a study names.

    Raises:
        UnknownNameError: none of that name is installed.
        StudyError: it is no sampler.
    """
    chosen: Any = study.sampler
    if isinstance(chosen, str):
        chosen = slapo_core.create_schedule(nn.Identity()).plugin_named("samplers", chosen)
    if isinstance(chosen, type) and issubclass(chosen, Sampler):
        chosen = chosen()
    if not isinstance(chosen, Sampler):
        raise StudyError(
            f"sampler must be the name of an installed one, or a slapo_core.Sampler (got {chosen!r})",
            hint='sampler="frontier"',
        )
    return chosen


def header_of(study: Study, space: Space, sampler: Sampler) -> dict[str, Any]:
    """What the log is of: a search with another one is another search."""
    functions = {name: _named(function) for name, function in study.functions().items() if callable(function)}
    return {
        "fingerprint": space.fingerprint(),
        "described": describe(space),
        "symbols": [row.name for row in table(space)],
        **functions,
        "sampler": sampler.name,
        "seed": study.seed,
        "world_size": study.world_size,
        "target": study.target,
        "memory": study.memory_limit,
        "process_memory": study.process_memory_limit,
        "accelerator": accelerator_of(study),
        "warmup": study.warmup,
        "steps": study.steps,
        "timeout": study.timeout,
        "sources": sources(study),
        "versions": {name: version(name) for name in ("slapo-core", "slapo-tune", "torch")},
        "started": time.time(),
    }


def _named(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def require_trials(log: Path, resume: bool | None) -> None:
    """Hold the log against what was asked for.

    Args:
        log: its path.
        resume: whether there have to be trials, or must not be; None allows both.

    Raises:
        LogError: the log has trials and should have none, or the other way round.
    """
    if resume is None:
        return
    has_some = log.is_file() and bool(parse(log.read_bytes(), log).trials)
    if resume and not has_some:
        raise LogError(f"there is nothing to go on with: the log {log} has no trial", hint="slapo tune run STUDY.py")
    if not resume and has_some:
        raise LogError(f"the log {log} has trials already", hint="slapo tune resume STUDY.py, or give another log=")
