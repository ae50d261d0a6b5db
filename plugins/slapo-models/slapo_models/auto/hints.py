"""The tensor-parallel plan of a transformers model, compared with what was proved; it decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slapo_models.auto.report import AutoReport, by_reason

if TYPE_CHECKING:
    from torch import nn

    import slapo_core as slapo

_AXES = {
    "colwise": -2,
    "packed_colwise": -2,
    "colwise_gather_output": -2,
    "rowwise": -1,
    "rowwise_split_input": -1,
    "embedding_rowwise": 0,
}
"""Word of a plan -> the axis of a matrix that it splits; other words are about gradients and experts."""


def tp_plan(model: nn.Module) -> dict[str, str]:
    """Return path of a parameter -> word of the plan that the model's class or configuration has."""
    plans = (
        (prefix, module, plan) for prefix, module in model.named_modules() for plan in _plans(prefix, module) if plan
    )
    prefix, module, plan = next(plans, ("", model, {}))
    found: dict[str, str] = {}
    for path, _ in module.named_parameters(remove_duplicate=False):
        own = ".".join("*" if level.isdigit() else level for level in path.split("."))
        word = plan.get(own, plan.get(own.rpartition(".")[0]))
        if word in _AXES:
            found[f"{prefix}.{path}".lstrip(".")] = word
    return found


def _plans(prefix: str, module: Any) -> Iterator[Mapping[str, Any]]:
    plan = getattr(module, "_tp_plan", None)
    if isinstance(plan, Mapping):
        yield plan
    plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if isinstance(plan, Mapping):
        start = getattr(module, "base_model_prefix", "")
        start = f"{start}." if start and hasattr(module, start) else ""
        yield {f"{start}{path}": word for path, word in plan.items()}


def compared(report: AutoReport, sch: slapo.Schedule) -> AutoReport:
    """Return a report that says where the plan of transformers differs.

    Args:
        report: of the steps that were applied.
        sch: the schedule.
    """
    plan = tp_plan(sch.model)
    if not plan:
        return report
    differs: dict[str, str] = {}
    for path in report.split:
        owner, _, name = path.rpartition(".")
        layout = sch[owner].layout(name)
        axes = [axis for _, axis in layout.shards()]
        if len(layout.shape) < 2 or not axes:
            continue
        if path not in plan:
            differs[path] = f"axis {axes[0]} is split, transformers' plan has nothing there"
        elif len(layout.shape) == 2 and _AXES[plan[path]] % 2 != axes[0]:
            differs[path] = f"axis {axes[0]} is split, transformers' plan has {plan[path]} there"
    said = {path: f"transformers' plan has {word} there" for path, word in plan.items()}
    return report.completed(said, by_reason("transformers' plan differs", differs))
