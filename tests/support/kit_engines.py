"""Engines for the tests of the kit: a good one, and bad ones that break just one promise each."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, OptimizerError, Plan, StepResult
from slapo_runtime.batches import switch_to_training


class GoodEngine:
    """One process, replicas, or a split model, in plain PyTorch."""

    def __init__(self, plan: Plan, context: Any) -> None:
        self.context, self.module, self.is_closed = context, context.schedule.model, False
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> Any:
        return self.context.make_optimizer()

    def compute_loss(self, batch: Any) -> Any:
        return self.context.compute_loss(batch)

    def clip(self) -> Any:
        return self.context.clip_gradients()

    def average(self) -> None:
        mesh = self.context.schedule.mesh
        if mesh is not None and mesh.size("dp") > 1:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=mesh.group("dp"))
                    parameter.grad /= mesh.size("dp")

    def require(self, usable: bool) -> None:
        if self.is_closed or not usable:
            raise BuildError("the engine is closed, or cannot train", hint="build(sch, optimizer=...)")

    def pieces(self, batch: Any) -> list[Any]:
        return self.context.micro_batches(batch)

    def share(self, loss: Any, count: int) -> Any:
        return loss / count

    def train_step(self, batch: Any) -> StepResult:
        self.require(self.optimizer is not None)
        losses, pieces = [], self.pieces(batch)
        for number, piece in enumerate(pieces):
            loss, output = self.compute_loss(piece)
            if number == 0:
                self.optimizer.zero_grad()
            self.share(loss, len(pieces)).backward()
            losses.append(loss.detach())
        self.average()
        norm = self.clip()
        self.optimizer.step()
        return StepResult(torch.stack(losses).mean(), output, norm)

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
        return self.context.state.state_dict(rank0_only=rank0_only)

    def load_state_dict(self, state: Any) -> None:
        self.context.state.load_state_dict(state)

    def check_replicas(self, *, repair: bool = False) -> None:
        self.context.state.check_replicas(optimizer=self.optimizer, repair=repair)

    def save(self, directory: Any) -> None:
        self.context.state.save(directory, optimizer=self.optimizer)

    def load(self, directory: Any) -> None:
        self.context.state.load(directory, optimizer=self.optimizer)

    def close(self) -> None:
        self.is_closed = True


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
            raise BuildError("no optimizer") from None


class CallsTheFactory(GoodEngine):
    def make_optimizer(self) -> Any:
        return self.context.optimizer and self.context.optimizer(list(self.module.parameters()))


class MakesNoOptimizer(GoodEngine):
    def make_optimizer(self) -> Any:
        return None


class WithoutLoad(GoodEngine):
    @property
    def load(self) -> Any:  # type: ignore[override]
        raise AttributeError("load")


class WithoutRank0Only(GoodEngine):
    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()


class WrapsTheModule(GoodEngine):
    def __init__(self, plan: Plan, context: Any) -> None:
        super().__init__(plan, context)
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
        known = self.context.state.state_dict()
        factory = self.context.optimizer
        return factory and factory([p for name, p in self.module.named_parameters() if name in known])


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
        if self.context._arguments.loss is None or not isinstance(batch, dict):
            return super().compute_loss(batch)
        output = self.module(**batch)
        return self.context._arguments.loss(output, batch), output


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
        self.context.state.save(directory)

    def load(self, directory: Any) -> None:
        self.context.state.load(directory)


class HasItsOwnFormat(GoodEngine):
    def save(self, directory: Any) -> None:
        os.makedirs(directory, exist_ok=True)
        torch.save((super().state_dict(), self.optimizer.state_dict()), os.path.join(directory, "all.pt"))

    def load(self, directory: Any) -> None:
        state, optimizer = torch.load(os.path.join(directory, "all.pt"))
        self.load_state_dict(state)
        self.optimizer.load_state_dict(optimizer)


class AveragesNothing(GoodEngine):
    def average(self) -> None:
        pass


class ClipsByItself(GoodEngine):
    def clip(self) -> Any:
        most = self.context._arguments.max_grad_norm
        return None if most is None else nn.utils.clip_grad_norm_(self.module.parameters(), most)


class EvaluatesOnTheFirstRank(GoodEngine):
    def eval_step(self, batch: Any) -> StepResult:
        result = super().eval_step(batch)
        return StepResult(result.loss * (not dist.is_initialized() or dist.get_rank() == 0), result.output)


class SavesOnItsOwn(GoodEngine):
    def state_dict(self, *, rank0_only: bool = False) -> Any:
        return super().state_dict()


class TrainsInTheModeItFinds(GoodEngine):
    def compute_loss(self, batch: Any) -> Any:
        modes = [(module, module.training) for module in self.module.modules()]

        def forward(*args: Any, **kwargs: Any) -> Any:
            for module, training in modes:
                module.training = training
            return self.module(*args, **kwargs)

        return self.context.compute_loss(batch, forward)


class PutsEverythingIntoTrainingMode(GoodEngine):
    def train_step(self, batch: Any) -> StepResult:
        self.module.train()
        return super().train_step(batch)


class TakesTheBatchWhole(GoodEngine):
    def pieces(self, batch: Any) -> list[Any]:
        return [batch]


class SumsMicroBatches(GoodEngine):
    def share(self, loss: Any, count: int) -> Any:
        return loss


class ForgetsTheScheduler(GoodEngine):
    def __init__(self, plan: Any, context: Any) -> None:
        super().__init__(plan, context)
        context.make_lr_scheduler(self.optimizer)


class IgnoresTheWeights(GoodEngine):
    def compute_loss(self, batch: Any) -> Any:
        if torch.is_grad_enabled():
            switch_to_training(self.module)
        return self.context._loss_call(batch)


class ComparesNothing(GoodEngine):
    def check_replicas(self, *, repair: bool = False) -> None:
        pass


class SavesElsewhere(GoodEngine):
    def save(self, directory: Any) -> None:
        torch.save(self.module.state_dict(), f"{directory}.pt")


class CallsTheModelItself(GoodEngine):
    def compute_loss(self, batch: Any) -> Any:
        output = self.module(**batch)
        return output["loss"], output
