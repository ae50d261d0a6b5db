"""Sources of schedules for simulating processes: shapes instead of values, except for small integers."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from slapo_core import create_schedule
from slapo_core.errors import ArgumentError, EstimateError, SealedError, SerializationError
from slapo_core.internals import buffers_of, parameters_of
from slapo_runtime.launcher import preload_modules
from slapo_runtime.schedule_copies import Sent, installed_modules, sent

if TYPE_CHECKING:
    from slapo_core import Schedule


def move_to_meta(modules: Iterable[nn.Module]) -> None:
    """Move parameters and buffers to the meta device; ties stay, also between the modules.

    Args:
        modules: copies; their tensors may share memory with others and are not modified in place.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the original alive, so that its id is unique
    for root in modules:
        for module in root.modules():
            for table in (parameters_of(module), buffers_of(module)):
                for name, tensor in table.items():
                    if tensor is None or nn.parameter.is_lazy(tensor):
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = (tensor, _without_values(tensor))
                    table[name] = made[id(tensor)][1]  # type: ignore[assignment]


def sendable_batch(batch: Any) -> Any:
    """Move the tensors of a batch to the meta device, except small integer ones."""
    from slapo_estimate.private import tree_map_only

    batch = dict(batch) if isinstance(batch, Mapping) else batch  # transformers' BatchEncoding
    return tree_map_only(torch.Tensor, _without_values, batch)


def require_sendable(name: str, value: Any, instead: str) -> None:
    """Require that pickle can send an argument to another process.

    Args:
        name: name of the argument.
        value: value of the argument.
        instead: the corrected argument.

    Raises:
        SerializationError: pickle refuses the value.
    """
    try:
        pickle.dumps(value)
    except Exception as error:  # pickle raises several kinds, and whatever __reduce__ raises
        raise SerializationError(
            f"estimate simulates each kind of rank in another process, and {name} cannot be pickled: {error}",
            hint=f"{instead}, made of functions at the top level of a module (no lambda, no inner function)",
        ) from error


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    from slapo_estimate.values import is_tracked

    if tensor.is_meta:
        return tensor
    if is_tracked(tensor):
        return tensor.detach().cpu()
    with torch.no_grad():
        strided = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        made = (
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            if strided
            else tensor.detach().to("meta")
        )
    if not isinstance(tensor, nn.Parameter):
        return made.requires_grad_(tensor.requires_grad)
    parameter = nn.Parameter(made, tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


class ScheduleSource(Protocol):
    """Make the schedule in another process."""

    def schedule(self, mesh: Mapping[str, int] | None, example_inputs: Any) -> Schedule:
        """Make the schedule for this process's rank."""


@dataclass(frozen=True)
class Functions:
    """Make a schedule by functions, which are sent by name.

    Args:
        make_model: returns the model; called under ``torch.device("meta")``.
        apply: applies steps to the default schedule.
        arguments: further arguments of ``apply``.
    """

    make_model: Callable[[], nn.Module]
    apply: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def schedule(self, mesh: Mapping[str, int] | None, example_inputs: Any) -> Schedule:
        from slapo_estimate.values import IntegerTracking

        with torch.device("meta"), IntegerTracking():
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
    """Make a source from the reference model without values, and the steps; the schedule is only read.

    A server of the processes that starts later imports the model's installed modules once for all of them.

    Raises:
        SealedError: the schedule dropped its reference model.
        SerializationError: a step cannot be sent to another process.
        EstimateError: a lazy module is not initialized yet.
    """
    instead = "estimate_functions(make_model, schedule, batch), with functions at the top level of a module"
    lazy = [name for name, parameter in schedule.model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise EstimateError(
            f"lazy parameter '{lazy[0]}' has no shape before the first call of the model",
            hint="model(batch) before sch.estimate(...)",
        )
    try:
        found = sent(schedule, strip=move_to_meta)
    except SealedError as error:
        raise SealedError(
            "estimate needs the reference model, which was dropped when the schedule was sealed",
            hint=f"call sch.estimate(...) before build() or seal(), or {instead}",
        ) from error
    except SerializationError as error:
        raise SerializationError(
            f"estimate repeats the schedule in another process, but {error.message}",
            hint=f"{error.hint}; or {instead}" if error.hint else instead,
        ) from error
    preload_modules(*installed_modules(found.model))
    return dataclasses.replace(found, example_inputs=sendable_batch(found.example_inputs))
