"""Steps made to do nothing, in full schedules: their code is taken out of the model, and their records stay."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import slapo_core as slapo
from slapo_core.internals import Internals, forwards, hooks_of
from slapo_runtime.receipts.attribution import StepPlaces
from slapo_runtime.receipts.receipt import expectations


def family(name: str) -> Any:
    return importlib.import_module("plugins.slapo-models.tests.families").FAMILIES[name]


def scheduled(name: str, mesh: dict[str, int], **options: Any) -> Any:
    """The full schedule of a family's tiny model."""
    one = family(name)
    sch = slapo.create_schedule(one.make().train(), mesh=mesh, example_inputs=one.batch)
    one.apply(sch, checkpoint=0.5, **options)
    return sch


def observed(name: str, sch: Any) -> Any:
    one = family(name)
    return slapo.observe(sch, one.batch, loss=one.loss)


def drawn(sch: Any) -> Iterator[str]:
    """One step of each kind that expects an effect: of each call, the last one."""
    found = {}
    for one in expectations(sch):
        assert one.step is not None
        found[str(one.step.primitive), type(one.effect).__name__] = one.source
    yield from dict.fromkeys(found.values())


def take_out(sch: Any, step: str) -> bool:
    """Take a step's hooks, wrappers and calls in graphs out of the model; False if it has none of them."""
    places = StepPlaces.of(sch.model, Internals(sch).entries())
    modules = dict(sch.model.named_modules())
    is_taken = False
    for (path, kind, number), name in places.hooks.items():
        if name == step:
            hooks_of(modules[path])[kind][number] = _nothing  # type: ignore[index]
            is_taken = True
    for path, names in places.wrappers.items():
        forward = modules[path].__dict__.get("forward")
        if step in names and isinstance(forward, forwards.ModuleForward):
            kept = [_same if name == step else one for one, name in zip(forward.wrappers, names, strict=True)]
            forward.exchange_wrappers(kept)
            is_taken = True
    return is_taken


def _nothing(*_: Any, **__: Any) -> None:
    """A hook without an effect."""


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def no_ops(name: str, mesh: dict[str, int], **options: Any) -> dict[str, Any]:
    """The alarms of a right schedule, and for each step made to do nothing the steps that are named."""
    sch = scheduled(name, mesh, **options)
    right = observed(name, sch)
    found: dict[str, Any] = {"seen": len(right.findings), "alarms": [str(one) for one in right.missing]}
    found["named"] = {}
    for step in drawn(sch):
        wrong = scheduled(name, mesh, **options)
        if take_out(wrong, step):
            try:
                found["named"][step] = [one.source for one in observed(name, wrong).missing]
            except Exception as error:  # noqa: BLE001 - is loud by itself
                found["named"][step] = type(error).__name__
    return found
