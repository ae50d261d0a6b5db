"""Handle training steps that fail after gradients were accumulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from slapo_core import BuildError


class Failing:
    """Knows whether a step may follow.

    Until the first backward pass of a step, DeepSpeed has only run the model: the next step starts afresh. From then on
    gradients are accumulated and cannot be removed: they would go into the next step.

    Args:
        engine: DeepSpeed's.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._reason: str | None = None
        self._has_gradients = False

    def backward_begins(self) -> None:
        self._has_gradients = True

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Wrap a training step."""
        self._has_gradients = False
        try:
            yield
        except BaseException as error:
            if self._has_gradients:
                self._reason = f"{type(error).__name__}: {error}".split("\n")[0]
            else:
                self._drop_forward()
            raise

    def refuse_after(self) -> None:
        """Raises:
        BuildError: a step failed after its first backward pass had begun.
        """
        if self._reason is not None:
            raise BuildError(
                "an earlier training step failed, and DeepSpeed still holds its partial gradients, which this step "
                f"would add: {self._reason}",
                hint="engine.save(directory), then build a fresh engine and engine.load(directory)",
            )

    def _drop_forward(self) -> None:
        """Abort an interrupted forward pass: ZeRO-3 partitions its gathered parameters again."""
        if self._engine.zero_optimization_partition_weights():
            self._engine.empty_partition_cache()
