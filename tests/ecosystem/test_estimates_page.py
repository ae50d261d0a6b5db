"""docs/guides/make-it-fit.md: its blocks run one after another, and print what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_testing import preload_modules
from tests.ecosystem.pages import Page

preload_modules("transformers.models.gpt2.modeling_gpt2", "slapo_pipeline", "slapo_estimate.simulation")

PAGE = Page("guides/make-it-fit.md")


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    PAGE.prints_what_it_shows(tmp_path, at_least=5, guarded=True)
