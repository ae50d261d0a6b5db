"""The dialect of target ``"megatron"``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_core import Dialect, Plan
from slapo_core.spec.dialect import arguments_as_options
from slapo_megatron.checking import violations
from slapo_megatron.groups.device import check_device, require_device
from slapo_megatron.installed import require_megatron

if TYPE_CHECKING:
    from slapo_core import Engine, Violation
    from slapo_core.spec.dialect import BuildArguments
    from slapo_core.spec.request import BuildRequest, ScheduledModel
    from slapo_core.testing import DialectCase

__all__ = ["MegatronDialect", "slapo_cases"]


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

    The first three may be objects of these classes too: their fields that differ from Megatron's defaults are taken.
    """

    name: ClassVar[str] = "megatron"
    supports: ClassVar[frozenset[str]] = frozenset({"dp", "pp", "tp"})
    accumulates: ClassVar[bool] = True

    def check(self, schedule: ScheduledModel) -> Iterable[Violation]:
        return violations(schedule)

    def options(self, config: Mapping[str, Any], arguments: BuildArguments) -> Mapping[str, Any]:
        """The options with what else was given to ``build``, for the plan to fill in.

        Raises:
            BuildError: the model is to go to another device than the one that Megatron takes.
        """
        check_device(arguments.device)
        return {**config, "arguments": arguments_as_options(arguments)}

    def plan(self, schedule: ScheduledModel, config: Mapping[str, Any]) -> Plan:
        """What Megatron will be given and do; its own classes read the options.

        Raises:
            BuildError: an option that there is none, a bad value, or one that contradicts the schedule; or
                Megatron-core is not installed.
        """
        require_megatron()
        from slapo_megatron.config.facts import StagesOf
        from slapo_megatron.config.filling import filled
        from slapo_megatron.config.planning import steps_of

        stages = StagesOf(schedule, config)
        options = filled(schedule, config, stages)
        return Plan("megatron", tuple(steps_of(schedule, options, stages)), options, ("arguments", "origins"))

    def stage_ranks(self, plan: Plan, stages: int, pp: int) -> tuple[int, ...]:
        """One stage a rank, or several in turn, ``(0, 1, 0, 1)``, as Megatron's interleaved schedule has them.

        Raises:
            BuildError: options do not go together with so many stages.
        """
        from slapo_megatron.config.sizes import check_stages

        check_stages(plan.config["model_parallel_config"], plan.config["microbatches"], stages, pp)
        return tuple(stage % pp for stage in range(stages))

    def build(self, plan: Plan, request: BuildRequest) -> Engine:
        from slapo_megatron.groups.starting import given_back

        require_device(request)
        with given_back():
            if request.stage_ranks:
                from slapo_megatron.pipeline.engine import PipelineEngine

                return PipelineEngine(plan, request)
            from slapo_megatron.whole.engine import WholeEngine

            return WholeEngine(plan, request)


def slapo_cases() -> list[DialectCase]:
    from slapo_megatron.cases import cases

    return cases()
