"""Refuse changes between training steps that DeepSpeed would ignore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slapo_core import BuildError
from slapo_runtime.engine import StepInvariants

if TYPE_CHECKING:
    from slapo_deepspeed.state import DeepSpeedTensors
    from slapo_runtime.context import BuildContext
    from slapo_runtime.storage import LiveTensor


class BetweenDeepSpeedSteps(StepInvariants):
    """The parameters, and DeepSpeed's counters.

    Args:
        context: of the build.
        engine: DeepSpeed's.
        tensors: compares the forward's parameters with their main weights.
    """

    def __init__(self, context: BuildContext, engine: Any, tensors: DeepSpeedTensors) -> None:
        self._engine = engine
        self._count = engine.gradient_accumulation_steps()
        mesh = context.schedule.mesh
        groups = [mesh.group("dp")] if mesh is not None and tensors.storage.are_parts else []
        super().__init__(context, tensors, "DeepSpeed", groups=groups)

    def check(self) -> None:
        """Before a step.

        Raises:
            BuildError: a parameter was frozen, or unfrozen, or written into; or DeepSpeed's accumulation was changed.
        """
        super().check()
        count = self._engine.gradient_accumulation_steps()
        if count != self._count:
            raise BuildError(
                f"DeepSpeed accumulates {count} micro-batches now, and this engine gives it {self._count} a step",
                hint=f"leave engine.deepspeed.set_train_batch_size(); or build(accumulate={count})",
            )

    def check_boundary(self) -> None:
        """Before a step of an engine whose micro-batches are steps of DeepSpeed's.

        Raises:
            BuildError: a part of a step ran outside of train_step.
        """
        done = self._engine.micro_steps % self._count
        if done:
            raise BuildError(
                f"train_step called in the middle of an accumulation window of engine.deepspeed ({done} of "
                f"{self._count} micro-batches already ran)",
                hint="run the others by engine.deepspeed.backward(loss) and engine.deepspeed.step() first",
            )

    def steps_frozen(self, live: LiveTensor) -> bool:
        """Also where ZeRO-3 steps the parts of a parameter that it holds."""
        return super().steps_frozen(live) or hasattr(live.tensor, "ds_tensor")
