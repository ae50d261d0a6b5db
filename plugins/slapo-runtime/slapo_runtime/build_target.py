"""The target of a build: its dialect, with checked answers and attributed errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slapo_core.errors import BuildError, SealedError, SlapoError, warn_user
from slapo_core.internals import Internals, sharded_mesh_dims, unused_mesh_dims
from slapo_runtime.planning import foreign_steps, unsupported_mesh_dims, with_choices
from slapo_runtime.ranks.consistency import refuse_if_incomplete, with_reasons

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.dialect import BuildArguments, Dialect, Engine, Plan
    from slapo_runtime.context import BuildContext


class BuildTarget:
    """A dialect, with the plugin that provides it.

    Args:
        name: the name of the target, e.g. ``"megatron"``.
        schedule: the schedule to build; the hooks of the plugin are activated in it.

    Attributes:
        dialect: the dialect.
        label: its plugin, e.g. ``"slapo-megatron 0.1.0"``.
        is_own: whether the plugin is slapo-torch: errors of its ``build`` are the user's own, e.g. of the optimizer's
            factory, and pass unchanged.

    Raises:
        SealedError: the schedule was built or sealed before.
        PluginError: no such target is installed, or it is not usable.
        BuildError: the constructor of the dialect raised.
    """

    def __init__(self, name: str, schedule: Schedule) -> None:
        if schedule.is_sealed:
            raise SealedError(
                "cannot build: the schedule was built or sealed before, and the originals are gone",
                hint="create a new schedule of a fresh model; sch.to_json() and replay() repeat the steps",
            )
        entry = Internals(schedule).registry.resolve("dialects", name)
        dialect = Internals(schedule).registry.load(entry)
        self.label, self.is_own, self._name = entry.label, entry.distribution == "slapo-torch", name
        with self._blamed("__init__"):
            self.dialect: Dialect = dialect()
        Internals(schedule).hooks.activate(entry.distribution, version=entry.version)

    def plan(self, schedule: Schedule, config: Mapping[str, Any], arguments: BuildArguments) -> Plan:
        """Make the dialect's plan.

        Args:
            schedule: the schedule to build.
            config: the options of the dialect, as the user gave them.
            arguments: the user's other arguments.

        Raises:
            BuildError: it cannot run this schedule, or the schedule is incomplete: with every reason; or an option is
                wrong.
        """
        self._check(schedule, trains=arguments.has_optimizer or not self.is_own)  # others may have one by an option
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
            return with_choices(self.dialect.plan(schedule, options), schedule)

    def stage_ranks(self, plan: Plan, stages: int, pp: int) -> tuple[int, ...]:
        """Return the pipeline rank of each stage.

        Raises:
            BuildError: a stage without a rank, or a rank without a stage.
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

    def build(self, plan: Plan, context: BuildContext) -> Engine:
        """Call the dialect's ``build``."""
        with self._blamed("build"):
            return self.dialect.build(plan, context)

    def simulate(self, plan: Plan, context: BuildContext) -> Callable[[Any], Any]:
        """Call the dialect's ``simulate``, for a training step on fake tensors.

        Raises:
            BuildError: it cannot simulate a step.
        """
        with self._blamed("simulate"):
            step = self.dialect.simulate(plan, context)
        if step is None:
            raise BuildError(
                f"target '{self.dialect.name}' cannot simulate a training step of this schedule with these options "
                "(pipeline stages, offloading)",
                plugin=self.label,
                hint='target="torch", with a margin for the memory of the runtime; or measure a training step',
            )
        return step

    def _check(self, schedule: Schedule, *, trains: bool) -> None:
        mesh = schedule.mesh
        with self._blamed("check"):
            reasons = [str(violation) for violation in self.dialect.check(schedule) or ()]
        reasons += [*unsupported_mesh_dims(self.dialect, schedule), *foreign_steps(schedule, self.dialect)]
        if reasons:
            raise BuildError(with_reasons(f"target '{self.dialect.name}' cannot run this schedule", reasons))
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

    @contextlib.contextmanager
    def _blamed(self, method: str) -> Iterator[None]:
        """Add the plugin's name to unexpected exceptions of a dialect."""
        try:
            yield
        except SlapoError:
            raise
        except Exception as error:
            if self.is_own:
                raise
            raise BuildError(
                f"target '{self._name}' of {self.label} failed in {method}(): {type(error).__name__}: {error}",
                plugin=self.label,
            ) from error


def _warn_of_unused_dimensions(schedule: Schedule) -> None:
    unused = [f"'{mesh_dim}'" for mesh_dim in unused_mesh_dims(schedule)]
    if unused and schedule.mesh is not None:
        warn_user(
            f"no step uses mesh_dim {', '.join(unused)} of the mesh {schedule.mesh}: its ranks do the same work",
        )


def _warn_if_unverified(schedule: Schedule) -> None:
    mesh, sharded = schedule.mesh, sharded_mesh_dims(schedule)
    if mesh is not None and sharded and mesh.is_first_rank and not schedule.is_verified:
        dims = ", ".join(f"mesh_dim '{mesh_dim}' ({mesh.size(mesh_dim)} ranks)" for mesh_dim in sharded)
        warn_user(
            f"the schedule shards tensors over {dims} and was never verified with these steps on this mesh: call "
            "slapo.verify(sch, batch) before build(); sch.to_json() keeps its result for replay()",
        )


def _warn_if_alone(schedule: Schedule) -> None:
    import torch.distributed as dist

    if schedule.mesh is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        world_size = dist.get_world_size()
        warn_user(
            f"torch.distributed runs {world_size} processes, but the schedule has no mesh: this rank trains "
            f'alone; create_schedule(model, mesh={{"dp": {world_size}}}) trains replicas together',
        )
