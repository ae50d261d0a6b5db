"""Schedules that were saved in format 1, under former names of primitives, are replayed and verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import slapo_core as slapo

from .saved.models import Net, batch

SAVED = sorted((Path(__file__).parent / "saved").glob("*.json"))


@pytest.mark.parametrize("file", SAVED, ids=lambda file: file.stem)
def test_a_saved_schedule_is_replayed_and_saved_again(file: Path) -> None:
    document = json.loads(file.read_text())
    sch = slapo.replay(Net(), document, example_inputs=batch())
    assert [record.path for record in sch.records] == [record["path"] for record in document["records"]]
    assert not {record.name for record in sch.records} & {"core.trace", "core.merge"}
    report = slapo.verify(sch, batch())
    assert report.steps_verified == len(document["records"])
    again = slapo.replay(Net(), sch.to_json(), example_inputs=batch())
    assert [record.primitive for record in again.records] == [record.primitive for record in sch.records]
    assert again.is_verified


def test_the_saved_schedules_hold_former_names_matches_and_patterns() -> None:
    texts = {file.stem: json.loads(file.read_text()) for file in SAVED}
    names = {record["primitive"] for document in texts.values() for record in document["records"]}
    assert {"core.trace", "core.merge", "core.replace", "core.checkpoint", "fusion.fuse", "tp.shard"} <= names
    assert texts["kernels"]["patterns"] == [{"name": "fusion.sdpa", "distribution": "slapo-fusion", "version": "0.1.0"}]


def test_a_pattern_that_the_document_does_not_hold_is_named() -> None:
    document = json.loads((Path(__file__).parent / "saved" / "kernels.json").read_text())
    document["patterns"] = []
    with pytest.raises(slapo.ReplayError, match="names pattern 0"):
        slapo.replay(Net(), document, example_inputs=batch())
