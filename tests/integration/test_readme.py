"""The README's first program runs as it stands, and prints what the README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def without_numbers(text: str) -> list[str]:
    """Lines without tree branches, and with every measured number as ``N``: those differ from machine to machine."""
    return [re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "N", re.sub(r"^[ │├└─]+", "", line)) for line in text.splitlines()]


@pytest.mark.ranks
def test_the_first_program_prints_what_the_readme_shows(tmp_path: Path) -> None:
    script = tmp_path / "tiny.py"
    script.write_text(blocks("python")[0], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr
    printed = without_numbers(done.stdout)
    shown = [line for line in without_numbers(blocks("text")[0]) if line != "..."]
    # The largest difference may be found in another tensor on another machine: compare up to its name.
    head = re.compile(r", in .*")
    printed = [head.sub("", line) for line in printed]
    assert [line for line in shown if head.sub("", line) not in printed] == []
    assert len(shown) > 8


def test_the_first_program_is_as_short_as_the_readme_says() -> None:
    code = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(code) <= 22
