"""examples/bert_deepspeed.py: ZeRO-2 over replicas, and a pipeline, by DeepSpeed against one process without it."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slapo_core.testing import preload_modules, run_ranks

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "slapo_pipeline.partition.hook")
preload_modules("transformers.models.bert.modeling_bert", "slapo_deepspeed.pipeline.engine")

ROOT = Path(__file__).parents[2]


def example() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import bert_deepspeed
    finally:
        sys.path.pop(0)
    return bert_deepspeed


def all_runs(arguments: list[str]) -> None:
    bert_deepspeed = example()
    for name in bert_deepspeed.RUNS:
        bert_deepspeed.run_scheduled(bert_deepspeed.parsed(arguments), name)


def test_deepspeed_trains_as_one_process_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "examples" / "bert_tp.py").read_text() * 2)
    arguments = ["--quick", "--text", str(text), "--output", str(tmp_path)]
    bert_deepspeed = example()
    options = bert_deepspeed.parsed(arguments)
    bert_deepspeed.run_plain(options)  # trains the tokenizer, too
    run_ranks(functools.partial(all_runs, arguments), world_size=2)
    capsys.readouterr()
    assert bert_deepspeed.compare(options) == 0
    printed = capsys.readouterr().out
    assert "the loss curves agree" in printed
    assert "checkpoint() at 'bert.encoder.layer.{0,2,4}' (x 3)" in printed
    assert (tmp_path / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    plain, replicated, cut = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "zero2_dp2", "pp2_zero1")
    )
    for run in (replicated, cut):
        assert run["losses"] == pytest.approx(plain["losses"], abs=2e-5)
        assert run["held_out"] == pytest.approx(plain["held_out"], abs=1e-4)
    # Replicas hold halves of the optimiser's state, stages halves of everything.
    (whole,) = [memory["weights and optimiser"] for memory in plain["memory"]]
    assert all(memory["weights and optimiser"] < 0.75 * whole for memory in replicated["memory"])
    assert all(memory["weights and optimiser"] < 0.65 * whole for memory in cut["memory"])

    cut["losses"][-1] += 2e-3  # the comparison can fail
    (tmp_path / "pp2_zero1.json").write_text(json.dumps(cut))
    assert bert_deepspeed.compare(options) == 1
