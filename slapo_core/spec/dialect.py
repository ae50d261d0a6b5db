"""The base class of runtimes that train a scheduled model, and helpers for their plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_core.errors import ArgumentError, BuildError, HookError, TraceError
from slapo_core.spec.mesh import Mesh

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.engine import Engine
    from slapo_core.spec.pipeline import Value
    from slapo_core.spec.primitive import Violation
    from slapo_core.spec.request import BuildRequest, ScheduledModel, StagedModel

__all__ = [
    "BuildArguments",
    "Dialect",
    "Plan",
    "arguments_as_options",
    "boundaries",
    "checked_axes",
    "device_of",
    "parameter_types",
    "plan_of",
    "samples_of",
    "topology",
]


@dataclass(frozen=True)
class BuildArguments:
    """The user's arguments of ``build`` as far as they can be part of a plan.

    Args:
        has_optimizer: whether there is a factory; without one, and without one by the options, the
            engine can only evaluate.
        has_loss: whether there is a loss; else it is that of the output.
        max_grad_norm: the largest L2 norm of all gradients, e.g. ``1.0``; None does not clip.
        accumulate: how many micro-batches a training step takes; default 1.
        device: where the user wants the model; None leaves it where it is.
    """

    has_optimizer: bool = False
    has_loss: bool = False
    max_grad_norm: float | None = None
    accumulate: int = 1
    device: torch.device | None = None


@dataclass(frozen=True)
class Plan:
    """The plan of a build, as data to print and compare beforehand.

    Args:
        target: the dialect's name, e.g. ``"torch"``.
        steps: one line each, in order, e.g. ``"DistributedDataParallel over mesh_dim 'dp' (2 ranks)"``.
        config: the options after defaults were filled in; the same on every rank, which ``build`` makes sure of.
        notes: names in ``config`` that are not options but explain them, e.g. ``("origins",)``: the
            arguments of ``build``, reasons. Ranks may differ in them.
    """

    target: str
    steps: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"plan for target '{self.target}'", *(f"  {step}" for step in self.steps)])


class Dialect(ABC):
    """A runtime: PyTorch itself, DeepSpeed, Megatron-core, ...

    ``build`` calls :meth:`check`, :meth:`options`, :meth:`plan` and :meth:`build` in this order, on every rank. All but
    the last must change nothing, so that a refusal leaves the schedule as it was.

    Attributes:
        name: what users pass as ``build(sch, target=...)``.
        supports: the mesh dimensions the runtime can run, e.g. ``frozenset({"dp", "tp"})``; ``build`` refuses larger
            ones than 1 that are not among them.
        takes_tensors: whether :meth:`build` takes the tensors one by one, through ``request.materialize()``, because
            it partitions them as they come. Otherwise they all have their values before it is called.
        accumulates: whether a training step of the engine takes ``request.micro_batches(batch)`` one after the other;
            ``build(..., accumulate=2)`` is refused otherwise.
    """

    name: ClassVar[str]
    supports: ClassVar[frozenset[str]]
    takes_tensors: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False

    def check(self, schedule: ScheduledModel) -> Iterable[Violation]:
        """Every reason why this schedule cannot be handed to the runtime."""
        return ()

    def options(self, config: Mapping[str, Any], arguments: BuildArguments) -> Mapping[str, Any]:
        """The options that :meth:`plan` is given; pure.

        For a runtime that has options of its own for what ``build`` takes as arguments, e.g. how often it accumulates:
        put here into the options, they are seen in the plan, and one that says something else is refused.

        Args:
            config: the options as the user gave them to ``build``; returned as they are by default.
            arguments: the user's other arguments.

        Raises:
            BuildError: an option contradicts an argument.
        """
        return config

    @abstractmethod
    def plan(self, schedule: ScheduledModel, config: Mapping[str, Any]) -> Plan:
        """Return the plan of :meth:`build`, with all options filled in; pure.

        Given the options of its own plan, it gives that plan again.

        Raises:
            BuildError: an option that the runtime does not have, or a bad value.
        """

    def stage_ranks(self, plan: Plan, stages: int, pp: int) -> tuple[int, ...]:
        """Return the pipeline rank of each stage; pure. Called for a mesh with several pipeline ranks.

        Args:
            plan: what :meth:`plan` gave.
            stages: how many the model is cut into, a multiple of ``pp``.
            pp: the size of that mesh dimension.

        Returns:
            one rank for each stage, each rank at least once: ``(0, 0, 1, 1)``, the default: neighbors share a rank;
            ``(0, 1, 0, 1)`` for a loop, ``(0, 1, 1, 0)`` for a V.
        """
        return tuple(stage * pp // stages for stage in range(stages))

    @abstractmethod
    def build(self, plan: Plan, request: BuildRequest) -> Engine:
        """Hand the scheduled model to the runtime.

        Args:
            plan: what :meth:`plan` gave; all ranks have the same.
            request: the model, its state, and the user's arguments of ``build``.
        """


def arguments_as_options(arguments: BuildArguments) -> dict[str, Any]:
    """The user's arguments of ``build``, as plain values that every rank can compare."""
    return {
        "accumulate": arguments.accumulate,
        "device": None if arguments.device is None else arguments.device.type,
        "has_loss": arguments.has_loss,
        "has_optimizer": arguments.has_optimizer,
        "max_grad_norm": arguments.max_grad_norm,
    }


