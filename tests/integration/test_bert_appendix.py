"""examples/bert_appendix.py: the paper's appendix, small: verified, trained, and no longer than the paper's."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "bert_appendix.py"
SMALL = ["--steps", "3", "--batch-size", "2", "--length", "32", "--vocab-size", "600", "--compiler", "eager"]


@pytest.mark.ranks
def test_the_appendix_trains_as_the_untouched_model_does(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "examples" / "bert_tp.py").read_text() * 3)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, "--text", str(text), "--output", str(tmp_path)],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the loss curves agree" in done.stdout
    assert "verified: BertForMaskedLM with " in done.stdout
    for step in (
        "replace('fusion.sdpa', match=<1 match of the pattern 'fusion.sdpa'>)",
        "fuse(<1 match of the pattern 'fusion.bias_gelu'>",
        "fuse(<2 matches of the pattern 'fusion.bias_dropout_add_norm'>",
    ):
        assert step in done.stdout
    plain, scheduled = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "scheduled"))
    assert len(plain["losses"]) == len(scheduled["losses"]) == 3
    assert plain["losses"][0] == pytest.approx(scheduled["losses"][0], abs=1e-5)


def test_the_schedule_is_not_longer_than_the_paper_s() -> None:
    tree = ast.parse(SCRIPT.read_text())
    (schedule,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "schedule_bert"]
    lines = SCRIPT.read_text().splitlines()[schedule.body[1].lineno - 1 : schedule.end_lineno]
    assert len([line for line in lines if not line.strip().startswith("#")]) <= 21
