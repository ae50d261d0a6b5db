"""Pictures as data and as text, compared with the model and its schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_core.errors import ArgumentError
from slapo_view import Picture, picture
from tests.messages import Messages

from .pictured import Blocks, rows, scheduled


def data_of(shown: Picture) -> dict[str, Any]:
    (found,) = json.loads(json.dumps(shown.to_json()))["schedules"]
    return found


def test_sizes_are_those_of_the_models_parameters_each_tied_one_once() -> None:
    plain = Blocks()
    found = data_of(picture(slapo.create_schedule(plain)))
    full = sum(each.numel() for each in plain.parameters())
    assert (found["parameters"], found["bytes"]) == (full, 4 * full)
    split = scheduled({"tp": 2})
    found = data_of(picture(split))
    assert found["parameters"] == full
    assert found["bytes"] == 4 * sum(each.numel() for each in split.model.parameters()) < 4 * full
    tree = rows(found["tree"])
    assert tree["head"]["tensors"][0]["tied_to"] == "embed.weight"
    assert "bytes" not in tree["head"]
    assert tree["embed"]["bytes"] == 4 * 32 * 16
    assert tree["last"]["alias"] == "blocks.5"
    assert tree[""]["tensors"] == [
        {"name": "scale", "kind": "buffer", "before": [1], "after": [1], "dtype": "float32", "bytes": 4, "elements": 1}
    ]


def test_equal_blocks_are_one_row_which_names_all_their_steps() -> None:
    schedule = scheduled({"tp": 2}, checkpoints=2)
    tree = rows(data_of(picture(schedule))["tree"])
    assert [path for path in tree if path.endswith("up")] == ["blocks.{0-1}.feed.up", "blocks.{2-5}.feed.up"]
    up = tree["blocks.{2-5}.feed.up"]
    assert up["count"] == 4
    (weight, bias), (shard, sync) = up["tensors"], up["steps"]
    assert (weight["before"], weight["after"], weight["layout"]) == ([64, 16], [32, 16], "tp: S(0)")
    assert (bias["before"], bias["after"]) == ([64], [32])
    for step in (shard, sync):
        paths = [f"blocks.{n}.feed.up" for n in range(2, 6)]
        own = [each.index for each in schedule.records if each.path in paths and each.name == step["name"]]
        assert step["numbers"] == f"{own[0]}-{own[-1]}"
        assert own == list(range(own[0], own[-1] + 1))
    assert (shard["name"], shard["call"]) == ("tp.shard", "shard(('weight', 'bias'), axis=0)")
    assert shard["at"].rpartition(":")[0].endswith("pictured.py")
    assert shard["line"].startswith('feeds["up"].shard(["weight", "bias"], axis=0)')
    assert sync["effects"] == ["all_reduce over 'tp' in each backward"]
    assert up["bytes"] == 4 * 4 * (32 * 16 + 32)
    assert [step["name"] for step in tree["blocks.{0-1}"]["steps"]] == ["core.checkpoint"]


@pytest.mark.parametrize(
    "differing",
    [
        lambda blocks: [nn.Dropout(0.1), *blocks[1:]],  # another class
        lambda blocks: [nn.Linear(16, 17), *blocks[1:]],
        lambda blocks: [nn.Linear(16, 16, dtype=torch.float64), *blocks[1:]],
        lambda blocks: [nn.Linear(16, 16, bias=False), *blocks[1:]],
    ],
)
def test_blocks_that_differ_are_rows_of_their_own(differing: Any) -> None:
    model = nn.Sequential(*differing([nn.Linear(16, 16) for _ in range(3)]))
    tree = rows(data_of(picture(slapo.create_schedule(model)))["tree"])
    assert list(tree) == ["", "0", "{1-2}"]


def test_steps_that_differ_in_a_decimal_number_are_not_folded() -> None:
    schedule = slapo.create_schedule(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    for number in range(4):
        schedule[str(number)].annotate("weight", "scale", 0.5 if number < 2 else 0.25)
    tree = rows(data_of(picture(schedule))["tree"])
    assert list(tree) == ["", "{0-1}", "{2-3}"]


def test_the_text_has_a_line_for_each_row() -> None:
    shown = picture(scheduled({"tp": 2}))
    lines = str(shown).splitlines()
    assert lines[0] == "Blocks on tp=2: 24 steps"
    (up,) = (line for line in lines if " up: Linear" in line)
    assert "weight 32x16 of 64x16, bias 32 of 64" in up
    assert "shard(('weight', 'bias'), axis=0), sync('bwd_post', op='all_reduce')" in up
    assert any(line.split()[1:5] == ["head:", "Linear", "tied", "to"] for line in lines)
    assert "x N: a row of N equal modules; it and the rows below have their sums" in lines
    assert any(line.startswith("│  └─ blocks.0-5 x 6: Block") or "blocks.0-5 x 6: Block" in line for line in lines)
    assert (
        sum(": " in line for line in lines if line.startswith(("├", "└", "│", " ")))
        == len(rows(shown.views[0].data["tree"])) - 1
    )


def test_a_picture_changes_nothing_and_comes_of_any_schedule() -> None:
    schedule = scheduled({"tp": 2}, checkpoints=1)
    before, records = {name: each.clone() for name, each in schedule.model.named_parameters()}, schedule.records
    found = data_of(picture(schedule))
    assert schedule.records == records
    assert all(torch.equal(each, before[name]) for name, each in schedule.model.named_parameters())
    schedule.seal()
    assert data_of(picture(schedule)) == found
    with torch.device("meta"):
        lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    tree = rows(data_of(slapo.create_schedule(lazy).picture())["tree"])
    assert "after" not in tree["0"]["tensors"][0]
    assert "bytes" not in tree["0"]
    assert tree["1"]["bytes"] == 4 * 20


def test_stages_have_the_parameters_and_values_of_the_partition() -> None:
    schedule = scheduled({"pp": 2, "tp": 2}, stages=2)
    found = data_of(picture(schedule, microbatches=4))
    first, second = found["stages"]["stages"]
    elements = sum(each.numel() for each in schedule.model.parameters())
    tied = 32 * 16
    assert first["bytes"] + second["bytes"] == 4 * (elements + tied)
    (crossing,) = first["sent"]
    assert (crossing["shape"], crossing["nbytes"]) == ([4, 6, 16], 4 * 6 * 16 * 4)
    tree = rows(found["tree"])
    assert tree["blocks.{0-1}"]["stages"] == [0]
    assert tree["blocks.{3-5}"]["stages"] == [1]
    assert tree["blocks"]["stages"] == [0, 1]
    chart = found["timeline"]
    assert (chart["schedule"], chart["ranks"], chart["microbatches"]) == ("1f1b", 2, 4)
    assert chart["bubble"] == pytest.approx(1 / 5)
    assert len(chart["actions"]) == 2 * 2 * 4
    assert "1f1b, 4 micro-batches: ranks wait 20.0 % of a step" in str(picture(schedule, microbatches=4))


def test_one_step_that_cuts_several_times_gives_all_its_stages() -> None:
    schedule = scheduled({"pp": 3})
    schedule["blocks"].pipeline_split(stages=3)
    assert len(schedule.records) == 1
    found = data_of(picture(schedule))
    assert [stage["index"] for stage in found["stages"]["stages"]] == [0, 1, 2]
    assert found["timeline"]["ranks"] == 3


@pytest.mark.parametrize(("pp", "stages"), [(2, 1), (2, 3), (3, 2)])
def test_stages_that_do_not_fit_the_ranks_are_a_note(pp: int, stages: int) -> None:
    found = data_of(picture(scheduled({"pp": pp}, stages=stages)))
    (note,) = found["notes"]
    assert note.startswith("pipeline ranks over time: not shown: ")
    assert f"{stages} stages on {pp} ranks" in note
    assert (found["stages"] is None) is (stages == 1)


def test_what_needs_a_batch_says_so() -> None:
    schedule = scheduled({"pp": 2}, stages=2)
    schedule.example_inputs = None
    found = data_of(picture(schedule, memory=True))
    assert [note.partition(":")[0] for note in found["notes"]] == ["stages", "memory"]
    assert found["stages"] is None
    assert found["timeline"]["microbatches"] == 2


def test_sizes_before_a_step_of_the_target_say_so() -> None:
    schedule = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4)), mesh={"dp": 2})
    schedule["0"].fully_shard()
    found = data_of(picture(schedule))
    (note,) = found["notes"]
    assert note == "shapes and bytes of parameters are before torch.fully_shard, which the target carries out"
    assert found["bytes"] == 4 * 20


def test_modules_that_differ_between_two_schedules_are_marked(message: Messages) -> None:
    one, two = picture(scheduled({"tp": 2})), picture(scheduled({"tp": 2}, checkpoints=2))
    left, right = (rows(each["tree"]) for each in one.beside(two).to_json()["schedules"])
    assert {path: row["differs"] for path, row in left.items() if "differs" in row} == {"blocks.{0-5}": 2}
    assert {path: row["differs"] for path, row in right.items() if "differs" in row} == {"blocks.{0-1}": 2}
    assert "(differs)" in str(one.beside(two))
    same, again = (rows(each["tree"]) for each in one.beside(one).to_json()["schedules"])
    assert not any("differs" in row for row in (*same.values(), *again.values()))
    with pytest.raises(ArgumentError) as refused:
        one.beside(two).beside(one)
    message(refused, "side by side")


def test_arguments_that_would_do_nothing_are_refused(message: Messages) -> None:
    with pytest.raises(ArgumentError) as refused:
        picture(nn.Linear(2, 2))  # type: ignore[arg-type]
    message(refused, "got Linear")
    with pytest.raises(ArgumentError) as refused:
        picture(scheduled({"tp": 2}), microbatches=4)
    message(refused, "pp=1")
    with pytest.raises(ArgumentError) as refused:
        picture(scheduled({"pp": 2}, stages=2), pipeline_schedule="2f2b")
    message(refused, "2f2b")


# -- receipts ----------------------------------------------------------------------------------------------------------


class Bypassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.out(x), self.fc.weight).sum()


def observed() -> tuple[slapo.Schedule, Any]:
    schedule = slapo.create_schedule(Bypassed())
    schedule["out"].checkpoint()
    schedule["fc"].checkpoint()
    return schedule, slapo.observe(schedule, (torch.randn(2, 4, requires_grad=True),))


def test_a_receipt_is_shown_at_its_steps(tmp_path: Path) -> None:
    schedule, observation = observed()
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(observation.to_json()))
    for receipt in (observation, file, str(file)):
        found = data_of(picture(schedule, receipt=receipt))
        tree = rows(found["tree"])
        assert tree["out"]["steps"][0]["seen"] == [1, 1]
        assert tree["fc"]["steps"][0]["seen"] == [0, 1]
        assert "ran past its hooks" in tree["fc"]["steps"][0]["missing"][0]
        assert (found["receipt"]["seen"], found["receipt"]["all"]) == (1, 2)


def test_receipts_of_something_else_are_refused(tmp_path: Path, message: Messages) -> None:
    schedule, observation = observed()
    good = observation.to_json()
    finding = good["findings"][0]
    wrong: dict[str, Any] = {
        "no file": tmp_path / "nothing.json",
        "not JSON": _written(tmp_path / "a.json", "{"),
        "a list": [],
        "no ranks": {**good, "ranks": []},
        "no number": {**good, "steps": 0},
        "no text": {**good, "findings": [{**finding, "seen": 1}]},
        "another mesh": {**good, "mesh": {"tp": 2}},
        "another step": {**good, "findings": [{**finding, "source": "#1 checkpoint() at 'in'"}]},
    }
    for name, receipt in wrong.items():
        with pytest.raises(ArgumentError) as refused:
            picture(schedule, receipt=receipt)
        text = str(refused.value).replace(str(tmp_path), "DIRECTORY")
        message(text, "receipt")
        assert "\n" not in refused.value.message, name
    with pytest.raises(ArgumentError, match="is not JSON"):
        picture(schedule, receipt=_written(tmp_path / "b.json", "[" * 100_000))


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# -- the estimate ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_memory_over_a_step_reaches_the_estimates_peak_and_collectives_have_their_bytes() -> None:
    schedule = scheduled({"tp": 2}, blocks=24)
    found = data_of(picture(schedule, memory=True))
    assert found["notes"] == []
    (kind,) = found["memory"]["kinds"]
    assert kind["ranks"] == [0, 1]
    totals = [sum(sample) for sample in kind["samples"]]
    assert max(totals) == kind["peak"]["total"]
    assert kind["places"][totals.index(max(totals))] == [kind["peak"]["phase"], kind["peak"]["module"]]
    held = found["memory"]["names"].index("parameters")
    assert {sample[held] for sample in kind["samples"]} == {found["bytes"]}
    assert kind["operations"] > 1000
    assert 100 < len(totals) <= 200
    tree = rows(found["tree"])
    message = 4 * 6 * 16 * 4  # bytes of the activations between blocks
    (forward,) = tree["blocks.{0-23}.feed.down"]["collectives"]
    assert (forward["kind"], forward["mesh_dim"], forward["phase"]) == ("all_reduce", "tp", "forward")
    assert (forward["step"], forward["source"]) == ("sync('fwd_post', op='all_reduce')", "estimate")
    assert (forward["count"], forward["bytes"]) == (24, 24 * message)
    (backward,) = tree["blocks.{0-23}.feed.up"]["collectives"]
    assert (backward["phase"], backward["count"], backward["bytes"]) == ("backward", 24, 24 * message)
    shown = [call for row in tree.values() for call in row.get("collectives", ())]
    assert sum(call["bytes"] for call in shown) == sum(call["bytes"] for call in kind["collectives"]) == 48 * message
