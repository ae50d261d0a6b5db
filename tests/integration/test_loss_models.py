"""The loss of real models from hidden states, by one line, on one and on two ranks.

A sample of what ``tools/loss_models.py --all`` runs; docs/results/loss_matrix.md has the whole table.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from slapo_loss import deferred_functions
from slapo_runtime.launcher import preload_modules, run_ranks
from tests.integration.zoo.losses import LossRow, compare_on_ranks
from tests.tiers import sampled

NAMES = sampled(
    ("causal/llama", "causal/gemma2", "causal/opt", "masked/bert", "masked/roberta", "masked/albert",
     "sequence to sequence/bart", "sequence to sequence/t5", "causal/gpt_neo", "sequence to sequence/fsmt",
     "causal/gpt2", "masked/mobilebert", "sequence to sequence/prophetnet"), 3
)  # fmt: skip
PAGE = Path("docs/results/loss_matrix.md")

preload_modules("tests.integration.zoo.losses")
preload_modules(*(f"transformers.models.{name}.modeling_{name}" for name in (each.partition("/")[2] for each in NAMES)))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend("tools")
    return importlib.import_module("loss_models")


@pytest.mark.ranks
def test_a_sample_of_the_page_comes_out_as_the_page_has_it(tool: object) -> None:
    of_one = compare_on_ranks(NAMES)
    of_two = run_ranks(compare_on_ranks, NAMES, world_size=2, timeout=180)
    assert [row.results for row in of_two[0]] == [row.results for row in of_two[1]]
    rows = PAGE.read_text().splitlines()
    for first, second in zip(of_one, of_two[0], strict=True):
        cells = (tool.word(first.results[1]), tool.word(second.results[2]))  # type: ignore[attr-defined]
        row = f"| {first.name} | {first.model} | `{first.head}` | {first.dtype} | {cells[0]} | {cells[1]} |"
        assert row in rows
        assert "WRONG" not in cells


def test_a_loss_that_is_not_the_plain_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = deferred_functions._loss
    monkeypatch.setattr(deferred_functions, "_loss", lambda *arguments: right(*arguments) * (1 + 1e-9))
    (row,) = compare_on_ranks(["causal/gpt2"])
    assert row.results[1].startswith("WRONG: the loss: by")


def test_at_least_120_causal_models_take_their_loss_from_hidden_states_and_none_is_wrong() -> None:
    totals = re.findall(
        r"^\| (causal|sequence to sequence|masked) \| (\d+) \| (\d+) \| \d+ \| (\d+) \|$", PAGE.read_text(), re.M
    )
    assert [kind for kind, *_ in totals] == ["causal", "sequence to sequence", "masked"]
    assert int(totals[0][2]) >= 120
    assert [wrong for *_, wrong in totals] == ["0", "0", "0"]


def test_the_page_is_made_of_rows(tool: object) -> None:
    rows = [
        LossRow("causal", "one", "One", head="head", dtype="float64", results={1: "loss", 2: "loss"}),
        LossRow("causal", "two", "Two", head="head", dtype="float64", results={1: "loss", 2: "WRONG: by 1"}),
        LossRow("masked", "three", "Three", head="head", dtype="float32", results={1: "logits: f", 2: "raises: no"}),
        LossRow("masked", "four", "Four", skipped="stays large"),
    ]
    page = tool.render(rows)  # type: ignore[attr-defined]
    assert "| causal | 2 | 1 | 0 | 1 |" in page
    assert "| masked | 1 | 0 | 1 | 0 |" in page
    assert "- causal/two, 2 ranks: WRONG: by 1" in page
    assert "| three | Three | `head` | float32 | logits | refused |" in page
    assert "- masked/four: stays large" in page
