"""docs/start.md: its programs print the text that the page shows, right, broken, and on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_core.errors import RankFailedError
from slapo_testing import preload_modules
from tests.ecosystem.pages import Page, matches, steps
from tests.support.programs import run_program

preload_modules("transformers.models.bert.modeling_bert", "slapo_tp")
PAGE = Page("start.md")
FILES = {block.value: block.text for block in PAGE.blocks if block.key == "file" and block.language == "python"}


def edited(source: str, diff: str) -> str:
    """Replace the lines that begin with ``-`` by the ones that begin with ``+``."""
    old, new = ("".join(line[1:] for line in diff.splitlines(True) if line[0] == sign) for sign in "-+")
    assert source.count(old) == 1
    return source.replace(old, new)


@pytest.mark.ranks
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    broken = ""
    ran = []
    for block in PAGE.blocks:
        if block.language == "diff":
            broken = edited(FILES[block.value], block.text)
        for command, expected in steps(block.text) if block.language == "console" else ():
            words = command.split()
            ran.append(words[0])
            for name, text in FILES.items():
                (tmp_path / name).write_text(broken if broken and name == "tiny.py" else text, encoding="utf-8")
            if broken:
                with pytest.raises(RankFailedError) as caught:
                    run_program(tmp_path / words[-1])
                assert matches(f"...{expected.partition('...')[2].rstrip()}...", str(caught.value)), str(caught.value)
                broken = ""
            else:
                processes = int(words[2]) if words[0] == "torchrun" else None
                PAGE.check(block, expected, run_program(tmp_path / words[-1], processes=processes))
    assert ran == ["python", "python", "torchrun"]


def test_each_program_is_short() -> None:
    for name, source in FILES.items():
        assert len([line for line in source.splitlines() if line.strip()]) <= 40, name
