"""`slapo checkpoint` shows, verifies and exports what engines saved, without their models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM
from typer.testing import CliRunner, Result

import slapo_core as slapo
from slapo_core.cli.main import make_app
from slapo_runtime.checkpoints.manifest import MANIFEST
from slapo_runtime.weights.safetensors_files import INDEX_FILE

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.arange(3, 15).reshape(2, 6)


def bert() -> BertForMaskedLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForMaskedLM(BertConfig(vocab_size=31, max_position_embeddings=16, **sizes)).eval()


def trained(root: Path, steps: int = 2) -> Any:
    """An engine that saved after each step."""
    engine = slapo.build(slapo.create_schedule(bert()), optimizer=lambda params: torch.optim.AdamW(params, lr=0.01))
    for _ in range(steps):
        engine.train_step({"input_ids": IDS, "labels": IDS})
        engine.save(root)
    return engine


def run(*arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(make_app(), ["checkpoint", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def as_json(*arguments: object, status: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", status=status).stdout)


def data_file(directory: Path) -> Path:
    return next(directory.glob("*.distcp"))


def test_checkpoints_are_shown_with_incomplete_ones(tmp_path: Path) -> None:
    engine = trained(tmp_path)
    (tmp_path / "step-00000009").mkdir()
    first, second, torn = as_json("show", tmp_path)["checkpoints"]
    assert [one["state"] for one in (first, second, torn)] == ["complete", "complete", "incomplete"]
    assert (second["step"], second["optimizer"], second["ranks"]) == (2, "AdamW", 1)
    assert second["tensors"] == len({id(one) for one in engine.module.state_dict(keep_vars=True).values()})
    assert second["size"] > 3 * sum(one.nbytes for one in engine.module.parameters())
    assert "incomplete" in run("show", tmp_path).stdout


def cut(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(cut, id="truncated", marks=pytest.mark.breadth),
        pytest.param(flip, id="changed"),
        pytest.param(Path.unlink, id="missing", marks=pytest.mark.breadth),
    ],
)
def test_damaged_checkpoints_are_found(tmp_path: Path, damage: Any) -> None:
    trained(tmp_path)
    (tmp_path / "step-00000009").mkdir()
    assert as_json("verify", tmp_path) == {"damaged": {}, "directory": str(tmp_path), "incomplete": ["step-00000009"]}
    file = data_file(tmp_path / "step-00000001")
    damage(file)
    assert list(as_json("verify", tmp_path, status=1)["damaged"]) == [str(file)]
    assert as_json("verify", tmp_path / "step-00000002")["damaged"] == {}
    assert str(file) in run("verify", tmp_path / "step-00000001", status=1).stdout


def without_a_rectangle(manifest: Any) -> None:
    del manifest["tensors"]["model.cls.predictions.bias"]["chunks"][0]


def beyond_the_file(manifest: Any) -> None:
    manifest["tensors"]["model.cls.predictions.bias"]["chunks"][0]["at"] = 1 << 40


def without_an_entry(manifest: Any) -> None:
    del manifest["id"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_a_rectangle, "has 0 of 31 elements"),
        (beyond_the_file, "outside of __0_0.distcp"),
        (without_an_entry, "lacks entries"),
    ],
)
def test_damaged_descriptions_are_found(tmp_path: Path, damage: Any, words: str) -> None:
    trained(tmp_path, steps=1)
    file = tmp_path / "step-00000001" / MANIFEST
    manifest = json.loads(file.read_text())
    damage(manifest)
    file.write_text(json.dumps(manifest))
    found = as_json("verify", tmp_path, status=1)["damaged"]
    assert list(found) == [str(file)]
    assert words in found[str(file)]


def test_checkpoints_of_format_1_are_shown_and_verified(tmp_path: Path) -> None:
    directory = shutil.copytree(Path(__file__).parent / "format_1" / "plain", tmp_path / "old")
    (shown,) = as_json("show", directory)["checkpoints"]
    assert shown["state"] == "complete, format 1"
    assert as_json("verify", directory)["damaged"] == {}
    flip(directory / "optimizer.safetensors")
    assert list(as_json("verify", directory, status=1)["damaged"]) == [str(directory / "optimizer.safetensors")]


def test_a_directory_without_a_complete_checkpoint_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "step-00000009").mkdir()
    assert as_json("verify", tmp_path, status=1)["damaged"] == {str(tmp_path): "no complete checkpoint"}


@pytest.mark.parametrize(
    "damage", [pytest.param(cut, id="truncated"), pytest.param(Path.unlink, id="missing", marks=pytest.mark.breadth)]
)
def test_damaged_exports_are_found(tmp_path: Path, damage: Any) -> None:
    slapo.build(slapo.create_schedule(bert())).export(tmp_path, max_shard_size=10_000)  # type: ignore[attr-defined]
    assert as_json("verify", tmp_path)["damaged"] == {}
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    damage(first)
    damage(second)
    assert set(as_json("verify", tmp_path, status=1)["damaged"]) == {str(first), str(second)}
    with pytest.raises(slapo.WeightsError) as caught:
        slapo.build(slapo.create_schedule(bert()), weights=tmp_path)
    assert str(first) in str(caught.value)
    assert str(second) in str(caught.value)


def test_a_checkpoint_is_exported_for_transformers(tmp_path: Path) -> None:
    engine = trained(tmp_path / "run")
    run("export", tmp_path / "run", tmp_path / "out", "--max-shard-size", "4kB", "--dtype", "bfloat16")
    assert (tmp_path / "out" / INDEX_FILE).is_file()
    model, info = BertForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert model.dtype == torch.bfloat16
    state = engine.state_dict()
    assert all(torch.equal(value, state[name].bfloat16()) for name, value in model.state_dict().items())
    run("export", tmp_path / "run" / "step-00000001", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not torch.equal(written["cls.predictions.bias"], state["cls.predictions.bias"])
    assert not (tmp_path / "out" / INDEX_FILE).exists()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "neither checkpoints nor safetensors" in str(run("show", tmp_path, status=1).exception)
    assert "does not exist" in str(run("verify", tmp_path / "none", status=1).exception)
