"""Write docs/reference from the sources: a page for each distribution, hooks.md, errors.md and cli.md.

python tools/generate_docs.py           write them
python tools/generate_docs.py --check   exit 1 with a diff if they are out of date
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pluggy
from docstring_markdown import sections, tidy
from reference_page import reference_pages

from slapo_core import errors, hookspecs
from slapo_core.plugins import current_registry

DOCS = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Made by tools/generate_docs.py; change the docstrings in {source} instead. -->\n"


def hooks_page() -> str:
    """Every hook: when it is called, its arguments, who may answer, and whose it is."""
    sources = [("slapo-core", hookspecs), *_hookspecs_of_distributions()]
    lines = [
        "# Hooks",
        "",
        NOTE.format(source=" and ".join(f"{module.__name__}" for _, module in sources)),
        inspect.cleandoc(hookspecs.__doc__ or ""),
    ]
    lines += ["", "| hook | of | answers |", "|---|---|---|"]
    parse = pluggy.PluginManager(hookspecs.PROJECT).parse_hookspec_opts
    hooks = [
        (name, distribution, getattr(module, name), options["firstresult"])
        for distribution, module in sources
        for name in vars(module)
        if (options := parse(module, name))
    ]
    for name, distribution, _, is_single in hooks:
        answers = "at most one active plugin" if is_single else "any number of active plugins"
        lines.append(f"| [`{name}`](#{name}) | {distribution} | {answers} |")
    for name, _, function, _ in hooks:
        signature = inspect.signature(function)
        arguments = ", ".join(str(parameter).replace("'", "") for parameter in signature.parameters.values())
        returns = str(signature.return_annotation).replace("'", "")
        lines += ["", f"## {name}", "", "```python", f"def {name}({arguments}) -> {returns}", "```", ""]
        lines += sections(inspect.getdoc(function) or "")
    return tidy(lines)


def _hookspecs_of_distributions() -> list[tuple[str, ModuleType]]:
    registry = current_registry()
    entries = [registry.resolve("hookspecs", name) for name in registry.names("hookspecs")]
    return [(entry.distribution, registry.load(entry)) for entry in entries]


def errors_page() -> str:
    """Every error class: when it is raised, what to do, what it carries, and its place in the hierarchy."""
    lines = ["# Errors", "", NOTE.format(source="slapo_core/errors.py")]
    lines += [
        "Every error that slapo raises on purpose is a `slapo_core.SlapoError`. It carries `message`, `path` (the node",
        "concerned), `plugin` (the distribution concerned) and `hint` (the corrected call, or the command that mends",
        "it); each but the message is None where it does not apply.",
        "",
        "```text",
        *_tree(errors.SlapoError),
        "```",
    ]
    for name in errors.__all__:
        cls = getattr(errors, name)
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        lines += ["", f"## {name}", "", f"Derived from {bases}.", "", *sections(inspect.getdoc(cls) or "")]
    return tidy(lines)


def cli_page() -> str:
    """The help of every command."""
    import typer.main
    from typer.testing import CliRunner

    from slapo_core.cli.main import make_app

    app = make_app()
    lines = ["# The command line", "", NOTE.format(source="slapo_core/cli/"), "Each command with `--json` prints one"]
    lines[-1] += " object for programs, keys sorted. The exit status is 0 if all is well, 1 if not, 2 for a wrong call."
    runner = CliRunner()
    for words in _commands(typer.main.get_command(app), ()):
        environment = {"COLUMNS": "120", "TERMINAL_WIDTH": "120", "NO_COLOR": "1"}
        done = runner.invoke(app, [*words, "--help"], prog_name="slapo", env=environment)
        if done.exit_code != 0:
            raise RuntimeError(f"slapo {' '.join(words)} --help failed: {done.output}")
        text = "\n".join(line.rstrip() for line in done.output.strip().splitlines())
        lines += ["", f"## {' '.join(['slapo', *words])}", "", "```text", text, "```"]
    return "\n".join(lines) + "\n"


def _commands(command: object, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    contributed = getattr(command, "contributed", dict)()
    for name, child in sorted({**getattr(command, "commands", {}), **contributed}.items()):
        yield from _commands(child, (*words, name))


def _tree(cls: type, depth: int = 0) -> Iterator[str]:
    yield "    " * depth + cls.__name__
    for child in sorted(cls.__subclasses__(), key=lambda item: item.__name__):
        if child.__module__ == errors.__name__:
            yield from _tree(child, depth + 1)


def pages() -> dict[str, str]:
    """Every page by its name in docs/reference."""
    made = {"hooks.md": hooks_page(), "errors.md": errors_page(), "cli.md": cli_page()}
    return made | reference_pages(NOTE.format(source="the sources"))


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]))
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    stale = False
    for name, text in pages().items():
        path = DOCS / name
        old = path.read_text("utf-8") if path.exists() else ""
        if not check:
            path.write_text(text, "utf-8")
        elif old != text:
            stale = True
            diff = difflib.unified_diff(
                old.splitlines(True), text.splitlines(True), f"docs/reference/{name}", "from the sources"
            )
            sys.stdout.writelines(diff)
    if stale:
        print("error: docs are out of date\n  hint: python tools/generate_docs.py", file=sys.stderr)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
