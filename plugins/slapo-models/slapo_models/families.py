"""Find the schedule of a model by its class, and ``slapo models``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core import Command
from slapo_core.cli import AsJson, print_json, print_table
from slapo_core.errors import UnknownNameError
from slapo_core.plugins import current_registry

if TYPE_CHECKING:
    from torch import nn


def schedule_for(model: nn.Module) -> Callable[..., None]:
    """Return the schedule function of a model's class, or of its nearest base class.

    Functions are entry points of the group ``slapo.v1.models``, named ``<package>.<Class>``: of ``slapo_models``
    and of other distributions. Only the function that is returned is imported.

    Args:
        model: e.g. transformers' ``LlamaForCausalLM``.

    Returns:
        a function of a schedule, e.g. ``slapo_models.llama``: ``schedule_for(sch.model)(sch, stages=2)``.

    Raises:
        UnknownNameError: no installed distribution has a schedule for the class.
        UnusablePluginError: the distribution that has one cannot be used, or several have one.
    """
    registry = current_registry()
    names = [f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}" for cls in type(model).__mro__]
    for name in names:
        with contextlib.suppress(UnknownNameError):
            return registry.load(name, "models")  # type: ignore[no-any-return]
    raise UnknownNameError(
        f"no installed plugin has a schedule for the class {names[0]}",
        hint="slapo_models.auto(sch) schedules any model; `slapo models list` shows the classes with a ready schedule",
    )


class ModelCommands(Command):
    """List the models with a ready schedule, or show one."""

    name = "models"

    def app(self) -> typer.Typer:
        app = typer.Typer(help="Ready schedules, by the class of the model.", no_args_is_help=True)
        app.command("list")(list_models)
        app.command("show")(show_model)
        return app


def list_models(
    as_json: AsJson = False,
) -> None:
    """List the classes of models with their schedules. Imports no schedule."""
    entries = _entries()
    if as_json:
        print_json([_described(entry) for entry in entries])
        return
    print_table(["SCHEDULE", "MODEL", "PLUGIN"], [[_function(entry), entry.name, entry.label] for entry in entries])


def show_model(
    name: Annotated[str, typer.Argument(help="A schedule or a class, e.g. llama or LlamaForCausalLM.")],
    as_json: AsJson = False,
) -> None:
    """Load one schedule, and show its source, with its documentation, and its models."""
    registry = current_registry()
    named = {entry.value: entry for entry in _entries() if _function(entry) == name}
    if len(named) > 1:
        classes = " or ".join(sorted(entry.name for entry in named.values()))
        raise UnknownNameError(f"several schedules are named '{name}'", hint=f"name the class: {classes}")
    entry = next(iter(named.values()), None) or registry.resolve("models", name)
    function = registry.load(entry)
    models = [each.name for each in _entries() if each.value == entry.value]
    if as_json:
        documentation = inspect.getdoc(function) or ""
        print_json(
            {
                **_described(entry),
                "documentation": documentation,
                "models": models,
                "source": inspect.getsource(function),
            }
        )
        return
    print(f"{_function(entry)}  ({entry.label}, {entry.value})")
    print(f"for {', '.join(models)}\n")
    print(inspect.getsource(function).rstrip())


def _entries() -> list[Any]:
    """The usable entry points, sorted by function and class."""
    registry = current_registry()
    registry.check_settings()
    entries = [registry.resolve("models", name) for name in registry.names("models")]
    return sorted(entries, key=lambda entry: (_function(entry), entry.name))


def _function(entry: Any) -> str:
    """The name of the schedule function, e.g. ``"llama"``."""
    return str(entry.value.rpartition(":")[2])


def _described(entry: Any) -> dict[str, Any]:
    return {
        "distribution": entry.distribution,
        "model": entry.name,
        "object": entry.value,
        "schedule": _function(entry),
        "version": entry.version,
    }
