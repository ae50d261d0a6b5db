"""Parts of the plans of several dialects: options, devices, topology, values between stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slapo_core.dialect import BuildArguments, Dialect, Plan
from slapo_core.effects import Collective
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
        dialect: of the plan.
        schedule: its mesh may be abstract.
        options: of the dialect, as the user gave them.
        given: ``optimizer``, ``loss``, ``max_grad_norm``, ``device`` and ``accumulate``, as for ``build``; only the
            presence of the first two counts.

    Raises:
        BuildError: the options contradict the schedule or one of the arguments, or the runtime refuses them.
    """
    import torch

    for reason in unsupported_mesh_dims(dialect, schedule):
        raise BuildError(f"target '{dialect.name}' cannot run this schedule: {reason}")
    device = given.pop("device", None)
    arguments = BuildArguments(
        has_optimizer=given.pop("optimizer", None) is not None,
        has_loss=given.pop("loss", None) is not None,
        device=None if device is None else torch.device(device),
        **given,
    )
    return with_choices(dialect.plan(schedule, dialect.options(options, arguments)), schedule)


def unsupported_mesh_dims(dialect: Dialect, schedule: Schedule) -> Iterator[str]:
    """Yield a reason for every mesh dimension that a dialect does not run."""
    for mesh_dim, size in schedule.mesh.sizes.items() if schedule.mesh is not None else ():
        if size > 1 and mesh_dim not in dialect.supports:
            known = ", ".join(sorted(dialect.supports)) or "none"
            yield f"it does not run mesh_dim '{mesh_dim}' (size {size}); it runs {known}"


def foreign_steps(schedule: Schedule, dialect: Dialect) -> Iterator[str]:
    """Name the first step that another target carries out, and the option of this one that does the same."""
    for record in schedule.records:
        targets = record.primitive.targets
        if targets is not None and dialect.name not in targets:
            option = dialect.instead.get(record.name)
            hint = f" (leave it out, and give build({option}))" if option else ""
            yield f"{record} is for target {' or '.join(map(repr, sorted(targets)))}{hint}"
            return


def with_choices(plan: Plan, schedule: Schedule) -> Plan:
    """Add the choices that steps noted, e.g. the implementation of a loss."""
    lines = [
        f"{effect.removeprefix(_CHOICE)} ({record})"
        for record in schedule.records
        for effect in record.edits
        if effect.startswith(_CHOICE)
    ]
    return replace(plan, steps=(*plan.steps, *lines)) if lines else plan


_CHOICE = "choice: "
"""The prefix of an `Edit.note` about a choice, for plans."""


