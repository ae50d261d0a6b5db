"""Promise: a saved schedule on a fresh instance gives equal records, and the same numbers."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import MeshError, ReplayError
from slapo_core.schedule.records import fingerprint
from slapo_testing import ModelSnapshot, assert_bit_identical
from slapo_testing.models import MLP, MODELS, Doubled, run
from tests.messages import Messages


def _scheduled(name: str) -> tuple[nn.Module, slapo.Schedule]:
    model = MODELS[name]().double()
    sch = slapo.create_schedule(model, mesh={"tp": 1})
    for path in list(sch._core.tree.index.modules)[1:]:
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


def test_a_saved_schedule_is_added_to_the_steps_of_another(message: Messages) -> None:
    saved = slapo.create_schedule(MLP(), mesh={"tp": 1})
    saved["layers.0"].checkpoint()
    sch = slapo.create_schedule(MLP(), mesh={"tp": 1})
    sch["head"].checkpoint()
    assert slapo.replay(sch, saved.to_json()) is sch
    assert [record.path for record in sch.records] == ["head", "layers.0"]
    slapo.verify(sch, torch.randn(2, 8))
    with pytest.raises(ReplayError):
        slapo.replay(sch, saved.to_json())  # checkpointed already
    assert [record.path for record in sch.records] == ["head", "layers.0"]
    with pytest.raises(slapo.ArgumentError) as refused:
        slapo.replay(sch, saved.to_json(), mesh={"tp": 2})
    message(refused, "mesh=")


@pytest.mark.parametrize("name", MODELS)
def test_replay_gives_equal_records_and_the_same_gradients(name: str) -> None:
    model, sch = _scheduled(name)
    fresh = MODELS[name]().double()
    again = slapo.replay(fresh, sch.to_json())
    assert again.records == sch.records
    assert len(again.records) > 10
    assert [record.edits for record in again.records] == [record.edits for record in sch.records]
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


def test_replay_reads_text_data_and_files(tmp_path: Path, message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    sch["layers.*"].checkpoint()
    file = tmp_path / "schedule.json"
    file.write_text(sch.to_json())
    for document in (sch.to_json(), sch.document(), file, str(file)):
        assert slapo.replay(MLP(), document).records == sch.records
    told = set()
    for text in ("nothing.json", "x" * 5000, "nul\0", str(tmp_path)):
        with pytest.raises(ReplayError) as caught:
            slapo.replay(MLP(), text)
        told.add(str(caught.value))
    message(*told, "neither a schedule in JSON nor an existing file", "replay(model, 'schedule.json')")
    with pytest.raises(ReplayError, match="cannot be read"):
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


class OtherMLP(MLP):
    """The same modules, of another class."""


def test_a_successful_verify_is_kept_for_these_steps_and_lost_with_any_change() -> None:
    sch = slapo.create_schedule(MLP(), mesh={"tp": 1})
    sch["layers.0"].checkpoint()
    sch["head"].annotate("weight", "mark", 1)
    assert not sch.is_verified
    assert "verified" not in sch.document()
    slapo.verify(sch, torch.randn(2, 8))
    assert sch.is_verified
    text = sch.to_json()
    assert slapo.replay(MLP(), text).is_verified
    assert slapo.replay(MLP(), text).to_json() == text
    assert not slapo.replay(OtherMLP(), text).is_verified
    with pytest.warns(UserWarning, match="of the 5 Sequential"):
        assert not slapo.replay(MLP(layers=5), text).is_verified
    assert not slapo.replay(MLP(), text, mesh={"tp": 2}).is_verified
    assert not slapo.replay(MLP(), text.replace('"mark"', '"other"')).is_verified
    for key, old in (("slapo-core", '"slapo-core": "'), ("version of a plugin", '"version": "')):
        other = json.loads(text.replace(old, f"{old}9."))
        other["verified"] = fingerprint(other)  # as that version would have written it
        assert not slapo.replay(MLP(), other).is_verified, key
    sch.undo()
    assert not sch.is_verified
    again = slapo.replay(MLP(), text)
    again["layers.1"].checkpoint()
    assert not again.is_verified


def test_a_schedule_that_verify_refuses_is_not_marked() -> None:
    right, wrong = slapo.create_schedule(model := MLP()), slapo.create_schedule(copy.deepcopy(model))
    wrong["head"].replace(Doubled(8, 4))
    wrong._core.mark_verified()  # as by a batch that told no difference
    with pytest.raises(slapo.VerifyError):
        slapo.verify([right, wrong], torch.randn(2, 8))
    assert (right.is_verified, wrong.is_verified) == (True, False)


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
    ("document", "word"),
    [
        ("{", "in JSON"),
        ("", "in JSON"),
        ("[]", "'records'"),
        ("null", "'records'"),
        ({}, "'records'"),
        ({"records": []}, "format None"),
        ({"format": 2, "records": []}, "format 2"),
        ({"format": 0, "records": []}, "format 0"),
        ({"format": True, "records": []}, "format True"),
        ({"format": "1", "records": []}, "format '1'"),
        ({"format": 1, "records": [3]}, "record 1 of"),
        (_document(path=None), "'path'"),
        (_document(arguments=[1]), "'arguments'"),
        (_document(primitive=1), "'primitive'"),
        (_document(arguments={"param": "weight", "key": "k", "value": 1, "more": 2, "alas": 3}), "'alas', 'more'"),
        (_document(arguments={"param": "weight", "value": 1}), "'key'"),
        (_document(arguments={"param": 7, "key": "k", "value": 1}), "got 7"),
        (_document(primitive="acme.pad", distribution="acme-slapo"), "acme-slapo 0.0.1"),
        (_document(path="heads"), "did you mean sch['head']"),
        (_document(path="layers.*"), "at 'layers.*'"),
        (_document(primitive="core.checkpoint", arguments={}), "checkpointed already"),
    ],
)
def test_failed_replay_explains_and_leaves_the_model_unchanged(document: Any, word: str, message: Messages) -> None:
    model = MLP()
    before = ModelSnapshot(model)
    told = set()
    for given in (document, json.dumps(document)) if isinstance(document, dict) else (document,):
        with pytest.raises(ReplayError) as caught:
            slapo.replay(model, given)
        told.add(str(caught.value))
        assert_bit_identical(before, model)
    message(*told, word)


def test_a_primitive_that_is_not_installed_is_named_with_those_that_are() -> None:
    with pytest.raises(ReplayError, match=r"step 2, core\.annotat .*(?s:.)*'core\.annotate'"):
        slapo.replay(MLP(), _document(primitive="core.annotat"))


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


def in_sequence(old: nn.Module) -> nn.Module:
    return Sequence(old)


class Sequence(nn.Linear):
    def __init__(self, old: nn.Module) -> None:
        super().__init__(old.in_features, old.out_features)


def test_a_function_at_the_top_level_of_a_module_is_saved_by_its_name_and_replayed() -> None:
    sch = slapo.create_schedule(MLP())
    sch["head"].replace(in_sequence)
    assert sch.document()["records"][0]["arguments"]["new_module"] == "tests.core.test_replay:in_sequence"
    model = MLP()
    again = slapo.replay(model, sch.to_json())
    assert type(model.head) is Sequence
    assert again.records == sch.records
    assert again.records[0].primitive.arguments()["new_module"] is in_sequence


@pytest.mark.ranks
def test_a_dry_schedule_with_a_function_is_verified() -> None:
    sch = slapo.create_schedule(MLP(), mesh={"dp": 2})
    sch["head"].replace(in_sequence)
    assert slapo.verify(sch, torch.randn(2, 8)).world_size == 2


def test_a_function_that_its_name_does_not_lead_to_is_not_saved(message: Messages) -> None:
    def in_sequence(old: nn.Module) -> nn.Module:
        return Sequence(old)

    hidden = in_sequence
    hidden.__qualname__ = "in_sequence"  # as a decorator leaves it: the name leads to another function
    for function, kind in ((hidden, "the function in_sequence"), (lambda old: Sequence(old), "a lambda")):
        sch = slapo.create_schedule(MLP())
        sch["head"].replace(function)
        with pytest.raises(slapo.SerializationError) as caught:
            sch.to_json()
        message(caught, "'new_module' of #1", kind)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("antigravity:fly", "not imported"),
        ("tests.core.test_replay:nothing", "no such function"),
        ("builtins:exec", "no such function"),
        ("json:JSONDecoder", "no such function"),
    ],
)
def test_a_function_that_is_not_there_is_refused_and_nothing_is_imported(
    name: str, word: str, message: Messages
) -> None:
    document = _document(primitive="core.replace", arguments={"new_module": name})
    with pytest.raises(ReplayError) as caught:
        slapo.replay(MLP(), document)
    message(caught, "'new_module'", repr(name), word)
    assert "antigravity" not in sys.modules


def test_a_schedule_for_fewer_layers_says_which_ones_it_leaves_out(message: Messages) -> None:
    sch = slapo.create_schedule(MLP(2))
    sch["layers.*.0"].checkpoint()
    saved = sch.document()
    older = {key: value for key, value in saved.items() if key != "blocks"}
    for document in (saved, older):
        with pytest.warns(UserWarning, match="none for 2, 3") as caught:
            again = slapo.replay(MLP(4), document)
        assert len(caught) == 1
        message(caught[0].message, "4 Sequential in 'layers'", "none for 2, 3")
        assert caught[0].filename == __file__
        assert len(again.records) == 2
    with pytest.warns(UserWarning, match="none for 2, 3") as caught:
        slapo.replay(MLP(24), saved)
    message(caught[0].message, "2, 3, 4, ..., 23 (22 in all)")


def test_a_schedule_that_left_layers_out_on_purpose_is_replayed_in_silence() -> None:
    sch = slapo.create_schedule(MLP(4))
    sch["layers.[01]"].checkpoint()
    nothing = slapo.create_schedule(MLP(2))
    nothing["head"].checkpoint()
    root = slapo.create_schedule(MLP(2))
    root["layers.*"].checkpoint()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slapo.replay(MLP(4), sch.document())
        slapo.replay(MLP(4), nothing.document())
        slapo.replay(MLP(2), root.document())