def plan_of(dialect: Dialect, schedule: ScheduledModel, options: Mapping[str, Any], **given: Any) -> Plan:
    """Return the plan of a build with a dialect, without building.

    Args:
        dialect: whose plan it is.
        schedule: with a mesh that may be only declared.
        options: of the dialect, as the user gave them.
        given: ``optimizer``, ``loss``, ``max_grad_norm``, ``device`` and ``accumulate``, as for ``build``; of the first
            two, whether they are there is all that is asked.

    Raises:
        BuildError: the options contradict the schedule or one of the arguments, or the runtime refuses them.
    """
    import torch

    for mesh_dim, size in schedule.mesh.sizes.items() if schedule.mesh is not None else ():
        if size > 1 and mesh_dim not in dialect.supports:
            raise BuildError(
                f"target '{dialect.name}' cannot run this schedule: it does not run mesh_dim '{mesh_dim}' "
                f"(size {size}); it runs {', '.join(sorted(dialect.supports)) or 'none'}"
            )
    device = given.pop("device", None)
    arguments = BuildArguments(
        has_optimizer=given.pop("optimizer", None) is not None,
        has_loss=given.pop("loss", None) is not None,
        device=None if device is None else torch.device(device),
        **given,
    )
    return dialect.plan(schedule, dialect.options(options, arguments))


def checked_axes(axes: Any) -> dict[str, int | None]:
    """The option ``batch_axes`` of dialects.

    Args:
        axes: as the user gave it; None for none.

    Raises:
        BuildError: it is something else than an axis, or None, for names of arguments.
    """
    axes = axes if axes is not None else {}
    is_right = isinstance(axes, Mapping) and all(
        isinstance(key, str) and (axis is None or type(axis) is int) for key, axis in axes.items()
    )
    if not is_right:
        raise BuildError(
            f"batch_axes must be an axis, or None, for arguments of the forward (got {axes!r})",
            hint='batch_axes={"bias": None, "x": 1}',
        )
    return dict(axes)


def device_of(schedule: ScheduledModel, asked: str | None) -> str:
    """The type of the device that a model is going to train on, e.g. ``"cpu"``.

    Args:
        schedule: the schedule to build.
        asked: the user's choice; None without one.
    """
    if asked is not None:
        return asked
    mesh = schedule.mesh
    if mesh is not None and mesh.device_mesh is not None:
        return str(mesh.device_mesh.device_type)
    found = {tensor.device.type for tensor in schedule.model.parameters()} - {"meta"}
    return sorted(found)[-1] if found else "cpu"


def parameter_types(schedule: ScheduledModel) -> frozenset[str]:
    """The types of the parameters that are floating-point numbers, e.g. ``{"float32"}``."""
    return frozenset(
        str(one.dtype).removeprefix("torch.") for one in schedule.model.parameters() if one.dtype.is_floating_point
    )


def samples_of(inputs: Any, axes: Mapping[str, int | None]) -> int | None:
    """Return the number of samples in a batch; None if its tensors differ.

    Args:
        inputs: a batch in any form of ``train_step``.
        axes: as :func:`checked_axes` gives them.
    """
    import torch

    from slapo_core.private import tree_leaves

    items = inputs.items() if isinstance(inputs, Mapping) else [("", inputs)]
    found = set()
    for name, value in items:
        axis = axes.get(name, 0) if isinstance(name, str) else 0
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and axis is not None and leaf.dim() > axis:
                found.add(leaf.shape[axis])
    return found.pop() if len(found) == 1 else None


def boundaries(schedule: ScheduledModel, ask: Callable[[], StagedModel]) -> Iterator[str]:
    """Describe the values that each stage sends to the next, by the example inputs.

    Args:
        schedule: the planned schedule, with several ranks along ``pp``.
        ask: for its stages, e.g. ``lambda: slapo_core.stages(schedule)``.
    """
    if schedule.example_inputs is None:
        yield "what crosses stages is known with the first batch: there are no example inputs"
        return
    try:
        asked = ask()
    except (ArgumentError, HookError, TraceError) as error:  # build says it, and ends there
        yield f"what crosses stages is not known: {error.message}"
        return
    values = asked.partition.values
    for number, names in enumerate(asked.liveness.boundaries):
        sent = ", ".join(_shown(values[name]) for name in names)
        yield f"stage {number} sends stage {number + 1}: {sent or 'nothing'}"


def topology(mesh: Mesh) -> str:
    """``0: pp 0, dp 0; 1: pp 0, dp 1; ...``: which rank is which stage's, replica's and shard's."""
    lines = []
    for rank in range(mesh.world_size):
        place = Mesh(mesh.sizes, rank=rank)
        where = ", ".join(f"{name} {place.rank(name)}" for name, size in mesh.sizes.items() if size > 1)
        lines.append(f"{rank}: {where}")
    return "; ".join(lines)


def _shown(value: Value) -> str:
    """``transformer_h_3 (batch, 16, 32) float32``."""
    return f"{value.name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
