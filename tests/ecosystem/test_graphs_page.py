"""docs/graphs.md is one program: its blocks run one after another, and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ecosystem.test_docs import Block, blocks, matches
from tests.programs import run_program

PAGE = (Path(__file__).parents[2] / "docs" / "graphs.md").read_text(encoding="utf-8")
BORDER = "-- end of block --"


def shown(page: list[Block]) -> list[tuple[Block, str]]:
    """Each block of Python with the output below it."""
    found: list[tuple[Block, str]] = []
    for block in page:
        if block.language == "python" and not block.key:
            found.append((block, ""))
        elif block.language == "text":
            assert not found[-1][1], f"line {block.line}: a second output of one block"
            found[-1] = (found[-1][0], block.text)
    return found


@pytest.mark.ranks
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    parts = shown(list(blocks(PAGE)))
    assert len(parts) >= 8
    program = "".join(f"{block.text}\nprint({BORDER!r})\n" for block, _ in parts)
    (tmp_path / "page.py").write_text(program, encoding="utf-8")
    printed = run_program(tmp_path / "page.py").split(f"{BORDER}\n")
    assert printed.pop() == ""
    for (block, expected), got in zip(parts, printed, strict=True):
        assert matches(expected, got), f"graphs.md:{block.line}\n--- shown\n{expected}--- printed\n{got}"
