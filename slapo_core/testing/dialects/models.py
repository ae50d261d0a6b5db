"""The models that dialects are tried on where a case gives none, their batches and their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.primitives.checkpoint import Checkpoint
from slapo_core.primitives.replace import Replace

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.request import LossFunction

__all__ = [
    "EVALUATING",
    "FORMS",
    "FROZEN",
    "OUTSIDE_LOSS",
    "PARTLY_EVALUATING",
    "TIED",
    "TRAINING",
    "Regression",
    "Subject",
    "adamw",
    "regression_batch",
    "regression_steps",
    "sgd",
]


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Args:
        model: makes a fresh model.
        batch: makes a batch.
        loss: as ``build`` takes it.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: LossFunction | None = None


class Scale(nn.Module):
    """Multiplies, and in evaluation mode adds: a buffer of the state dict, one beside it, and a mode that matters."""

    factor: torch.Tensor
    offset: torch.Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("factor", torch.empty(features))
        self.register_buffer("offset", torch.empty(features), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.factor, 0.5)
        nn.init.constant_(self.offset, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor if self.training else x * self.factor + self.offset


class Predictor(nn.Module):
    """``predictor(x)``: (samples, 6) -> (samples, 4); the loss is somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.act = nn.GELU()
        self.down = nn.Linear(8, 8)
        self.scale = Scale(8)
        self.head = nn.Linear(8, 4)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.down(self.act(self.up(x))))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.features(x))


class Regression(Predictor):
    """``regression(x, y)``: the mean squared error, and the prediction."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        prediction = self.head(self.features(x))
        return {"loss": nn.functional.mse_loss(prediction, y), "prediction": prediction}


class Tied(Regression):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.again.weight = self.down.weight

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(super().features(x))


class Renamed(nn.Module):
    """A linear layer whose parameters have other names than in the reference state dict."""

    def __init__(self, matrix: torch.Tensor, offset: torch.Tensor) -> None:
        super().__init__()
        self.matrix, self.offset = nn.Parameter(matrix), nn.Parameter(offset)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.matrix, self.offset)


def renamed(old: Any) -> nn.Module:
    return Renamed(old.weight, old.bias)


def regression_batch() -> dict[str, torch.Tensor]:
    """Eight samples."""
    return {"x": torch.randn(8, 6), "y": torch.randn(8, 4)}


def regression_steps(schedule: Schedule) -> None:
    """A replacement with other names, recomputed in the backward pass; with ``tp``, two layers split over its ranks."""
    head = schedule.tree.node("head")
    schedule.apply_at(head, Replace(renamed, params={"weight": "matrix", "bias": "offset"}))
    schedule.apply_at(schedule.tree.node("head"), Checkpoint())
    if schedule.mesh is not None and schedule.mesh.size("tp") > 1:
        node: Any = schedule.tree.node  # the two primitives are a plugin's
        node("up").shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        node("down").shard("weight", axis=1).sync("fwd_post", "all_reduce")


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _frozen() -> nn.Module:
    model = Regression()
    model.up.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


def _in_evaluation_mode() -> nn.Module:
    return Regression().eval()


def _partly_in_evaluation_mode() -> nn.Module:
    model = Regression()
    model.scale.eval()
    return model


def _as_tuple() -> tuple[torch.Tensor, ...]:
    return tuple(regression_batch().values())


def _one_tensor() -> torch.Tensor:
    return torch.randn(8, 6)


def _error(prediction: torch.Tensor, batch: Any) -> torch.Tensor:
    y = batch["y"] if isinstance(batch, dict) else batch[1]
    return nn.functional.mse_loss(prediction, y)


def _energy(prediction: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (prediction * (1 + batch[:, :4])).square().mean()


TIED = Subject(Tied, regression_batch)
EVALUATING = Subject(_in_evaluation_mode, regression_batch)
PARTLY_EVALUATING = Subject(_partly_in_evaluation_mode, regression_batch)
TRAINING = Subject(Regression, regression_batch)
FROZEN = Subject(_frozen, regression_batch)
OUTSIDE_LOSS = Subject(Predictor, regression_batch, _error)
FORMS = {
    "a mapping": Subject(Regression, regression_batch),
    "a tuple": Subject(Regression, _as_tuple),
    "a tuple with labels for loss=": Subject(Predictor, _as_tuple, _error),
    "one tensor": Subject(Predictor, _one_tensor, _energy),
}
