"""Refuse changes between training steps that Megatron would ignore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import BuildError
from slapo_megatron.private import write_count
from slapo_runtime.engine import REBUILD, StepInvariants

if TYPE_CHECKING:
    from slapo_megatron.state.flat_layout import Places
    from slapo_megatron.state.tensors import MegatronTensors
    from slapo_runtime.context import BuildContext
    from slapo_runtime.storage import LiveTensor


class BetweenMegatronSteps(StepInvariants):
    """The parameters, and where they lie in Megatron's buffers.

    Args:
        context: of the build.
        places: of the engine.
        tensors: compares the forward's parameters with their main weights.
    """

    def __init__(self, context: BuildContext, places: Places, tensors: MegatronTensors) -> None:
        super().__init__(context, tensors, "Megatron", groups=places.shared)
        in_buffers = {id(parameter) for parameter in places.order}
        self._buffered = [(live, live.tensor.data_ptr()) for live in self._parameters if id(live.tensor) in in_buffers]

    def check(self) -> None:
        """Before a step.

        Raises:
            BuildError: a parameter was frozen, or unfrozen, or written into, or got other memory.
        """
        super().check()
        for live, place in self._buffered:
            if live.tensor.data_ptr() != place:
                raise BuildError(
                    f"'{live.name}' got other memory after the build (parameter.data = ...), and Megatron would go on "
                    "to gather the values of its buffer, which the model computes with no more",
                    hint="write into it: parameter.data.copy_(values); " + REBUILD,
                )

    def stamp(self, live: LiveTensor) -> object:
        """Also another one where it got other memory."""
        return write_count(live.tensor), live.tensor.data_ptr()

    def steps_frozen(self, live: LiveTensor) -> bool:
        """Always: what Megatron steps by is its own buffer of gradients."""
        return True
