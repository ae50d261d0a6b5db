"""examples/gpt_3d.py: a pipeline of tensor-parallel stages and one of replicas, small, against one process."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slapo_core.testing import preload_modules, run_ranks

pytestmark = pytest.mark.ranks
preload_modules("transformers.models.gpt2.modeling_gpt2", "slapo_tp", "slapo_pipeline")

ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "3", "--batch-size", "8", "--length", "16", "--vocab-size", "600", "--layers", "2"]


def example() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import gpt_3d
    finally:
        sys.path.pop(0)
    return gpt_3d


def both_meshes(arguments: list[str]) -> None:
    gpt_3d = example()
    for name in gpt_3d.MESHES:
        gpt_3d.run_scheduled(gpt_3d.parser().parse_args(arguments), name)


def test_four_processes_train_as_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "examples" / "bert_tp.py").read_text() * 2)
    arguments = [*SMALL, "--text", str(text), "--output", str(tmp_path)]
    gpt_3d = example()
    options = gpt_3d.parser().parse_args(arguments)
    gpt_3d.run_plain(options)  # trains the tokenizer, too
    run_ranks(functools.partial(both_meshes, arguments), world_size=4)
    capsys.readouterr()
    assert gpt_3d.compare(options) == 0
    printed = capsys.readouterr().out
    assert "the loss curves agree" in printed
    assert "pipeline_split(2, balance='flops', after=('h.0',)) at 'transformer'" in printed
    assert (tmp_path / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    plain, split, replicated = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "pp2_tp2", "dp2_pp2")
    )
    assert plain["losses"] == pytest.approx(split["losses"], abs=1e-5)
    assert plain["losses"] == pytest.approx(replicated["losses"], abs=1e-5)
    # A rank holds a stage, or a half of each of its layers: clearly less than the whole model.
    (whole,) = [memory["weights and optimiser"] for memory in plain["memory"]]
    assert all(memory["weights and optimiser"] < 0.65 * whole for memory in replicated["memory"])
    assert all(memory["weights and optimiser"] < 0.4 * whole for memory in split["memory"])

    split["losses"][-1] += 2 * gpt_3d.TOLERANCE  # the comparison can fail
    (tmp_path / "pp2_tp2.json").write_text(json.dumps(split))
    assert gpt_3d.compare(options) == 1
