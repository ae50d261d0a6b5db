"""Refuse, plan and build schedules for target ``"megatron"``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_core import Dialect, Plan, Violation
from slapo_core.dialect import arguments_as_options
from slapo_megatron.groups import unfit
from slapo_megatron.runtime import MEGATRON, check_device, require_device

if TYPE_CHECKING:
    from slapo_core import Engine, Schedule
    from slapo_core.dialect import BuildArguments
    from slapo_runtime.context import BuildContext


def violations(schedule: Schedule) -> Iterator[Violation]:
    """Every reason why Megatron cannot run a schedule.

    Args:
        schedule: to build.
    """
    mesh = schedule.mesh
    if mesh is None:
        yield from _alone()
        return
    reason = unfit(mesh)
    if reason is not None:
        yield reason
    yield from _steps(schedule)


def _alone() -> Iterator[Violation]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        count = dist.get_world_size()
        yield Violation(
            f"the schedule has no mesh, and torch.distributed runs {count} processes, over which all of Megatron's "
            "groups lie",
            hint=f'create_schedule(model, mesh={{"dp": {count}}})',
        )


def _steps(schedule: Schedule) -> Iterator[Violation]:
    """Refuse steps along mesh dimensions other than ``tp`` and ``pp``."""
    mesh = schedule.mesh
    assert mesh is not None
    found = False
    for record in schedule.records:
        mesh_dim = getattr(record.primitive, "mesh_dim", None)
        if mesh_dim == "dp" and mesh.size(mesh_dim) > 1:
            found = True
            yield Violation(
                f"{record} works along mesh_dim '{mesh_dim}', whose ranks are replicas for Megatron: they have other "
                "samples, and average all gradients",
                hint='mesh_dim="tp"',
            )
    if found:
        return
    for node in schedule.root.walk():
        for name in node.parameters:
            layout = node.layout(name)
            for mesh_dim in {*(mesh_dim for mesh_dim, _ in layout.shards()), *layout.partials()} - {"tp"}:
                if mesh.size(mesh_dim) > 1:
                    yield Violation(
                        f"parameter '{f'{node.path}.{name}' if node.path else name}' has layout {layout} over mesh_dim "
                        f"'{mesh_dim}', and Megatron knows sharded parameters over 'tp' only"
                    )


class MegatronDialect(Dialect):
    """Megatron-core's process groups, DistributedDataParallel, optimizers and schedules.

    Options:

    - ``optimizer_config``: fields of Megatron's ``OptimizerConfig``, e.g. ``{"lr": 1e-4, "bf16": True}``.
    - ``ddp_config``: fields of its ``DistributedDataParallelConfig``, e.g. ``{"overlap_grad_reduce": True}``.
    - ``model_parallel_config``: fields of its ``ModelParallelConfig`` that say how a model runs, e.g.
      ``{"deallocate_pipeline_outputs": True}``.
    - ``scheduler``: arguments of its ``OptimizerParamScheduler``; one step of it after each training step.
    - ``microbatches``: into how many micro-batches a batch is cut.
    - ``batch_axes``: where: for an argument of the forward, the axis of its tensors that counts the samples, None for
      one that every micro-batch has as a whole. Default: the first axis of every tensor.

    The first three may be objects of these classes too, and the third a ``TransformerConfig``: fields that differ from
    Megatron's defaults are taken.
    """

    name: ClassVar[str] = "megatron"
    supports: ClassVar[frozenset[str]] = frozenset({"dp", "pp", "tp"})
    accumulates: ClassVar[bool] = True

    def check(self, schedule: Schedule) -> Iterable[Violation]:
        return violations(schedule)

    def options(self, config: Mapping[str, Any], arguments: BuildArguments) -> Mapping[str, Any]:
        """The options with what else was given to ``build``, for the plan to fill in.

        Raises:
            BuildError: the model is to go to another device than the one that Megatron takes.
        """
        check_device(arguments.device)
        return {**config, "arguments": arguments_as_options(arguments)}

    def plan(self, schedule: Schedule, config: Mapping[str, Any]) -> Plan:
        """Plan the options and steps; Megatron's own classes validate the options.

        Raises:
            BuildError: an option that there is none, a bad value, or one that contradicts the schedule; or
                Megatron-core is not installed.
        """
        MEGATRON.require()
        from slapo_megatron.config import StagesOf, filled, steps_of

        stages = StagesOf(schedule, config)
        options = filled(schedule, config, stages)
        return Plan("megatron", tuple(steps_of(schedule, options, stages)), options, ("arguments", "origins"))

    def stage_ranks(self, plan: Plan, stages: int, pp: int) -> tuple[int, ...]:
        """Require one stage a rank, or several, alternating: ``(0, 1, 0, 1)``, as Megatron's interleaved schedule.

        Raises:
            BuildError: options do not fit this number of stages.
        """
        from slapo_megatron.config import check_stages

        check_stages(plan.config, stages, pp)
        return tuple(stage % pp for stage in range(stages))

    def build(self, plan: Plan, context: BuildContext) -> Engine:
        from slapo_megatron.groups import given_back

        require_device(context)
        with given_back():
            if context.stage_ranks:
                from slapo_megatron.pipeline import PipelineEngine

                return PipelineEngine(plan, context)
            from slapo_megatron.engine import WholeEngine

            return WholeEngine(plan, context)

    def simulate(self, plan: Plan, context: BuildContext) -> Callable[[Any], Any] | None:
        """Without stages, which tell each other what they send; this process then takes the CPU for its GPU."""
        from slapo_megatron.without_gpu import run_without_gpu

        if context.stage_ranks:
            return None
        run_without_gpu()
        return self.build(plan, context).train_step
