"""Guides whose programs are files: they run as their commands say, and print what the page shows."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slapo_core.cli.main import make_app
from slapo_testing import preload_modules
from tests.ecosystem.pages import Page

preload_modules("deepspeed")  # which prints when transformers imports it


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        "tensor-parallelism.md",
        "make-it-faster.md",
        "find-what-is-wrong.md",
        "gpus.md",
        "fsdp-and-precision.md",
        "weights.md",
        "layer-types.md",
        "hosts.md",
        "auto.md",
        "build-and-train.md",
        "lightning.md",
        "ready-schedules.md",
        "look-at-a-schedule.md",
    ],
)
def test_the_commands_print_what_the_page_shows(name: str, tmp_path: Path) -> None:
    Page(f"guides/{name}").runs_its_files(tmp_path)


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_commands_of_the_page_on_pictures_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page("guides/look-at-a-schedule.md")
    (source,) = (block for block in page.blocks if block.value == "llama.py")
    (tmp_path / "llama.py").write_text(source.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    commands = [line for block in page.blocks if block.language == "sh" for line in block.text.splitlines()]
    assert len(commands) == 7
    for command in commands:
        words, to = shlex.split(command, comments=True), ""
        if ">" in words:
            words, to = words[: words.index(">")], words[-1]
        done = CliRunner().invoke(make_app(), words[1:])
        assert done.exit_code == 0, f"{command}\n{done.output}{done.exception}"
        if to:
            (tmp_path / to).write_text(done.stdout, encoding="utf-8")
    assert {"llama.html", "both.html", "llama.json"} <= {file.name for file in tmp_path.iterdir()}
