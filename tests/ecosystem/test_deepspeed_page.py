"""DeepSpeed's guide and options: blocks print what the pages show, the program trains, the table is the code's."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_deepspeed.config import DANGERS
from slapo_testing import preload_modules
from tests.ecosystem.pages import Page

preload_modules("deepspeed", "slapo_deepspeed.dialect", "slapo_pipeline")

PAGE = Page("guides/deepspeed.md")
OPTIONS = Page("reference/deepspeed-options.md")


@pytest.mark.ranks
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    PAGE.prints_what_it_shows(tmp_path, at_least=1)


@pytest.mark.ranks
def test_the_options_print_what_they_show(tmp_path: Path) -> None:
    OPTIONS.prints_what_it_shows(tmp_path, at_least=2)


@pytest.mark.ranks
def test_the_program_trains_on_two_ranks(tmp_path: Path) -> None:
    PAGE.trains_on_two_ranks(tmp_path)
    assert list((tmp_path / "checkpoint").glob("step-*/checkpoint.json"))


def test_the_table_is_that_of_the_code() -> None:
    rows = [line for line in OPTIONS.text.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{danger.key}` | {danger.why} |" for danger in DANGERS]
