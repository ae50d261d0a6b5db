"""docs/deepspeed.md: its blocks print what it shows, its program trains, its tables are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_core.testing import preload_modules
from slapo_deepspeed.config.keys import KEYS
from slapo_deepspeed.config.refusing import ZERO_REFUSED
from tests.ecosystem.test_docs import Block, blocks, matches, steps
from tests.ecosystem.test_graphs_page import BORDER, shown
from tests.programs import run_program

preload_modules("deepspeed", "slapo_deepspeed.dialect", "slapo_pipeline")

TEXT = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text(encoding="utf-8")
PAGE = list(blocks(TEXT))


def check(block: Block, expected: str, got: str) -> None:
    assert matches(expected, got), f"deepspeed.md:{block.line}\n--- shown\n{expected}--- printed\n{got}"


@pytest.mark.ranks
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    parts = shown(PAGE)
    assert len(parts) >= 3
    program = "".join(f"{block.text}\nprint({BORDER!r})\n" for block, _ in parts)
    (tmp_path / "page.py").write_text(program, encoding="utf-8")
    printed = run_program(tmp_path / "page.py").split(f"{BORDER}\n")
    assert printed.pop() == ""
    for (block, expected), got in zip(parts, printed, strict=True):
        check(block, expected, got)


@pytest.mark.ranks
def test_the_program_trains_on_two_ranks(tmp_path: Path) -> None:
    (source,) = (block for block in PAGE if block.value == "train.py")
    (launch,) = (block for block in PAGE if block.text.startswith("$ torchrun --nproc-per-node 2 train.py"))
    (tmp_path / "train.py").write_text(source.text, encoding="utf-8")
    ((_, expected),) = steps(launch.text)
    check(launch, expected, run_program(tmp_path / "train.py", processes=2))
    assert list((tmp_path / "checkpoint").glob("*.safetensors"))


def test_the_tables_are_those_of_the_code() -> None:
    rows = {line for line in TEXT.splitlines() if line.startswith("| `")}
    keys = {f"| `{name}` | {key.how} | {key.why} |" for name, key in KEYS.items()}
    assert rows == keys | {f"| `{name}` | {why} |" for name, (_, why) in ZERO_REFUSED.items()}
