"""Where the process that plays a rank gets its schedule from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from slapo_core.schedule.creation import create_schedule

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Functions", "Source"]


class Source(Protocol):
    """Makes the schedule once more, in another process."""

    def schedule(self, mesh: Mapping[str, int] | None, example_inputs: Any) -> Schedule:
        """The schedule for the rank that torch.distributed says this process is."""


@dataclass(frozen=True)
class Functions:
    """The user's functions; sent by their names.

    Args:
        make_model: gives the model; it is called under ``torch.device("meta")``.
        schedule: is given the default schedule, and applies steps to it.
        arguments: what ``schedule`` is given beside it.
    """

    make_model: Callable[[], nn.Module]
    apply: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def schedule(self, mesh: Mapping[str, int] | None, example_inputs: Any) -> Schedule:
        with torch.device("meta"):
            model = self.make_model()
        schedule = create_schedule(model, mesh=mesh, example_inputs=example_inputs)
        self.apply(schedule, *self.arguments)
        return schedule
