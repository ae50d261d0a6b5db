"""docs/guides/graphs-and-fusion.md is one program: its blocks run one after another, and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ecosystem.pages import Page

PAGE = Page("guides/graphs-and-fusion.md")


@pytest.mark.ranks
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    PAGE.prints_what_it_shows(tmp_path, at_least=8)
