"""Provide fresh models, batches, schedules and engines for the checks of a dialect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import create_schedule
from slapo_core.errors import SlapoError
from slapo_core.internals import Annotate, Internals
from slapo_core.plugins import Registry, current_registry, use_registry
from slapo_runtime.batches import micro_batches
from slapo_runtime.build import build
from slapo_runtime.losses import LossCall
from slapo_testing.bench import SEED, seeded
from slapo_testing.check import CheckError
from slapo_testing.device import backend_for, resolve_device
from slapo_testing.dialects.case import DialectCase, Subject
from slapo_testing.private import tree_map_only
from slapo_testing.snapshot import ModelSnapshot, listed

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Schedule
    from slapo_core.dialect import Dialect, Engine
    from slapo_runtime.context import LossFunction, OptimizerFactory


@dataclass(frozen=True)
class Training:
    """The results of some steps.

    Args:
        losses: of each step.
        norms: of all gradients before clipping, of each step; empty where nothing was clipped.
        state: the state dict afterwards.
    """

    losses: Sequence[torch.Tensor]
    norms: Sequence[torch.Tensor]
    state: Mapping[str, torch.Tensor]

    def cpu(self) -> Training:
        """Return the same results on the CPU."""
        losses, norms = ([tensor.cpu() for tensor in tensors] for tensors in (self.losses, self.norms))
        return Training(losses, norms, {name: tensor.cpu() for name, tensor in self.state.items()})

    def named(self) -> dict[str, torch.Tensor]:
        """Everything that can be compared, by the words for it."""
        return {
            **{f"the loss of step {number}": loss for number, loss in enumerate(self.losses, start=1)},
            **{f"the gradient norm of step {number}": norm for number, norm in enumerate(self.norms, start=1)},
            **{f"'{name}' after step {len(self.losses)}": tensor for name, tensor in self.state.items()},
        }


def train(engine: Engine, batches: Sequence[Any], *, first: int = 0) -> Training:
    """Take a step with each batch.

    Args:
        engine: it is trained.
        batches: one for each step.
        first: how many steps were taken before: step n has the same random numbers in every run.
    """
    results = []
    for number, batch in enumerate(batches, start=first):
        with seeded(SEED + number):
            results.append(engine.train_step(batch))
    norms = [result.grad_norm for result in results if result.grad_norm is not None]
    return Training([result.loss for result in results], norms, engine.state_dict())


def train_in_plain_torch(
    model: nn.Module,
    batches: Sequence[Any],
    optimizer: OptimizerFactory,
    *,
    loss: LossFunction | None = None,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    loss_weight: Callable[[Any], Any] | None = None,
) -> Training:
    """Train in plain PyTorch, the reference of every engine, over ``accumulate`` micro-batches."""
    compute_loss, chosen = LossCall(model, loss), optimizer(list(model.parameters()))
    scheduler = None if lr_scheduler is None else lr_scheduler(chosen)
    losses, norms = [], []
    for number, batch in enumerate(batches):
        parts = micro_batches(batch, accumulate)
        with seeded(SEED + number):
            values = [compute_loss(each)[0] for each in parts]
        weights = [1.0 if loss_weight is None else float(loss_weight(each)) for each in parts]
        scales = [weight * accumulate / sum(weights) for weight in weights]
        value = torch.stack([scale * one for scale, one in zip(scales, values, strict=True)]).mean()
        chosen.zero_grad()
        value.backward()
        if max_grad_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
        chosen.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(value.detach())
    return Training(losses, norms, {name: tensor.clone() for name, tensor in model.state_dict().items()})


def evaluate_in_plain_torch(model: nn.Module, batch: Any, loss: LossFunction | None = None) -> tuple[torch.Tensor, Any]:
    """The loss and the output of a plain model in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad(), seeded():
        value, output = LossCall(model, loss)(batch)
    for module, training in modes:
        module.training = training
    return value, output


def differences(
    expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], *, tolerance: float
) -> list[str]:
    """List the differences, one line each, in the order of ``expected``.

    Args:
        expected: by the words for it.
        got: likewise.
        tolerance: relative to the largest element of the expected tensor; 0 asks for the same bits.
    """
    lines = [f"{name}: missing" for name in expected if name not in got]
    lines += [f"{name}: not expected" for name in got if name not in expected]
    for name, reference in expected.items():
        text = _difference(reference, got[name], tolerance) if name in got else None
        if text is not None:
            lines.append(f"{name}: {text}")
    return lines


def _difference(expected: torch.Tensor, got: torch.Tensor, tolerance: float) -> str | None:
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"{got.dtype} instead of {expected.dtype}"
    one, other = expected.detach().cpu(), got.detach().cpu()
    if torch.equal(one, other) or not one.numel():
        return None
    if not one.is_floating_point():
        return f"{other.flatten()[:4].tolist()} instead of {one.flatten()[:4].tolist()}"
    largest = float((one.double() - other.double()).abs().max())
    allowed = tolerance * max(float(one.double().abs().max()), 1e-3)
    if largest <= allowed:
        return None
    shown = f"{float(other):.6g} instead of {float(one):.6g}, " if one.dim() == 0 else ""
    return f"{shown}a difference of {largest:.3g} where {allowed:.3g} is allowed"


