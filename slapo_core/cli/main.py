"""The command ``slapo``: its own commands, and the commands of plugins.

`make_app` lists the commands of this package. Plugins' commands come after them, listed by name and imported when
called. Slow imports are inside the command that needs them.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from slapo_core.cli import plugins, steps, stubs, vocabulary
from slapo_core.cli.arguments import AsJson
from slapo_core.cli.output import print_json
from slapo_core.errors import SlapoError, UnknownNameError, UnusablePluginError
from slapo_core.plugins import current_registry
from slapo_core.plugins.metadata import DISABLE, Entry, core_version


class Command(ABC):
    """A family of commands of a plugin: ``slapo <name> ...``.

    Published by an entry point of the group ``slapo.v1.commands``. It is imported when it is called, and not when
    ``slapo --help`` lists it.

    Attributes:
        name: the word after ``slapo``, e.g. ``"acme"``; ``"plugins.acme"`` for ``slapo plugins acme``.

    The first line of the class's docstring is what ``slapo --help`` says of it.
    """

    name: ClassVar[str]

    @abstractmethod
    def app(self) -> typer.Typer:
        """Return the typer app, whose commands are ``slapo <name> <command>``; a single one is ``slapo <name>``.

        A `SlapoError` that it raises is printed without traceback, and ends the process with status 2: the command
        could not do its work. A negative answer (not verified, not equal) is ``raise typer.Exit(1)``.
        """


class CommandGroup(TyperGroup):
    """``slapo``: its own commands, then the plugins' commands (kind ``commands``)."""

    prefix: ClassVar[str] = ""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in self._entries() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Look up a command; a plugin's is not imported yet.

        Raises:
            PluginError: the plugin that provides it cannot be used, or the project's own that does is not installed.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None or "." in cmd_name:
            return own
        if (entry := self._entries().get(cmd_name)) is not None:
            return _LazyCommand(entry)
        try:
            current_registry().resolve("commands", self.prefix + cmd_name)
        except UnknownNameError as error:
            if error.plugin is None:  # a word that means nothing anywhere
                return None
            raise

    def contributed(self) -> dict[str, Any]:
        """Import the plugins' commands, for the documentation."""
        return {name: _loaded(entry) for name, entry in self._entries().items()}

    def _entries(self) -> dict[str, Entry]:
        registry = current_registry()
        plugins = [plugin for plugin in registry.plugins if plugin.usable]
        usable = [entry for plugin in plugins for entry in plugin.entries if entry not in plugin.lost]
        named = {entry.name: entry for entry in usable if entry.kind == "commands"}
        known = {name.removeprefix(self.prefix): named[name] for name in registry.names("commands") if name in named}
        return {name: entry for name, entry in known.items() if self.prefix + name == entry.name and "." not in name}


class PluginsGroup(CommandGroup):
    """``slapo plugins``: plugins publish further commands as ``plugins.<name>``."""

    prefix = "plugins."


class _LazyCommand(TyperCommand):
    """Load a plugin's command when it is called."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry.bare, help=_summary(entry))
        self.entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return _loaded(self.entry).make_context(info_name, args, parent=parent, **extra)


def _summary(entry: Entry) -> str:
    """Read the first docstring line of a class from its file, without an import."""
    module, _, name = entry.value.partition(":")
    top, *below = module.split(".")
    with contextlib.suppress(AttributeError, ImportError, OSError, StopIteration, SyntaxError, TypeError, ValueError):
        spec: Any = importlib.util.find_spec(top)
        places = [Path(place, *below) for place in spec.submodule_search_locations or ()]
        files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
        file = next(file for file in (*files, Path(spec.origin)) if file.is_file())
        code = ast.parse(file.read_text(encoding="utf-8"))
        found = next(part for part in code.body if isinstance(part, ast.ClassDef) and part.name == name)
        return str(ast.get_docstring(found)).splitlines()[0] if ast.get_docstring(found) else f"Of {entry.label}."
    return f"Of {entry.label}."


def _loaded(entry: Entry) -> Any:
    """Load a plugin's command.

    Raises:
        PluginError: it cannot be imported, or is not an app of typer.
    """
    cls = current_registry().load(entry)
    remedy = f"pip install --upgrade {entry.distribution}, or {DISABLE}={entry.distribution}"
    subject = f"command '{entry.name}' of {entry.label}"
    try:
        app = cls().app()
        command = _family(app, entry.bare) if isinstance(app, typer.Typer) else None
    except Exception as error:
        raise UnusablePluginError(
            f"{subject} could not be made: {type(error).__name__}: {error}", plugin=entry.label, hint=remedy
        ) from error
    if command is None:
        raise UnusablePluginError(f"{subject} must give a typer.Typer (got {app!r})", plugin=entry.label, hint=remedy)
    return command


def _family(app: typer.Typer, name: str) -> Any:
    """Convert a typer app to a command with completion and style of the outer app."""
    outer = typer.Typer(add_completion=False, rich_markup_mode=_markup())
    if app.registered_callback is None and not app.registered_groups and len(app.registered_commands) == 1:
        outer.registered_commands = app.registered_commands  # a single command, as typer has it
        command = typer.main.get_command(outer)
        command.name = name
        return command
    outer.add_typer(app, name=name)
    return typer.main.get_group(outer).commands[name]


def _markup() -> Literal["rich"] | None:
    """Choose rich, which is slow to import, for a terminal only."""
    return "rich" if sys.stdout.isatty() else None


def make_app() -> typer.Typer:
    """Make the command line with all its commands."""
    root = typer.Typer(
        name="slapo",
        cls=CommandGroup,
        help="A schedule language for PyTorch training.",
        no_args_is_help=True,
        rich_markup_mode=_markup(),
        pretty_exceptions_enable=False,
    )
    about = "The installed plugins and their state."
    family = typer.Typer(cls=PluginsGroup, help=about, no_args_is_help=True, rich_markup_mode=_markup())
    root.add_typer(family, name="plugins")

    @root.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", help="Show the version of slapo-core.", callback=_version, is_eager=True)
        ] = False,
    ) -> None:
        pass

    family.command("list")(plugins.list_plugins)
    family.command("show")(plugins.show)
    root.command("primitives")(vocabulary.primitives)
    root.command("dialects")(vocabulary.dialects)
    root.command("explain")(steps.explain)
    root.command("diff")(steps.diff)
    root.command("stubs")(stubs.stubs)
    root.command("doctor")(_doctor)
    return root


def _doctor(
    ask: Annotated[
        list[str] | None,
        typer.Option("--ask", help="A plugin whose own slapo_doctor hook to ask as well; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look over the environment; exit 1 if something is wrong.

    Imports torch and every plugin.
    """
    from slapo_core.cli.doctor import diagnose, print_report

    report = diagnose(current_registry(), ask=ask or ())
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        print_report(report)
    if report.problems:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; print a slapo error without traceback, with exit status 2."""
    try:
        make_app()()
    except SlapoError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slapo-core {core_version() or '(from a source tree, not installed)'}")
        raise typer.Exit


if __name__ == "__main__":
    main()
