"""Megatron's guide, options and README: blocks print what they show, programs train, tables are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slapo_megatron.config import DANGERS
from slapo_testing import preload_modules
from tests.ecosystem.pages import Page
from tests.support.programs import run_program

preload_modules("tests.support.cpu_megatron", "slapo_megatron.dialect", "slapo_pipeline")

ROOT = Path(__file__).parents[2]
PAGE = Page("guides/megatron.md")
OPTIONS = Page("reference/megatron-options.md")


@pytest.mark.ranks
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    PAGE.prints_what_it_shows(tmp_path, at_least=1)


@pytest.mark.ranks
def test_the_options_print_what_they_show(tmp_path: Path) -> None:
    OPTIONS.prints_what_it_shows(tmp_path, at_least=2)


@pytest.mark.ranks
def test_the_program_trains_on_two_ranks(tmp_path: Path) -> None:
    PAGE.trains_on_two_ranks(tmp_path)
    assert list((tmp_path / "checkpoint").glob("step-*/checkpoint.json"))


@pytest.mark.ranks
def test_the_program_of_the_readme_trains(tmp_path: Path) -> None:
    page = (ROOT / "plugins" / "slapo-megatron" / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "readme.py").write_text(program, encoding="utf-8")
    printed = run_program(tmp_path / "readme.py")
    assert printed.startswith("plan for target 'megatron'\n  the scheduled Sequential, 1 steps applied\n")
    assert printed.endswith("True\nChainedOptimizer\n")


def test_the_page_lists_the_dangerous_fields_of_the_code() -> None:
    for key, why in DANGERS.items():
        option, _, name = key.partition(".")
        assert f"| `{name}` of `{option}` | {why} |" in OPTIONS.text