class Before:
    """Everything observable about a schedule and its model; the schedule is only read."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._model = ModelSnapshot(schedule.model)
        self._records, self._layouts = schedule.records, dict(Internals(schedule).tree.layouts)

    def differences(self) -> list[str]:
        """The differences, one line each."""
        schedule = self._schedule
        lines = self._model.differences(schedule.model)
        if schedule.records != self._records:
            lines.append("the records of the schedule: not those of before")
        if Internals(schedule).tree.layouts != self._layouts:
            lines.append("the layouts of the schedule: not those of before")
        if schedule.is_sealed:
            lines.append("the schedule: sealed")
        return lines

    def require(self, what: str) -> None:
        """Hold the schedule against itself, then use it on: another step, undo, and a build for another target.

        Args:
            what: the call that failed, for the message, e.g. ``"refusing micro_batches=0"``.

        Raises:
            CheckError: something was left behind, or the schedule cannot be used.
        """
        lines = self.differences()
        if lines:
            raise CheckError(
                f"{what} leaves traces",
                required="the model is bit-identical to before, and the schedule has the same steps",
                got=listed(lines),
                hint="refuse in check() or plan(); in build(), change the model only after everything that can fail",
            )
        schedule = self._schedule
        name = next(name for name, _ in schedule.model.named_parameters())
        path, _, own_name = name.rpartition(".")
        try:
            Internals(schedule).apply(Internals(schedule).node(path), Annotate(own_name, "tried", True))
            schedule.undo()
            lines = self.differences()
            build(schedule, "torch")
        except Exception as error:
            raise CheckError(
                f"the schedule cannot be used after {what}",
                required="another step, undo(), and a build for target 'torch' work",
                got=f"{type(error).__name__}: {error}",
                hint="keep no state outside of the engine (e.g. an attribute of the model)",
            ) from error
        if lines:
            raise CheckError(
                f"undo() after {what} does not give back the model",
                required="bit-identical to before",
                got=listed(lines),
                hint="keep no state outside of the engine (e.g. an attribute of the model)",
            )


@dataclass(frozen=True)
class DialectBench:
    """Make models, batches and engines of a case; a ``subject`` replaces the case's model, batch and loss.

    Args:
        case: the dialect and what to train.
        dialect: its class.
        registry: where ``build`` finds it under its name.
    """

    case: DialectCase
    dialect: type[Dialect]
    registry: Registry

    def model(self, subject: Subject | None = None, *, seed: int = SEED) -> nn.Module:
        """A fresh model; the same weights every time for the same seed."""
        with seeded(seed):
            model = (subject or self.case.subject).model()
        if not isinstance(model, torch.nn.Module):
            raise CheckError(
                "the case's model is not an nn.Module",
                required="model=: a function that returns a torch.nn.Module",
                got=repr(model),
                hint="model=lambda: MyModel(...)",
            )
        return model.to(self.device, self.case.dtype)

    @property
    def device(self) -> torch.device:
        """Where models and batches are."""
        return resolve_device(self.case.device)

    def meta_model(self) -> nn.Module:
        """The model of the case without values."""
        with torch.device("meta"):
            return self.case.model().to(self.case.dtype)

    def batches(self, count: int, subject: Subject | None = None) -> list[Any]:
        """Fresh batches; the same numbers every time."""
        made = []
        for number in range(count):
            with seeded(SEED + 1 + number):
                made.append((subject or self.case.subject).batch())
        return [tree_map_only(torch.Tensor, self._cast, batch) for batch in made]

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.case.dtype if tensor.is_floating_point() else tensor.dtype)

    def schedule(
        self, model: nn.Module | None = None, *, steps: bool = False, mesh: Mapping[str, int] | None = None
    ) -> Schedule:
        """A schedule of a model, or of a fresh one of the case, with the case's steps applied or without."""
        model = self.model() if model is None else model
        if dict(mesh or {}).get("pp", 1) > 1:  # the stages are found on an example
            schedule = create_schedule(model, mesh=mesh, example_inputs=self.batches(1)[0])
        else:
            schedule = create_schedule(model, mesh=mesh)
        if steps and self.case.steps is not None:
            try:
                self.case.steps(schedule)
            except SlapoError as error:
                raise CheckError(
                    "a step of schedule= cannot be applied",
                    required="a function that applies steps to a schedule of the case's model",
                    got=str(error),
                    hint='schedule=lambda sch: sch["layer.0"].checkpoint()',
                ) from error
        return schedule

    def engine(
        self,
        schedule: Schedule | None = None,
        *,
        subject: Subject | None = None,
        target: str | None = None,
        optimizer: OptimizerFactory | None = None,
        **options: Any,
    ) -> Engine:
        """Build an engine, with the options of the case where the target is the case's.

        Args:
            schedule: default: of a fresh model without steps.
            subject: whose loss is used.
            target: default: the case's.
            optimizer: default: the first one of the case.
            options: further arguments of ``build``; an option that is None is left out.
        """
        config = dict(self.case.config) if target is None else {}
        arguments = {
            "optimizer": optimizer or self.case.optimizers[0],
            "loss": (subject or self.case.subject).loss,
            **config,
            **options,
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        schedule = schedule or self.schedule(self.model(subject))
        if self.device.type != "cpu" and any(parameter.is_meta for parameter in schedule.model.parameters()):
            given.setdefault("device", self.device)  # without one, such a model is initialized on the CPU
        return build(schedule, target or self.case.dialect_name, **given)

    def build_with(self, schedule: Schedule, options: Mapping[str, Any]) -> Engine:
        """Build with these options of the dialect and no others."""
        return build(schedule, self.case.dialect_name, optimizer=self.case.optimizers[0], **options)

    def evaluator(self, schedule: Schedule | None = None, **options: Any) -> Engine:
        """An engine without an optimizer."""
        return build(
            schedule or self.schedule(),
            self.case.dialect_name,
            **{"loss": self.case.loss, **self.case.config, **options},
        )

    def train_in_plain_torch(
        self,
        batches: Sequence[Any],
        *,
        subject: Subject | None = None,
        optimizer: OptimizerFactory | None = None,
        max_grad_norm: float | None = None,
        **how: Any,
    ) -> Training:
        """Train the reference model on these batches in plain PyTorch; ``how`` as for the function of this name."""
        return train_in_plain_torch(
            self.model(subject),
            batches,
            optimizer or self.case.optimizers[0],
            loss=(subject or self.case.subject).loss,
            max_grad_norm=max_grad_norm,
            **how,
        )

    def compare_with_plain_training(
        self,
        *,
        subject: Subject | None = None,
        steps: bool = False,
        optimizer: OptimizerFactory | None = None,
        max_grad_norm: float | None = None,
        under: str,
        hint: str,
    ) -> None:
        """Train three steps both ways.

        Args:
            under: the special condition, for the message, e.g. ``"tied weights"``.
            hint: the way out.

        Raises:
            CheckError: losses, gradient norms or state dicts differ.
        """
        batches = self.batches(3, subject)
        expected = self.train_in_plain_torch(batches, subject=subject, optimizer=optimizer, max_grad_norm=max_grad_norm)
        schedule = self.schedule(self.model(subject), steps=steps)
        engine = self.engine(schedule, subject=subject, optimizer=optimizer, max_grad_norm=max_grad_norm)
        self.require_same(expected.named(), train(engine, batches).named(), under=under, hint=hint)

    def require_same(
        self, expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], *, under: str, hint: str
    ) -> None:
        """Hold tensors against those of plain training, up to the tolerance of the case.

        Raises:
            CheckError: the first differences are named.
        """
        lines = differences(expected, got, tolerance=self.case.allowed)
        if lines:
            raise CheckError(
                f"training is not that of the plain model, {under}",
                required="the losses, gradient norms and state dict of plain training with the same batches",
                got="\n".join([*lines[:3], *([f"and {len(lines) - 3} more"] if len(lines) > 3 else [])]),
                hint=hint,
            )


