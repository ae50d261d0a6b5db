"""docs/how/receipts.md: its program prints the receipts that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ecosystem.pages import Page


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    Page("how/receipts.md").prints_what_it_shows(tmp_path, at_least=2, guarded=True)
