"""The README's first program runs as it stands, and prints what the README shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slapo_testing import preload_modules
from tests.support.programs import run_program

preload_modules("transformers.models.bert.modeling_bert", "slapo_tp")
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def masked(text: str) -> list[str]:
    """The lines, without the measured differences and where they were largest: both depend on the processor."""
    measured = r"largest difference \S+ of \S+ allowed, in .*"
    return [re.sub(measured, "largest difference N of N allowed, in TENSOR", line) for line in text.splitlines()]


def abridged(printed: list[str], shown: list[str]) -> list[str]:
    """What a page would show of the printed lines, if it left out the same ones as ``shown`` does by ``...``."""
    kept, at = [], 0
    for line, following in zip(shown, [*shown[1:], None], strict=True):
        if line == "...":
            kept.append(line)
            at = next((number for number in range(at, len(printed)) if printed[number] == following), len(printed))
        else:
            kept += printed[at : at + 1]
            at += 1
    return kept + printed[at:]


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_first_program_prints_what_the_readme_shows(tmp_path: Path) -> None:
    script = tmp_path / "tiny.py"
    script.write_text(blocks("python")[0], encoding="utf-8")
    printed = run_program(script)
    (block,) = blocks("text")  # no other printed text in the README
    shown = masked(block)
    assert abridged(masked(printed), shown) == shown
    assert len(shown) > 5


@pytest.mark.parametrize(
    "printed",
    ["a\nb\nc\nd\nz", "a\nb\nc\nd", "a\nb\nc\nD\ne", "a\nb\ne", "b\nc\nd\ne", "a\nb\nd\nc\ne"],
    ids=["changed at the end", "line missing at the end", "changed", "both missing", "first missing", "other order"],
)
def test_other_lines_than_the_shown_ones_are_noticed(printed: str) -> None:
    shown = ["a", "...", "c", "d", "e"]
    assert abridged("a\nb\nb\nc\nd\ne".splitlines(), shown) == shown
    assert abridged("a\nc\nd\ne\nnew".splitlines(), shown) != shown
    assert abridged(printed.splitlines(), shown) != shown


def test_the_first_program_is_as_short_as_the_readme_says() -> None:
    code = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(code) <= 15
    assert len(README.splitlines()) <= 120
