"""docs/guides/pipelines.md: blocks run in turn, a program trains on two ranks, commands print what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from slapo_core.cli.main import make_app
from slapo_testing import preload_modules
from tests.ecosystem.pages import Page, steps

preload_modules("transformers.models.gpt2.modeling_gpt2", "slapo_pipeline")

PAGE = Page("guides/pipelines.md")


@pytest.mark.ranks
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    PAGE.prints_what_it_shows(tmp_path, at_least=5)


def test_the_commands_print_what_the_page_shows() -> None:
    drawn = [
        (block, command.split()[1:], expected)
        for block in PAGE.blocks
        if block.language == "console"
        for command, expected in steps(block.text)
        if command.startswith("slapo ")
    ]
    assert len(drawn) >= 2
    for block, words, expected in drawn:
        done = CliRunner().invoke(make_app(), words)
        assert done.exit_code == 0, done.output
        PAGE.check(block, expected, done.output)


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_program_trains_on_two_ranks(tmp_path: Path) -> None:
    PAGE.trains_on_two_ranks(tmp_path)
