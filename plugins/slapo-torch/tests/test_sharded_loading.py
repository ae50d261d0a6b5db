"""A model on the meta device is loaded under `fully_shard` by rows: no rank holds full parameters of all units."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import slapo_core as slapo
from slapo_runtime.weights.sources import SafetensorsSource
from slapo_testing import preload_modules, run_ranks

preload_modules("transformers.models.llama.modeling_llama", "torch.distributed.fsdp", "slapo_tp")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
TEXT = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # 61 rows: not divisible by 2
BATCH = {"input_ids": torch.arange(3, 19).reshape(4, 4), "labels": torch.arange(19, 35).reshape(4, 4)}


def bert() -> nn.Module:
    """The weight of the embedding is that of the head, too."""
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(max_position_embeddings=16, **TEXT, **SIZES, **off)).double()


def llama() -> nn.Module:
    config = LlamaConfig(num_key_value_heads=2, use_cache=False, tie_word_embeddings=False, **TEXT, **SIZES)
    return LlamaForCausalLM(config).double()


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, fused=True)


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make().train()  # type: ignore[no-any-return]


def scheduled(make: Any, mesh: dict[str, int]) -> slapo.Schedule:
    sch = slapo.create_schedule(on_meta(make), mesh=mesh)
    if mesh.get("tp", 1) > 1:
        for layer in sch["model.layers.*"]:
            for name in ("gate_proj", "up_proj"):
                layer[f"mlp.{name}"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
            layer["mlp.down_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return sch


def read_elements(patch: pytest.MonkeyPatch) -> list[int]:
    """Note the number of elements of each tensor that is read from a file."""
    noted: list[int] = []
    read = SafetensorsSource.read_as

    def noting(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        found = read(self, *args, **options)
        noted.append(found.numel())
        return found

    patch.setattr(SafetensorsSource, "read_as", noting)
    return noted


def train(make: Any, mesh: dict[str, int], weights: str | None, **options: Any) -> tuple[int, dict[str, Any], Any]:
    """Return the number of elements that were read, the weights before training, and the losses of two steps."""
    with pytest.MonkeyPatch.context() as patch:
        noted = read_elements(patch)
        engine = slapo.build(scheduled(make, mesh), weights=weights, optimizer=fused_adamw, **options)
    before = engine.state_dict()
    return sum(noted), before, torch.stack([engine.train_step(BATCH).loss for _ in range(2)])


@pytest.mark.parametrize(
    ("make", "mesh"),
    [
        (bert, {"dp": 2}),
        (llama, {"dp": 2}),
        (llama, {"dp_replicate": 2, "dp": 2}),
        (llama, {"dp": 2, "tp": 2}),
    ],
    ids=["bert", "llama", "hsdp", "with tp"],
)
def test_each_rank_reads_its_rows_only(tmp_path: Path, make: Any, mesh: dict[str, int]) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    state, whole = model.state_dict(), sum(parameter.numel() for parameter in model.parameters())
    _, _, expected = train(make, {}, str(tmp_path))
    ranks = math.prod(mesh.values())
    found = run_ranks(train, make, mesh, str(tmp_path), data_parallel="fsdp", world_size=ranks)
    assert sum(elements for elements, _, _ in found) >= whole * mesh.get("dp_replicate", 1)
    assert max(elements for elements, _, _ in found) < 0.6 * whole
    for _, before, losses in found:
        assert all(torch.equal(before[name], value) for name, value in state.items())
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.breadth
def test_rows_of_initialized_parameters_are_those_of_one_process() -> None:
    _, state, _ = train(llama, {}, None)
    for _, before, _ in run_ranks(train, llama, {"dp": 2}, None, data_parallel="fsdp", world_size=2):
        assert all(torch.equal(before[name], value) for name, value in state.items())


def fail_to_build(directory: str) -> bool:
    sch = scheduled(bert, {"dp": 2})
    with pytest.raises(slapo.OptimizerError):
        slapo.build(sch, weights=directory, optimizer=lambda params: None, data_parallel="fsdp")
    model: nn.Module = sch.model
    return all(one.is_meta and one.is_contiguous() for one in model.parameters())


def test_a_failed_build_leaves_the_model_on_the_meta_device(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)  # type: ignore[operator]
    assert run_ranks(fail_to_build, str(tmp_path), world_size=2) == [True, True]
