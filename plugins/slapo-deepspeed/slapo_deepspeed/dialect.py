"""Refuse, plan and build schedules for target ``"deepspeed"``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_core import Dialect, Plan, Violation
from slapo_core.dialect import arguments_as_options
from slapo_deepspeed.config import NOTES, filled, steps_of
from slapo_deepspeed.effects import effects_of
from slapo_runtime.planning import complex_parameters

if TYPE_CHECKING:
    from slapo_core import Engine, Schedule
    from slapo_core.dialect import BuildArguments
    from slapo_runtime.context import BuildContext


class DeepSpeedDialect(Dialect):
    """DeepSpeed's engine: ZeRO 0 to 3, pipelines, and tensor parallelism as the schedule says.

    Options:

    - ``config``: DeepSpeed's configuration, a dictionary or the path of a JSON file, completed by the schedule.
    - ``batch_axes``: how a batch is cut into micro-batches: argument of the forward -> batch axis of its tensors; None
      for an argument that every micro-batch gets in full. Default: the first axis of every tensor.
    """

    name: ClassVar[str] = "deepspeed"
    supports: ClassVar[frozenset[str]] = frozenset({"dp", "pp", "tp"})
    takes_tensors: ClassVar[bool] = True
    accumulates: ClassVar[bool] = True
    instead: ClassVar[Mapping[str, str]] = {"torch.fully_shard": 'zero_optimization={"stage": 3}'}

    def check(self, schedule: Schedule) -> Iterable[Violation]:
        return complex_parameters(schedule, "DeepSpeed")

    def options(self, config: Mapping[str, Any], arguments: BuildArguments) -> Mapping[str, Any]:
        """Return the options together with the other arguments of ``build``."""
        return {**config, "arguments": arguments_as_options(arguments)}

    def plan(self, schedule: Schedule, config: Mapping[str, Any]) -> Plan:
        """Plan the configuration and steps; DeepSpeed itself validates the configuration.

        Raises:
            BuildError: an unknown option, a bad value, or one that contradicts the schedule; or DeepSpeed is not
                installed.
        """
        options = filled(schedule, config)
        return Plan(
            "deepspeed", tuple(steps_of(schedule, options)), options, NOTES, tuple(effects_of(schedule, options))
        )

    def build(self, plan: Plan, context: BuildContext) -> Engine:
        if context.stage_ranks:
            from slapo_deepspeed.pipeline import DeepSpeedPipelineEngine

            return DeepSpeedPipelineEngine(plan, context)
        from slapo_deepspeed.engine import ZeroEngine

        return ZeroEngine(plan, context)

    def simulate(self, plan: Plan, context: BuildContext) -> Callable[[Any], Any] | None:
        """Return a training step on fake tensors; None with stages, which exchange messages, or with offloading.

        The dtypes are the configuration's, whether or not this machine supports them.
        """
        zero = plan.config["config"].get("zero_optimization") or {}
        offloads = [(zero.get(name) or {}).get("device", "none") for name in ("offload_optimizer", "offload_param")]
        if context.stage_ranks or set(offloads) != {"none"}:
            return None
        from slapo_deepspeed.private import all_dtypes_supported

        with all_dtypes_supported():
            return self.build(plan, context).train_step
