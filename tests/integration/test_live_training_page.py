"""The program on the page about live training runs as it stands, and gives the reference model with trained values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from slapo_testing import preload_modules
from tests.support.programs import run_program

preload_modules("transformers.models.bert.modeling_bert", "slapo_tp")

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "training-a-live-model.md").read_text(encoding="utf-8")


@pytest.mark.ranks
def test_the_program_trains_and_what_it_saves_is_the_reference_model(tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    program = "".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))  # with saving and resuming
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    run_program(tmp_path / "train.py", processes=4)
    loaded, info = BertForMaskedLM.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert "intermediate" in "".join(torch.load(tmp_path / "resume.pt", weights_only=True)["optimizer"]["state"])
    torch.manual_seed(0)
    before = BertForMaskedLM(loaded.config).state_dict()
    after = loaded.state_dict()
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
    moved = {name: (after[name] - before[name]).abs().max().item() for name, _ in loaded.named_parameters()}
    assert all(0 < distance < 0.01 for name, distance in moved.items() if "intermediate" in name)  # three steps of 5e-4
