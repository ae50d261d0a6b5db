"""Guides whose programs are files: they run as their commands say, and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_testing import preload_modules
from tests.ecosystem.pages import Page

preload_modules("deepspeed")  # which prints when transformers imports it


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        "tensor-parallelism.md",
        "make-it-faster.md",
        "find-what-is-wrong.md",
        "gpus.md",
        "fsdp-and-precision.md",
        "weights.md",
    ],
)
def test_the_commands_print_what_the_page_shows(name: str, tmp_path: Path) -> None:
    Page(f"guides/{name}").runs_its_files(tmp_path)
