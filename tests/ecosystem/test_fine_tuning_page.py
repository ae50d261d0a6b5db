"""docs/guides/fine-tuning.md: its files, run as its commands say, print what it shows and leave trained models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import GPT2Config, GPT2LMHeadModel

import slapo_core as slapo
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


def adapted(*, forgotten: bool = False) -> slapo.Schedule:
    """GPT-2 with biases and a fused projection, split as the section on LoRA says."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    names = ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]
    lora = LoraConfig(r=4, target_modules=names, fan_in_fan_out=True, init_lora_weights=False)
    model = get_peft_model(GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False)), lora)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)  # a bias that is added twice is seen
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    (block,) = sch["base_model.model.transformer.h.*"]
    for column, options in (("attn.c_attn", {"packed": 3}), ("mlp.c_fc", {})):
        block[column]["base_layer"].shard(["weight", "bias"], axis=1, **options)
        block[column]["lora_B.default"].shard("weight", axis=0, **options)
        if not forgotten:
            block[column]["lora_A.default"].sync_gradient("weight")
    block["attn"].shard_attribute("split_size")
    for row in ("attn.c_proj", "mlp.c_proj"):
        projection = block[row]
        projection["base_layer"].shard("weight", axis=0)
        projection["lora_A.default"].shard("weight", axis=1)
        projection["base_layer"].sync("fwd_post", "all_reduce")
        projection["lora_A.default"].sync("fwd_post", "all_reduce")
    for name in ("attn", "mlp"):
        block[name].sync("bwd_post", "all_reduce")
    return sch


@pytest.mark.breadth
@pytest.mark.ranks
def test_verify_accepts_adapters_of_layers_with_a_bias_and_names_a_forgotten_sum() -> None:
    ids = torch.arange(2, 18).reshape(2, 8)
    batch = {"input_ids": ids, "labels": ids}
    slapo.verify(adapted(), batch)
    with pytest.raises(slapo.VerifyError, match=r"sync_gradient\('weight'"):
        slapo.verify(adapted(forgotten=True), batch)
