"""docs/pipelines.md: blocks run one after another, a program trains on two ranks, commands print what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from slapo_core.cli.main import make_app
from slapo_core.testing import preload_modules
from tests.ecosystem.test_docs import Block, blocks, matches, steps
from tests.ecosystem.test_graphs_page import BORDER, shown
from tests.programs import run_program

preload_modules("transformers.models.gpt2.modeling_gpt2", "slapo_pipeline")

PAGE = list(blocks((Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")))


def check(block: Block, expected: str, got: str) -> None:
    assert matches(expected, got), f"pipelines.md:{block.line}\n--- shown\n{expected}--- printed\n{got}"


@pytest.mark.ranks
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    parts = shown(PAGE)
    assert len(parts) >= 5
    program = "".join(f"{block.text}\nprint({BORDER!r})\n" for block, _ in parts)
    (tmp_path / "page.py").write_text(program, encoding="utf-8")
    printed = run_program(tmp_path / "page.py").split(f"{BORDER}\n")
    assert printed.pop() == ""
    for (block, expected), got in zip(parts, printed, strict=True):
        check(block, expected, got)


def test_the_commands_print_what_the_page_shows() -> None:
    drawn = [
        (block, command.split()[1:], expected)
        for block in PAGE
        if block.language == "console"
        for command, expected in steps(block.text)
        if command.startswith("slapo ")
    ]
    assert len(drawn) >= 2
    for block, words, expected in drawn:
        done = CliRunner().invoke(make_app(), words)
        assert done.exit_code == 0, done.output
        check(block, expected, done.output)


@pytest.mark.ranks
def test_the_program_trains_on_two_ranks(tmp_path: Path) -> None:
    (source,) = (block for block in PAGE if block.value == "train.py")
    launches = [block for block in PAGE if block.text.startswith("$ torchrun --nproc-per-node 2 train.py")]
    (tmp_path / "train.py").write_text(source.text, encoding="utf-8")
    (expected,) = (output for _, output in steps(launches[0].text))
    check(launches[0], expected, run_program(tmp_path / "train.py", processes=2))
