"""Parts of plans that several dialects make: options, devices, topology, what crosses stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slapo_core.dialect import BuildArguments, Dialect, Plan
from slapo_core.errors import ArgumentError, BuildError, HookError, TraceError
from slapo_core.layout import Mesh
from slapo_core.primitive import Violation

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.options import Options
    from slapo_runtime.stages import StagedModel
    from slapo_runtime.stages.partition import Value


def plan_of(dialect: Dialect, schedule: Schedule, options: Mapping[str, Any], **given: Any) -> Plan:
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
    return with_choices(dialect.plan(schedule, dialect.options(options, arguments)), schedule)


def with_choices(plan: Plan, schedule: Schedule) -> Plan:
    """Add the choices that were left to steps, e.g. the implementation of a loss, as they noted them."""
    lines = [
        f"{effect.removeprefix(_CHOICE)} ({record})"
        for record in schedule.records
        for effect in record.effects
        if effect.startswith(_CHOICE)
    ]
    return replace(plan, steps=(*plan.steps, *lines)) if lines else plan


_CHOICE = "choice: "
"""What `Edit.note` begins with, of a choice that plans show."""


@dataclass(frozen=True)
class ScheduleFacts:
    """What the schedule and the arguments of ``build`` decide of a runtime's configuration.

    Args:
        mesh: as messages show it, e.g. ``"{'pp': 2, 'dp': 2}"``; ``"none"`` without one.
        dp: the number of replicas.
        pp: the number of ranks of the pipeline.
        tp: the number of ranks that hold shards of a parameter.
        device: the type of the device that the model trains on, e.g. ``"cpu"``.
        dtypes: of the parameters, those that are floating-point numbers, e.g. ``{"float32"}``.
        trained_dtypes: of those that are trained; of all where none is.
        split: names of the parameters that a step splits over ``tp``; empty with one rank along it.
        samples: in the example inputs, which are the batch of a replica; None where they do not say.
        accumulate: the micro-batches that the user asks for; None where nothing is said.
        max_grad_norm: the norm that the user asks for; None where nothing is said.
        has_optimizer: whether the user gives a factory; None if unknown, in a plan without ``build``.
        has_loss: whether the user gives a loss.
        has_lr_scheduler: whether the user gives a scheduler of the learning rate.
    """

    mesh: str
    dp: int
    pp: int
    tp: int
    device: str
    dtypes: frozenset[str]
    trained_dtypes: frozenset[str]
    split: tuple[str, ...]
    samples: int | None
    accumulate: int | None
    max_grad_norm: float | None
    has_optimizer: bool | None
    has_loss: bool
    has_lr_scheduler: bool

    @classmethod
    def of(cls, schedule: Schedule, options: Mapping[str, Any]) -> ScheduleFacts:
        """Read them from a schedule, and from the options of a dialect.

        Args:
            schedule: to build.
            options: with ``arguments``, those of ``build`` (:func:`slapo_core.dialect.arguments_as_options`), and
                ``batch_axes``.
        """
        mesh, arguments = schedule.mesh, options.get("arguments") or {}
        sizes = {name: mesh.size(name) if mesh is not None else 1 for name in ("dp", "pp", "tp")}
        accumulate = arguments.get("accumulate", 1)
        dtypes = parameter_types(schedule)
        trained = frozenset(_name(one.dtype) for one in schedule.model.parameters() if one.requires_grad)
        return cls(
            mesh="none" if mesh is None else str(mesh),
            **sizes,
            device=device_of(schedule, arguments.get("device")),
            dtypes=dtypes,
            trained_dtypes=trained or dtypes,
            split=tuple(_split(schedule)) if sizes["tp"] > 1 else (),
            samples=samples_of(schedule.example_inputs, options.get("batch_axes") or {}),
            accumulate=accumulate if accumulate > 1 else None,
            max_grad_norm=arguments.get("max_grad_norm"),
            has_optimizer=arguments.get("has_optimizer"),
            has_loss=bool(arguments.get("has_loss")),
            has_lr_scheduler=bool(arguments.get("has_lr_scheduler")),
        )

    def micro_batches(self, options: Options, key: str) -> int:
        """Fill in the number of micro-batches of a training step.

        It is ``build(accumulate=...)``, else what the key says, else one for each rank of the pipeline.

        Args:
            options: of the runtime.
            key: of the number.
        """
        if self.accumulate is not None:
            return int(options.own(key, self.accumulate, f"build(accumulate={self.accumulate})", "say it once"))
        if self.pp > 1:
            return int(options.default(key, self.pp, f"one micro-batch for each of {self.pp} ranks of the pipeline"))
        return int(options.default(key, 1, "nothing is accumulated"))


def complex_parameters(schedule: Schedule, runtime: str) -> Iterator[Violation]:
    """Refuse trained complex parameters, for a runtime that reduces and clips real gradients only."""
    found = [name for name, one in schedule.model.named_parameters() if one.is_complex() and one.requires_grad]
    if found:
        more = f" and {len(found) - 1} more" if found[1:] else ""
        yield Violation(
            f"'{found[0]}'{more} is complex, and {runtime} reduces gradients of real types only",
            hint='target="torch", or a real parameter and torch.view_as_complex in the forward',
        )


def _split(schedule: Schedule) -> Iterator[str]:
    for node in schedule.root.walk():
        for name in node.parameters:
            if any(mesh_dim == "tp" for mesh_dim, _ in node.layout(name).shards()):
                yield f"{node.path}.{name}" if node.path else name


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


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


def device_of(schedule: Schedule, asked: str | None) -> str:
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


def parameter_types(schedule: Schedule) -> frozenset[str]:
    """The types of the parameters that are floating-point numbers, e.g. ``{"float32"}``."""
    return frozenset(_name(one.dtype) for one in schedule.model.parameters() if one.dtype.is_floating_point)


def samples_of(inputs: Any, axes: Mapping[str, int | None]) -> int | None:
    """Return the number of samples in a batch; None if its tensors differ.

    Args:
        inputs: a batch in any form of ``train_step``.
        axes: as :func:`checked_axes` gives them.
    """
    import torch

    from slapo_runtime.private import tree_leaves

    items = inputs.items() if isinstance(inputs, Mapping) else [("", inputs)]
    found = set()
    for name, value in items:
        axis = axes.get(name, 0) if isinstance(name, str) else 0
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and axis is not None and leaf.dim() > axis:
                found.add(leaf.shape[axis])
    return found.pop() if len(found) == 1 else None


def boundaries(schedule: Schedule, ask: Callable[[], StagedModel]) -> Iterator[str]:
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
    return f"{value.name} {tuple(value.shape)} {_name(value.dtype)}"
