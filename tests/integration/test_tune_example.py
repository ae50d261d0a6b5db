"""examples/tune_bert.py: a small search over real ranks; what does not fit is never started, the best is verified."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import slapo_core as slapo
import slapo_tune
from slapo_core.cli.main import make_app
from slapo_tune.winner import best_file
from tests.integration.example_runs import EXAMPLES, example, text_for

SMALL = ["--steps", "1", "--length", "16", "--vocab-size", "600", "--memory", "80MiB", "--sampler", "exhaustive"]
SMALL += ["--device", "cpu"]


@pytest.fixture
def tune_bert(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))  # for the processes of the trials, too
    module = example("tune_bert")
    monkeypatch.setattr(module, "BATCHES", (2,))
    monkeypatch.setattr(module, "RATIOS", (1.0,))
    return module


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_search_starts_what_fits_and_verifies_the_best(
    tune_bert: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--text", str(text_for(tmp_path)), "--output", str(tmp_path)]
    options = tune_bert.parser().parse_args(words)
    assert tune_bert.main(options) == 0
    printed, progress = capfd.readouterr()
    assert "2 points (0 more refused by the space); 1 started, 1 pruned, 0 not tried" in printed
    assert "verified: BertForMaskedLM" in printed
    assert "over_memory  1" in printed  # a whole replica needs more than 80 MiB
    assert len([line for line in progress.splitlines() if line.startswith("trial ")]) == 3  # the verification's too
    assert (tmp_path / "search.png").stat().st_size > 10_000
    kept = json.loads(best_file(tmp_path / "tune_bert.jsonl").read_text())
    assert kept["point"]["tp"] == 2
    with torch.device("meta"):
        model = tune_bert.make_model(600)
    sch = slapo.replay(model, kept["document"])
    assert sch["bert.encoder.layer.0.intermediate.dense"].module.weight.shape == (512, 256)

    result = tune_bert.make_study(options).run()  # all is in the log: nothing is tried again
    assert (len(result.trials), result.ended) == (2, "space")
    wrong = replace(result, winner=replace(result.winner, right=False, reason="outputs differ"))
    monkeypatch.setattr(slapo_tune.Study, "run", lambda study, **_: wrong)
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert tune_bert.main(options) == 1
    printed = capfd.readouterr().out
    assert "no plot: matplotlib is not installed (hint: pip install matplotlib)\n" in printed
    assert "FAILED: no verified schedule: outputs differ" in printed


def test_the_example_is_a_study_file(tune_bert: Any) -> None:
    assert isinstance(tune_bert.study, slapo_tune.Study)
    file = EXAMPLES / "tune_bert.py"
    done = CliRunner().invoke(make_app(), ["tune", "show", str(file)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("2 points, 0 more refused\n")  # the module is imported already, with what is set here
    assert sys.modules["tune_bert"] is tune_bert
