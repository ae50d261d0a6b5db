"""A cut model on real ranks against the reference model in one process, over the same micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import slapo_core as slapo

__all__ = ["Case", "differences", "sgd"]

Batch = dict[str, Any]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@dataclass(frozen=True)
class Case:
    """One training run.

    Args:
        make: the model, with the same values whenever it is called.
        batch: of a replica, by the number of the step and the replica.
        cuts: after which modules.
        mesh: its sizes.
        schedule: the name, or None for the default.
        count: of micro-batches.
        steps: applied beside the cuts, e.g. those of tensor parallelism.
        options: of ``build``.
        tolerance: absolute, of losses and of the weights after the last step.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    cuts: Sequence[str]
    mesh: Mapping[str, int]
    schedule: str | None
    count: int
    steps: Callable[[slapo.Schedule], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    tolerance: float = 1e-11
    training_steps: int = 3

    def __str__(self) -> str:
        return f"{self.schedule} {dict(self.mesh)} {len(self.cuts) + 1} stages {self.count} micro-batches"

    def build(self) -> tuple[slapo.Schedule, Any]:
        sch = slapo.create_schedule(self.make(), mesh=dict(self.mesh), example_inputs=self.batch(0, 0))
        if self.steps is not None:
            self.steps(sch)
        for path in self.cuts:
            sch[path].pipeline_split()
        given = {} if self.schedule is None else {"pipeline_schedule": self.schedule}
        engine = slapo.build(sch, optimizer=self.optimizer, microbatches=self.count, **given, **self.options)
        return sch, engine


def differences(case: Case) -> list[str]:
    """What this rank's engine does otherwise than the reference model; every rank of the mesh calls it."""
    sch, engine = case.build()
    assert sch.mesh is not None
    replicas, own = sch.mesh.size("dp"), sch.mesh.rank("dp")
    reference = _Reference(case, replicas)
    found = []
    for step in range(case.training_steps):
        result = engine.train_step(case.batch(step, own))
        losses, norm = reference.train_step(step)
        if not _close(result.loss, losses[own], case.tolerance):
            found.append(f"{case}: the loss of step {step} is {result.loss} instead of {losses[own]}")
        if result.grad_norm is not None and not _close(result.grad_norm, norm, case.tolerance * 100):
            found.append(f"{case}: the norm of step {step} is {result.grad_norm} instead of {norm}")
    engine.check_replicas()
    evaluated = engine.eval_step(case.batch(99, own), gather_outputs=True)
    loss, outputs = reference.eval_step(99, own)
    if not _close(evaluated.loss, loss, case.tolerance):
        found.append(f"{case}: the loss of the evaluation is {evaluated.loss} instead of {loss}")
    for name, tensor in outputs.items():
        other = evaluated.output[name]
        if other.shape != tensor.shape or not _close(other, tensor, case.tolerance):
            found.append(f"{case}: '{name}' of the evaluation differs")
    wanted = reference.models[own].state_dict()  # with the running statistics of this replica
    for name, tensor in engine.state_dict().items():
        if not _close(tensor, wanted[name], case.tolerance):
            found.append(f"{case}: '{name}' differs by {(tensor - wanted[name]).abs().max():.1e} after training")
    engine.close()
    return found


class _Reference:
    """The reference model; one copy for each replica, because running statistics are its own."""

    def __init__(self, case: Case, replicas: int) -> None:
        self.case = case
        first = case.make()
        first.train()
        self.models = [first, *(copy.deepcopy(first) for _ in range(replicas - 1))]
        self.optimizers = [case.optimizer(model.parameters()) for model in self.models]

    def train_step(self, step: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        losses = []
        for number, model in enumerate(self.models):
            model.zero_grad()
            pieces = _pieces(self.case, self.case.batch(step, number))
            each = [self._loss(model(**self._inputs(piece)), piece) for piece in pieces]
            for one in each:
                (one / len(pieces)).backward()
            losses.append(torch.stack(each).mean().detach())
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if gradients:
                mean = torch.stack(gradients).mean(0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
        largest = self.case.options.get("max_grad_norm") or float("inf")
        norm = torch.tensor(0.0)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            norm = nn.utils.clip_grad_norm_(model.parameters(), largest)
            optimizer.step()
        return losses, norm

    @torch.no_grad()
    def eval_step(self, step: int, replica: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = self.models[replica].eval()
        pieces = _pieces(self.case, self.case.batch(step, replica))
        outputs = [model(**self._inputs(piece)) for piece in pieces]
        losses = [self._loss(output, piece) for output, piece in zip(outputs, pieces, strict=True)]
        whole = {
            name: torch.cat([output[name] for output in outputs])
            for name, tensor in outputs[0].items()
            if isinstance(tensor, torch.Tensor) and tensor.dim()
        }
        model.train()
        return torch.stack(losses).mean(), whole

    def _loss(self, output: Any, piece: Batch) -> torch.Tensor:
        loss = self.case.options.get("loss")
        return output["loss"] if loss is None else loss(output, piece)

    def _inputs(self, piece: Batch) -> Batch:
        return {name: value for name, value in piece.items() if not name.startswith("only_for_loss")}


def _pieces(case: Case, batch: Batch) -> list[Batch]:
    whole = {name for name, axis in case.options.get("batch_axes", {}).items() if axis is None}
    return [
        {
            name: value.chunk(case.count)[number] if isinstance(value, torch.Tensor) and name not in whole else value
            for name, value in batch.items()
        }
        for number in range(case.count)
    ]


def _close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(one.double().cpu(), other.double().cpu(), rtol=1e-10, atol=tolerance)
