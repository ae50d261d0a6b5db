"""Where the process that plays a rank gets its schedule from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from slapo_core.errors import ArgumentError, EstimateError, SealedError, SerializationError
from slapo_core.estimation.sending import sendable_batch, stripped
from slapo_core.estimation.values import Following
from slapo_core.schedule.creation import create_schedule
from slapo_core.verification.dry import Sent, sent

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Functions", "Source", "of_schedule"]


class Source(Protocol):
    """Makes the schedule once more, in another process."""

    def schedule(self, mesh: Mapping[str, int] | None, example_inputs: Any) -> Schedule:
        """The schedule for the rank that torch.distributed says this process is."""


@dataclass(frozen=True)
class Functions:
    """The user's functions; sent by their names.

    Args:
        make_model: gives the model; it is called under ``torch.device("meta")``.
        apply: is given the default schedule, and applies steps to it.
        arguments: what ``apply`` is given beside it.
    """

    make_model: Callable[[], nn.Module]
    apply: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def schedule(self, mesh: Mapping[str, int] | None, example_inputs: Any) -> Schedule:
        with torch.device("meta"), Following():
            model = self.make_model()
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"make_model() must return a torch.nn.Module (got {type(model).__name__})",
                hint="estimate_functions(make_model, schedule, batch)",
            )
        schedule = create_schedule(model, mesh=mesh, example_inputs=example_inputs)
        self.apply(schedule, *self.arguments)
        return schedule


def of_schedule(schedule: Schedule) -> Sent:
    """The reference model without memory, and the steps; the schedule and its model are only read.

    Raises:
        SealedError: the originals were dropped.
        SerializationError: a step cannot be sent to another process.
        EstimateError: a lazy module has not been run yet.
    """
    instead = "estimate_functions(make_model, schedule, batch), with functions at the top level of a module"
    lazy = [name for name, parameter in schedule.model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise EstimateError(
            f"'{lazy[0]}' of a lazy module has no shape before the model has been called once",
            hint="model(batch) before sch.estimate(...)",
        )
    try:
        found = sent(schedule, strip=stripped)
    except SealedError as error:
        raise SealedError(
            "estimate repeats the steps on the reference model, which was dropped when the schedule was sealed",
            hint=f"call sch.estimate(...) before build() or seal(), or {instead}",
        ) from error
    except SerializationError as error:
        raise SerializationError(
            f"estimate repeats the schedule in another process, but {error.message}",
            hint=f"{error.hint}; or {instead}" if error.hint else instead,
        ) from error
    return dataclasses.replace(found, example_inputs=sendable_batch(found.example_inputs))
