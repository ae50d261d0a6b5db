"""What the checks of a dialect start from: fresh models, batches, schedules, and engines built for its target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from slapo_core.building.phases import build
from slapo_core.errors import SlapoError
from slapo_core.plugins import current_registry, use_registry
from slapo_core.plugins.registry import Registry
from slapo_core.schedule.creation import create_schedule
from slapo_core.testing.bench import SEED, seeded
from slapo_core.testing.check import CheckError
from slapo_core.testing.dialects.case import DialectCase
from slapo_core.testing.dialects.models import Subject
from slapo_core.testing.dialects.training import Training, differences, train, train_by_hand

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.dialect import Dialect
    from slapo_core.spec.engine import Engine
    from slapo_core.spec.request import OptimizerFactory

__all__ = ["DialectBench", "open_bench", "process_group_of_one"]


@dataclass(frozen=True)
class DialectBench:
    """Makes what a check needs of a case; a ``subject`` takes the place of the case's model, batch and loss.

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
                "the case's model is no model",
                required="model=: a function that returns a torch.nn.Module",
                got=repr(model),
                hint="model=lambda: MyModel(...)",
            )
        return model.to(self.case.dtype)

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
        return tensor.to(self.case.dtype) if tensor.is_floating_point() else tensor

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
        return build(schedule or self.schedule(self.model(subject)), target or self.case.dialect_name, **given)

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

    def train_by_hand(
        self,
        batches: Sequence[Any],
        *,
        subject: Subject | None = None,
        optimizer: OptimizerFactory | None = None,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
    ) -> Training:
        """What plain PyTorch makes of the reference model with these batches."""
        return train_by_hand(
            self.model(subject),
            batches,
            optimizer or self.case.optimizers[0],
            loss=(subject or self.case.subject).loss,
            max_grad_norm=max_grad_norm,
            accumulate=accumulate,
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
            under: what is special here, for the message, e.g. ``"tied weights"``.
            hint: the way out.

        Raises:
            CheckError: losses, gradient norms or state dicts differ.
        """
        batches = self.batches(3, subject)
        expected = self.train_by_hand(batches, subject=subject, optimizer=optimizer, max_grad_norm=max_grad_norm)
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
    """A bench, in a registry that knows the dialect, and in a process group of one where the case needs one.

    Raises:
        PluginError: no such dialect is installed, or it is not usable.
        CheckError: the class given is not the one that is installed under its name.
    """
    registry, cls = current_registry(), case.target
    if isinstance(cls, str):
        with process_group_of_one(case.needs_process_group):
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
    with use_registry(registry), process_group_of_one(case.needs_process_group):
        yield DialectBench(case, cls, registry)


@contextlib.contextmanager
def process_group_of_one(needed: bool = True) -> Iterator[None]:
    """A process group of this process alone, for the duration of the block, unless there is one."""
    import torch.distributed as dist

    if not needed or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
