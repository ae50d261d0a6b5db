"""What `engine.export` writes of a transformers model is read by `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from tests.support.building import adam, bert, gpt2, split
from tests.support.checkpoints import newest


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_saved_directory_is_read_by_from_pretrained(name: str, tmp_path: Path) -> None:
    model: Any = {"bert": bert, "gpt2": gpt2}[name]()
    model.config.custom_note = "kept"
    engine = slapo.build(slapo.create_schedule(model), optimizer=adam)
    tokens = torch.arange(12).reshape(2, 6)
    engine.train_step({"input_ids": tokens, "labels": tokens})
    engine.export(tmp_path)
    engine.export(tmp_path)  # over the first
    engine.save(tmp_path / "checkpoints")
    again: Any = type(model).from_pretrained(tmp_path)
    assert again.config.custom_note == "kept"
    assert again.config.architectures == [type(model).__name__]
    assert model.config.architectures is None  # the live one is left alone
    for key, tensor in engine.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
    model.eval()
    assert torch.equal(model(tokens).logits, again(tokens).logits)
    if name == "gpt2":
        assert again.lm_head.weight is again.transformer.wte.weight
    assert (tmp_path / "generation_config.json").exists() == (name == "gpt2")

    schedule = slapo.create_schedule(again)  # comes in evaluation mode, and goes on training in training mode
    resumed = slapo.build(schedule, optimizer=adam)
    resumed.load(tmp_path / "checkpoints")
    with pytest.warns(UserWarning, match=f"^{type(model).__name__} was in evaluation mode"):
        resumed.train_step({"input_ids": tokens, "labels": tokens})
    assert again.training


def test_the_element_type_is_that_of_the_weights(tmp_path: Path) -> None:
    model: Any = bert().bfloat16()
    slapo.build(slapo.create_schedule(model)).export(tmp_path)
    assert type(model).from_pretrained(tmp_path).dtype == torch.bfloat16


class Refusing:
    def save_pretrained(self, directory: Any) -> None:
        raise ValueError("do_sample is not set")


def test_a_configuration_that_cannot_be_written_costs_no_checkpoint(tmp_path: Path) -> None:
    model: Any = gpt2()
    model.generation_config = Refusing()
    engine = slapo.build(slapo.create_schedule(model))
    with pytest.warns(UserWarning, match="no generation_config.json, .*ValueError: do_sample"):
        engine.save(tmp_path)
    assert (newest(tmp_path) / "config.json").exists()
    engine.load(tmp_path)


def save_split(directory: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    engine = slapo.build(split(slapo.create_schedule(gpt2(), mesh={"tp": 2}), "gpt2"))
    engine.export(directory)
    return engine.state_dict()


@pytest.mark.ranks
def test_a_split_model_is_saved_whole_and_with_its_configuration(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    state = run_ranks(save_split, str(tmp_path), world_size=2)[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in state.items())
