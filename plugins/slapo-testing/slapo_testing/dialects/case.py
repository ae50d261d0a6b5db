"""`DialectCase`: a dialect, with models, batches and steps to train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.dialect import Dialect
from slapo_core.errors import ArgumentError
from slapo_core.internals import Checkpoint, Internals, Replace
from slapo_core.layout import MESH_DIMS
from slapo_testing.case import require_factories

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.context import LossFunction, OptimizerFactory


@dataclass(frozen=True)
class Subject:
    """A model to train, with its batch and loss.

    Args:
        model: makes a model.
        batch: makes a batch.
        loss: as for ``build``.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: LossFunction | None = None


class Scale(nn.Module):
    """Multiply by a buffer, and in evaluation mode add a non-persistent one."""

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
    """``predictor(x)``: (samples, 6) -> (samples, 4); the loss is given to build."""

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


class TiedRegression(Regression):
    """A regression with two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.again.weight = self.down.weight

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(super().features(x))


class Renamed(nn.Module):
    """A linear layer with other parameter names than the reference state dict."""

    def __init__(self, matrix: torch.Tensor, offset: torch.Tensor) -> None:
        super().__init__()
        self.matrix, self.offset = nn.Parameter(matrix), nn.Parameter(offset)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.matrix, self.offset)


def renamed(old: Any) -> nn.Module:
    return Renamed(old.weight, old.bias)


def regression_batch() -> dict[str, torch.Tensor]:
    """Make a batch of eight samples."""
    return {"x": torch.randn(8, 6), "y": torch.randn(8, 4)}


def regression_steps(schedule: Schedule) -> None:
    """Replace a layer by one with other names, checkpoint it, and shard two layers over ``tp``."""
    head = Internals(schedule).node("head")
    Internals(schedule).apply(head, Replace(renamed, params={"weight": "matrix", "bias": "offset"}))
    Internals(schedule).apply(Internals(schedule).node("head"), Checkpoint())
    if schedule.mesh is not None and schedule.mesh.size("tp") > 1:
        node: Any = Internals(schedule).node  # both primitives are a plugin's
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


TIED = Subject(TiedRegression, regression_batch)
EVALUATING = Subject(_in_evaluation_mode, regression_batch)
PARTLY_EVALUATING = Subject(_partly_in_evaluation_mode, regression_batch)
TRAINING = Subject(Regression, regression_batch)
FROZEN = Subject(_frozen, regression_batch)
OUTSIDE_LOSS = Subject(Predictor, regression_batch, _error)
BATCH_TYPES = {
    "a mapping": Subject(Regression, regression_batch),
    "a tuple": Subject(Regression, _as_tuple),
    "a tuple with labels for loss=": Subject(Predictor, _as_tuple, _error),
    "one tensor": Subject(Predictor, _one_tensor, _energy),
}


_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True, eq=False)
class DialectCase:
    """A dialect with options, model and batches for its checks.

    Args:
        target: the dialect's installed name, e.g. ``"accumulate"``, or its class.
        config: options to build with, e.g. ``{"micro_batches": 3}``.
        rejects: options that must be refused, e.g. ``[{"micro_batches": 0}]``.
        model: makes a model; called under a fixed seed, so that all calls give equal weights.
        batch: makes a batch as ``train_step`` takes it; called under a different seed for each batch. The first axis of
            each tensor has the samples, and the loss is a mean over them.
        loss: ``loss(output, batch)``; None takes the loss of the model's output.
        schedule: applies steps to a schedule of the model, on each mesh and without: see ``schedule.mesh``. Default:
            steps for the default model, with ``shard`` and ``sync`` on ``tp``; none for another model.
        optimizers: factories, each at the top level of a module; most checks use the first one.
        meshes: the meshes to train on, with one process for each rank; None tries two ranks of ``dp`` and of ``tp`` if
            the dialect supports them. For pipelines give a mesh with ``pp``, and a ``schedule`` that cuts the model.
        dtype: dtype of the model and of floating-point tensors of a batch.
        tolerance: maximum difference from plain training, relative to the largest element of a tensor; None allows 1e-9
            in float64, 1e-4 in float32, and 1e-2 otherwise.
        device: device of models and batches, e.g. ``"cuda"``; None: the accelerator if there is one, else the CPU.
        device_per_rank: whether each rank needs its own accelerator. Otherwise ranks may share one over gloo, which
            reduces and gathers its tensors, but cannot send them between stages. If ranks cannot share, checks on a
            mesh with more ranks than accelerators are skipped, with the reason.
        needs_process_group: whether the runtime needs ``torch.distributed`` for a single process, too.
        unavailable: why engines cannot run on this machine, e.g. ``"no GPU found"``; checks that build an engine are
            skipped with this reason. None if engines can run.
        name: part of the test's id; default: the dialect's name.

    Raises:
        ArgumentError: an argument has a wrong type; the hint is the corrected call.
    """

    target: str | type[Dialect]
    _: KW_ONLY
    config: Mapping[str, Any] = field(default_factory=dict)
    rejects: Sequence[Mapping[str, Any]] = ()
    model: Callable[[], nn.Module] = Regression
    batch: Callable[[], Any] = regression_batch
    loss: LossFunction | None = None
    schedule: Callable[[Schedule], Any] | None = None
    optimizers: Sequence[OptimizerFactory] = (sgd, adamw)
    meshes: Sequence[Mapping[str, int]] | None = None
    dtype: torch.dtype = torch.float64
    tolerance: float | None = None
    device: torch.device | str | None = None
    device_per_rank: bool = False
    needs_process_group: bool = False
    unavailable: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        target = self.target
        if not isinstance(target, str) and not (isinstance(target, type) and issubclass(target, Dialect)):
            raise ArgumentError(
                f"DialectCase: target must be the name or the class of a dialect (got {target!r})",
                hint='DialectCase("torch")',
            )
        if isinstance(self.rejects, Mapping):
            raise ArgumentError(
                f"DialectCase: rejects must be a list of options (got {self.rejects!r})",
                hint=f"rejects=[{dict(self.rejects)!r}]",
            )
        require_factories(self, "model", "batch")
        if not self.optimizers or not all(map(callable, self.optimizers)):
            raise ArgumentError(
                f"DialectCase: optimizers must be a list of factories (got {self.optimizers!r})",
                hint="optimizers=[make_adamw]",
            )
        for mesh in self.meshes or ():
            if not isinstance(mesh, Mapping) or not mesh or set(mesh) - set(MESH_DIMS):
                raise ArgumentError(
                    f"DialectCase: meshes must be a list of mappings of {', '.join(MESH_DIMS)} to sizes (got {mesh!r})",
                    hint='meshes=[{"dp": 2}]',
                )

    @property
    def subject(self) -> Subject:
        """The default subject of checks."""
        return Subject(self.model, self.batch, self.loss)

    @property
    def steps(self) -> Callable[[Schedule], Any] | None:
        """The function that applies steps; None without one."""
        return self.schedule or (regression_steps if self.model is Regression else None)

    @property
    def allowed(self) -> float:
        """The relative tolerance."""
        return _TOLERANCES.get(self.dtype, 1e-2) if self.tolerance is None else self.tolerance

    @property
    def dialect_name(self) -> str:
        """The name of the dialect for ``build``."""
        return self.target if isinstance(self.target, str) else self.target.name

    @property
    def label(self) -> str:
        """Part of a test's id, e.g. ``"accumulate"``."""
        return self.name or self.dialect_name

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.config.items())
        return f"target '{self.dialect_name}'" + (f" with {options}" if options else "")
