"""docs/guides/deepspeed.md: its blocks print what it shows, its program trains, its table is that of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_deepspeed.config import DANGERS
from slapo_testing import preload_modules
from tests.ecosystem.pages import Page

preload_modules("deepspeed", "slapo_deepspeed.dialect", "slapo_pipeline")

PAGE = Page("guides/deepspeed.md")


@pytest.mark.ranks
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    PAGE.prints_what_it_shows(tmp_path, at_least=3)


@pytest.mark.ranks
def test_the_program_trains_on_two_ranks(tmp_path: Path) -> None:
    PAGE.trains_on_two_ranks(tmp_path)
    assert list((tmp_path / "checkpoint").glob("step-*/checkpoint.json"))


def test_the_table_is_that_of_the_code() -> None:
    rows = [line for line in PAGE.text.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{danger.key}` | {danger.why} |" for danger in DANGERS]
