"""The program on the page about live training runs as it stands, and gives the untouched model with trained values."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "training-a-live-model.md").read_text(encoding="utf-8")


@pytest.mark.ranks
def test_the_program_trains_and_what_it_saves_is_the_untouched_model(tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    program = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    # Torch's own threads for gloo may abort a process that comes to its end, on a busy machine, with slapo or without.
    end_at_once = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
    (tmp_path / "train.py").write_text(program + end_at_once, encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run([*launch, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded, info = BertForMaskedLM.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.manual_seed(0)
    before = BertForMaskedLM(loaded.config).state_dict()
    after = loaded.state_dict()
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
    moved = {name: (after[name] - before[name]).abs().max().item() for name, _ in loaded.named_parameters()}
    assert all(0 < distance < 0.01 for name, distance in moved.items() if "intermediate" in name)  # three steps of 5e-4
