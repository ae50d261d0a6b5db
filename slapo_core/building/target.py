"""The dialect that `build` was asked for: found, held against the schedule, and called."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.errors import BuildError, SealedError, SlapoError
from slapo_core.schedule.consistency import refuse_if_incomplete, sharded_mesh_dims, unused_mesh_dims
from slapo_core.spec.reserved import CORE_DISTRIBUTION

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.dialect import BuildArguments, Dialect, Plan
    from slapo_core.spec.engine import Engine
    from slapo_core.spec.request import BuildRequest

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """A dialect with the plugin that it comes from.

    Args:
        dialect: the dialect.
        label: its plugin, e.g. ``"slapo-megatron 0.1.0"``.
        is_own: whether it is slapo-core's: what its ``build`` raises is then the user's own, such as the optimizer's
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
        is_own = entry.distribution == CORE_DISTRIBUTION
        with _blamed(entry.label, name, "__init__", is_own=is_own):
            target = cls(dialect(), entry.label, is_own)
        schedule.hooks.activate(entry.distribution, version=entry.version)
        return target

    def plan(self, schedule: Schedule, config: Mapping[str, Any], arguments: BuildArguments) -> Plan:
        """What the dialect is going to do.

        Args:
            schedule: what is built.
            config: the options of the dialect, as the user gave them.
            arguments: the rest of what the user gave.

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
        """Which rank along ``pp`` runs each stage.

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
        if mesh is not None and mesh.is_dry:
            raise BuildError(
                f"the mesh {mesh} is only declared: it needs {mesh.world_size} processes, and this is one without "
                "torch.distributed",
                hint=f"call torch.distributed.init_process_group() first and launch with `{mesh.launch_command()}`",
            )
        _warn_if_alone(schedule)
        _warn_if_unverified(schedule)

    def _blamed(self, method: str) -> contextlib.AbstractContextManager[None]:
        return _blamed(self.label, self.dialect.name, method, is_own=self.is_own)


@contextlib.contextmanager
def _blamed(label: str, name: str, method: str, *, is_own: bool) -> Iterator[None]:
    """Give what a dialect raises the name of its plugin; errors that say what is wrong stay as they are."""
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
