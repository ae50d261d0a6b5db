"""The files of a checkpoint: every rank's own, readable by torch.distributed.checkpoint, complete or not taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Shard

import slapo_core as slapo
from slapo_core.layout import Layout, Mesh
from slapo_runtime.checkpoints import manifest as manifests
from slapo_runtime.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    begin_step,
    check_files,
    newest_checkpoint,
    step_directories,
)
from slapo_runtime.checkpoints.writer import Completion, RankFile
from slapo_runtime.weights.checkpoint_source import CheckpointSource
from tests.messages import Messages

TENSORS = {
    "model.weight": torch.arange(24.0, dtype=torch.float64).view(6, 4),
    "model.half": torch.arange(5.0).bfloat16(),
    "optimizer.weight::step": torch.tensor(3.0),
}


def written(root: Path, step: int, *, keep: int | None = None, plus: float = 0.0) -> Path:
    """A checkpoint of two ranks, with two rectangles of the weight each."""
    directory = begin_step(root, step)
    own: list[list[tuple[str, tuple[int, ...], torch.Tensor]]] = [
        [("model.weight", (0, 0), TENSORS["model.weight"][:3, :3]), ("model.half", (0,), TENSORS["model.half"])],
        [("model.weight", (3, 0), TENSORS["model.weight"][3:]), ("optimizer.weight::step", (), torch.tensor(3.0))],
    ]
    own[1].append(("model.weight", (0, 3), TENSORS["model.weight"][:3, 3:]))
    for rank, rectangles in enumerate(own):
        with RankFile(directory, rank, "one save") as file:
            for name, offset, value in rectangles:
                file.add(name, tuple(TENSORS[name].shape), offset, value + plus)
            file.finish()
    return Completion(directory, "one save", step, 2, {"extra": {}}, {}, keep).run()


def test_torch_reads_a_checkpoint_without_slapo(tmp_path: Path) -> None:
    directory = written(tmp_path, 7)
    empty: dict[str, Any] = {"model": {}, "optimizer": {}}
    for name, tensor in TENSORS.items():
        part, _, key = name.partition(".")
        empty[part][key] = torch.zeros_like(tensor)
    dcp.load(empty, checkpoint_id=directory, no_dist=True)
    dcp_to_torch_save(directory, tmp_path / "one.pt")
    for found in (empty, torch.load(tmp_path / "one.pt")):
        for name, tensor in TENSORS.items():
            part, _, key = name.partition(".")
            assert found[part][key].dtype == tensor.dtype
            assert torch.equal(found[part][key], tensor)
    assert b"slapo" not in (directory / ".metadata").read_bytes()
    assert sorted(file.name for file in directory.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        MANIFEST,
    ]


def test_a_rank_reads_the_chunks_of_its_own_rectangles_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = CheckpointSource(written(tmp_path, 7))
    assert source.shapes() == {"weight": (6, 4), "half": (5,)}
    read: list[tuple[int, ...]] = []
    load = CheckpointSource._load

    def noted(self: Any, name: str, chunk: Any) -> torch.Tensor:
        read.append(chunk.offset)
        return load(self, name, chunk)

    monkeypatch.setattr(CheckpointSource, "_load", noted)
    mesh = Mesh({"tp": 2}, rank=1)
    weight = source.read("weight", Layout("weight", (6, 4), (("tp", Shard(0)),)), mesh)
    assert torch.equal(weight, TENSORS["model.weight"][3:])
    assert read == [(3, 0)]
    packed = Layout("weight", (6, 4), (("tp", Shard(1)),), packing=((1, (2, 2)),))
    assert torch.equal(source.read("weight", packed, mesh), TENSORS["model.weight"][:, [1, 3]])
    assert read[1:] == [(0, 0), (3, 0), (0, 3)]
    assert source.read("half", Layout("half", (5,)), None).dtype == torch.bfloat16


def test_damaged_and_missing_files_are_found(tmp_path: Path, message: Messages) -> None:
    directory = written(tmp_path, 7)
    file, whole = directory / "__1_0.distcp", (directory / "__1_0.distcp").read_bytes()
    files = Manifest.read(directory).files
    check_files(directory, files)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for content, text in (
        (whole[:-1], "holds"),
        (bytes(flipped), "the checksum of its chunk 1 of 1"),
        (None, "cannot be read"),
    ):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(slapo.WeightsError, match=text) as caught:
            check_files(directory, files)
        message(caught, "__1_0.distcp")
    file.write_bytes(bytes(flipped))
    check_files(directory, {file.name: files[file.name]}, part=(1, 2))  # the share of another rank


def test_a_manifest_that_is_damaged_or_newer_is_refused(tmp_path: Path, message: Messages) -> None:
    directory = written(tmp_path, 7)
    file, values = directory / MANIFEST, json.loads((directory / MANIFEST).read_text())
    for changed, text in (
        ({**values, "format": 3}, "format 3"),
        ({**values, "tensors": 1}, "AttributeError"),
        ({key: values[key] for key in values if key != "id"}, "it lacks entries"),
    ):
        file.write_text(json.dumps(changed))
        with pytest.raises(slapo.WeightsError, match=text) as caught:
            Manifest.read(directory)
        message(caught, text)
    values["tensors"]["model.half"]["chunks"][0]["file"] = "../elsewhere"
    file.write_text(json.dumps(values))
    with pytest.raises(slapo.WeightsError, match="outside of the directory"):
        Manifest.read(directory)


def test_a_checkpoint_without_all_elements_is_refused(tmp_path: Path) -> None:
    directory = written(tmp_path, 7)
    values = json.loads((directory / MANIFEST).read_text())
    del values["tensors"]["model.weight"]["chunks"][0]
    (directory / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(slapo.WeightsError, match=r"lacks elements of 'model\.weight'"):
        CheckpointSource(directory).read("weight", Layout("weight", (6, 4)), None)


def test_the_newest_complete_step_is_taken_and_older_ones_go(tmp_path: Path) -> None:
    for step in (2, 10, 4):
        written(tmp_path, step)
    begin_step(tmp_path, 11)  # interrupted
    (tmp_path / "step-of-the-user").mkdir()
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000010"
    begin_step(tmp_path, 3)
    written(tmp_path, 12, keep=2)
    assert [one.name for one in step_directories(tmp_path)] == ["step-00000010", "step-00000012"]
    assert (tmp_path / "step-of-the-user").is_dir()


def test_a_second_checkpoint_of_a_step_takes_the_place_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def value() -> float:
        newest = newest_checkpoint(tmp_path)
        assert newest is not None
        return float(CheckpointSource(newest).read("weight", Layout("weight", (6, 4)), None)[0, 0])

    written(tmp_path, 5)
    begin_step(tmp_path, 5)
    assert value() == 0.0  # the second one is not complete
    written(tmp_path, 5, plus=1.0)
    assert value() == 1.0
    assert [one.name for one in step_directories(tmp_path)] == ["step-00000005"]
    monkeypatch.setattr(manifests, "remove_checkpoint", _killed)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path, 5, plus=2.0)  # complete, but not yet in place
    monkeypatch.undo()
    assert value() == 2.0
    written(tmp_path, 5, plus=3.0)
    assert value() == 3.0
    assert [one.name for one in step_directories(tmp_path)] == ["step-00000005"]


def _killed(directory: Path) -> None:
    raise KeyboardInterrupt
