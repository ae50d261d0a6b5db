"""examples/lightning_gpt.py: on two processes as on one, and resumed under another mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slapo_testing import preload_modules, run_ranks
from tests.integration.example_runs import example, text_for

preload_modules("lightning.pytorch", "transformers.models.gpt2.modeling_gpt2", "slapo_tp", "slapo_loss", "slapo_models")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


def run_all(text: Path, output: Path, *meshes: str) -> list[dict[str, Any]]:
    """On every rank: an epoch, and another one under the next mesh."""
    module = example("lightning_gpt")
    quick = f"--steps 4 --length 16 --vocab-size 600 --width 32 --no-progress --text {text} --output {output}"
    arguments = [[*quick.split(), "--mesh", *mesh.split()] for mesh in meshes]
    return [module.run(module.parsed(one + ["--resume"] * number)) for number, one in enumerate(arguments)]


def test_a_gpt_trains_on_two_processes_as_on_one(tmp_path: Path) -> None:
    text = text_for(tmp_path)
    (one,) = run_ranks(run_all, text, tmp_path / "one", "tp=1", "tp=1", world_size=1)
    two, other = run_ranks(run_all, text, tmp_path / "two", "tp=2", "dp=2", world_size=2)
    for ours, theirs in zip(two, one, strict=True):
        assert len(ours["losses"]) == 4
        assert ours["held_out"] == pytest.approx(theirs["held_out"], abs=1e-4)
        assert ours["written"].startswith("def ")
    assert two[0]["losses"] == pytest.approx(one[0]["losses"], abs=2e-5)
    halves = [(ours + theirs) / 2 for ours, theirs in zip(two[1]["losses"], other[1]["losses"], strict=True)]
    assert halves == pytest.approx(one[1]["losses"], abs=2e-5)
    assert two[0]["parameters"] < 0.6 * one[0]["parameters"]
