"""docs/start.md: its files run as its commands say, also the broken one, and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_testing import preload_modules
from tests.ecosystem.pages import Page

preload_modules("transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2", "slapo_models")

PAGE = Page("start.md")


@pytest.mark.ranks
def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    PAGE.runs_its_files(tmp_path)
    assert list((tmp_path / "trained").glob("*.safetensors"))


def test_a_change_of_a_file_that_has_not_the_line_is_an_error(tmp_path: Path) -> None:
    (change,) = (block for block in PAGE.blocks if block.language == "diff")
    (tmp_path / change.value).write_text("other\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        PAGE.change(change, tmp_path)
