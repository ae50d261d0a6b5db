"""Find the dialect of a build, check the schedule against it, and find the stages."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.dialect import BuildArguments
from slapo_core.errors import ArgumentError, BuildError, HookError, OptimizerError, SealedError, SlapoError, TraceError
from slapo_core.layout import accelerator, device_of
from slapo_core.schedule.mesh_dims import sharded_mesh_dims, unused_mesh_dims
from slapo_runtime.consistency import refuse_if_incomplete
from slapo_runtime.pipeline.batches import InputSignature, bound_batch, in_mode
from slapo_runtime.pipeline.stages import Staged, needing, staged

if TYPE_CHECKING:
    from slapo_core.dialect import Dialect, Engine, Plan
    from slapo_core.schedule.schedule import Schedule
    from slapo_runtime.partition import Output
    from slapo_runtime.request import BuildRequest


@dataclass(frozen=True)
class Arguments:
    """The arguments of :func:`slapo_core.build`, as they were given."""

    optimizer: Any
    weights: Any
    loss: Any
    max_grad_norm: float | None
    device: torch.device | str | None
    seed: int
    accumulate: int = 1
    elementwise: bool = False

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            OptimizerError: an optimizer instead of a factory.
            BuildError: a bad number, or a loss that cannot be called.
        """
        optimizer = self.optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            name = type(optimizer).__name__
            rate = optimizer.param_groups[0].get("lr")
            shown = f", lr={float(rate):g}" if isinstance(rate, (int, float)) else ""
            raise OptimizerError(
                f"optimizer must be a factory (got the optimizer {name}, made before the schedule was built, which "
                "holds the parameters of the reference model)",
                hint=f"build(sch, optimizer=lambda params: torch.optim.{name}(params{shown}))",
            )
        if optimizer is not None and not callable(optimizer):
            raise OptimizerError(
                f"optimizer must be a factory (got {optimizer!r})",
                hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))",
            )
        if self.loss is not None and not callable(self.loss):
            raise BuildError(
                f"loss must be a function of the output and the batch (got {self.loss!r})",
                hint="loss=lambda output, batch: ...",
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise BuildError(
                f"max_grad_norm must be positive (got {self.max_grad_norm})", hint="max_grad_norm=1.0, or None"
            )

        if type(self.accumulate) is not int or self.accumulate < 1:
            raise BuildError(
                f"accumulate must be a positive number of micro-batches (got {self.accumulate!r})", hint="accumulate=4"
            )

    def for_plan(self) -> BuildArguments:
        """Return the arguments that a dialect may put into its plan."""
        return BuildArguments(
            has_optimizer=self.optimizer is not None,
            has_loss=self.loss is not None,
            max_grad_norm=self.max_grad_norm,
            accumulate=self.accumulate,
            device=self.torch_device(),
        )

    def torch_device(self) -> torch.device | None:
        """The device with its index, so that it compares equal to that of a tensor."""
        if self.device is None:
            return None
        device = torch.device(self.device)
        return device_of(device.type) if device.index is None and device.type not in ("cpu", "meta") else device


@dataclass(frozen=True)
class Target:
    """A dialect with the plugin that it comes from.

    Args:
        dialect: the dialect.
        label: its plugin, e.g. ``"slapo-megatron 0.1.0"``.
        is_own: whether it is slapo-runtime's: what its ``build`` raises is then the user's own, such as the optimizer's
            factory, and is not given another name.
    """

    dialect: Dialect
    label: str
    is_own: bool

    @classmethod
    def named(cls, name: str, schedule: Schedule) -> Target:
        """Find a dialect, and activate the hooks of its plugin in the schedule.

        Raises:
            SealedError: the schedule was built or sealed before.
            PluginError: no such target is installed, or it is not usable.
            BuildError: the dialect cannot be made.
        """
        if schedule.is_sealed:
            raise SealedError(
                "cannot build: the schedule was built or sealed before, and the originals are gone",
                hint="create a new schedule of a fresh model; sch.to_json() and replay() repeat the steps",
            )
        entry = schedule.registry.resolve("dialects", name)
        dialect = schedule.registry.load(entry)
        is_own = entry.distribution == "slapo-runtime"
        with _blamed(entry.label, name, "__init__", is_own=is_own):
            target = cls(dialect(), entry.label, is_own)
        schedule.hooks.activate(entry.distribution, version=entry.version)
        return target

    def plan(self, schedule: Schedule, config: Mapping[str, Any], arguments: BuildArguments) -> Plan:
        """Make the dialect's plan.

        Args:
            schedule: the schedule to build.
            config: the options of the dialect, as the user gave them.
            arguments: the user's other arguments.

        Raises:
            BuildError: it cannot run this schedule, or a plugin says that the schedule is incomplete: every reason is
                given; or an option is wrong.
        """
        self._check(schedule, trains=arguments.has_optimizer or not self.is_own)  # others: by their options too
        if arguments.accumulate > 1 and not self.dialect.accumulates:
            raise BuildError(
                f"target '{self.dialect.name}' does not accumulate gradients (got accumulate={arguments.accumulate})",
                hint='accumulate=1, or target="torch"',
            )
        with self._blamed("options"):
            options: Any = self.dialect.options(config, arguments)
        if not isinstance(options, Mapping):
            raise BuildError(
                f"target '{self.dialect.name}' of {self.label} must give a mapping of options (got {options!r})",
                plugin=self.label,
                hint="options(config, arguments) returns {**config, ...}",
            )
        with self._blamed("plan"):
            return self.dialect.plan(schedule, options)

    def stage_ranks(self, plan: Plan, stages: int, pp: int) -> tuple[int, ...]:
        """Return the pipeline rank of each stage.

        Raises:
            BuildError: the dialect's answer leaves out a stage or a rank.
        """
        with self._blamed("stage_ranks"):
            ranks = self.dialect.stage_ranks(plan, stages, pp)
        if not isinstance(ranks, tuple) or len(ranks) != stages or set(ranks) != set(range(pp)):
            raise BuildError(
                f"target '{self.dialect.name}' of {self.label} must give one of the {pp} ranks along 'pp' for each of "
                f"{stages} stages, and each rank a stage (got {ranks!r})",
                plugin=self.label,
                hint="stage_ranks(plan, 4, 2) == (0, 0, 1, 1)",
            )
        return ranks

    def build(self, plan: Plan, request: BuildRequest) -> Engine:
        """Let the dialect make its engine."""
        with self._blamed("build"):
            return self.dialect.build(plan, request)

    def _check(self, schedule: Schedule, *, trains: bool) -> None:
        mesh = schedule.mesh
        with self._blamed("check"):
            reasons = [str(violation) for violation in self.dialect.check(schedule) or ()]
        for mesh_dim, size in mesh.sizes.items() if mesh is not None else ():
            if size > 1 and mesh_dim not in self.dialect.supports:
                can = ", ".join(sorted(self.dialect.supports)) or "none"
                reasons.append(f"it does not run mesh_dim '{mesh_dim}' (size {size}); it runs {can}")
        if reasons:
            start = f"target '{self.dialect.name}' cannot run this schedule"
            lines = [f"{start}: {reasons[0]}"] if len(reasons) == 1 else [f"{start}:", *(f"  - {r}" for r in reasons)]
            raise BuildError("\n".join(lines))
        refuse_if_incomplete(schedule, trains=trains)
        _warn_of_unused_dimensions(schedule)
        if mesh is not None and mesh.is_abstract:
            raise BuildError(
                f"the mesh {mesh} is abstract: build() needs {mesh.world_size} processes, and torch.distributed is not "
                "initialized",
                hint=f"call torch.distributed.init_process_group() first and launch with `{mesh.launch_command()}`",
            )
        _warn_if_alone(schedule)
        _warn_if_unverified(schedule)

    def _blamed(self, method: str) -> contextlib.AbstractContextManager[None]:
        return _blamed(self.label, self.dialect.name, method, is_own=self.is_own)


@contextlib.contextmanager
def _blamed(label: str, name: str, method: str, *, is_own: bool) -> Iterator[None]:
    """Add the plugin's name to unexpected exceptions of a dialect."""
    try:
        yield
    except SlapoError:
        raise
    except Exception as error:
        if is_own:
            raise
        raise BuildError(
            f"target '{name}' of {label} failed in {method}(): {type(error).__name__}: {error}", plugin=label
        ) from error


def _warn_of_unused_dimensions(schedule: Schedule) -> None:
    unused = [f"'{mesh_dim}'" for mesh_dim in unused_mesh_dims(schedule)]
    if unused and schedule.mesh is not None:
        warnings.warn(
            f"mesh_dim {', '.join(unused)} of the mesh {schedule.mesh} is used by no step: its ranks do the same work",
            stacklevel=4,
        )


def _warn_if_unverified(schedule: Schedule) -> None:
    mesh, sharded = schedule.mesh, sharded_mesh_dims(schedule)
    if mesh is not None and sharded and mesh.is_first_rank and not schedule.is_verified:
        dims = ", ".join(f"mesh_dim '{mesh_dim}' ({mesh.size(mesh_dim)} ranks)" for mesh_dim in sharded)
        warnings.warn(
            f"the schedule shards tensors over {dims} and was never verified with these steps on this mesh: call "
            "slapo_core.verify(sch, batch) before build(); sch.to_json() keeps its result for replay()",
            stacklevel=7,
        )


def _warn_if_alone(schedule: Schedule) -> None:
    import torch.distributed as dist

    if schedule.mesh is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        world_size = dist.get_world_size()
        warnings.warn(
            f"torch.distributed runs {world_size} processes, but the schedule has no mesh: this rank trains "
            f'on its own; create_schedule(model, mesh={{"dp": {world_size}}}) trains replicas together',
            stacklevel=7,
        )


Outputs = Sequence[str] | Callable[["Output"], Sequence[str]] | None
_FORMS = 16  # that are kept


class Stages:
    """Cache the stages of a materialized model for the most recent input signatures.

    Args:
        schedule: the schedule to build.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._modules = list(schedule.model.modules())
        self._parameters = list(schedule.model.parameters())
        self._kept: list[tuple[Any, InputSignature, Staged | None]] = []  # those that came last, last

    def of(
        self,
        inputs: Mapping[str, Any],
        *,
        training: bool,
        outputs: Outputs,
        batch_axes: Mapping[str, int | None] | None,
    ) -> Staged | None:
        """Find the stages; see :meth:`slapo_runtime.request.BuildRequest.stages`."""
        with in_mode(self._modules, training=training):
            form = InputSignature(inputs, [module.training for module in self._modules])
            if not form.is_plain:
                return ask(self._schedule, inputs, outputs, batch_axes)
            key = (
                [(parameter.requires_grad, parameter.dtype) for parameter in self._parameters],  # runtimes convert them
                outputs if outputs is None or callable(outputs) else tuple(outputs),
                dict(batch_axes or {}),
                _autocast(),
            )
            known = next((one for one in reversed(self._kept) if one[0] == key and one[1] == form), None)
            if known is None:
                known = (key, form, ask(self._schedule, inputs, outputs, batch_axes))
            self._kept = [*[one for one in self._kept if one is not known][1 - _FORMS :], known]
        return known[2]


def stages_of_build(
    schedule: Schedule, arguments: Arguments, target: Target, plan: Plan
) -> tuple[Staged, tuple[int, ...]] | None:
    """Find the stages for the schedule's example inputs, and each stage's pipeline rank.

    Returns:
        None where there is one rank along ``pp``.

    Raises:
        BuildError: stages and mesh do not go together, there are no example inputs, or the dialect's answer is none.
        TraceError: the model cannot be cut there.
        HookError: a plugin's answer is invalid.
    """
    pp = schedule.mesh.size("pp") if schedule.mesh is not None else 1
    if pp == 1:
        _refuse_cut(schedule, arguments)
        return None
    if schedule.example_inputs is None:
        raise BuildError(
            f"mesh_dim 'pp' has {pp} ranks, and the schedule has no example inputs, on which the stages of the model "
            "are found",
            hint=f"create_schedule(model, mesh={schedule.mesh}, example_inputs=batch), a batch as train_step takes it",
        )
    inputs = bound_batch(schedule.model, schedule.example_inputs, for_loss=arguments.loss is not None)
    with in_mode(list(schedule.model.modules()), training=True):
        found = ask(schedule, inputs)
    if found is None:
        raise BuildError(
            f"mesh_dim 'pp' has {pp} ranks, and no step cuts the model into stages for them",
            hint='sch["encoder.layer.5"].pipeline_split() cuts it after that module',
        )
    stages = len(found.partition.stages)
    if stages % pp:
        fitting = ", ".join(str(number * pp) for number in range(1, 4))
        raise BuildError(
            f"the model is cut into {stages} stages ({_cuts(found)}), which cannot be divided over the {pp} ranks of "
            "mesh_dim 'pp'",
            hint=f"cut it into {fitting}, ... stages: one pipeline_split() less than stages",
        )
    return found, target.stage_ranks(plan, stages, pp)


def ask(
    schedule: Schedule,
    inputs: Mapping[str, Any],
    outputs: Outputs = None,
    batch_axes: Mapping[str, int | None] | None = None,
) -> Staged | None:
    """Ask the plugins; ``outputs`` may be a function of the model's output, as data."""
    found = staged(schedule, inputs, batch_axes=batch_axes)
    if found is None or outputs is None:
        return found
    return needing(schedule, found, outputs(found.partition.output) if callable(outputs) else outputs)


def _refuse_cut(schedule: Schedule, arguments: Arguments) -> None:
    """Refuse a model that is cut, where no ranks are there for the stages."""
    inputs: dict[str, Any] = {}
    if schedule.example_inputs is not None:
        with contextlib.suppress(ArgumentError):  # of no batch: nothing but a message depends on it here
            inputs = bound_batch(schedule.model, schedule.example_inputs, for_loss=arguments.loss is not None)
    found: Staged | None = None
    cause: Exception | None = None
    try:
        with in_mode(list(schedule.model.modules()), training=True):
            found = ask(schedule, inputs)
    except (TraceError, HookError) as error:  # who does not cut it answers None, whatever the inputs
        cause = error
    if found is None and cause is None:
        return
    what = f"into {len(found.partition.stages)} stages ({_cuts(found)})" if found is not None else "into stages"
    where = "the schedule has no mesh" if schedule.mesh is None else f"the mesh {schedule.mesh} has one rank along 'pp'"
    sizes = {**(schedule.mesh.sizes if schedule.mesh is not None else {}), "pp": 2}
    raise BuildError(
        f"the model is cut {what}, and {where}",
        hint=f"create_schedule(model, mesh={sizes}, example_inputs=batch), or leave out pipeline_split()",
    ) from cause


def _cuts(found: Staged) -> str:
    return "after " + ", ".join(f"'{stage.last}'" for stage in found.partition.stages[:-1])


def _autocast() -> tuple[Any, ...]:
    kinds = ("cpu", *({device.type} if (device := accelerator()) is not None else ()))
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
