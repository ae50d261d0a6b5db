"""Provide fresh models, batches, schedules and engines for the checks of a dialect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import create_schedule
from slapo_core.errors import BuildError, SlapoError
from slapo_core.internals import Annotate, Internals
from slapo_core.plugins import Registry, current_registry, use_registry
from slapo_runtime.batches import micro_batches
from slapo_runtime.build import build
from slapo_runtime.losses import LossCall
from slapo_testing.bench import SEED, ScheduleSnapshot, require_module, seeded
from slapo_testing.check import CheckError
from slapo_testing.device import backend_for, resolve_device
from slapo_testing.dialects.case import DialectCase, Subject
from slapo_testing.private import tree_map_only
from slapo_testing.snapshot import listed

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Schedule
    from slapo_core.dialect import Dialect, Engine
    from slapo_runtime.context import LossFunction, OptimizerFactory


@dataclass(frozen=True)
class Training:
    """The results of some steps.

    Args:
        losses: loss of each step.
        norms: norm of all gradients before clipping, of each step; empty without clipping.
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
        """Return all tensors by a description, for comparison."""
        return {
            **{f"the loss of step {number}": loss for number, loss in enumerate(self.losses, start=1)},
            **{f"the gradient norm of step {number}": norm for number, norm in enumerate(self.norms, start=1)},
            **{f"'{name}' after step {len(self.losses)}": tensor for name, tensor in self.state.items()},
        }


