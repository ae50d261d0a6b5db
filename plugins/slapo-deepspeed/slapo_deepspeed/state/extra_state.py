"""Save and load the engine's extra state: scheduler, loss scale and counters."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from slapo_core import BuildError

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
SCHEDULER, SCALE, COUNTERS = "lr_scheduler", "loss_scale", "counters"


def read_extra_state(engine: Any) -> dict[str, Any]:
    """Return the extra state of DeepSpeed's engine, as JSON.

    Raises:
        BuildError: the scheduler's state is not JSON-serializable.
    """
    found: dict[str, Any] = {COUNTERS: {name: int(getattr(engine, name)) for name in _COUNTERS}}
    if engine.lr_scheduler is not None:
        found[SCHEDULER] = _to_json(engine.lr_scheduler.state_dict(), type(engine.lr_scheduler).__name__)
    scaler = _scaler(engine)
    if scaler is not None:
        found[SCALE] = {name: getattr(scaler, name) for name in _SCALE if getattr(scaler, name, None) is not None}
    return found


def used_extra_state(engine: Any) -> list[str]:
    """List the entries of a checkpoint's extra state that an engine uses."""
    there = {SCHEDULER: engine.lr_scheduler is not None, SCALE: _scaler(engine) is not None, COUNTERS: True}
    return [name for name, is_there in there.items() if is_there]


def write_extra_state(engine: Any, found: Mapping[str, Any]) -> None:
    """Load the result of :func:`read_extra_state`; warn if the scheduler has to start from step 0."""
    for name, value in found.get(COUNTERS, {}).items():
        if name in _COUNTERS:
            setattr(engine, name, value)
    scheduler, scaler = engine.lr_scheduler, _scaler(engine)
    if scheduler is not None and SCHEDULER in found:
        scheduler.load_state_dict(_from_json(found[SCHEDULER], scheduler.state_dict()))
    elif scheduler is not None:
        warnings.warn(
            f"the checkpoint holds no state of a scheduler of the learning rate: {type(scheduler).__name__} goes on "
            "from where it was before, and sets the learning rate in the next step",
            stacklevel=4,
        )
    if scaler is not None and SCALE in found:
        for name, value in found[SCALE].items():
            if name in _SCALE:
                setattr(scaler, name, value)


def _scaler(engine: Any) -> Any:
    """Return the dynamic loss scaler of float16, or None."""
    wrapper = engine.optimizer
    for name in ("loss_scaler", "loss_scale_config"):
        scaler = getattr(wrapper, name, None)
        if scaler is not None and getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)):
            return scaler
    return None


def _to_json(value: Any, what: str) -> Any:
    """Mappings as lists of pairs, because their keys may be numbers."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {"items": [[_to_json(key, what), _to_json(item, what)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_to_json(item, what) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a number of torch or numpy
        return value.item()
    raise BuildError(
        f"the state of the scheduler {what} cannot be saved: it holds a {type(value).__name__}",
        hint="engine.deepspeed.save_checkpoint(directory) saves it",
    )


def _from_json(value: Any, present: Any) -> Any:
    """A saved value, in the kind that the scheduler holds now."""
    if isinstance(value, dict):
        known = present if isinstance(present, Mapping) else {}
        found = {key: _from_json(item, known.get(key)) for key, item in value["items"]}
        return Counter(found) if isinstance(present, Counter) else found
    if isinstance(value, list):
        items = [_from_json(item, None) for item in value]
        return tuple(items) if isinstance(present, tuple) else items
    return value
