"""Files in a model's published format, whose names and shapes are not those of its modules, are read by the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from tests.messages import Messages


def vit(layers: int = 1) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 24, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(**sizes, num_hidden_layers=layers, num_attention_heads=2))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=3))


@pytest.mark.parametrize("make", [vit, mixtral])
@pytest.mark.parametrize("on_meta", [True, False])
def test_build_reads_what_save_pretrained_wrote(make: Callable[[], Any], on_meta: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    slapo.save_pretrained(slapo.create_schedule(model), tmp_path)
    with torch.device("meta" if on_meta else "cpu"):
        other: nn.Module = make()
    before = torch.random.get_rng_state()
    state = slapo.build(slapo.create_schedule(other), weights=tmp_path).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_files_that_lack_or_add_tensors_are_refused_as_before(tmp_path: Path, message: Messages) -> None:
    vit(layers=2).save_pretrained(tmp_path / "two")
    vit(layers=1).vit.save_pretrained(tmp_path / "base")
    with pytest.raises(slapo.WeightsError) as refused:
        slapo.build(slapo.create_schedule(vit(layers=1)), weights=tmp_path / "two")
    assert "unexpected" in str(refused.value)
    with pytest.raises(slapo.WeightsError) as refused:
        slapo.build(slapo.create_schedule(vit(layers=1)), weights=tmp_path / "base")
    message(str(refused.value).replace(str(tmp_path), "..."), "missing: classifier.bias, classifier.weight")
