"""``slapo pipeline draw``: torch's orders in time, the bubble, and the picture."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import slapo_core as slapo
from slapo_pipeline.timeline import SCHEDULES, Action, PipelineCommands, orders, simulate
from tests.messages import Messages


def run(*words):
    return CliRunner().invoke(PipelineCommands().app(), ["draw", *words], catch_exceptions=True)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_equals_the_formula(schedule):
    for pp in (1, 2, 3, 4, 7):
        for microbatches in (pp, pp + 1, 2 * pp, 13):
            for forward, backward in ((1, 2), (1, 1), (3, 0.5)):
                work = orders(schedule, stages=pp, microbatches=microbatches)
                found = simulate(work, forward=forward, backward=backward)
                assert found.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))
                assert found.length == pytest.approx((microbatches + pp - 1) * (forward + backward))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_does_everything_once_and_in_time(schedule):
    stages, microbatches = (4, 8) if schedule in ("gpipe", "1f1b") else (8, 8)
    found = simulate(orders(schedule, stages=stages, microbatches=microbatches))
    ends = {each.action: each.end for each in found.actions}
    assert len(ends) == len(found.actions)
    for stage in range(stages):
        for number in range(microbatches):
            forward, full = Action("F", stage, number), Action("B", stage, number)
            parts = [Action("I", stage, number), Action("W", stage, number)]
            done = [each for each in (full, *parts) if each in ends]
            assert forward in ends
            assert done in ([full], parts)
            assert ends[forward] < ends[done[0]]
            if stage:
                assert ends[Action("F", stage - 1, number)] < ends[forward]
    for one, other in zip(found.actions, found.actions[1:], strict=False):
        assert one.rank != other.rank or one.end <= other.start
    assert found.ranks == 4
    assert 0 < found.bubble < 3 / 11 + 1e-9  # none is worse than one stage a rank, run one after the other


def test_interleaving_and_splitting_the_backward_make_the_bubble_smaller():
    bubbles = {
        name: simulate(orders(name, stages=4 if name in ("gpipe", "1f1b") else 8, microbatches=8)).bubble
        for name in SCHEDULES
    }
    assert bubbles["interleaved_1f1b"] == pytest.approx(3 / (2 * 8 + 3))  # (p-1)/(v*m+p-1), v stages a rank
    assert bubbles["zbv_zero_bubble"] < bubbles["interleaved_1f1b"] < bubbles["1f1b"]


def test_ranks_that_wait_for_each_other_are_found():
    with pytest.raises(ValueError, match="waits for another one"):
        simulate([[Action("B", 0, 0), Action("F", 0, 0)]])


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"schedule": "2f2b"}, ("'2f2b'",)),
        ({"pp": 2}, ("1f1b", "4 stages on 2 ranks")),
        ({"schedule": "zbv_zero_bubble", "pp": 4}, ("zbv_zero_bubble", "4 stages on 4")),
        ({"schedule": "looped_bfs", "stages": 5, "pp": 2}, ("looped_bfs", "5 stages")),
        ({"microbatches": 0}, ("got 4, 4 and 0",)),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers, words, message: Messages):
    with pytest.raises(slapo.ArgumentError) as caught:
        orders(**{"schedule": "1f1b", "stages": 4, "microbatches": 8} | numbers)
    message(caught, *words)
    assert caught.value.hint


def test_refusals_of_torch_keep_its_words():
    with pytest.raises(slapo.ArgumentError) as caught:
        orders(schedule="1f1b", stages=4, microbatches=3)
    assert str(caught.value).startswith("torch refuses 1f1b on 4 ranks: ")
    assert caught.value.hint


def test_the_command_prints_the_bubble_and_writes_the_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "schedule.png"
    done = run("--schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--out", str(picture))
    assert done.exit_code == 0, done.output
    assert done.output == (
        "1f1b: 4 stages on 4 ranks, 8 micro-batches, bubble 27.3 %\n"
        "33 units of time for a step; a stage takes 1 forward and 2 backward\n"
        f"wrote {picture}\n"
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(slapo.ArgumentError, match="picture cannot be written"):
        raise run("--out", str(tmp_path / "missing" / "x.png")).exception


def test_the_json_has_every_action_at_its_time():
    done = run("--stages", "2", "--microbatches", "2", "--backward", "1", "--json")
    data = json.loads(done.output)
    assert done.output == json.dumps(data, indent=2, sort_keys=True) + "\n"
    assert (data["bubble"], data["time"], data["ranks"]) == (pytest.approx(1 / 3), 6, 2)
    assert data["actions"][0] == {"end": 1, "kind": "F", "microbatch": 0, "rank": 0, "stage": 0, "start": 0}
    assert [action["kind"] for action in data["actions"] if action["rank"] == 1] == ["F", "B", "F", "B"]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path: Path, message: Messages):
    real = builtins.__import__

    def without(name, *arguments, **named):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert run("--microbatches", "4").exit_code == 0
    error = run("--microbatches", "4", "--out", str(tmp_path / "x.png")).exception
    message(error, "matplotlib", "pip install 'slapo-pipeline[draw]'")
    with pytest.raises(slapo.ArgumentError, match="times must be positive"):
        raise run("--forward", "0").exception


def test_the_app_is_a_family():
    assert set(typer.main.get_command(PipelineCommands().app()).commands) == {"draw"}
