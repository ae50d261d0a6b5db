"""Smaller settings: those that are "auto", half precision, and the scheduler."""

from __future__ import annotations

import difflib
from typing import Any

from slapo_core import BuildError
from slapo_deepspeed.config.draft import AUTO, Draft

__all__ = ["fill_precision", "fill_scheduler", "leave_out_auto"]


def leave_out_auto(draft: Draft) -> None:
    """Take out the values "auto" below ``zero_optimization``: sizes, which DeepSpeed has defaults for."""
    section = draft.config.get("zero_optimization", {})
    for key in [key for key, value in section.items() if value == AUTO]:
        draft.leave_out(f"zero_optimization.{key}", "'auto' is DeepSpeed's default here")


def fill_precision(draft: Draft) -> None:
    """``"enabled": "auto"`` becomes whether the parameters of the model are of that type.

    Raises:
        BuildError: two kinds of half precision are enabled at once.
    """
    if "bf16" in draft.config and "bfloat16" in draft.config:
        raise BuildError(
            f"{draft.source.of('bf16')} and its old name {draft.source.of('bfloat16')} are both given; DeepSpeed reads "
            "the first alone",
            hint="leave out 'bfloat16'",
        )
    for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16")):
        section = draft.config.get(name)
        if isinstance(section, dict) and section.get("enabled") == AUTO:
            found = ", ".join(sorted(draft.facts.dtypes)) or "no parameters"
            draft.fill(f"{name}.enabled", draft.facts.dtypes == {dtype}, f"the model is in {found}")
            for key in [key for key, value in section.items() if value == AUTO]:
                draft.leave_out(f"{name}.{key}", "'auto' is DeepSpeed's default here")


def fill_scheduler(draft: Draft) -> None:
    """A scheduler without params gets none; one that cannot be made is refused.

    Raises:
        BuildError: there is no such scheduler, or nothing for it to schedule.
    """
    if "scheduler" not in draft.config:
        return
    source, name = draft.source, draft.get("scheduler.type")
    if "optimizer" not in draft.config and draft.facts.has_optimizer is False:
        raise BuildError(
            f"{source.of('scheduler')} is {name!r}, but there is no optimizer: the engine only evaluates",
            hint='"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, or optimizer= of build',
        )
    if not isinstance(name, str):
        raise BuildError(
            f"{source.of('scheduler.type')} must name a scheduler (got {name!r})",
            hint='"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}',
        )
    params: Any = draft.get("scheduler.params")
    if params is None:
        params = draft.fill("scheduler.params", {}, "all defaults")
    if not isinstance(params, dict):
        raise BuildError(f"{source.of('scheduler.params')} must be an object, {{...}} (got {params!r})")


def nearest(name: str, known: list[str]) -> str:
    """`` did you mean ...?``, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
