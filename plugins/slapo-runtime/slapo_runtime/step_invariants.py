"""Checks between training steps: parameters changed outside of the engine, parameters without a gradient."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import BuildError
from slapo_core.internals import parameters_of
from slapo_core.private import write_count

if TYPE_CHECKING:
    import torch

    from slapo_runtime.request import BuildRequest
    from slapo_runtime.state import LiveTensor, TensorStorage

__all__ = ["REBUILD", "StepInvariants", "UnusedParameters"]


REBUILD = "engine.save(directory); build a fresh engine of the model as it is to be, and engine.load(directory)"


class StepInvariants:
    """Check that parameters were not replaced, frozen or modified since the last step.

    Every rank checks its own, because all ranks run the same program. Only ranks that hold shards of a parameter
    communicate: a change may lie in one shard.

    Args:
        request: of the build.
        tensors: the storage, which knows whether a parameter matches its main copy.
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
            (trained[id(parameter)], parameters_of(module), name)
            for module in request.schedule.model.modules()
            for name, parameter in parameters_of(module).items()
            if id(parameter) in trained
        ]
        self.note()

    def note(self) -> None:
        """Record the parameters' versions, after the build and after each step."""
        self._stamps = [self.stamp(live) for live in self._parameters]

    def check(self) -> None:
        """Check the parameters, before a step.

        Raises:
            BuildError: a parameter was replaced, frozen, or unfrozen, or written into.
        """
        for live, table, name in self._places:
            if table.get(name) is not live.tensor:
                raise BuildError(
                    f"'{live.name}' was replaced after build(): {self._runtime} still optimizes the old parameter",
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
                f"'{names[0]}' no longer matches its main copy: it was modified in place since the last step, and the "
                f"next step of {self._runtime} would overwrite it",
                hint="state = engine.state_dict(), change it there, and engine.load_state_dict(state)",
            )

    # -- what differs from runtime to runtime -------------------------------------------------------------------

    def stamp(self, live: LiveTensor) -> object:
        """Return a value that changes with every in-place write to a parameter."""
        return write_count(live.tensor)

    def steps_frozen(self, live: LiveTensor) -> bool:
        """Return whether the runtime still steps a parameter that was frozen, as runtimes with main copies do."""
        return self._storage.working(live) is not None

    def _of_all(self, names: list[str]) -> list[str]:
        """Gather the names that any rank with a shard found."""
        for group in self._groups:
            import torch.distributed as dist

            by_rank: list[list[str]] = [[]] * group.size()
            dist.all_gather_object(by_rank, names, group=group)
            names = list(dict.fromkeys(name for theirs in by_rank for name in theirs))
        return names

    def _other_trained(self, live: LiveTensor, trained: bool) -> BuildError:
        if trained:
            return BuildError(
                f"'{live.name}' was frozen after build(): {self._runtime} would still step it, with zero gradients",
                hint=REBUILD,
            )
        return BuildError(
            f"'{live.name}' was unfrozen after build(): {self._runtime} has no optimizer state for it, and would not "
            "step it",
            hint=REBUILD,
        )


_SHOWN = 5
_STEPS = 3


class UnusedParameters:
    """Warn of the first training step that gives some parameters no gradient.

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
        """Note that a parameter has a gradient."""
        self._seen.add(id(parameter))

    def step_begins(self) -> None:
        """Forget the gradients of an earlier step that failed."""
        self._seen.clear()

    def step_is_over(self) -> None:
        """Warn if this step is the first with unused parameters."""
        self._steps += 1
        if not self._names.keys() <= self._seen:
            names = [name for key, name in self._names.items() if key not in self._seen]
            self.stop()
            which = "the first training step" if self._steps == 1 else f"training step {self._steps}"
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            warnings.warn(
                f"{which} gave {', '.join(map(repr, names[:_SHOWN]))}{more} no gradient: {self._runtime} steps unused "
                "parameters with zero gradients, so weight decay and momentum change them, unlike in torch; set "
                "requires_grad=False on unused parameters before build",
                stacklevel=3,
            )
        elif self._steps == _STEPS:
            self.stop()
        self._seen.clear()

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._names.clear()
