"""Calls of each module when the reference model runs on the schedule's example inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError, TraceError

if TYPE_CHECKING:
    from torch import nn


class ExampleCalls:
    """The calls of one run without values.

    Args:
        model: the reference model.
        example_inputs: of the schedule.

    Raises:
        ArgumentError: there are none.
    """

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        if example_inputs is None:
            raise ArgumentError(
                "tracing runs the model once, without values, to record each module's arguments, and this "
                "schedule has no example inputs",
                hint="create_schedule(model, example_inputs={'input_ids': ids}), or trace(example_inputs=...) with "
                "this module's arguments",
            )
        from slapo_graph.examples import example_calls

        self._calls, self._error = example_calls(model, example_inputs)

    def of(self, path: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the first call of the module at ``path``.

        Raises:
            TraceError: the run raised before, or never called the module.
        """
        if path in self._calls:
            return self._calls[path]
        where = f"'{path}'" if path else "the root"
        hint = "trace(example_inputs=...), with this module's arguments"
        if self._error is None:
            raise TraceError(f"the model does not call {where} on the example inputs", path=path, hint=hint)
        raise TraceError(
            f"the arguments of {where} are not known: on inputs without values the model raises "
            f"{type(self._error).__name__}: {self._error}",
            path=path,
            hint=hint,
        ) from self._error