@dataclass(frozen=True)
class ScheduleFacts:
    """The facts of a schedule and the arguments of ``build`` that decide a runtime's configuration.

    Args:
        mesh: as in messages, e.g. ``"{'pp': 2, 'dp': 2}"``; ``"none"`` without one.
        dp: the number of replicas.
        pp: the number of pipeline ranks.
        tp: the number of tensor-parallel ranks.
        device: the type of the training device, e.g. ``"cpu"``.
        dtypes: of the floating-point parameters, e.g. ``{"float32"}``.
        trained_dtypes: of the trained parameters; of all if none is trained.
        split: names of the parameters that steps split over ``tp``; empty with one rank along it.
        samples: in the example inputs, which are the batch of a replica; None if unknown.
        accumulate: the user's number of micro-batches; None without one.
        max_grad_norm: the user's norm; None without one.
        has_optimizer: whether the user gives a factory; None if unknown, in a plan without ``build``.
        has_loss: whether the user gives a loss.
        has_lr_scheduler: whether the user gives a learning-rate scheduler.
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
        """Read the facts from a schedule, and from the options of a dialect.

        Args:
            schedule: to build.
            options: with ``arguments`` (:func:`slapo_core.dialect.arguments_as_options`) and ``batch_axes``.
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

        By ``build(accumulate=...)``, else the key's value, else one for each pipeline rank.

        Args:
            options: of the runtime.
            key: of the number.
        """
        if self.accumulate is not None:
            return int(options.own(key, self.accumulate, f"build(accumulate={self.accumulate})", "say it once"))
        if self.pp > 1:
            return int(options.default(key, self.pp, f"one micro-batch for each of {self.pp} ranks of the pipeline"))
        return int(options.default(key, 1, "nothing is accumulated"))


def stage_messages(mesh: Mesh, *, over: str = "pp") -> Iterator[Collective]:
    """Yield the messages between stages that this rank of a pipeline makes at least, for ``Plan.effects``.

    Args:
        mesh: of the schedule.
        over: the mesh dimension of their process group.
    """
    if mesh.rank("pp") < mesh.size("pp") - 1:
        yield Collective("send", over, "step")
    if mesh.rank("pp") > 0:
        yield Collective("recv", over, "step")


def at_modules(effect: Collective, names: Iterable[str]) -> Iterator[Collective]:
    """Yield an effect at the module of each parameter: one that a pipeline rank without these modules does not show."""
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        yield replace(effect, at=path)


def complex_parameters(schedule: Schedule, runtime: str) -> Iterator[Violation]:
    """Refuse trained complex parameters, for a runtime that reduces and clips real gradients only."""
    found = [name for name, one in schedule.model.named_parameters() if one.is_complex() and one.requires_grad]
    if found:
        more = f" and {len(found) - 1} more" if found[1:] else ""
        yield Violation(
            f"'{found[0]}'{more} is complex, but {runtime} reduces gradients of real types only",
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
    """Check the option ``batch_axes`` of dialects.

    Args:
        axes: as the user gave it; None for none.

    Raises:
        BuildError: it does not map names of arguments to an axis or None.
    """
    axes = axes if axes is not None else {}
    is_right = isinstance(axes, Mapping) and all(
        isinstance(key, str) and (axis is None or type(axis) is int) for key, axis in axes.items()
    )
    if not is_right:
        raise BuildError(
            f"batch_axes must map arguments of the forward to an axis or None (got {axes!r})",
            hint='batch_axes={"bias": None, "x": 1}',
        )
    return dict(axes)


def device_of(schedule: Schedule, asked: str | None) -> str:
    """Return the type of a model's training device, e.g. ``"cpu"``.

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
    """Return the types of the floating-point parameters, e.g. ``{"float32"}``."""
    return frozenset(_name(one.dtype) for one in schedule.model.parameters() if one.dtype.is_floating_point)


def samples_of(inputs: Any, axes: Mapping[str, int | None]) -> int | None:
    """Return the number of samples in a batch; None if its tensors differ.

    Args:
        inputs: a batch of ``train_step``.
        axes: from :func:`checked_axes`.
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
        ask: gives its stages, e.g. ``lambda: slapo_core.stages(schedule)``.
    """
    if schedule.example_inputs is None:
        yield "the values sent between stages are unknown before the first batch: there are no example inputs"
        return
    try:
        stages = ask()
    except (ArgumentError, HookError, TraceError) as error:  # build raises it
        yield f"the values sent between stages are unknown: {error.message}"
        return
    values = stages.partition.values
    for number, names in enumerate(stages.liveness.boundaries):
        sent = ", ".join(_shown(values[name]) for name in names)
        yield f"stage {number} sends stage {number + 1}: {sent or 'nothing'}"


def topology(mesh: Mesh) -> str:
    """Return the coordinates of all ranks: ``0: pp 0, dp 0; 1: pp 0, dp 1; ...``."""
    lines = []
    for rank in range(mesh.world_size):
        place = Mesh(mesh.sizes, rank=rank)
        where = ", ".join(f"{name} {place.rank(name)}" for name, size in mesh.sizes.items() if size > 1)
        lines.append(f"{rank}: {where}")
    return "; ".join(lines)


def _shown(value: Value) -> str:
    """Return ``transformer_h_3 (batch, 16, 32) float32``."""
    return f"{value.name} {tuple(value.shape)} {_name(value.dtype)}"
