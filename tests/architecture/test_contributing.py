"""CONTRIBUTING.md and the workflow of continuous integration call what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", ".github/workflows/ci.yml")
EXAMPLES = ("scale", "slapo-x", "slapo_x")
"""Parts of paths of what a contributor adds."""


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))


def called(page: str) -> set[str]:
    """The targets of make that a page calls: in commands and in backticks."""
    return set(re.findall(r"(?:\$ |`|run: )make ([a-z-]+)", page))


def missing_paths(page: str) -> Iterator[str]:
    """Yield the files and folders of this repository that a page names, and that are not there."""
    for path in re.findall(r"(?:tools|plugins|tests|docs|slapo_core)/[\w/.-]*\w", page):
        if not any(part in path for part in EXAMPLES) and not (ROOT / path).exists():
            yield path


def missing_options(page: str) -> Iterator[tuple[str, str]]:
    """Yield each tool with an option that a page gives it, and that it has not."""
    for tool, rest in re.findall(r"tools/(\w+\.py)([^`\n#]*)", page):
        source = (ROOT / "tools" / tool).read_text(encoding="utf-8")
        yield from ((tool, option) for option in re.findall(r"--[a-z]+", rest) if f'"{option}"' not in source)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_targets_paths_and_options_that_exist(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert called(page) - targets() == set()
    assert list(missing_paths(page)) == []
    assert list(missing_options(page)) == []


def test_continuous_integration_checks_and_tests() -> None:
    assert {"check", "test"} <= called((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))


def test_missing_paths_are_found() -> None:
    page = "$ make nothing\nrun: make test\n`tools/release.py --frobnicate` and tests/nowhere, tests/core\n"
    assert called(page) - targets() == {"nothing"}
    assert list(missing_paths(page)) == ["tests/nowhere"]
    assert list(missing_options(page)) == [("release.py", "--frobnicate")]
