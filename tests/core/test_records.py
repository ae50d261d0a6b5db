"""Promise: the schedule as data: saved to JSON, whole messages for what cannot be saved."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import SerializationError
from slapo_core.schedule.records import primitive_to_json
from slapo_testing.models import MLP, keep
from tests.messages import Messages
from tests.support.edits import Call, TestPrimitive


class Mode(enum.StrEnum):
    ONE = "one"


@dataclass(frozen=True)
class Hold(TestPrimitive):
    name = "test.hold"
    value: Any

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("held")


def test_steps_go_on_where_the_working_directory_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    sch = slapo.create_schedule(MLP())
    sch["layers.0"].checkpoint()
    file, _, line = sch.records[0].location.rpartition(":")
    assert file == __file__
    assert int(line) > 0


def test_document_holds_every_step() -> None:
    sch = slapo.create_schedule(MLP(), mesh={"tp": 2})
    sch["layers.0"].checkpoint(preserve_rng_state=False)
    sch["head"].annotate("weight", "mark", {"a": [1, None, 2.5], "b": "text"})
    document = json.loads(sch.to_json())
    assert document == sch.document() | {"records": document["records"]}
    version = document["slapo-core"]
    first, second = (record.location for record in sch.records)
    assert document == {
        "format": 1,
        "slapo-core": version,
        "model": "slapo_testing.models.MLP",
        "blocks": {"layers": 4},
        "mesh": {"tp": 2},
        "records": [
            {
                "primitive": "core.checkpoint",
                "path": "layers.0",
                "arguments": {"preserve_rng_state": False},
                "distribution": "slapo-core",
                "version": version,
                "location": first,
            },
            {
                "primitive": "core.annotate",
                "path": "head",
                "arguments": {"param": "weight", "key": "mark", "value": {"a": [1, None, 2.5], "b": "text"}},
                "distribution": "slapo-core",
                "version": version,
                "location": second,
            },
        ],
    }
    assert slapo.create_schedule(MLP()).document()["mesh"] is None


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        (lambda x: x, "", "a lambda"),
        (keep, "", "the function keep"),
        (nn.ReLU(), "", "torch.nn.modules.activation.ReLU"),
        (torch.float16, "", "torch.dtype"),
        ([1, {"a": [nn.ReLU()]}], "[1]['a'][0]", "torch.nn.modules.activation.ReLU"),
        (Mode.ONE, "", "tests.core.test_records.Mode"),
        ({1: 2}, "", "builtins.dict"),
        ({1, 2}, "", "builtins.frozenset"),
        (1j, "", "builtins.complex"),
    ],
)
def test_serialization_error_names_argument_and_record(value: Any, where: str, kind: str, message: Messages) -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    sch["layers.0"].checkpoint()
    sch["head"].apply(Hold(value))
    with pytest.raises(SerializationError) as caught:
        sch.to_json()
    message(caught, f"'value'{where} of #2 hold(", kind)
    assert str(sch.records[1]).startswith("#2 hold(")
    assert "\n" not in str(sch.records[1])


def test_replace_with_a_module_is_applied_but_not_saved(message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    sch["layers.0"].replace(lambda old: nn.Sequential(old))
    with pytest.raises(SerializationError) as caught:
        sch.to_json()
    message(caught, "'new_module' of #1 replace(", "'layers.0'", "a lambda")


def test_numbers_keep_their_type_through_json() -> None:
    values = [True, 1, 1.0, 1e-30, -0.0, 2**70, "ü\n", None]
    encoded = json.loads(json.dumps(primitive_to_json(Hold(values), where="here")))
    back = Hold(**encoded)
    assert repr(back.value) == repr(tuple(values))


def test_records_are_values() -> None:
    one, other = slapo.create_schedule(MLP()), slapo.create_schedule(MLP())
    one["layers.*"].checkpoint()
    for node in other["layers.*"]:
        node.checkpoint()
    assert one.records == other.records, "where it was written is no part of what it says"
    assert one.records[0].location != other.records[0].location
    assert len({*one.records, *other.records}) == 4
    assert one.records[0] != one.records[1]
    with pytest.raises(AttributeError):
        one.records[0].path = "elsewhere"  # type: ignore[misc]


def test_effects_say_what_changed() -> None:
    sch = slapo.create_schedule(MLP())

    def change(node: slapo.Node, edit: slapo.Edit) -> None:
        edit.set_attribute(node, "in_features", 4)
        edit.set_attribute(node, "fresh", "yes")
        edit.set_parameter(node, "weight", torch.zeros(4, 4))
        edit.set_parameter(node, "bias", None)
        edit.add_hook(node, "forward_pre", keep)
        edit.note("and this")

    sch["head"].apply(Call(change))
    assert sch.records[0].edits == (
        "in_features 8 -> 4",
        "fresh (none) -> 'yes'",
        "weight (4, 8) -> (4, 4)",
        "bias (4,) -> None",
        "forward_pre hook keep",
        "and this",
    )
