"""Dialects for the tests of the kit: a good one, and for every check bad ones that break just that promise."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Dialect, Plan
from tests.support.kit_engines import GoodEngine

COUNTER = itertools.count()


class Good(Dialect):
    """Option ``bucket``, an int (default 25), which means nothing."""

    name = "good"
    supports = frozenset({"dp", "tp"})
    accumulates = True
    engine: Any = GoodEngine

    def plan(self, schedule: Any, config: Mapping[str, Any]) -> Plan:
        unknown = set(config) - {"bucket"}
        if unknown:
            raise BuildError(f"target 'good' has no option {', '.join(sorted(unknown))}; it has bucket")
        if type(config.get("bucket", 25)) is not int:
            raise BuildError(f"bucket must be an int (got {config['bucket']!r})", hint="bucket=25")
        return Plan(self.name, ("train in plain PyTorch",), {"bucket": 25, **config})

    def build(self, plan: Plan, context: Any) -> Any:
        return self.engine(plan, context)


class PlanMarksTheModel(Good):
    def plan(self, schedule: Any, config: Any) -> Plan:
        schedule.model.planned = True
        return super().plan(schedule, config)


class CheckDraws(Good):
    def check(self, schedule: Any) -> Any:
        torch.rand(1)
        return ()


class PlanFillsInTheOptions(Good):
    def plan(self, schedule: Any, config: Any) -> Plan:
        plan = super().plan(schedule, config)
        config["bucket"] = 99
        return plan


class PlanCounts(Good):
    def plan(self, schedule: Any, config: Any) -> Plan:
        plan = super().plan(schedule, config)
        return Plan(plan.target, (f"plan number {next(COUNTER)}",), plan.config)


class PlanForgetsDefaults(Good):
    def plan(self, schedule: Any, config: Any) -> Plan:
        return Plan(self.name, super().plan(schedule, config).steps, dict(config))


class PlanSaysNothing(Good):
    def plan(self, schedule: Any, config: Any) -> Plan:
        return Plan(self.name, (), super().plan(schedule, config).config)


class IgnoresOptions(Good):
    def plan(self, schedule: Any, config: Any) -> Plan:
        return super().plan(schedule, {name: value for name, value in config.items() if name == "bucket"})


class RefusesWithoutWords(Good):
    def plan(self, schedule: Any, config: Any) -> Plan:
        if set(config) - {"bucket"}:
            raise BuildError("wrong options")
        return super().plan(schedule, config)


class AcceptsBadValues(Good):
    def plan(self, schedule: Any, config: Any) -> Plan:
        super().plan(schedule, {name: 1 if name == "bucket" else value for name, value in config.items()})
        return Plan(self.name, ("train in plain PyTorch",), {"bucket": 25, **config})


class RaisesAnotherError(Good):
    def plan(self, schedule: Any, config: Any) -> Plan:
        if type(config.get("bucket", 25)) is not int:
            raise TypeError("bucket must be an int")
        return super().plan(schedule, config)


class MarksTheModelFirst(Good):
    def build(self, plan: Plan, context: Any) -> Any:
        context.schedule.model.built_by = self.name
        return super().build(plan, context)


class Unties(Good):
    def build(self, plan: Plan, context: Any) -> Any:
        engine, seen = super().build(plan, context), set()
        for module in context.schedule.model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter in seen:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone())
                seen.add(parameter)
        return engine


class TrainsEverything(Good):
    def build(self, plan: Plan, context: Any) -> Any:
        engine = super().build(plan, context)
        context.schedule.model.requires_grad_(True)
        return engine


class InitializesItself(Good):
    takes_tensors = True

    def build(self, plan: Plan, context: Any) -> Any:
        empty = {name for name, parameter in context.schedule.model.named_parameters() if parameter.is_meta}
        for live in context.materialize():
            if live.name in empty:
                nn.init.constant_(live.tensor, 0.125)
        return super().build(plan, context)


class KeepsItsValues(Good):
    takes_tensors = True

    def build(self, plan: Plan, context: Any) -> Any:
        before = {
            name: parameter.detach().clone()
            for name, parameter in context.schedule.model.named_parameters()
            if not parameter.is_meta
        }
        for live in context.materialize():
            if live.name in before:
                live.tensor.detach().copy_(before[live.name])
        return super().build(plan, context)


class InitializesByRank(Good):
    takes_tensors = True

    def build(self, plan: Plan, context: Any) -> Any:
        empty = {name for name, parameter in context.schedule.model.named_parameters() if parameter.is_meta}
        for live in context.materialize():
            if live.name in empty and dist.is_initialized():
                live.tensor.detach().mul_(1 + dist.get_rank())
        return super().build(plan, context)


class SupportsText(Good):
    supports = "dp"  # type: ignore[assignment]


class AveragesOnOneRankOnly(Good):
    def build(self, plan: Plan, context: Any) -> Any:
        engine = super().build(plan, context)
        if dist.is_initialized() and dist.get_rank() == 1:
            engine.average = _raise
        return engine


def _raise() -> None:
    raise ZeroDivisionError("rank 1 is not thought of")


class NeedsAGroup(Good):
    def build(self, plan: Plan, context: Any) -> Any:
        dist.barrier()
        return super().build(plan, context)


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


class PlanHidesValues(Good):
    def plan(self, schedule: Any, config: Any) -> Plan:
        bare = {name: getattr(value, "value", value) for name, value in config.items()}
        plan = super().plan(schedule, bare)
        return Plan(plan.target, plan.steps, {name: Opaque(value) for name, value in plan.config.items()})


class TakesTheTensors(Good):
    takes_tensors = True

    def build(self, plan: Plan, context: Any) -> Any:
        for _ in context.materialize():
            pass
        return super().build(plan, context)


WITH = {
    engine: type(f"With{engine.__name__}", (Good,), {"engine": engine, "__module__": __name__})
    for engine in GoodEngine.__subclasses__()
}
"""The good dialect with each of the bad engines, at the top level of this module: ranks import it by its name."""

globals().update({cls.__name__: cls for cls in WITH.values()})
