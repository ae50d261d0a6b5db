"""benchmarks/paper.py, small: predictions, training beside other systems, and the page."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODELS = ["bert", "roberta", "gpt", "opt", "t5", "llama", "wide_resnet"]


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # also of the ranks
    return importlib.import_module("paper")


def test_the_page_is_that_of_the_results(paper: Any) -> None:
    rows = json.loads(paper.RESULT.read_text())["rows"]
    assert paper.page({row.pop("model"): row for row in rows}) == paper.PAGE.read_text(), (
        "write it: python benchmarks/paper.py --page"
    )


def test_losses_that_differ_are_told(paper: Any) -> None:
    alone = {"unscheduled": {"losses": [2.0, 1.0], "seconds": [1.0]}}
    off = {"losses": [2.0, 1.001], "seconds": [1.0]}
    parts = {"ALONE": {**alone, "+ kernels": off}, "TOGETHER": {"DTensor": {"refused": "TypeError: no"}}}
    assert list(paper.wrong_losses({"bert": parts})) == [
        "bert, + kernels: losses [2.0, 1.001] differ by 5.0e-04 of the first"
    ]


REFUSED = {
    "gpt": {"DTensor parallelize_module"},  # a plan has no style for Conv1D
    "wide_resnet": {"DTensor parallelize_module", "Megatron-core's layers, tp 2"},
    "roberta": {"Megatron-core's layers, tp 2"},
    "opt": {"Megatron-core's layers, tp 2"},
    "t5": {"Megatron-core's layers, tp 2"},
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llama", ["ALONE"]),
        *(
            pytest.param(name, ["predicted", "ALONE", "TOGETHER", "BESIDE_MEGATRON"], marks=pytest.mark.breadth)
            for name in MODELS
        ),
    ],
)
def test_the_small_form_trains_each_system_to_the_losses_of_the_model(paper: Any, name: str, parts: list[str]) -> None:
    known = paper.main(["--small", "--only", name, "--parts", *parts])[name]
    results = {system: result for _, system, result in paper._results(known)}
    refused = {system: result["refused"] for system, result in results.items() if "refused" in result}
    assert refused.keys() == (REFUSED.get(name, set()) if "TOGETHER" in parts else set()), refused
    assert all(len(result["seconds"]) == 2 for result in results.values() if "refused" not in result)
    if "predicted" in parts:
        of = {step: known[f"predicted {step}"] for step in paper.STEPS}
        assert of["vanilla"]["traffic"] == 0 < of["+ shard layers"]["traffic"]
        assert of["+ shard embeddings"]["memory"] < of["vanilla"]["memory"]


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_benchmark_of_two_ranks_compares_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # also of the ranks
    rows = importlib.import_module("two_ranks").main(["--small", "--only", "llama"])
    assert [row.get("refused") for row in rows] == [None] * 4
    assert len([row for row in rows if row.get("losses_apart", 1) < 1e-5]) == 3  # all but Megatron-core's
