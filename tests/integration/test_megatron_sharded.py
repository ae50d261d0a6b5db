"""Megatron's own sharded checkpoints: tensor parallelism, stages and replicas of any number read those of any other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from slapo_core.layout import Layout
from slapo_testing import preload_modules, run_ranks
from tests.integration.megatron.resharding import Pair, refused, to_the_last_bit, written_and_read

pytestmark = pytest.mark.ranks
preload_modules("slapo_tp", "slapo_pipeline")

WHOLE = bool(os.environ.get("SLAPO_TEST_WHOLE"))  # one process alone, too, and further forms of two and four
ON_TWO = ("megatron tp2", *(("megatron dp2 distributed",) if WHOLE else ()))
ON_FOUR = (
    "megatron pp2 dp2 distributed",
    *(("megatron pp2 tp2", "megatron tp2 dp2 distributed") if WHOLE else ()),
)
READING: dict[int, list[Pair]] = {
    2: [("megatron dp2 distributed", "megatron pp2 dp2 distributed")],
    4: [("megatron pp2 tp2", "megatron tp2")],
}
FURTHER_READING: dict[int, list[Pair]] = {
    1: [("megatron", "megatron pp2 tp2"), ("megatron", "megatron dp2 distributed")],
    2: [
        ("megatron tp2", "megatron pp2 dp2 distributed"),
        ("megatron dp2 distributed", "megatron pp2 tp2"),
        ("megatron dp2 distributed", "megatron tp2 dp2 distributed"),
        ("megatron tp2", "megatron dp2 distributed"),
    ],
    4: [
        ("megatron pp2 tp2", "megatron dp2 distributed"),
        ("megatron pp2 dp2 distributed", "megatron tp2"),
        ("megatron pp2 dp2 distributed", "megatron pp2 tp2"),
        ("megatron pp2 tp2", "megatron"),
        ("megatron tp2 dp2 distributed", "megatron pp2 tp2"),
        ("megatron pp2 dp2 distributed", "megatron pp2 dp2 distributed"),
    ],
}


def on_two_ranks(directory: Path) -> dict[str, Any]:
    return {
        "written": written_and_read(ON_TWO, [], directory),
        "bits": to_the_last_bit(directory / "bits"),
        "refused": refused(directory / "refused"),
        "misplaced": misplaced(directory),
    }


def misplaced(directory: Path) -> dict[str, list[str]]:
    """A fault: pieces of a split tensor come from the beginning of the whole one, whichever they are."""
    right = Layout.segments

    def segments(self: Layout, mesh: Any) -> Any:
        return [[(0, length) for _, length in axis] for axis in right(self, mesh)]

    with mock.patch.object(Layout, "segments", segments):
        return written_and_read((), [("megatron tp2", "megatron tp2")], directory)


@pytest.mark.breadth
def test_checkpoints_go_from_any_sizes_to_any_others(tmp_path: Path) -> None:
    """Two ranks write, four write and read those, two read those of four."""
    if WHOLE:
        assert run_ranks(written_and_read, ("megatron",), [], tmp_path, world_size=1) == [{}]
    for rank in run_ranks(on_two_ranks, tmp_path, world_size=2, timeout=1800):
        assert rank["written"] == {}
        check_bits(rank["bits"])
        check_refused(rank["refused"])
        assert "blocks.0.up.weight" in str(rank["misplaced"]), "the control"
    by_four, by_two = ([*READING[size], *(FURTHER_READING[size] if WHOLE else [])] for size in (4, 2))
    for rank in run_ranks(written_and_read, ON_FOUR, by_four, tmp_path, world_size=4, timeout=1800):
        assert rank == {}
    for rank in run_ranks(written_and_read, [], by_two, tmp_path, world_size=2, timeout=1800):
        assert rank == {}
    if WHOLE:
        assert run_ranks(written_and_read, [], FURTHER_READING[1], tmp_path, world_size=1) == [{}]


def check_bits(found: dict[str, Any]) -> None:
    for form, said in found["resumed"].items():
        assert said == ("fine", "fine", []), form
    assert found["files"] == ["low"], "nothing is left beside it"
    tensors = found["tensors"]
    name = "blocks.0.up.weight"
    assert tensors[name] == ((14, 10), "torch.float32"), "main parameters, whole, by the reference name"
    assert tensors[f"optimizer.state.exp_avg.{name}"] == ((14, 10), "torch.float32")
    assert tensors[f"optimizer.state.step.{name}"] == ((), "torch.float32")
    assert "head.weight" not in tensors, "a tie is one tensor"


def check_refused(found: dict[str, str]) -> None:
    for what in ("nothing", "ours", "foreign"):
        assert "engine.save_sharded(): " in found[what], found[what]
        assert found[what].startswith("WeightsError: "), found[what]
    assert "is not empty" in found["in its place"]
    assert "the state of AdamW" in found["another optimizer"]
    assert "is SGD" in found["another optimizer"]
    assert json.loads(found["unchanged"]) == []
    assert json.loads(found["weights alone"]) == []
    assert "holds no optimizer state" in found["no state"]
    assert "do not fit the model" in found["another model"]
