"""Promise: a saved schedule on a fresh instance gives equal records, and the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import MeshError, ReplayError
from slapo_core.testing import ModelSnapshot, assert_bit_identical
from tests.core.small_models import MLP, MODELS, run


def _scheduled(name: str) -> tuple[nn.Module, slapo.Schedule]:
    model = MODELS[name]().double()
    sch = slapo.create_schedule(model, mesh={"tp": 1})
    for path in list(sch.tree.index.modules)[1:]:
        node = sch[path]
        if type(node.module).forward is not nn.Module.forward:
            node.checkpoint()
        for parameter in node.parameters:
            node.annotate(parameter, "mark", path)
    return model, sch


def _gradients(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    run(model.train(), name).backward()
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_replay_gives_equal_records_and_the_same_gradients(name: str) -> None:
    model, sch = _scheduled(name)
    fresh = MODELS[name]().double()
    again = slapo.replay(fresh, sch.to_json())
    assert again.records == sch.records
    assert len(again.records) > 10
    assert [record.effects for record in again.records] == [record.effects for record in sch.records]
    assert [record.location for record in again.records] == [record.location for record in sch.records]
    assert again.mesh is not None
    assert again.mesh.sizes == {"tp": 1}
    assert again.to_json() == sch.to_json()
    expected, got = _gradients(model, name), _gradients(fresh, name)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    again.undo(to=0)
    plain = MODELS[name]().double()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fresh.parameters(), strict=True))


def test_replay_reads_text_data_and_files(tmp_path: Path) -> None:
    sch = slapo.create_schedule(MLP())
    sch["layers.*"].checkpoint()
    file = tmp_path / "schedule.json"
    file.write_text(sch.to_json())
    for document in (sch.to_json(), sch.document(), file):
        assert slapo.replay(MLP(), document).records == sch.records
    with pytest.raises(ReplayError) as caught:
        slapo.replay(MLP(), str(file))
    assert str(caught.value).startswith("this is not a schedule in JSON: ")
    assert str(caught.value).endswith("\n  hint: a file is given as pathlib.Path('schedule.json')")
    with pytest.raises(FileNotFoundError):
        slapo.replay(MLP(), tmp_path / "nothing.json")


def test_replay_on_another_mesh() -> None:
    sch = slapo.create_schedule(MLP(), mesh={"tp": 2})
    sch["head"].annotate("weight", "mark", 1)
    assert str(slapo.replay(MLP(), sch.document()).mesh) == "{'tp': 2}"
    other = slapo.replay(MLP(), sch.document(), mesh={"dp": 2, "tp": 4}, rank=5)
    assert other.records == sch.records
    assert other.mesh is not None
    assert (other.mesh.rank("dp"), other.mesh.rank("tp")) == (1, 1)
    with pytest.raises(MeshError):
        slapo.replay(MLP(), sch.document() | {"mesh": {"tp": "two"}})


def test_replayed_schedule_goes_on_with_its_own_lines() -> None:
    sch = slapo.create_schedule(MLP())
    sch["head"].checkpoint()
    document = sch.document()
    document["records"][0]["location"] = "train.py:12"
    again = slapo.replay(MLP(), document)
    again["layers.0"].checkpoint()
    assert again.records[0].location == "train.py:12"
    assert again.records[1].location.startswith("tests/core/test_replay.py:")


def _document(**changes: Any) -> dict[str, Any]:
    record = {"primitive": "core.annotate", "path": "head", "arguments": {"param": "weight", "key": "k", "value": 1}}
    record.update(distribution="slapo-core", version="0.0.1")
    record.update(changes)
    return {"format": 1, "records": [{"primitive": "core.checkpoint", "path": "head", "arguments": {}}, record]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "this is not a schedule in JSON: "),
        ("", "this is not a schedule in JSON: "),
        ("[]", "this is not a schedule: it has no list of 'records'\n  hint: save one with sch.to_json()"),
        ("null", "this is not a schedule: it has no list of 'records'\n  hint: save one with sch.to_json()"),
        ({}, "this is not a schedule: it has no list of 'records'\n  hint: save one with sch.to_json()"),
        (
            {"records": []},
            "the schedule is in format None; this slapo-core reads up to 1\n  hint: pip install --upgrade",
        ),
        ({"format": 2, "records": []}, "the schedule is in format 2; this slapo-core reads up to 1\n"),
        ({"format": 0, "records": []}, "the schedule is in format 0; this slapo-core reads up to 1\n"),
        ({"format": True, "records": []}, "the schedule is in format True; this slapo-core reads up to 1\n"),
        ({"format": "1", "records": []}, "the schedule is in format '1'; this slapo-core reads up to 1\n"),
        ({"format": 1, "records": [3]}, "record 1 of the schedule has no valid 'primitive'"),
        (_document(path=None), "record 2 of the schedule has no valid 'path'"),
        (_document(arguments=[1]), "record 2 of the schedule has no valid 'arguments'"),
        (_document(primitive=1), "record 2 of the schedule has no valid 'primitive'"),
        (
            _document(arguments={"param": "weight", "key": "k", "value": 1, "more": 2, "alas": 3}),
            "step 2, core.annotate (saved with slapo-core 0.0.1), cannot be replayed: core.annotate has no argument "
            "'alas', 'more'; it has key, param, value\n"
            "  hint: install the version of the plugin that the schedule was saved with",
        ),
        (
            _document(arguments={"param": "weight", "value": 1}),
            "step 2, core.annotate (saved with slapo-core 0.0.1), cannot be replayed: core.annotate: missing a "
            "required argument: 'key'\n  hint: core.annotate takes key, param, value",
        ),
        (
            _document(arguments={"param": 7, "key": "k", "value": 1}),
            "step 2, core.annotate (saved with slapo-core 0.0.1), cannot be replayed: core.annotate: argument 'param' "
            "must be str (got 7)",
        ),
        (
            _document(primitive="core.annotat"),
            "step 2, core.annotat (saved with slapo-core 0.0.1), cannot be replayed: ",
        ),
        (
            _document(primitive="acme.pad", distribution="acme-slapo"),
            "step 2, acme.pad (saved with acme-slapo 0.0.1), ",
        ),
        (
            _document(path="heads"),
            "step 2 of 2, annotate('weight', key='k', value=1) at 'heads', was refused: the model has no module 'heads'"
            "\n  hint: did you mean sch['head']?",
        ),
        (_document(path="layers.*"), "step 2 of 2, annotate('weight', key='k', value=1) at 'layers.*', was refused: "),
        (
            _document(primitive="core.checkpoint", arguments={}),
            "step 2 of 2, checkpoint() at 'head', was refused: cannot apply checkpoint() at 'head': the module is "
            "checkpointed already; remove this second call",
        ),
    ],
)
def test_what_cannot_be_replayed_says_why_and_leaves_the_model_untouched(document: Any, message: str) -> None:
    model = MLP()
    before = ModelSnapshot(model)
    for given in (document, json.dumps(document)) if isinstance(document, dict) else (document,):
        with pytest.raises(ReplayError) as caught:
            slapo.replay(model, given)
        assert str(caught.value).startswith(message)
        assert_bit_identical(before, model)


def test_refused_step_chains_the_refusal() -> None:
    with pytest.raises(ReplayError) as caught:
        slapo.replay(MLP(), _document(primitive="core.checkpoint", arguments={}))
    assert isinstance(caught.value.__cause__, slapo.PreconditionError)
    assert caught.value.path == "head"


def test_document_is_not_changed_by_replaying() -> None:
    document = _document()
    text = json.dumps(document)
    slapo.replay(MLP(), document)
    assert json.dumps(document) == text
