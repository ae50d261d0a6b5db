"""examples/bert_tp.py: the whole path, small, and proof that its comparison can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slapo_testing import preload_modules
from tests.integration.example_runs import example, text_for
from tests.support.programs import run_program

pytestmark = pytest.mark.ranks
preload_modules("transformers.models.bert.modeling_bert", "slapo_tp")

SMALL = ["--steps", "4", "--batch-size", "2", "--length", "32", "--vocab-size", "600", "--device", "cpu"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def started(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """What the script starts, in processes that have imported everything."""
    assert options == {"env": options["env"], "check": False}
    assert command[0] == sys.executable
    together = command[1:6] == TORCHRUN
    script, *arguments = command[6:] if together else command[1:]
    print(run_program(Path(script), *arguments, processes=2 if together else None))
    return subprocess.CompletedProcess(command, 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bert")
    text_for(made)
    return made


def test_scheduled_and_unscheduled_training_agree(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bert_tp = example("bert_tp")
    monkeypatch.setattr(bert_tp.common, "subprocess", SimpleNamespace(run=started))
    arguments = [*SMALL, "--text", str(directory / "text.txt"), "--output", str(directory)]
    monkeypatch.setattr(sys, "argv", ["bert_tp.py", *arguments])
    assert bert_tp.main(bert_tp.parser().parse_args()) == 0
    printed = capsys.readouterr().out
    assert "the loss curves agree" in printed
    assert "shard(('weight', 'bias'), axis=0) at 'bert.encoder.layer.{0-5}.attention.self.query' (x 6)" in printed
    plain, scheduled = (json.loads((directory / f"{name}.json").read_text()) for name in ("plain", "scheduled"))
    assert len(plain["losses"]) == len(scheduled["losses"]) == 4
    assert plain["losses"][0] == pytest.approx(scheduled["losses"][0], abs=1e-5)
    # Every layer is split over both ranks, so each holds clearly less than the whole model.
    whole, *_ = [memory["weights and optimizer"] for memory in plain["memory"]]
    assert all(memory["weights and optimizer"] < 0.75 * whole for memory in scheduled["memory"])
    assert (directory / "loss_curves.png").read_bytes().startswith(b"\x89PNG")


def test_loss_curves_that_part_end_with_status_1(directory: Path) -> None:
    bert_tp = example("bert_tp")
    file = directory / "scheduled.json"
    honest = file.read_text()
    result = json.loads(honest)
    result["losses"][-1] += 2 * bert_tp.common.TOLERANCE
    file.write_text(json.dumps(result))
    options = bert_tp.parser().parse_args([*SMALL, "--output", str(directory)])
    try:
        assert bert_tp.compare(options) == 1
        file.write_text(honest)
        assert bert_tp.compare(options) == 0
    finally:
        file.write_text(honest)


@pytest.mark.breadth
def test_without_matplotlib_the_runs_are_compared_and_a_line_says_what_to_install(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bert_tp = example("bert_tp")
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    (directory / "loss_curves.png").unlink()
    assert bert_tp.compare(bert_tp.parser().parse_args([*SMALL, "--output", str(directory)])) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "matplotlib" in line] == [
        "no plot: matplotlib is not installed (hint: pip install matplotlib)"
    ]
    assert printed[-1].startswith("the loss curves agree")
    assert not (directory / "loss_curves.png").exists()
