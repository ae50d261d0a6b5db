"""`DialectCase`: a dialect, and the models, batches and steps to train with it."""

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

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.context import LossFunction, OptimizerFactory


@dataclass(frozen=True)
class Subject:
    """A model to train, with its batch and loss.

    Args:
        model: makes a fresh model.
        batch: makes a batch.
        loss: as ``build`` takes it.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: LossFunction | None = None


class Scale(nn.Module):
    """Multiply, or add in evaluation mode: with a persistent buffer and one that is not."""

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
    head = Internals(schedule).node("head")
    Internals(schedule).apply(head, Replace(renamed, params={"weight": "matrix", "bias": "offset"}))
    Internals(schedule).apply(Internals(schedule).node("head"), Checkpoint())
    if schedule.mesh is not None and schedule.mesh.size("tp") > 1:
        node: Any = Internals(schedule).node  # the two primitives are a plugin's
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


_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True, eq=False)
class DialectCase:
    """Define a dialect with the options, model and batches to try it on.

    Args:
        target: the name that the dialect is installed under, e.g. ``"accumulate"``, or its class.
        config: the options to build with, e.g. ``{"micro_batches": 3}``.
        rejects: options that must be refused, e.g. ``[{"micro_batches": 0}]``.
        model: makes a fresh model; called under a fixed random seed, so that every call gives the same weights.
        batch: makes a batch as ``train_step`` takes it; called under another seed for each batch. The first axis of
            every tensor counts the samples, and the loss is a mean over them.
        loss: ``loss(output, batch)``; None takes that of the model's output.
        schedule: applies steps to a schedule of the model, on each mesh and without: ``schedule.mesh`` says which.
            Default: those of the default model, which on ``tp`` use ``shard`` and ``sync``; none for another model.
        optimizers: factories, each at the top level of a module; the first one serves where one is enough.
        meshes: the meshes to train on, with one process a rank; None tries two ranks of ``dp`` and of ``tp`` as far as
            the dialect supports them. For pipelines give one with ``pp``, and a ``schedule`` that cuts the model.
        dtype: of the model and of the floating-point numbers in a batch.
        tolerance: the largest difference to plain training, relative to the largest element of a tensor; None allows
            1e-9 in float64, 1e-4 in float32, and 1e-2 otherwise.
        device: where models and batches are put, e.g. ``"cuda"``; None: the accelerator if there is one, else the CPU.
        device_per_rank: whether each rank needs an accelerator of its own. Otherwise ranks may share one over gloo,
            which reduces and gathers its tensors, but sends none between stages. Checks on a mesh with more ranks than
            accelerators are skipped, with the reason, where the ranks cannot share.
        needs_process_group: whether the runtime needs ``torch.distributed`` for a single process too.
        unavailable: why engines cannot run on this machine, e.g. ``"no GPU found"``; checks that build one are
            skipped, and say so. None where they can.
        name: stands in the test's id; default: the dialect's name.

    Raises:
        ArgumentError: an argument of another kind; the message gives the call to write.
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
        for name in ("model", "batch"):
            value = getattr(self, name)
            # A live module can be called too: a class is a fine factory, an instance would be shared by all checks.
            if not callable(value) or isinstance(value, nn.Module):
                raise ArgumentError(
                    f"DialectCase: {name} must be a function that makes a fresh one (got a {type(value).__name__})",
                    hint=f"{name}=lambda: ...",
                )
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
        """The subject of checks without special requirements."""
        return Subject(self.model, self.batch, self.loss)

    @property
    def steps(self) -> Callable[[Schedule], Any] | None:
        """The function that applies the steps of a schedule; None if the case has none."""
        return self.schedule or (regression_steps if self.model is Regression else None)

    @property
    def allowed(self) -> float:
        """The relative tolerance."""
        return _TOLERANCES.get(self.dtype, 1e-2) if self.tolerance is None else self.tolerance

    @property
    def dialect_name(self) -> str:
        """The name that ``build`` takes."""
        return self.target if isinstance(self.target, str) else self.target.name

    @property
    def label(self) -> str:
        """The case's part of a test's id, e.g. ``"accumulate"``."""
        return self.name or self.dialect_name

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.config.items())
        return f"target '{self.dialect_name}'" + (f" with {options}" if options else "")
