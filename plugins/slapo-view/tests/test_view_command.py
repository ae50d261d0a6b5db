"""``slapo show``: text, JSON and a page of one schedule or two; and each wrong call."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from slapo_core.cli import main as command_line
from slapo_core.cli.main import make_app

SOURCE = """
import torch
from torch import nn
import slapo_core as slapo


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.long), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x[self.mask.bool()].sum()


class Plain(Model):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def steps(sch):
    for number in (0, 2):
        sch[f"layers.{number}"].shard(["weight", "bias"], axis=0).sync("backward")
        sch[f"layers.{number + 1}"].shard("weight", axis=1).sync("forward")


def stages(mesh=None):
    sch = slapo.create_schedule(Plain(), mesh=mesh)
    sch["layers.1"].pipeline_split()
    return sch
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "tiny_shown.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("tiny_shown", None)


def run(*words: str) -> Result:
    return CliRunner().invoke(make_app(), ["show", *words])


STEPS = ("tiny_shown:steps", "--model", "tiny_shown:Model")


def test_a_schedule_is_shown_as_text_and_as_json(here: Path) -> None:
    done = run(*STEPS, "--mesh", "tp=2")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("tiny_shown:steps: Model on tp=2: 8 steps\n1,088 parameters; on a rank 2.19KiB\n")
    assert "weight 8x16 of 16x16, bias 8 of 16" in done.stdout
    (found,) = json.loads(run(*STEPS, "--mesh", "tp=2", "--json").stdout)["schedules"]
    assert (found["steps"], found["mesh"], found["memory"]) == (8, {"tp": 2}, None)


def test_two_meshes_stand_side_by_side_in_a_page(here: Path) -> None:
    words = ("tiny_shown:stages", "--mesh", "pp=2", "--mesh", "pp=1", "--html", "out.html", "--no-estimate")
    done = run(*words, "--batch", "x=4x16:float32")
    assert done.exit_code == 0, done.output
    assert done.stdout == "wrote out.html\n"
    page = (here / "out.html").read_text("utf-8")
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [each["mesh"] for each in data["schedules"]] == [{"pp": 2}, {"pp": 1}]
    assert len(data["schedules"][0]["stages"]["stages"]) == 2


@pytest.mark.ranks
def test_the_page_has_the_estimate_of_a_model_that_reads_a_mask(here: Path) -> None:
    done = run(*STEPS, "--mesh", "tp=2", "--batch", "x=4x16:float32", "--html", "out.html")
    assert done.exit_code == 0, done.output
    assert "note:" not in done.stderr
    page = (here / "out.html").read_text("utf-8")
    (found,) = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["schedules"]
    assert found["memory"]["kinds"][0]["peak"]["optimizer"] > 2 * found["bytes"] - 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tiny_shown:stages", "tiny_shown:stages", "tiny_shown:stages"), "at most two"),
        (("tiny_shown:stages", "tiny_shown:stages", "--receipt", "r.json"), "a receipt is of one schedule"),
        (("tiny_shown:stages", "--html", "."), "cannot be written"),
        (("tiny_shown:stages", "--receipt", "r.json"), "cannot be read"),
        (("tiny_shown:stages", "--optimizer", "Adamm"), "no optimizer 'Adamm'"),
        (("tiny_shown:stages", "--pipeline-schedule", "1f1b"), "on ranks along pp"),
        (("tiny_shown:stages", "--mesh", "pp=2", "--microbatches", "1"), "1f1b"),
        (("tiny_shown:stages", "--batch", "x=4:float99"), "no dtype"),
        ((*STEPS, "--mesh", "tp=3"), "cannot apply shard"),
    ],
)
def test_a_wrong_call_ends_in_a_line_and_status_2(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["slapo", "show", *words])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    (line,) = [line for line in shown.splitlines() if line.lower().startswith("error: ")]
    assert said in line
    assert "Traceback" not in shown