def train(engine: Engine, batches: Sequence[Any], *, first: int = 0) -> Training:
    """Take a step with each batch.

    Args:
        engine: the engine.
        batches: one batch for each step.
        first: number of earlier steps: step n has the same RNG state in all runs.
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
        micro = micro_batches(batch, accumulate)
        with seeded(SEED + number):
            values = [compute_loss(each)[0] for each in micro]
        weights = [1.0 if loss_weight is None else float(loss_weight(each)) for each in micro]
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
    """Return loss and output of a plain model in evaluation mode."""
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
        expected: tensors by description.
        got: tensors by description.
        tolerance: relative to the largest element of the expected tensor; 0 requires equal bits.
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


def require_usable(before: ScheduleSnapshot, what: str) -> None:
    """Require that a schedule is unchanged, and usable for steps, undo and builds.

    Args:
        before: snapshot of the schedule.
        what: the failed call, for the message, e.g. ``"refusing micro_batches=0"``.

    Raises:
        CheckError: the schedule was changed, or cannot be used.
    """
    lines = before.differences()
    if lines:
        raise CheckError(
            f"{what} changes the schedule or its model",
            required="a bit-identical model, and a schedule with the same steps",
            got=listed(lines),
            hint="refuse in check() or plan(); in build(), change the model only after everything that can fail",
        )
    schedule = before.schedule
    name = next(name for name, _ in schedule.model.named_parameters())
    path, _, own_name = name.rpartition(".")
    try:
        Internals(schedule).apply(Internals(schedule).node(path), Annotate(own_name, "tried", True))
        schedule.undo()
        lines = before.differences()
        build(schedule, "torch")
    except Exception as error:
        raise CheckError(
            f"the schedule cannot be used after {what}",
            required="another step, undo(), and a build for target 'torch' succeed",
            got=f"{type(error).__name__}: {error}",
            hint="keep no state outside of the engine (e.g. an attribute of the model)",
        ) from error
    if lines:
        raise CheckError(
            f"undo() after {what} does not restore the model",
            required="bit-identical to before",
            got=listed(lines),
            hint="keep no state outside of the engine (e.g. an attribute of the model)",
        )


def require_equal(
    expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], violation: str, *, required: str, hint: str
) -> None:
    """Require equal bits.

    Raises:
        CheckError: with the first differences.
    """
    lines = differences(expected, got, tolerance=0)
    if lines:
        raise CheckError(violation, required=required, got="\n".join(lines[:3]), hint=hint)


def refusal(call: Callable[[], Any], what: str) -> BuildError:
    """Return the BuildError of a call that must be refused.

    Raises:
        CheckError: another error, or none.
    """
    try:
        call()
    except BuildError as error:
        return error
    except Exception as error:
        raise CheckError(
            f"{what} raises another error",
            required="BuildError",
            got=f"{type(error).__name__}: {error}",
            hint="check the arguments first, and raise BuildError",
        ) from error
    raise CheckError(f"{what} is not refused", required="BuildError", got="no error", hint="raise BuildError")


@dataclass(frozen=True)
class DialectBench:
    """Make models, batches and engines of a case, or of another ``subject``.

    Args:
        case: the dialect and the model to train.
        dialect: class of the dialect.
        registry: the registry in which ``build`` finds the dialect.
    """

    case: DialectCase
    dialect: type[Dialect]
    registry: Registry

    def model(self, subject: Subject | None = None, *, seed: int = SEED) -> nn.Module:
        """Make a model; equal weights for equal seeds."""
        with seeded(seed):
            model = (subject or self.case.subject).model()
        return require_module(model).to(self.device, self.case.dtype)

    @property
    def device(self) -> torch.device:
        """The device of models and batches."""
        return resolve_device(self.case.device)

    def meta_model(self) -> nn.Module:
        """Make the model of the case on the meta device."""
        with torch.device("meta"):
            return self.case.model().to(self.case.dtype)

    def batches(self, count: int, subject: Subject | None = None) -> list[Any]:
        """Make batches; equal numbers at each call."""
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
        """Make a schedule of a model, default the case's, with or without the case's steps."""
        model = self.model() if model is None else model
        if dict(mesh or {}).get("pp", 1) > 1:  # stages are cut on an example
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
        """Build an engine, with the case's options for the case's target.

        Args:
            schedule: default: a schedule without steps.
            subject: its loss is used.
            target: default: the case's target.
            optimizer: default: the first optimizer of the case.
            options: further arguments of ``build``; options of None are left out.
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
            given.setdefault("device", self.device)  # by default such a model is initialized on the CPU
        return build(schedule, target or self.case.dialect_name, **given)

    def build_with(self, schedule: Schedule, options: Mapping[str, Any]) -> Engine:
        """Build with these options of the dialect only."""
        return build(schedule, self.case.dialect_name, optimizer=self.case.optimizers[0], **options)

    def evaluator(self, schedule: Schedule | None = None, **options: Any) -> Engine:
        """Build an engine without an optimizer."""
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
        """Train the reference model in plain PyTorch; see the function of this name."""
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
        """Compare three steps with plain training.

        Args:
            under: the condition, for the message, e.g. ``"tied weights"``.
            hint: the correction.

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
        """Compare tensors with plain training, up to the tolerance of the case.

        Raises:
            CheckError: with the first differences.
        """
        lines = differences(expected, got, tolerance=self.case.allowed)
        if lines:
            raise CheckError(
                f"training differs from the plain model, {under}",
                required="the losses, gradient norms and state dict of plain training with the same batches",
                got="\n".join([*lines[:3], *([f"and {len(lines) - 3} more"] if len(lines) > 3 else [])]),
                hint=hint,
            )


@contextlib.contextmanager
def open_bench(case: DialectCase) -> Iterator[DialectBench]:
    """Make a bench in a registry with the dialect, and in a process group of one if needed.

    Raises:
        PluginError: the dialect is not installed or not usable.
        CheckError: another class is installed under the name of the case's class.
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
            f"target '{cls.name}' is not the class of the case",
            required=f"{cls.__module__}:{cls.__qualname__}",
            got=f"{installed.__module__}:{installed.__qualname__}",
            hint="correct the entry point, or the name of the class",
        )
    with use_registry(registry), process_group_of_one(resolve_device(case.device), case.needs_process_group):
        yield DialectBench(case, cls, registry)


@contextlib.contextmanager
def process_group_of_one(device: torch.device, needed: bool = True) -> Iterator[None]:
    """Initialize a process group of this process during the block, unless there is one."""
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
