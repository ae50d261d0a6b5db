"""Checks between training steps: parameters changed outside of the engine, parameters without a gradient."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import BuildError

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.request import BuildRequest
    from slapo_core.spec.state import LiveTensor, TensorStorage

__all__ = ["REBUILD", "StepInvariants", "UnusedParameters"]


REBUILD = "engine.save(directory); build a fresh engine of the model as it is to be, and engine.load(directory)"


class StepInvariants:
    """Compares the parameters with those of the build and of the last step.

    Every rank looks at its own: what this finds is in the program, which all of them run. Where ranks hold parts of a
    parameter, one of them may not see what was written into it: they then ask each other.

    Args:
        request: of the build.
        tensors: what knows whether the forward computes with what is trained.
        runtime: its name, for messages.
        groups: over which it partitions parameters; the ranks are the product of these.
    """

    def __init__(
        self, request: BuildRequest, tensors: TensorStorage, runtime: str, *, groups: Sequence[Any] = ()
    ) -> None:
        self._storage, self._runtime, self._groups = tensors, runtime, groups
        self._parameters = [live for live in request.state.tensors() if live.is_parameter and live.is_local]
        self._trained = [live.tensor.requires_grad for live in self._parameters]
        trained = {id(live.tensor): live for live in self._parameters}
        self._places = [
            (trained[id(parameter)], module._parameters, name)
            for module in request.schedule.model.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in trained
        ]
        self.note()

    def note(self) -> None:
        """A step is over, or the engine is made: from here on nothing may change the parameters in place."""
        self._stamps = [self.stamp(live) for live in self._parameters]

    def check(self) -> None:
        """Before a step.

        Raises:
            BuildError: a parameter was replaced, frozen, or unfrozen, or written into.
        """
        for live, table, name in self._places:
            if table.get(name) is not live.tensor:
                raise BuildError(
                    f"'{live.name}' is another parameter now than at the build: {self._runtime} would go on to train "
                    "that one, and never step what the model computes with",
                    hint=REBUILD,
                )
        for live, trained in zip(self._parameters, self._trained, strict=True):
            if live.tensor.requires_grad is not trained and (not trained or self.steps_frozen(live)):
                raise self._other_trained(live, trained)
        rows = zip(self._parameters, self._stamps, strict=True)
        written = [live for live, stamp in rows if self.stamp(live) != stamp]
        if not written:
            return
        names = self._of_all([live.name for live in written if not self._storage.is_current(live)])
        if names:
            raise BuildError(
                f"'{names[0]}' was changed in place since the last step, and {self._runtime} trains a copy of it: "
                "the step would take the change back",
                hint="state = engine.state_dict(), change it there, and engine.load_state_dict(state)",
            )

    # -- what differs from runtime to runtime -------------------------------------------------------------------

    def stamp(self, live: LiveTensor) -> object:
        """Something that is another one after whoever wrote into a parameter."""
        return live.tensor._version

    def steps_frozen(self, live: LiveTensor) -> bool:
        """Whether the runtime goes on stepping a parameter that was frozen: with a copy of it, it does."""
        return self._storage.working(live) is not None

    def _of_all(self, names: list[str]) -> list[str]:
        """What any of the ranks found that hold parts."""
        for group in self._groups:
            import torch.distributed as dist

            by_rank: list[list[str]] = [[]] * group.size()
            dist.all_gather_object(by_rank, names, group=group)
            names = list(dict.fromkeys(name for theirs in by_rank for name in theirs))
        return names

    def _other_trained(self, live: LiveTensor, trained: bool) -> BuildError:
        if trained:
            return BuildError(
                f"'{live.name}' was frozen after the build: {self._runtime} would go on to step it, with gradients of "
                "zero",
                hint=REBUILD,
            )
        return BuildError(
            f"'{live.name}' was unfrozen after the build: {self._runtime} has no state for it, and would never step it",
            hint=REBUILD,
        )


_SHOWN = 5
_STEPS = 3


class UnusedParameters:
    """Watches training steps, and warns at the first one that gives some parameters no gradient; then it stops.

    It stops after three steps that gave each of them one, too: no later step pays for it.

    Args:
        request: of the build.
        runtime: its name, for the warning, e.g. ``"DeepSpeed"``.
        steps_with_zeros: whether it steps such parameters; else nothing is watched.
    """

    def __init__(self, request: BuildRequest, runtime: str, *, steps_with_zeros: bool = True) -> None:
        self._runtime = runtime
        self._names: dict[int, str] = {}
        self._seen: set[int] = set()
        self._handles: list[Any] = []
        self._steps = 0
        if not steps_with_zeros:
            return
        for live in request.state.tensors():
            if live.is_parameter and live.is_local and live.tensor.requires_grad:
                self._names[id(live.tensor)] = live.reference_name
                self._handles.append(live.tensor.register_post_accumulate_grad_hook(self.seen))

    def seen(self, parameter: torch.Tensor) -> None:
        """A parameter has a gradient."""
        self._seen.add(id(parameter))

    def step_begins(self) -> None:
        """What an earlier step that failed has seen does not count."""
        self._seen.clear()

    def step_is_over(self) -> None:
        """Warn, if this step is the first one that left some out."""
        self._steps += 1
        if not self._names.keys() <= self._seen:
            names = [name for key, name in self._names.items() if key not in self._seen]
            self.stop()
            which = "the first training step" if self._steps == 1 else f"training step {self._steps}"
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            warnings.warn(
                f"{which} gave {', '.join(map(repr, names[:_SHOWN]))}{more} no gradient: {self._runtime} steps them "
                "with a gradient of zero, so that weight decay and momentum change them, where torch leaves them "
                "alone; set requires_grad=False on what the loss does not depend on, before build",
                stacklevel=3,
            )
        elif self._steps == _STEPS:
            self.stop()
        self._seen.clear()

    def stop(self) -> None:
        """Stop to watch."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._names.clear()
