"""The ready patterns in real models: every operation that is there is found, and what replaces it is right.

A sample of what ``tools/pattern_zoo.py --all`` looks at; docs/results/patterns.md has all.
"""

from __future__ import annotations

import importlib

import pytest

from tests.integration.zoo.operations import OPERATIONS
from tests.integration.zoo.patterns import PatternRow, patterns_in
from tests.integration.zoo.subjects import subject
from tests.tiers import sampled

SAMPLE = {
    "bert": {"fusion.sdpa": 2, "fusion.bias_gelu": 2, "fusion.bias_dropout_add_norm": 4, "fusion.qkv": 2},
    "gpt2": {"fusion.sdpa": 2, "fusion.gelu_tanh": 2, "fusion.bias_dropout_add_norm": 2},
    "llama": {"fusion.sdpa": 2, "fusion.rms_norm": 4, "fusion.swiglu": 2, "fusion.rotary": 4, "fusion.qkv": 2},
    "t5": {"fusion.sdpa": 6, "fusion.rms_norm": 10, "fusion.qkv": 4},
    "vit": {"fusion.sdpa": 2, "fusion.bias_gelu": 2, "fusion.bias_dropout_add_norm": 2, "fusion.qkv": 2},
}
"""Model -> how often each pattern is found in two layers (of T5: two of each stack)."""


@pytest.mark.parametrize("name", sampled(SAMPLE, 3))
def test_every_layer_has_its_matches_and_their_replacements_are_verified(name: str) -> None:
    row = patterns_in(subject(name))
    assert row.skipped is None
    assert {pattern: found for pattern, (found, _) in row.found.items()} == SAMPLE[name]
    assert {pattern: there for pattern, (_, there) in row.found.items()} == SAMPLE[name]  # counted another way
    assert (row.missed, row.refused) == ({}, {})
    assert sum(row.replaced.values()) > 0
    assert row.verified == "ok"


def test_misses_have_a_reason() -> None:
    missed = patterns_in(subject("bloom"))
    assert missed.found["fusion.sdpa"] == (0, 2)
    assert "calls match" in missed.missed["fusion.sdpa"]
    giving = patterns_in(subject("gptj"))  # its attention gives the weights too, which nothing uses
    assert giving.found["fusion.sdpa"] == (2, 2)
    assert giving.replaced["fusion.sdpa"] == 2
    assert (giving.refused, giving.verified) == ({}, "ok")


def test_the_page_is_made_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("tools")
    render = importlib.import_module("pattern_zoo").render
    found = dict.fromkeys(OPERATIONS, (2, 2)) | {"fusion.sdpa": (0, 2)}
    rows = [
        PatternRow("one", "One", blocks=(2, 2), found=found, replaced={"fusion.gelu": 2}, verified="ok"),
        PatternRow("two", "Two", blocks=(2, 2), found={"fusion.sdpa": (1, 2)}, missed={"fusion.sdpa": "1 of 2"}),
        PatternRow("three", "Three", skipped="stays large"),
    ]
    page = render(rows)
    assert "| `fusion.sdpa` | 0 models | 1 | 1 | 1 | 0 of 0 models |" in page
    assert "| `fusion.gelu` | 1 models | 0 | 0 | 2 | 1 of 1 models |" in page
    assert "- `fusion.sdpa`: two: 1 of 2" in page
    assert "2 models were looked at, 1 were not" in page
