"""On a mesh of size 1 a distributed primitive is recorded and costs nothing."""

from __future__ import annotations

from torch import nn

from slapo_core.testing.bench import prepare
from slapo_core.testing.case import Case
from slapo_core.testing.check import CheckError, NotApplicable

__all__ = ["mesh_of_one_is_free"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def mesh_of_one_is_free(case: Case) -> None:
    """With one rank in every mesh dimension the step adds no hook, no forward and no module."""
    if case.mesh is None:
        raise NotApplicable("the case has no mesh=(...)")
    bench = prepare(case, mesh_size=1)
    before = _costs(bench.model)
    bench.apply()
    added = {place: text for place, text in _costs(bench.model).items() if before.get(place) != text}
    if added:
        raise CheckError(
            "it costs something on a mesh of one rank",
            required="recorded, with edit.note(...) as its receipt; no hook, no wrapped forward, no new module",
            got="; ".join(f"{place}: {text}" for place, text in added.items()),
            hint=f"if node.mesh.size('{case.mesh[-1]}') == 1: edit.note(\"it has one rank\"); return",
        )


def _costs(model: nn.Module) -> dict[str, str]:
    costs = {}
    for path, module in model.named_modules():
        place = f"'{path}'" if path else "the root"
        costs[f"module {place}"] = f"{type(module).__qualname__} {id(module)}"
        costs[f"forward of {place}"] = (
            f"{type(module.__dict__.get('forward')).__name__} {id(module.__dict__.get('forward'))}"
        )
        for table in _HOOKS:
            hooks = getattr(module, table)
            costs[f"{table} of {place}"] = ", ".join(getattr(f, "__qualname__", repr(f)) for f in hooks.values())
    return costs
