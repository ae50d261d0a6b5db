"""Exported safetensors are read by transformers and by `build`, whatever the layout of the ranks that wrote them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import slapo_core as slapo
from slapo_runtime.weights.safetensors_files import INDEX_FILE, SINGLE_FILE, SafetensorsWriter, read_header
from slapo_testing import preload_modules, run_ranks

preload_modules("transformers.models.llama.modeling_llama", "torch.distributed.fsdp", "slapo_tp")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {"vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IDS = torch.arange(3, 15).reshape(2, 6)


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(num_key_value_heads=1, use_cache=False, tie_word_embeddings=tied, **TEXT, **SIZES)
    return LlamaForCausalLM(config).double().eval()


def bert() -> BertForMaskedLM:
    torch.manual_seed(3)
    return BertForMaskedLM(BertConfig(max_position_embeddings=16, **TEXT, **SIZES)).double().eval()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(engine: Any) -> Any:
    engine.train_step({"input_ids": IDS, "labels": IDS})
    return engine


def check_pretrained(directory: Path, kind: type, state: dict[str, torch.Tensor]) -> None:
    """`from_pretrained` gives the model with the weights of `state`, all of them from the files."""
    model, info = kind.from_pretrained(directory, output_loading_info=True)  # type: ignore[attr-defined]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    reference = kind(model.config).to(model.dtype).eval()
    reference.load_state_dict(state)
    assert model.dtype == torch.float64
    assert torch.equal(model.eval()(input_ids=IDS).logits, reference(input_ids=IDS).logits)


@pytest.mark.parametrize("make", [pytest.param(llama, marks=pytest.mark.breadth), bert], ids=["llama", "bert"])
def test_transformers_reads_an_exported_model(tmp_path: Path, make: Any) -> None:
    model = make()
    kind = type(model)
    engine = trained(slapo.build(slapo.create_schedule(model), optimizer=adamw))
    engine.export(tmp_path)
    check_pretrained(tmp_path, kind, engine.state_dict())
    assert sorted(load_file(tmp_path / SINGLE_FILE)) == sorted(engine.state_dict())  # ties under each name
    assert {"config.json", "generation_config.json", SINGLE_FILE} >= {file.name for file in tmp_path.iterdir()}


def test_files_of_another_type_have_a_limited_size_and_an_index(tmp_path: Path) -> None:
    engine = slapo.build(slapo.create_schedule(llama(tied=True)))
    engine.export(tmp_path)
    engine.export(tmp_path, max_shard_size=4000, dtype=torch.bfloat16)
    names = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert {file.name for file in files} == set(names.values())
    assert len(files) == 3
    read = {name: value for file in files for name, value in load_file(file).items()}
    assert all(torch.equal(read[name], one.bfloat16()) for name, one in engine.state_dict().items())
    assert set(read) == set(names) == set(engine.state_dict())
    assert all(sum(one.size for one in read_header(file).values()) <= 4000 for file in files)
    assert LlamaForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    engine.export(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == [SINGLE_FILE]


def sharded(mesh: dict[str, int], make: Any = llama) -> slapo.Schedule:
    sch = slapo.create_schedule(make().train(), mesh=mesh, example_inputs={"input_ids": IDS, "labels": IDS})
    if mesh.get("tp", 1) > 1:
        sch["model.embed_tokens"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")  # 31 rows
        for layer in sch["model.layers.*"]:
            for name in ("gate_proj", "up_proj"):
                layer[f"mlp.{name}"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
            layer["mlp.down_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if mesh.get("pp", 1) > 1:
        sch["model.layers.0"].pipeline_split()
    return sch


def export_on_ranks(directory: str, mesh: dict[str, int], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = trained(slapo.build(sharded(mesh), optimizer=adamw, **options))
    engine.export(directory)
    state: dict[str, torch.Tensor] = engine.state_dict()
    return state


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param({"tp": 2}, {}, id="tp2"),
        pytest.param({"dp": 2}, {"data_parallel": "fsdp"}, id="fsdp2"),
        pytest.param({"pp": 2}, {}, id="pp2"),
    ],
)
def test_all_ranks_write_the_reference_models_weights(
    tmp_path: Path, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    state = run_ranks(export_on_ranks, str(tmp_path), mesh, options, world_size=2)[0]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    sizes = [sum(one.size for one in read_header(file).values()) for file in files]
    assert max(sizes) < 1.5 * min(sizes)  # dealt out by size
    assert {file.name for file in tmp_path.iterdir()} == {
        *(file.name for file in files),
        INDEX_FILE,
        "config.json",
        "generation_config.json",
    }
    check_pretrained(tmp_path, LlamaForCausalLM, state)
    engine = slapo.build(slapo.create_schedule(llama()), weights=tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in engine.state_dict().items())


def fail_on_the_second_rank(directory: str) -> str:
    engine = slapo.build(sharded({"tp": 2}))
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(SafetensorsWriter, "write", raise_full)
        with pytest.raises(slapo.BuildError) as caught:
            engine.export(directory)  # type: ignore[attr-defined]
    return str(caught.value)


def raise_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.ranks
def test_an_error_of_one_rank_is_raised_on_all_and_leaves_former_files(tmp_path: Path) -> None:
    slapo.build(slapo.create_schedule(llama())).export(tmp_path)  # type: ignore[attr-defined]
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    messages = run_ranks(fail_on_the_second_rank, str(tmp_path), world_size=2)
    assert all("No space left on device" in message for message in messages)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_interrupted_export_is_not_taken_for_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = slapo.build(slapo.create_schedule(llama()))
    engine.export(tmp_path, max_shard_size=4000)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", raise_full)  # in the middle of coming into their places
        with pytest.raises(slapo.BuildError):
            engine.export(tmp_path, max_shard_size=4000)
    with pytest.raises(slapo.WeightsError):
        slapo.build(slapo.create_schedule(llama()), weights=tmp_path)
    engine.export(tmp_path)
    assert slapo.build(slapo.create_schedule(llama()), weights=tmp_path)
