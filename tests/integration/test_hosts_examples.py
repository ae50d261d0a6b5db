"""examples/trainer_bert.py and sft_llama.py: trained on two processes, resumed on one, generated with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slapo_testing import preload_modules
from tests.integration.example_runs import EXAMPLES, text_for
from tests.support.programs import run_program

pytestmark = pytest.mark.ranks
preload_modules(
    "slapo_transformers", "transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama"
)


def test_a_bert_trained_on_two_processes_goes_on_with_one(tmp_path: Path) -> None:
    given = ["--cpu", "--vocab-size", "301", "--text", str(text_for(tmp_path)), "--output", str(tmp_path / "out")]
    printed = run_program(EXAMPLES / "trainer_bert.py", "--steps", "4", *given, processes=2)
    assert "checkpoint-4 holds a BertForMaskedLM" in printed
    assert len(re.findall("'eval_loss'", printed)) == 2
    assert (tmp_path / "out" / "checkpoint-4" / "rng_state_tp1.pth").is_file()
    printed = run_program(EXAMPLES / "trainer_bert.py", "--steps", "8", "--resume", *given)
    assert "checkpoint-8 holds a BertForMaskedLM" in printed
    assert len(re.findall("'loss'", printed)) == 4  # of the last four steps


@pytest.mark.breadth
def test_a_llama_with_lora_is_trained_on_two_processes_and_generates(tmp_path: Path) -> None:
    given = ["--cpu", "--vocab-size", "301", "--text", str(text_for(tmp_path)), "--output", str(tmp_path / "out")]
    printed = run_program(EXAMPLES / "sft_llama.py", "--steps", "4", *given, processes=2)
    assert "generated: 'import" in printed
    assert "saved: adapter_config.json adapter_model.safetensors" in printed
