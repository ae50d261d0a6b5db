"""docs/guides/tuning.md: its study is searched on two ranks, its commands, program and sampler run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slapo_core.cli.main import main
from slapo_tune.samplers import Trial
from tests.ecosystem.pages import Page, steps

PAGE = Page("guides/tuning.md")


def run(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints: progress and errors, then what was found."""
    monkeypatch.setattr(sys, "argv", command.split())
    status: Any = 0
    try:
        main()
    except SystemExit as error:
        status = error.code
    printed, told = capsys.readouterr()
    assert (status == 2) == ("error: " in told), told + printed
    return "".join(line for line in told.splitlines(keepends=True) if not line.startswith("wrote ")) + printed


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_page_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (study,) = (block for block in PAGE.blocks if block.value == "study.py")
    (tmp_path / "study.py").write_text(study.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "study", raising=False)
    shown = [(block, *step) for block in PAGE.blocks if block.language == "console" for step in steps(block.text)]
    assert len(shown) == 7
    for block, command, expected in shown:
        PAGE.check(block, expected, run(command, monkeypatch, capsys))
    monkeypatch.delitem(sys.modules, "study")
    PAGE.prints_what_it_shows(tmp_path, at_least=2)  # replays the document that the last command wrote
    trials = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    ended = [one for one in trials if one.get("event") == "ended"]
    assert [one["number"] for one in ended] == list(range(10))  # the refused second run has left it as it was
    assert {one["status"] for one in ended} == {"ok", "over_memory"}


class Small:
    """Three points; the largest does not fit."""

    memory = 10

    def points(self) -> list[dict[str, int]]:
        return [{"batch": 1}, {"batch": 4}, {"batch": 2}]

    def predicted_memory(self, point: dict[str, int]) -> int:
        return 3 * point["batch"]


def test_the_sampler_of_the_page_proposes_what_it_says() -> None:
    (block,) = (block for block in PAGE.blocks if block.language == "python" and "LargestFirst" in block.text)
    names: dict[str, Any] = {}
    exec(compile(block.text, "tuning.md", "exec"), names)
    sampler, space = names["LargestFirst"](), Small()
    assert sampler.suggest(space, (), 0) == {"batch": 2}
    history = [Trial(0, {"batch": 2}, "ok", 1.0), Trial(1, {"batch": 1}, "crash", reason="x")]
    assert sampler.suggest(space, history[:1], 0) == {"batch": 1}
    assert sampler.suggest(space, history, 0) is None
