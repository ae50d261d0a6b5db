"""A base class of engines: state dicts, checkpoints and refusals."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slapo_core.errors import BuildError

if TYPE_CHECKING:
    import torch

    from slapo_runtime.state import ModelState, OptimizerStorage


class StatefulEngine:
    """State dicts and checkpoints by the request's state, and refusals of steps.

    An engine that derives from it sets the two attributes, and has all members of
    :class:`slapo_core.dialect.Engine` but ``module``, the steps and ``close``. One whose runtime keeps values
    elsewhere calls ``request.state.keep_in``, and overrides the methods from :meth:`_kept_optimizer` on.

    Attributes:
        optimizer: None where the engine only evaluates, or is closed.
        _state: ``request.state``.
    """

    optimizer: Any
    _state: ModelState
    _reason: str | None = None  # why it is closed

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
        """The reference model's state dict; ``include_added`` gives what a step added too, under its own name."""
        return self._state.state_dict(rank0_only=rank0_only, include_added=include_added)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state.load_state_dict(state)

    def check_replicas(self, *, repair: bool = False) -> None:
        self._state.check_replicas(optimizer=self._kept_optimizer(), repair=repair)

    def save(self, directory: str | os.PathLike[str]) -> None:
        self._state.save(directory, optimizer=self._kept_optimizer(), runtime=self._beside())

    def load(self, directory: str | os.PathLike[str]) -> None:
        self._resume(self._state.load(directory, optimizer=self._kept_optimizer(), uses=self._uses()))

    # -- for a runtime that keeps values elsewhere ------------------------------------------------------------

    def _kept_optimizer(self) -> torch.optim.Optimizer | OptimizerStorage | None:
        """The optimizer, as the state is given it."""
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = self.optimizer
        return optimizer

    def _beside(self) -> Mapping[str, Any]:
        """Return the runtime's further state for checkpoints, as JSON, by name."""
        return {}

    def _uses(self) -> Collection[str]:
        """Return the names of :meth:`_beside` that this engine loads; a warning names the others."""
        return ()

    def _resume(self, runtime: Mapping[str, Any]) -> None:
        """Take what :meth:`_beside` of the engine that saved it gave, after weights and optimizer; ``{}``: nothing."""

    # -- the end ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _closing(self, at: Callable[[], str]) -> Iterator[None]:
        """Close the engine if a step fails midway: the ranks have diverged.

        Other ranks may wait for this one then, until the launcher of the job ends them, or the timeout of the group.

        Args:
            at: tells what this rank does just now, e.g. ``"stage 1 in the forward of micro-batch 0"``.
        """
        try:
            yield
        except BaseException as error:
            error.add_note(f"a step of the pipeline failed here: {at()}")
            self._reason = f"a step failed: {type(error).__name__}: {error}"
            self.close()  # type: ignore[attr-defined]
            raise

    # -- refusals -----------------------------------------------------------------------------------------------

    @staticmethod
    def _refuse_without_gradients() -> None:
        """Refuse a training step where torch computes no gradients."""
        import torch

        if not torch.is_grad_enabled():
            raise BuildError(
                "train_step() was called without gradients: inside of torch.no_grad() or torch.inference_mode()",
                hint="call it outside of that block, or engine.eval_step(batch) inside",
            )

    @staticmethod
    def _without_optimizer() -> BuildError:
        return BuildError(
            "this engine cannot train: it was built without an optimizer",
            hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))",
        )

    @staticmethod
    def _closed(reason: str = "") -> BuildError:
        return BuildError(
            f"the engine is closed{reason and ', because '}{reason}",
            hint="schedule and build a fresh model, with weights=engine.state_dict()",
        )
