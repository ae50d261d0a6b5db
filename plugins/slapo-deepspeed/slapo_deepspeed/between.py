"""What must stay as it was from one training step to the next: DeepSpeed does not look at it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slapo_core import BuildError

if TYPE_CHECKING:
    from slapo_core.spec.request import BuildRequest
    from slapo_core.spec.state import LiveTensor
    from slapo_deepspeed.state.tensors import DeepSpeedTensors

__all__ = ["BetweenSteps"]

_AFRESH = "engine.save(directory); build a fresh engine of the model as it is to be, and engine.load(directory)"


class BetweenSteps:
    """Compares the model and DeepSpeed's counters with those of the build and of the last step.

    Every rank looks at its own, without asking the others: what this finds is in the program, which all of them run.

    Args:
        request: of the build.
        engine: DeepSpeed's.
        tensors: what knows whether the forward computes with what is trained.
    """

    def __init__(self, request: BuildRequest, engine: Any, tensors: DeepSpeedTensors) -> None:
        self._engine, self._tensors = engine, tensors
        self._count = engine.gradient_accumulation_steps()
        self._parameters = [live for live in request.state.tensors() if live.is_parameter and live.is_here]
        self._trained = [live.tensor.requires_grad for live in self._parameters]
        self.note()

    def note(self) -> None:
        """A step is over, or the engine is made: from here on nothing may change the parameters in place."""
        self._versions = [live.tensor._version for live in self._parameters]

    def check(self) -> None:
        """Before a step.

        Raises:
            BuildError: a parameter was frozen, or unfrozen, or written into; or DeepSpeed's accumulation was changed.
        """
        rows = zip(self._parameters, self._trained, self._versions, strict=True)
        for live, trained, version in rows:
            if live.tensor.requires_grad is not trained and (not trained or self._has_copy(live)):
                raise _other_trained(live, trained)
            if live.tensor._version != version and not self._tensors.is_current(live):
                raise BuildError(
                    f"'{live.name}' was changed in place since the last step, and DeepSpeed trains a copy of it: the "
                    "step would take the change back",
                    hint="state = engine.state_dict(), change it there, and engine.load_state_dict(state)",
                )
        count = self._engine.gradient_accumulation_steps()
        if count != self._count:
            raise BuildError(
                f"DeepSpeed accumulates {count} micro-batches now, and this engine gives it {self._count} a step",
                hint=f"leave engine.deepspeed.set_train_batch_size(); or build(accumulate={count})",
            )

    def check_boundary(self) -> None:
        """Before a step of an engine whose micro-batches are steps of DeepSpeed's.

        Raises:
            BuildError: a part of a step was taken by hand.
        """
        done = self._engine.micro_steps % self._count
        if done:
            raise BuildError(
                f"engine.deepspeed was given {done} of the {self._count} micro-batches of a step by hand, and would "
                "step in the middle of those of train_step",
                hint="give it the others by engine.deepspeed.backward(loss) and engine.deepspeed.step() first",
            )

    def _has_copy(self, live: LiveTensor) -> bool:
        """Whether DeepSpeed steps a copy, in full precision or in parts, and not the parameter itself."""
        return self._tensors.working(live) is not None or hasattr(live.tensor, "ds_tensor")


def _other_trained(live: LiveTensor, trained: bool) -> BuildError:
    if trained:
        return BuildError(
            f"'{live.name}' was frozen after the build: DeepSpeed would go on to step it, with gradients of zero",
            hint=_AFRESH,
        )
    return BuildError(
        f"'{live.name}' was unfrozen after the build: DeepSpeed has no state for it, and would never step it",
        hint=_AFRESH,
    )
