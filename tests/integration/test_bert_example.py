"""examples/bert_tp.py: the whole path, small, and proof that its comparison can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "4", "--batch-size", "2", "--length", "32", "--vocab-size", "600"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "bert_tp.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    directory = tmp_path_factory.mktemp("bert")
    text = directory / "text.txt"
    text.write_text((ROOT / "examples" / "bert_tp.py").read_text() * 3)
    return directory, run(*SMALL, "--text", str(text), "--output", str(directory))


def test_scheduled_and_unscheduled_training_agree(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    directory, done = finished
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the loss curves agree" in done.stdout
    assert "shard(('weight', 'bias'), axis=0) at 'bert.encoder.layer.{0-5}.attention.self.query' (x 6)" in done.stdout
    plain, scheduled = (json.loads((directory / f"{name}.json").read_text()) for name in ("plain", "scheduled"))
    assert len(plain["losses"]) == len(scheduled["losses"]) == 4
    assert plain["losses"][0] == pytest.approx(scheduled["losses"][0], abs=1e-5)
    # Every layer is split over both ranks, so each holds clearly less than the whole model.
    whole, *_ = [memory["weights and optimiser"] for memory in plain["memory"]]
    assert all(memory["weights and optimiser"] < 0.75 * whole for memory in scheduled["memory"])
    assert (directory / "loss_curves.png").read_bytes().startswith(b"\x89PNG")


def test_loss_curves_that_part_end_with_status_1(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    directory, _ = finished
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import bert_tp
    finally:
        sys.path.pop(0)
    file = directory / "scheduled.json"
    honest = file.read_text()
    result = json.loads(honest)
    result["losses"][-1] += 2 * bert_tp.TOLERANCE
    file.write_text(json.dumps(result))
    options = bert_tp.parser().parse_args([*SMALL, "--output", str(directory)])
    try:
        assert bert_tp.compare(options) == 1
        file.write_text(honest)
        assert bert_tp.compare(options) == 0
    finally:
        file.write_text(honest)
