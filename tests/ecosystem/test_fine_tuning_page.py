"""docs/guides/fine-tuning.md: its files, run as its commands say, print what it shows and leave trained models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from slapo_testing import preload_modules
from tests.ecosystem.pages import Page

preload_modules(
    "deepspeed", "slapo_transformers", "slapo_models", "slapo_loss.implementations", "slapo_torch.sharded_data", "peft",
    "slapo_verify", "transformers.models.llama.modeling_llama", "transformers.models.byt5.tokenization_byt5",
)  # fmt: skip


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return found


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    Page("guides/fine-tuning.md").runs_its_files(tmp_path)
    base = weights(tmp_path / "base")
    for name in ("tuned", "tuned-by-trainer", "trainer/checkpoint-30"):
        tuned = weights(tmp_path / name)
        assert {key: value.shape for key, value in tuned.items()} == {key: value.shape for key, value in base.items()}
        moved = {key: (tuned[key].float() - value).abs().max().item() for key, value in base.items()}
        assert all(0 < distance < 0.1 for distance in moved.values()), moved  # at most 30 steps of 1e-3
    adapter = weights(tmp_path / "lora" / "checkpoint-20")
    assert len(adapter) == 2 * 7 * 2  # A and B of seven projections in two layers
    assert all(value.abs().max() > 0 for value in adapter.values())
