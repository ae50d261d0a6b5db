"""Commands of plugins: ``slapo <name>`` from an entry point, listed without importing, and whatever goes wrong told."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from slapo_core.cli.main import make_app
from slapo_core.errors import UnknownNameError
from slapo_core.plugins import use_registry
from slapo_core.plugins.metadata import CORE_COMMANDS
from slapo_testing.distributions import FakeDistribution, FakeEnvironment
from tests.messages import Messages

SOURCE = """
import pathlib
pathlib.Path({sentinel!r}).write_text("imported")
import typer
from slapo_core import ArgumentError, Command


class Sums(Command):
    name = {name!r}

    def app(self):
        app = typer.Typer()

        @app.command()
        def add(one: int, other: int):
            if one < 0:
                raise ArgumentError("no negative numbers", hint="slapo sums add 1 2")
            print(one + other)

        @app.command()
        def nothing():
            pass

        return {app}
"""


def sums(
    environment: FakeEnvironment, name: str = "acme-slapo", command: str = "sums", app: str = "app"
) -> FakeDistribution:
    module = name.replace("-", "_")
    sentinel = str(environment.directory / f"{module}.imported")
    source = SOURCE.format(sentinel=sentinel, name=command, app=app)
    return FakeDistribution(name, "1.0", {"slapo.v1.commands": {command: f"{module}:Sums"}}, {module: source})


def test_help_says_what_a_command_does_and_imports_nothing(fake_distributions: FakeEnvironment) -> None:
    helps = {"documented": '"""Add numbers.\n\n    More."""', "silent": "", "broken": "1 +"}
    for name, text in helps.items():
        source = f"raise SystemExit\nclass Sums:\n    {text}\n    name = {name!r}\n"
        point = {"slapo.v1.commands": {name: f"acme_{name}.cli:Sums"}}
        package = {f"acme_{name}": "", f"acme_{name}.cli": source}
        fake_distributions.install(FakeDistribution(f"acme-{name}", "1.0", point, package))
    fake_distributions.install(FakeDistribution("acme-x", "1.0", {"slapo.v1.commands": {"gone": "nowhere:Sums"}}))
    with use_registry(fake_distributions.registry(with_installed=True)):
        shown = CliRunner().invoke(make_app(), ["--help"]).output
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines() if line.strip()}
    assert lines["documented"] == "Add numbers."
    assert lines["silent"] == "Of acme-silent 1.0."
    assert lines["broken"] == "Of acme-broken 1.0."
    assert lines["gone"] == "Of acme-x 1.0."
    assert lines["tune"].startswith("Search")


@pytest.mark.slow
def test_a_command_is_listed_without_being_imported_and_runs(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(sums(fake_distributions))
    sentinel = fake_distributions.directory / "acme_slapo.imported"
    shown = fake_distributions.slapo("--help")
    assert shown.returncode == 0, shown.stderr
    assert "sums" in {line.split()[0] for line in shown.stdout.splitlines() if line.strip()}
    assert "Of acme-slapo 1.0." in shown.stdout
    listed = json.loads(fake_distributions.slapo("plugins", "list", "--json").stdout)["plugins"]
    assert next(plugin for plugin in listed if plugin["name"] == "acme-slapo")["commands"] == ["sums"]
    assert fake_distributions.slapo("plugins", "list").returncode == 0
    assert not sentinel.exists()
    done = fake_distributions.slapo("sums", "add", "2", "3")
    assert (done.returncode, done.stdout) == (0, "5\n")
    assert sentinel.exists()
    assert "sums [OPTIONS] COMMAND" in fake_distributions.slapo("sums", "--help").stdout
    refused = fake_distributions.slapo("sums", "add", "--", "-2", "3")
    assert (refused.returncode, refused.stderr) == (2, "error: no negative numbers\n  hint: slapo sums add 1 2\n")
    assert fake_distributions.slapo("sums", "subtract").returncode == 2


@pytest.mark.slow
def test_a_command_that_cannot_be_used_says_why(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(
        sums(fake_distributions, "broken-slapo", "broken"),
        sums(fake_distributions, "failing-slapo", "failing", app="1 / 0"),
        sums(fake_distributions, "wrong-slapo", "wrong", app="'an app'"),
        sums(fake_distributions, "one-slapo", "twice"),
        sums(fake_distributions, "other-slapo", "twice"),
        sums(fake_distributions, "taken-slapo", "doctor"),
        sums(fake_distributions, "pipe-slapo", "pipeline"),
    )
    (fake_distributions.directory / "broken_slapo.py").write_text("raise OSError('no disk')\n")

    def error(*words: str, **environ: str) -> str:
        done = fake_distributions.slapo(*words, environ=environ)
        assert done.returncode == 2, done.stdout
        assert "Traceback" not in done.stderr
        return done.stderr

    assert fake_distributions.slapo("--help").returncode == 0
    message(error("broken"), "'broken' of broken-slapo 1.0 (broken_slapo:Sums)", "OSError: no disk")
    message(error("failing", "add"), "'failing' of failing-slapo 1.0", "ZeroDivisionError")
    message(error("wrong"), "'wrong' of wrong-slapo 1.0", "typer.Typer", "got 'an app'")
    message(error("twice"), "'twice'", "one-slapo 1.0 and other-slapo 1.0")
    assert (
        "2"
        in fake_distributions.slapo("twice", "add", "1", "1", environ={"SLAPO_DISABLE_PLUGINS": "other-slapo"}).stdout
    )
    message(error("twice", SLAPO_DISABLE_PLUGINS="other-slapo,one-slapo"), "'twice' of one-slapo 1.0", "disabled")
    rejected = fake_distributions.slapo("plugins", "list").stdout
    assert "'doctor' belongs to slapo-core" in rejected
    assert "'pipeline' belongs to slapo-pipeline" in rejected
    missing = fake_distributions.slapo("nosuch")
    assert missing.returncode == 2
    assert "No such command 'nosuch'" in missing.stderr


def test_the_names_of_slapos_own_commands_are_reserved() -> None:
    import typer.main

    own = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
    below = [f"plugins.{name}" for name in own["plugins"].commands]
    assert sorted([*own, *below]) == sorted(CORE_COMMANDS)


def test_a_word_of_slapo_itself_is_nobody_elses(fake_distributions: FakeEnvironment) -> None:
    for number, name in enumerate((*CORE_COMMANDS, "device", "patterns", "plugins.check", "acme.run")):
        fake_distributions.install(sums(fake_distributions, f"evil{number}", name))
    fake_distributions.install(sums(fake_distributions, "good", "plugins.count"))
    registry = fake_distributions.registry()
    assert {plugin.name for plugin in registry.plugins if plugin.state == "ok"} == {"good"}
    assert registry.names("commands") == ("plugins.count",)


@pytest.mark.parametrize(
    ("name", "owner"), [("plugins.check", "slapo-testing"), ("patterns", "slapo-graph"), ("device", "slapo-estimate")]
)
def test_a_command_of_a_distribution_that_is_missing_says_what_to_install(
    fake_distributions: FakeEnvironment, name: str, owner: str
) -> None:
    with use_registry(fake_distributions.registry()):
        done = CliRunner().invoke(make_app(), name.split("."))
    assert isinstance(done.exception, UnknownNameError)
    assert done.exception.hint == f"pip install {owner}"
