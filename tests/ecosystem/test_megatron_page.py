"""docs/megatron.md and the package's README: blocks print what they show, programs train, tables are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slapo_core.testing import preload_modules
from slapo_megatron.config.fields import FIELDS
from tests.ecosystem.test_docs import Block, blocks, matches, steps
from tests.ecosystem.test_graphs_page import BORDER, shown
from tests.programs import run_program

preload_modules("tests.cpu_megatron", "slapo_megatron.dialect", "slapo_pipeline")

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
PAGE = list(blocks(TEXT))


def check(block: Block, expected: str, got: str) -> None:
    assert matches(expected, got), f"megatron.md:{block.line}\n--- shown\n{expected}--- printed\n{got}"


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


@pytest.mark.ranks
def test_the_program_of_the_readme_trains(tmp_path: Path) -> None:
    page = (ROOT / "plugins" / "slapo-megatron" / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "readme.py").write_text(program, encoding="utf-8")
    printed = run_program(tmp_path / "readme.py")
    assert printed.startswith("plan for target 'megatron'\n  the scheduled Sequential, 1 steps applied\n")
    assert printed.endswith("True\nChainedOptimizer\n")


def test_the_tables_are_those_of_the_code() -> None:
    for option, fields in FIELDS.items():
        section = TEXT.partition(f"### `{option}`")[2].partition("\n#")[0]
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        groups: dict[tuple[str, str], list[str]] = {}
        for name, field in fields.items():
            groups.setdefault((field.how, field.why), []).append(f"`{name}`")
        assert rows == [f"| {', '.join(names)} | {how} | {why} |" for (how, why), names in groups.items()], option
