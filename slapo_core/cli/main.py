"""The command ``slapo``: its own commands, and those of plugins.

A file of this package adds its commands by a function ``register(root, plugins)``, listed in `_FAMILIES`; ``root`` is
``slapo``, ``plugins`` is ``slapo plugins``. Plugins' commands come after them, listed by name and imported when called.
Slow imports are inside the command that needs them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from slapo_core.cli import new, plugins, stubs, vocabulary
from slapo_core.errors import SlapoError


class Command(ABC):
    """A family of commands of a plugin: ``slapo <name> ...``.

    Published by an entry point of the group ``slapo.v1.commands``. It is imported when it is called, and not when
    ``slapo --help`` lists it.

    Attributes:
        name: the word after ``slapo``, e.g. ``"pipeline"``.
    """

    name: ClassVar[str]

    @abstractmethod
    def app(self) -> typer.Typer:
        """Return the typer app, whose commands are ``slapo <name> <command>``.

        A `SlapoError` that it raises is printed without traceback, and ends the process with status 1.
        """


class RootGroup(TyperGroup):
    """``slapo``: its own commands, and those of plugins of kind ``commands`` behind them."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in _registry().names("commands") if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; one of a plugin is not imported yet.

        Raises:
            PluginError: the plugin that provides it cannot be used, or the project's own that does is not installed.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        from slapo_core.errors import UnknownNameError

        registry = _registry()
        if cmd_name not in registry.names("commands"):
            try:
                registry.resolve("commands", cmd_name)
            except UnknownNameError as error:
                if error.plugin is None:  # a word that means nothing anywhere
                    return None
                raise
        return _Contributed(cmd_name)

    def contributed(self) -> dict[str, Any]:
        """The commands of plugins by name, imported: for the documentation."""
        return {name: _loaded(name) for name in _registry().names("commands")}


class _Contributed(TyperCommand):
    """Load a command of a plugin when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help=f"Of {_label(name)}.")

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return _loaded(str(self.name)).make_context(info_name, args, parent=parent, **extra)


def _loaded(name: str) -> Any:
    """The command itself.

    Raises:
        PluginError: it cannot be imported, or is not an app of typer.
    """
    import typer

    from slapo_core.errors import UnusablePluginError

    registry = _registry()
    entry = registry.resolve("commands", name)
    cls = registry.load(entry)
    remedy = f"pip install --upgrade {entry.distribution}, or SLAPO_DISABLE_PLUGINS={entry.distribution}"
    subject = f"command '{name}' of {entry.label}"
    try:
        app = cls().app()
        command = _family(app, name) if isinstance(app, typer.Typer) else None
    except Exception as error:
        raise UnusablePluginError(
            f"{subject} could not be made: {type(error).__name__}: {error}", plugin=entry.label, hint=remedy
        ) from error
    if command is None:
        raise UnusablePluginError(f"{subject} must give a typer.Typer (got {app!r})", plugin=entry.label, hint=remedy)
    return command


def _family(app: Any, name: str) -> Any:
    """An app as a part of another one, which has completion and looks as that one does."""
    import typer.main

    outer = typer.Typer(add_completion=False, rich_markup_mode="rich" if sys.stdout.isatty() else None)
    if app.registered_callback is None and not app.registered_groups and len(app.registered_commands) == 1:
        outer.registered_commands = app.registered_commands  # a single command, as typer has it
        command = typer.main.get_command(outer)
        command.name = name
        return command
    outer.add_typer(app, name=name)
    return typer.main.get_group(outer).commands[name]


def _label(name: str) -> str:
    found = (entry for plugin in _registry().plugins for entry in plugin.entries)
    return next((entry.label for entry in found if (entry.kind, entry.name) == ("commands", name)), "a plugin")


def _registry() -> Any:
    from slapo_core.plugins import current_registry

    return current_registry()


_FAMILIES = (plugins, new, vocabulary, stubs)


def make_app() -> typer.Typer:
    """The command line with all its commands."""
    markup: Literal["rich"] | None = (
        "rich" if sys.stdout.isatty() else None
    )  # rich is slow to import, and a pipe cannot show it
    root = typer.Typer(
        name="slapo",
        cls=RootGroup,
        help="A schedule language for PyTorch training.",
        no_args_is_help=True,
        rich_markup_mode=markup,
        pretty_exceptions_enable=False,
    )
    family = typer.Typer(help="The installed plugins and their state.", no_args_is_help=True, rich_markup_mode=markup)
    root.add_typer(family, name="plugins")

    @root.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", help="Show the version of slapo-core.", callback=_version, is_eager=True)
        ] = False,
    ) -> None:
        pass

    for module in _FAMILIES:
        module.register(root, family)
    root.command("doctor")(_doctor)
    return root


def _doctor(
    ask: Annotated[
        list[str] | None,
        typer.Option("--ask", help="A plugin whose own slapo_doctor hook to ask as well; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, keys sorted.")] = False,
) -> None:
    """Look over the environment; exit 1 if something is wrong.

    Imports torch, and no plugin but those named with --ask.
    """
    from slapo_core.cli.doctor import diagnose, print_report
    from slapo_core.cli.output import print_json
    from slapo_core.plugins import current_registry

    report = diagnose(current_registry(), ask=ask or ())
    if as_json:
        print_json(report.as_json())
    else:
        print_report(report)
    if report.problems:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line of this process; a slapo error is printed without traceback, with exit status 1."""
    try:
        make_app()()
    except SlapoError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        from slapo_core.plugins.metadata import core_version

        typer.echo(f"slapo-core {core_version() or '(from a source tree, not installed)'}")
        raise typer.Exit


if __name__ == "__main__":
    main()