@contextlib.contextmanager
def open_bench(case: DialectCase) -> Iterator[DialectBench]:
    """Open a bench in a registry with the dialect, and in a process group of one if needed.

    Raises:
        PluginError: no such dialect is installed, or it is not usable.
        CheckError: the class given is not the one that is installed under its name.
    """
    registry, cls = current_registry(), case.target
    if isinstance(cls, str):
        with process_group_of_one(resolve_device(case.device), case.needs_process_group):
            yield DialectBench(case, registry.load(cls, "dialects"), registry)
        return
    if cls.name not in registry.names("dialects"):
        registry = Registry.discover()
        registry.register(cls, kind="dialects")
    installed = registry.load(cls.name, "dialects")
    if installed is not cls:
        raise CheckError(
            f"the target '{cls.name}' is another class than the case's",
            required=f"{cls.__module__}:{cls.__qualname__}",
            got=f"{installed.__module__}:{installed.__qualname__}",
            hint="correct the entry point, or the name of the class",
        )
    with use_registry(registry), process_group_of_one(resolve_device(case.device), case.needs_process_group):
        yield DialectBench(case, cls, registry)


@contextlib.contextmanager
def process_group_of_one(device: torch.device, needed: bool = True) -> Iterator[None]:
    """A process group of this process alone, for tensors on a device, during the block, unless there is one."""
    import torch.distributed as dist

    if not needed or dist.is_initialized():
        yield
        return
    dist.init_process_group(backend_for(device, 1), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
