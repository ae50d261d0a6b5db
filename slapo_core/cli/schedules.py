"""Schedules that are named on the command line: by a function, by a function of a file, or as saved JSON."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core.cli.arguments import ExampleBatch, call_function, find_function, is_function_name, mesh_of
from slapo_core.errors import ArgumentError, ReplayError, SlapoError, TraceError

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.schedule.schedule import Schedule

SCHEDULE_HELP = (
    "MODULE:FUNCTION or FILE.py:FUNCTION. The function returns a schedule or a model; with --model, it applies steps "
    "to a schedule. Or a JSON file of sch.to_json(), with --model."
)
ScheduleName = Annotated[str, typer.Argument(metavar="SCHEDULE", help=SCHEDULE_HELP)]
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="MODULE:FUNCTION", help="A function that returns the schedule's model.")
]


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule of the command line, imported and not made yet.

    Args:
        name: as given on the command line.
        mesh: sizes of ``--mesh``, else those that it was saved with; None: what `apply` chooses.
        model: the name of `make_model`.
        make_model: returns the model; None: `apply` returns a schedule or a model.
        apply: applies steps to a schedule; without `make_model`, returns a schedule or a model.
    """

    name: str
    mesh: Mapping[str, int] | None
    model: str | None
    make_model: Callable[[], nn.Module] | None
    apply: Callable[..., Any]

    def make(self, example_inputs: Callable[[nn.Module], Any] | None = None, *, on_meta: bool = False) -> Schedule:
        """Make the schedule of this process, on an abstract mesh as of rank 0.

        Args:
            example_inputs: returns example inputs of a model, for steps that run it; not called where `apply` makes the
                schedule.
            on_meta: whether its model is made on the meta device, without memory. One that cannot be is made in
                memory, which a line on stderr says.

        Raises:
            BadParameter: a function returns something else, or does not take ``--mesh``.
            SlapoError: a function or a step raised.
        """
        import torch

        if not on_meta:
            return self._scheduled(example_inputs)
        try:
            with torch.device("meta"):
                return self._scheduled(example_inputs)
        except SlapoError as error:
            if not isinstance(error, TraceError) and not isinstance(error.__cause__, RuntimeError):
                raise
            print(f"note: the model is made in memory; on the meta device, {error.message}", file=sys.stderr)
            return self._scheduled(example_inputs)

    def _scheduled(self, example_inputs: Callable[[nn.Module], Any] | None) -> Schedule:
        from torch import nn

        from slapo_core.schedule.creation import create_schedule
        from slapo_core.schedule.schedule import Schedule

        if self.make_model is not None:
            model = call_function(self.make_model, str(self.model))
            if not isinstance(model, nn.Module):
                got = type(model).__name__
                raise typer.BadParameter(f"{self.model} must return a model (got {got})", param_hint="--model")
            inputs = None if example_inputs is None else example_inputs(model)
            schedule = create_schedule(model, mesh=self.mesh, example_inputs=inputs)
            call_function(self.apply, self.name, schedule)
            return schedule
        parameter = _parameters(self.apply).get("mesh")
        takes_mesh = parameter is not None and (self.mesh is not None or parameter.default is parameter.empty)
        made = call_function(self.apply, self.name, **({"mesh": self.mesh} if takes_mesh else {}))
        if isinstance(made, nn.Module):
            return create_schedule(made, mesh=self.mesh)
        if not isinstance(made, Schedule):
            raise typer.BadParameter(
                f"{self.name} must return a schedule or a model (got {type(made).__name__}); or give --model, the "
                "function of its model, if it applies steps to a schedule",
                param_hint="SCHEDULE",
            )
        sizes = made.mesh.sizes if made.mesh is not None else None
        if self.mesh is not None and sizes != dict(self.mesh):
            raise typer.BadParameter(
                f"{self.name} returned a schedule of the mesh {sizes}, not {dict(self.mesh)}: let it take the argument "
                "mesh and pass it on, create_schedule(model, mesh=mesh)",
                param_hint="--mesh",
            )
        return made


