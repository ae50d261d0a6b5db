"""Make learning-rate schedulers by the user's factory; save and resume them as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slapo_core.errors import BuildError, OptimizerError, warn_user

NAME = "lr_scheduler"
"""The name of a scheduler's state in a checkpoint."""

_CALL = "build(sch, optimizer=..., lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000))"


def make_lr_scheduler(factory: Callable[[Any], Any] | None, optimizer: torch.optim.Optimizer | None) -> Any:
    """Call the user's factory with the optimizer, and check the scheduler.

    Args:
        factory: the user's ``lr_scheduler``; None makes none.
        optimizer: of torch, whose groups it sets.

    Raises:
        OptimizerError: the factory made something else, a scheduler of another optimizer, or one that needs a metric.
    """
    if factory is None or optimizer is None:
        return None
    scheduler: Any = factory(optimizer)
    if not all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise OptimizerError(
            f"lr_scheduler must make a learning-rate scheduler (got {type(scheduler).__name__})", hint=_CALL
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise OptimizerError(
            "ReduceLROnPlateau steps by a metric, which a training step does not have",
            hint="make it of engine.optimizer after build, and call its step(loss) after each evaluation",
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise OptimizerError("lr_scheduler made a scheduler of another optimizer than its argument", hint=_CALL)
    return scheduler


def saved(scheduler: Any) -> dict[str, Any]:
    """Return the state of a scheduler, as JSON under its name; ``{}`` without one.

    Raises:
        BuildError: JSON cannot hold its state.
    """
    if scheduler is None:
        return {}
    kind = type(scheduler).__name__
    return {NAME: {"kind": kind, "state": _to_json(scheduler.state_dict(), kind)}}


def resume(scheduler: Any, runtime: Mapping[str, Any]) -> None:
    """Load a :func:`saved` state, or warn that the scheduler keeps its own."""
    if scheduler is None:
        return
    kind, found = type(scheduler).__name__, runtime.get(NAME)
    if found is not None and found["kind"] == kind:
        scheduler.load_state_dict(_from_json(found["state"], scheduler.state_dict()))
        return
    has = "no state of a learning-rate scheduler" if found is None else f"the state of a {found['kind']}"
    warn_user(
        f"the checkpoint holds {has}: {kind} keeps its own state, and sets the learning rate in the next step",
    )


def _to_json(value: Any, kind: str) -> Any:
    """Convert to JSON, with mappings as lists of pairs for numeric keys."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {"items": [[_to_json(key, kind), _to_json(item, kind)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_to_json(item, kind) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a number of torch or numpy
        return value.item()
    raise BuildError(
        f"the state of the scheduler {kind} cannot be saved: it holds a {type(value).__name__}",
        hint="use a scheduler with numbers, strings, lists and dictionaries in its state_dict()",
    )


def _from_json(value: Any, present: Any) -> Any:
    """Convert a saved value to the type of the scheduler's present one."""
    if isinstance(value, dict):
        known = present if isinstance(present, Mapping) else {}
        found = {key: _from_json(item, known.get(key)) for key, item in value["items"]}
        return Counter(found) if isinstance(present, Counter) else found
    if isinstance(value, list):
        known_items = (
            present if isinstance(present, (list, tuple)) and len(present) == len(value) else [None] * len(value)
        )
        items = [_from_json(item, known) for item, known in zip(value, known_items, strict=True)]
        return tuple(items) if isinstance(present, tuple) else items
    return value
