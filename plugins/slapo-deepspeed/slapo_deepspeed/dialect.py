"""The dialect of target ``"deepspeed"``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_core import Dialect, Plan, Violation
from slapo_core.dialect import arguments_as_options
from slapo_deepspeed.config import NOTES, filled, steps_of
from slapo_runtime.planning import complex_parameters

if TYPE_CHECKING:
    from slapo_core import Engine, Schedule
    from slapo_core.dialect import BuildArguments
    from slapo_runtime.context import BuildContext


class DeepSpeedDialect(Dialect):
    """DeepSpeed's engine: ZeRO 0 to 3, pipelines, and tensor parallelism as the schedule says.

    Options:

    - ``config``: DeepSpeed's own, a dictionary or the path of a JSON file, completed by the schedule.
    - ``batch_axes``: where a batch is cut into micro-batches: for an argument of the forward, the axis of its tensors
      that counts the samples, None for one that every micro-batch has as a whole. Default: the first axis of every
      tensor.
    """

    name: ClassVar[str] = "deepspeed"
    supports: ClassVar[frozenset[str]] = frozenset({"dp", "pp", "tp"})
    takes_tensors: ClassVar[bool] = True
    accumulates: ClassVar[bool] = True

    def check(self, schedule: Schedule) -> Iterable[Violation]:
        return complex_parameters(schedule, "DeepSpeed")

    def options(self, config: Mapping[str, Any], arguments: BuildArguments) -> Mapping[str, Any]:
        """The options with what else was given to ``build``, for the plan to fill in."""
        return {**config, "arguments": arguments_as_options(arguments)}

    def plan(self, schedule: Schedule, config: Mapping[str, Any]) -> Plan:
        """Plan the configuration and steps; DeepSpeed itself validates the configuration.

        Raises:
            BuildError: an option that there is none, a bad value, or one that contradicts the schedule; or DeepSpeed
                is not installed.
        """
        options = filled(schedule, config)
        return Plan("deepspeed", tuple(steps_of(schedule, options)), options, NOTES)

    def build(self, plan: Plan, context: BuildContext) -> Engine:
        if context.stage_ranks:
            from slapo_deepspeed.pipeline import PipelineEngine

            return PipelineEngine(plan, context)
        from slapo_deepspeed.engine import ZeroEngine

        return ZeroEngine(plan, context)

    def simulate(self, plan: Plan, context: BuildContext) -> Callable[[Any], Any] | None:
        """Without stages, which tell each other what they send, and where everything stays on the device.

        The dtypes are those of the configuration, whether or not this machine computes in them.
        """
        zero = plan.config["config"].get("zero_optimization") or {}
        offloads = [(zero.get(name) or {}).get("device", "none") for name in ("offload_optimizer", "offload_param")]
        if context.stage_ranks or set(offloads) != {"none"}:
            return None
        from slapo_deepspeed.private import all_dtypes_supported

        with all_dtypes_supported():
            return self.build(plan, context).train_step
