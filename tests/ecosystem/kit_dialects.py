"""Dialects for the tests of the kit: a good one, and for every check bad ones that break just that promise."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Dialect, OptimizerError, Plan, StepResult

COUNTER = itertools.count()


class GoodEngine:
    """One process, replicas, or a split model, in plain PyTorch."""

    def __init__(self, plan: Plan, request: Any) -> None:
        self.request, self.module, self.is_closed = request, request.schedule.model, False
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> Any:
        return self.request.make_optimizer()

    def compute_loss(self, batch: Any) -> Any:
        return self.request.compute_loss(batch)

    def clip(self) -> Any:
        return self.request.clip_gradients()

    def average(self) -> None:
        mesh = self.request.schedule.mesh
        if mesh is not None and mesh.size("dp") > 1:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=mesh.group("dp"))
                    parameter.grad /= mesh.size("dp")

    def require(self, usable: bool) -> None:
        if self.is_closed or not usable:
            raise BuildError("the engine is closed, or cannot train", hint="build(sch, optimizer=...)")

    def train_step(self, batch: Any) -> StepResult:
        self.require(self.optimizer is not None)
        loss, output = self.compute_loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.average()
        norm = self.clip()
        self.optimizer.step()
        return StepResult(loss.detach(), output, norm)

    def eval_step(self, batch: Any) -> StepResult:
        self.require(True)
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            with torch.no_grad():
                return StepResult(*self.compute_loss(batch))
        finally:
            for module, training in modes:
                module.training = training

    def state_dict(self, *, rank0_only: bool = False) -> Any:
        return self.request.state.state_dict(rank0_only=rank0_only)

    def load_state_dict(self, state: Any) -> None:
        self.request.state.load_state_dict(state)

    def save(self, directory: Any) -> None:
        self.request.state.save(directory, optimizer=self.optimizer)

    def load(self, directory: Any) -> None:
        self.request.state.load(directory, optimizer=self.optimizer)

    def close(self) -> None:
        self.is_closed = True


class Good(Dialect):
    """Option ``bucket``, an int (default 25), which means nothing."""

    name = "good"
    supports = frozenset({"dp", "tp"})
    engine: Any = GoodEngine

    def plan(self, schedule: Any, config: Mapping[str, Any]) -> Plan:
        unknown = set(config) - {"bucket"}
        if unknown:
            raise BuildError(f"target 'good' has no option {', '.join(sorted(unknown))}; it has bucket")
        if type(config.get("bucket", 25)) is not int:
            raise BuildError(f"bucket must be an int (got {config['bucket']!r})", hint="bucket=25")
        return Plan(self.name, ("train in plain PyTorch",), {"bucket": 25, **config})

    def build(self, plan: Plan, request: Any) -> Any:
        return self.engine(plan, request)


# -- plans ----------------------------------------------------------------------------------------------------


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


# -- failures -------------------------------------------------------------------------------------------------


class MarksTheModelFirst(Good):
    def build(self, plan: Plan, request: Any) -> Any:
        request.schedule.model.built_by = self.name
        return super().build(plan, request)


class SwallowsErrors(GoodEngine):
    def make_optimizer(self) -> Any:
        try:
            return super().make_optimizer()
        except Exception as error:
            if isinstance(error, OptimizerError):
                raise
            return None


class HidesErrors(GoodEngine):
    def make_optimizer(self) -> Any:
        try:
            return super().make_optimizer()
        except Exception as error:
            if isinstance(error, OptimizerError):
                raise
            raise BuildError("no optimiser") from None


class CallsTheFactory(GoodEngine):
    def make_optimizer(self) -> Any:
        return self.request.optimizer and self.request.optimizer(list(self.module.parameters()))


# -- engines --------------------------------------------------------------------------------------------------


class WithoutLoad(GoodEngine):
    @property
    def load(self) -> Any:  # type: ignore[override]
        raise AttributeError("load")


class WithoutRank0Only(GoodEngine):
    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()


class WrapsTheModule(GoodEngine):
    def __init__(self, plan: Plan, request: Any) -> None:
        super().__init__(plan, request)
        self.module = nn.Sequential(self.module)


class TrainsWithoutOptimizer(GoodEngine):
    def train_step(self, batch: Any) -> StepResult:
        return super().train_step(batch) if self.optimizer else StepResult(self.compute_loss(batch)[0].detach())


class RefusesWithoutWayOut(GoodEngine):
    def require(self, usable: bool) -> None:
        if self.is_closed or not usable:
            raise BuildError("the engine is closed, or cannot train")


class StaysOpen(GoodEngine):
    def close(self) -> None:
        pass


class EndsTheProcessGroup(GoodEngine):
    def close(self) -> None:
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()


# -- steps ----------------------------------------------------------------------------------------------------


class GivesTheGraph(GoodEngine):
    def train_step(self, batch: Any) -> StepResult:
        result = super().train_step(batch)
        return StepResult(result.loss.clone().requires_grad_(), result.output, result.grad_norm)


class GivesANormAlways(GoodEngine):
    def clip(self) -> Any:
        return super().clip() or torch.tensor(0.0)


class KeepsGradients(GoodEngine):
    def make_optimizer(self) -> Any:
        optimizer = super().make_optimizer()
        if optimizer is not None:
            optimizer.zero_grad = lambda: None
        return optimizer


class TrainsKnownNamesOnly(GoodEngine):
    def make_optimizer(self) -> Any:
        known = self.request.state.state_dict()
        return self.request.make_optimizer(
            [parameter for name, parameter in self.module.named_parameters() if name in known]
        )


class Unties(Good):
    def build(self, plan: Plan, request: Any) -> Any:
        engine, seen = super().build(plan, request), set()
        for module in request.schedule.model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter in seen:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone())
                seen.add(parameter)
        return engine


class TrainsEverything(Good):
    def build(self, plan: Plan, request: Any) -> Any:
        engine = super().build(plan, request)
        request.schedule.model.requires_grad_(True)
        return engine


class ClipsAfterTheStep(GoodEngine):
    def train_step(self, batch: Any) -> StepResult:
        clip, self.clip = self.clip, lambda: None  # type: ignore[method-assign]
        result = super().train_step(batch)
        self.clip = clip  # type: ignore[method-assign]
        return StepResult(result.loss, result.output, self.clip())


class TakesMappingsOnly(GoodEngine):
    def compute_loss(self, batch: Any) -> Any:
        return super().compute_loss(dict(batch) if isinstance(batch, dict) else {"x": batch[0], "y": batch[1]})


class IgnoresTheLoss(GoodEngine):
    def compute_loss(self, batch: Any) -> Any:
        if self.request.loss is None or not isinstance(batch, dict):
            return super().compute_loss(batch)
        output = self.module(**batch)
        return self.request.loss(output, batch), output


# -- evaluation -----------------------------------------------------------------------------------------------


class EvaluatesInTrainingMode(GoodEngine):
    @torch.no_grad()
    def eval_step(self, batch: Any) -> StepResult:
        self.require(True)
        return StepResult(*self.compute_loss(batch))


class StaysInEvaluationMode(GoodEngine):
    @torch.no_grad()
    def eval_step(self, batch: Any) -> StepResult:
        self.require(True)
        self.module.eval()
        return StepResult(*self.compute_loss(batch))


class ForgetsTheModeOnErrors(GoodEngine):
    @torch.no_grad()
    def eval_step(self, batch: Any) -> StepResult:
        self.require(True)
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        result = StepResult(*self.compute_loss(batch))
        for module, training in modes:
            module.training = training
        return result


class KeepsTheGraph(GoodEngine):
    def eval_step(self, batch: Any) -> StepResult:
        output = super().eval_step(batch).output
        leaf = {name: tensor.requires_grad_() for name, tensor in output.items()}
        return StepResult(leaf["loss"].detach(), leaf)


# -- state ----------------------------------------------------------------------------------------------------


class GivesLiveNames(GoodEngine):
    def state_dict(self, *, rank0_only: bool = False) -> Any:
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}


class GivesLiveTensors(GoodEngine):
    def state_dict(self, *, rank0_only: bool = False) -> Any:
        return dict(zip(super().state_dict(), self.module.state_dict().values(), strict=True))


class LoadsNothing(GoodEngine):
    def load_state_dict(self, state: Any) -> None:
        pass


class LoadsIntoNewParameters(GoodEngine):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        for module in self.module.modules():
            for name, parameter in module._parameters.items():
                module._parameters[name] = parameter if parameter is None else nn.Parameter(parameter.detach().clone())


class LoadsWhatFits(GoodEngine):
    def load_state_dict(self, state: Any) -> None:
        own = self.state_dict()
        super().load_state_dict({**own, **{name: state[name] for name in state if name in own}})


class SavesNoOptimizer(GoodEngine):
    def save(self, directory: Any) -> None:
        self.request.state.save(directory)

    def load(self, directory: Any) -> None:
        self.request.state.load(directory)


class HasItsOwnFormat(GoodEngine):
    def save(self, directory: Any) -> None:
        import os

        os.makedirs(directory, exist_ok=True)
        torch.save((super().state_dict(), self.optimizer.state_dict()), os.path.join(directory, "all.pt"))

    def load(self, directory: Any) -> None:
        import os

        state, optimizer = torch.load(os.path.join(directory, "all.pt"))
        self.load_state_dict(state)
        self.optimizer.load_state_dict(optimizer)


# -- values ---------------------------------------------------------------------------------------------------


class InitialisesItself(Good):
    takes_tensors = True

    def build(self, plan: Plan, request: Any) -> Any:
        empty = {name for name, parameter in request.schedule.model.named_parameters() if parameter.is_meta}
        for live in request.materialise():
            if live.name in empty:
                nn.init.constant_(live.tensor, 0.125)
        return super().build(plan, request)


class KeepsItsValues(Good):
    takes_tensors = True

    def build(self, plan: Plan, request: Any) -> Any:
        before = {
            name: parameter.detach().clone()
            for name, parameter in request.schedule.model.named_parameters()
            if not parameter.is_meta
        }
        for live in request.materialise():
            if live.name in before:
                live.tensor.detach().copy_(before[live.name])
        return super().build(plan, request)


# -- ranks ----------------------------------------------------------------------------------------------------


class SupportsText(Good):
    supports = "dp"  # type: ignore[assignment]


class AveragesNothing(GoodEngine):
    def average(self) -> None:
        pass


class AveragesOnOneRankOnly(Good):
    def build(self, plan: Plan, request: Any) -> Any:
        engine = super().build(plan, request)
        if dist.is_initialized() and dist.get_rank() == 1:
            engine.average = _raise
        return engine


def _raise() -> None:
    raise ZeroDivisionError("rank 1 is not thought of")


class NeedsAGroup(Good):
    def build(self, plan: Plan, request: Any) -> Any:
        dist.barrier()
        return super().build(plan, request)


class ClipsByItself(GoodEngine):
    def clip(self) -> Any:
        most = self.request.max_grad_norm
        return None if most is None else nn.utils.clip_grad_norm_(self.module.parameters(), most)


class SavesOnItsOwn(GoodEngine):
    def state_dict(self, *, rank0_only: bool = False) -> Any:
        return super().state_dict()


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


WITH = {
    engine: type(f"With{engine.__name__}", (Good,), {"engine": engine, "__module__": __name__})
    for engine in GoodEngine.__subclasses__()
}
"""The good dialect with each of the bad engines, at the top level of this module: ranks import it by its name."""

globals().update({cls.__name__: cls for cls in WITH.values()})
