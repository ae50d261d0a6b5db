"""``slapo explain`` and ``slapo diff``: what a schedule does, and what another one does otherwise."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from slapo_core.cli.main import make_app

SOURCE = """
from torch import nn
from slapo_testing.models import bert

LAYERS = "bert.encoder.layer.*"


def make():
    return bert(num_hidden_layers=4)


def deeper():
    return bert(num_hidden_layers=5)


def steps(sch):
    for layer in sch[LAYERS]:
        layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("backward")
        layer["output.dense"].shard("weight", axis=1).sync("forward")


def more(sch):
    steps(sch)
    sch[LAYERS][:2].checkpoint()


def other_axis(sch):
    for layer in sch[LAYERS]:
        layer["output.dense"].shard("weight", axis=1)


def first_axis(sch):
    for layer in sch[LAYERS]:
        layer["output.dense"].shard("weight", axis=0)


def traced(sch):
    sch["bert.encoder.layer.0"].trace()


def noted(sch):
    sch["cls.predictions"].annotate("bias", "mark", 1)
    sch["cls.predictions"].annotate("bias", "other", 2)


def noted_later(sch):
    sch["cls.predictions"].annotate("bias", "other", 2)
    sch["cls.predictions"].annotate("bias", "mark", 1)


def replaced(sch):
    sch["bert.encoder.layer.0.intermediate.intermediate_act_fn"].replace(nn.ReLU())


def replaced_otherwise(sch):
    sch["bert.encoder.layer.0.intermediate.intermediate_act_fn"].replace(nn.Sigmoid())
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "compared.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("compared", None)


def run(command: str, *words: str) -> Result:
    names = [f"compared:{word}" if word.isidentifier() else word for word in words]
    return CliRunner().invoke(make_app(), [command, *names, "--model", "compared:make"])


def difference(*words: str) -> tuple[int, dict[str, Any]]:
    done = run("diff", *words, "--json")
    assert done.stdout, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["is_equal"] == (done.exit_code == 0)
    return done.exit_code, found


def test_explain_shows_each_step_with_its_line(here: Path) -> None:
    done = run("explain", "steps", "--mesh", "tp=2")
    assert done.exit_code == 0, done.output
    line = SOURCE.splitlines().index('        layer["output.dense"].shard("weight", axis=1).sync("forward")') + 1
    assert "#3,7,11,15 shard('weight', axis=1) at 'bert.encoder.layer.{0-3}.output.dense' (x 4)" in done.stdout
    assert f"compared.py:{line}" in done.stdout
    found = json.loads(run("explain", "steps", "--mesh", "dp=1,tp=2", "--json").stdout)
    assert found["mesh"] == {"dp": 1, "tp": 2}
    assert found["model"].endswith("BertForMaskedLM")
    assert [step["primitive"] for step in found["steps"][:4]] == ["tp.shard", "tp.sync", "tp.shard", "tp.sync"]
    assert found["steps"][2]["changes"][0] == "weight (16, 32) -> (16, 16), tp: S(1)"
    assert json.loads(run("explain", "noted", "--mesh", "tp=2", "--json").stdout)["unused_mesh_dims"] == ["tp"]


def test_steps_that_run_the_model_get_example_inputs(here: Path) -> None:
    done = run("explain", "traced")
    assert done.exit_code == 0, done.exception
    assert "forward runs <static graph of 'bert.encoder.layer.0'" in done.stdout
    assert (run("diff", "traced", "traced").exit_code, done.stderr) == (0, "")
    assert "must be MODULE:FUNCTION" in run("diff", "traced", "traced", "--batch", "input_ids=2x4").output


def test_equal_schedules_end_with_0(here: Path) -> None:
    assert run("diff", "steps", "steps", "--mesh", "tp=2").exit_code == 0
    saved = json.loads(run("explain", "steps", "--json", "--mesh", "tp=2").stdout)
    assert len(saved["steps"]) == 16
    assert difference("steps", "compared.py:steps", "--mesh", "tp=2")[0] == 0


def test_added_and_removed_steps_are_folded(here: Path) -> None:
    done = run("diff", "steps", "more", "--mesh", "tp=2")
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "A: compared:steps, 16 steps, mesh {'tp': 2}",
        "B: compared:more, 18 steps, mesh {'tp': 2}",
        "+ checkpoint() at 'bert.encoder.layer.{0-1}' (x 2)",
    ]
    found = difference("more", "steps", "--mesh", "tp=2")[1]
    assert [one["path"] for one in found["removed"]] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert (found["added"], found["changed"], found["tensors"]) == ([], [], [])


def test_changed_arguments_and_shapes(here: Path) -> None:
    found = difference("other_axis", "first_axis", "--mesh", "tp=2")[1]
    assert [(one["a"]["call"], one["b"]["call"]) for one in found["changed"]] == [
        ("shard('weight', axis=1)", "shard('weight', axis=0)")
    ] * 4
    assert {(one["tensor"], one["a"], one["b"]) for one in found["tensors"]} == {
        ("weight", "(16, 16) [tp: S(1)] float32", "(8, 32) [tp: S(0)] float32"),
    }


def test_two_meshes_differ_in_shapes_only(here: Path) -> None:
    found = difference("steps", "--mesh", "tp=2", "--mesh", "dp=2,tp=4")[1]
    assert (found["a"]["mesh"], found["b"]["mesh"]) == ({"tp": 2}, {"dp": 2, "tp": 4})
    assert (found["added"], found["removed"], found["changed"]) == ([], [], [])
    assert len(found["tensors"]) == 3 * 4
    shown = run("diff", "steps", "--mesh", "tp=2", "--mesh", "dp=2,tp=4").stdout
    assert "'bert.encoder.layer.{0-3}.output.dense' (x 4)        weight  (16, 16) [tp: S(1)] float32  (16, 8)" in shown


def test_two_models_differ_in_modules_too(here: Path) -> None:
    found = difference("steps", "--mesh", "tp=2", "--model", "compared:deeper")[1]
    assert {one["path"].split(".")[3] for one in (*found["removed"], *found["tensors"])} == {"4"}
    assert len(found["removed"]) == 4
    assert {"a": "BertLayer", "b": None, "path": "bert.encoder.layer.4", "tensor": ""} in found["tensors"]


def test_order_at_one_module_counts(here: Path) -> None:
    code, found = difference("noted", "noted_later")
    assert (code, found["reordered"]) == (1, ["cls.predictions"])
    assert difference("noted", "noted")[0] == 0


def test_modules_of_other_classes_differ_and_live_arguments_are_said(here: Path) -> None:
    found = difference("replaced", "replaced_otherwise")[1]
    path = "bert.encoder.layer.0.intermediate.intermediate_act_fn"
    assert {"a": "ReLU", "b": "Sigmoid", "path": path, "tensor": ""} in found["tensors"]
    done = run("diff", "replaced", "replaced")
    assert done.exit_code == 0
    assert "note: compared by name or type only: " in done.stdout


def test_a_code_and_a_saved_schedule(here: Path) -> None:
    from slapo_core.cli import find_schedule

    saved = find_schedule("compared:steps", model="compared:make", mesh="tp=2").make().to_json()
    (here / "saved.json").write_text(saved)
    assert difference("steps", "saved.json", "--mesh", "tp=2")[0] == 0
    (here / "saved.json").write_text(saved.replace('"axis": 1', '"axis": 0'))
    assert len(difference("steps", "saved.json", "--mesh", "tp=2")[1]["changed"]) == 4
