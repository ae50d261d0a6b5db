"""Refuse, plan and build schedules for target ``"megatron"``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_core import Dialect, Plan, Violation
from slapo_core.dialect import arguments_as_options
from slapo_megatron.effects import effects_of
from slapo_megatron.runtime import MEGATRON, require_device
from slapo_runtime.planning import complex_parameters

if TYPE_CHECKING:
    from slapo_core import Engine, Schedule
    from slapo_core.dialect import BuildArguments
    from slapo_runtime.context import BuildContext


def violations(schedule: Schedule) -> Iterator[Violation]:
    """Yield every reason why Megatron cannot run a schedule.

    Args:
        schedule: to build.
    """
    yield from complex_parameters(schedule, "Megatron")
    mesh = schedule.mesh
    for record in schedule.records:
        if getattr(record.primitive, "mesh_dim", None) == "dp" and mesh is not None and mesh.size("dp") > 1:
            yield Violation(
                f"{record} uses mesh_dim 'dp', whose ranks are replicas for Megatron: they have different samples, and "
                "average all gradients",
                hint='mesh_dim="tp"',
            )


class MegatronDialect(Dialect):
    """Megatron-core's process groups, DistributedDataParallel, optimizers and schedules.

    Options:

    - ``optimizer_config``: fields of Megatron's ``OptimizerConfig``, e.g. ``{"lr": 1e-4, "bf16": True}``.
    - ``ddp_config``: fields of its ``DistributedDataParallelConfig``, e.g. ``{"overlap_grad_reduce": True}``.
    - ``model_parallel_config``: fields of its ``ModelParallelConfig``, e.g. ``{"deallocate_pipeline_outputs": True}``.
    - ``scheduler``: arguments of its ``OptimizerParamScheduler``, which steps after each training step.
    - ``microbatches``: number of micro-batches of a batch.
    - ``batch_axes``: how a batch is cut: argument of the forward -> batch axis of its tensors; None for an argument
      that every micro-batch gets in full. Default: the first axis of every tensor.

    The first three may be objects of these classes too, and the third a ``TransformerConfig``: fields that differ from
    Megatron's defaults count as explicitly set.
    """

    name: ClassVar[str] = "megatron"
    supports: ClassVar[frozenset[str]] = frozenset({"dp", "pp", "tp"})
    accumulates: ClassVar[bool] = True
    instead: ClassVar[Mapping[str, str]] = {"torch.fully_shard": "use_distributed_optimizer=True"}

    def check(self, schedule: Schedule) -> Iterable[Violation]:
        return violations(schedule)

    def options(self, config: Mapping[str, Any], arguments: BuildArguments) -> Mapping[str, Any]:
        """Return the options together with the other arguments of ``build``."""
        return {**config, "arguments": arguments_as_options(arguments)}

    def plan(self, schedule: Schedule, config: Mapping[str, Any]) -> Plan:
        """Plan the options and steps; Megatron's own classes validate the options.

        Raises:
            BuildError: an unknown option, a bad value, or one that contradicts the schedule; or Megatron-core is not
                installed.
        """
        MEGATRON.require()
        from slapo_megatron.config import filled, stages_of, steps_of

        ask = stages_of(schedule, config)
        options = filled(schedule, config, ask)
        steps, effects = tuple(steps_of(schedule, options, ask)), tuple(effects_of(schedule, options))
        return Plan("megatron", steps, options, ("arguments", "origins"), effects)

    def stage_ranks(self, plan: Plan, stages: int, pp: int) -> tuple[int, ...]:
        """Return the ranks in turn, e.g. ``(0, 1, 0, 1)``, as Megatron's interleaved schedule requires.

        Raises:
            BuildError: options contradict this number of stages.
        """
        from slapo_megatron.config import check_stages

        check_stages(plan.config, stages, pp)
        return tuple(stage % pp for stage in range(stages))

    def build(self, plan: Plan, context: BuildContext) -> Engine:
        require_device(context)
        if context.stage_ranks:
            from slapo_megatron.pipeline import MegatronPipelineEngine

            return MegatronPipelineEngine(plan, context)
        from slapo_megatron.engine import SingleStageEngine

        return SingleStageEngine(plan, context)

    def simulate(self, plan: Plan, context: BuildContext) -> Callable[[Any], Any] | None:
        """Return a training step on fake CPU tensors; None with offloading, or stages, which exchange messages."""
        from slapo_megatron.without_gpu import run_without_gpu

        if context.stage_ranks or plan.config["optimizer_config"].get("optimizer_cpu_offload"):
            return None
        run_without_gpu()
        return self.build(plan, context).train_step