def find_schedule(
    name: str, *, model: str | None = None, mesh: str | None = None, model_is_optional: bool = False
) -> NamedSchedule:
    """Import a schedule of the command line.

    Args:
        name: of a function, or of a file with a saved schedule.
        model: of the function that returns the model: the value of ``--model``.
        mesh: the value of ``--mesh``, e.g. ``"dp=2,tp=2"``.
        model_is_optional: leave ``model`` out where the function returns a schedule by itself.

    Raises:
        BadParameter: a name is malformed, nothing is there, a file is not a schedule, or ``--model`` is missing or too
            much.
        ArgumentError: an import raised.
    """
    sizes = mesh_of(mesh)
    if not is_function_name(name):
        return _saved(name, model, sizes)
    make_model = None if model is None else find_function(model, "--model")
    apply = find_function(name, "SCHEDULE")
    parameters = _parameters(apply)
    required = [key for key, one in parameters.items() if one.default is one.empty and one.kind in _ORDINARY]
    needs_model = bool(set(required) - {"mesh"})
    if model_is_optional and not needs_model:
        return NamedSchedule(name, sizes, None, None, apply)
    if make_model is None and needs_model:
        raise typer.BadParameter(
            f"{name} takes {', '.join(required)}: if it applies steps to a schedule, add --model MODULE:FUNCTION, "
            "which returns the model",
            param_hint="SCHEDULE",
        )
    if make_model is not None and (next(iter(parameters), "") == "mesh" or not _takes_one(apply)):
        raise typer.BadParameter(
            f"with --model, {name} must take one argument, the schedule; it takes {', '.join(parameters) or 'none'}",
            param_hint="SCHEDULE",
        )
    return NamedSchedule(name, sizes, model, make_model, apply)


def batch_for(model: nn.Module, words: Sequence[str] | None, seed: int = 0) -> ExampleBatch:
    """Make the batch of ``--batch``, with values; without one, a batch on which the model runs in evaluation.

    Args:
        model: the reference model; only read.
        words: as for :func:`~slapo_core.cli.batch_of`; None or empty: make one for the model.
        seed: of the values.

    Raises:
        BadParameter: the words are malformed.
        ArgumentError: nothing that is known of the model gives one.
    """
    from slapo_core.cli.example_batch import make_batch

    return make_batch(model, words, seed)


def batch_for_steps(model: nn.Module, words: Sequence[str] | None) -> Any:
    """Return example inputs for steps that run the model.

    Args:
        model: the reference model; only read.
        words: as for :func:`batch_for`.

    Returns:
        the inputs; None where none can be made, for schedules without such steps: a note on stderr says why.
    """
    try:
        return batch_for(model, words).inputs
    except ArgumentError as error:
        print(f"note: steps get no example inputs: {error.message}", file=sys.stderr)
        return None


_ORDINARY = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # written in C
        return {}


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(object())
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True


def _saved(name: str, model: str | None, sizes: Mapping[str, int] | None) -> NamedSchedule:
    """Read a file."""
    if not Path(name).is_file():
        raise typer.BadParameter(
            f"must be MODULE:FUNCTION, FILE.py:FUNCTION, or an existing JSON file (got {name!r})",
            param_hint="SCHEDULE",
        )
    from slapo_core.schedule.records import load_document

    try:
        document = load_document(Path(name))
    except ReplayError as error:
        raise typer.BadParameter(f"{name}: {error.message}", param_hint="SCHEDULE") from error
    if model is None:
        saved_for = f", of {document['model']}" if isinstance(document.get("model"), str) else ""
        raise typer.BadParameter(
            f"required for a saved schedule: MODULE:FUNCTION that returns the model{saved_for}", param_hint="--model"
        )
    apply = functools.partial(_replay, document=document)
    return NamedSchedule(name, sizes or document.get("mesh"), model, find_function(model, "--model"), apply)


def _replay(schedule: Schedule, document: Mapping[str, Any]) -> None:
    from slapo_core.schedule.creation import replay

    replay(schedule, document)
