"""Weights come from safetensors files by slice, or from a mapping, under the reference model's names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

import slapo_core as slapo
from slapo_core.layout import Layout, Mesh
from slapo_runtime.correspondence.storage import Window
from slapo_runtime.launcher import run_ranks
from slapo_runtime.weights.sources import MappingSource, SafetensorsSource
from tests.messages import Messages
from tests.support.building import on_meta, real, split


def saved(directory: Path, name: str) -> dict[str, torch.Tensor]:
    state = {key: tensor.clone() for key, tensor in real(name, seed=5).state_dict().items()}
    save_file(state, directory / "model.safetensors")
    return state


@pytest.mark.parametrize("name", ["gpt2", "bert", "cnn"])
@pytest.mark.parametrize("make", [on_meta, real], ids=["meta", "real"])
def test_a_directory_of_safetensors_fills_a_model(tmp_path: Path, name: str, make: object) -> None:
    state = saved(tmp_path, name)
    model = make(name)  # type: ignore[operator]
    engine = slapo.build(split(slapo.create_schedule(model, mesh={"tp": 1}), name), weights=tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key]), key
    assert list(engine.state_dict()) == list(state)


def test_real_parameters_are_overwritten_in_place(tmp_path: Path) -> None:
    state, model = saved(tmp_path, "mlp"), real("mlp")
    weight = model.fc1.weight
    slapo.build(slapo.create_schedule(model), weights=tmp_path / "model.safetensors")
    assert model.fc1.weight is weight
    assert torch.equal(weight, state["fc1.weight"])


def write_over(file: Path) -> None:
    """Other bytes in the same file, in place, as another program would that has it mapped."""
    with file.open("r+b") as handle:
        size = len(handle.read())
        length = int.from_bytes(file.read_bytes()[:8], "little") + 8  # of the header
        handle.seek(length)
        handle.write(bytes(size - length))


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
@pytest.mark.parametrize("make", [on_meta, real], ids=["meta", "real"])
def test_a_file_written_over_later_is_not_the_models_memory(tmp_path: Path, name: str, make: object) -> None:
    state = saved(tmp_path, name)
    model = make(name)  # type: ignore[operator]
    engine = slapo.build(split(slapo.create_schedule(model, mesh={"tp": 1}), name), weights=tmp_path)
    write_over(tmp_path / "model.safetensors")
    assert [key for key, tensor in engine.state_dict().items() if not torch.equal(tensor, state[key])] == []


def load_on_two_ranks(directory: str, name: str) -> tuple[dict[str, torch.Tensor], list[tuple[int, ...]]]:
    schedule = split(slapo.create_schedule(on_meta(name), mesh={"tp": 2}), name)
    engine = slapo.build(schedule, weights=directory)
    return engine.state_dict(), [tuple(parameter.shape) for parameter in engine.module.parameters()]


@pytest.mark.ranks
def test_each_rank_reads_its_own_shards_also_packed(tmp_path: Path) -> None:
    state = saved(tmp_path, "gpt2")
    for loaded, shapes in run_ranks(load_on_two_ranks, str(tmp_path), "gpt2", world_size=2):
        assert list(loaded) == list(state)
        assert all(torch.equal(loaded[key], state[key]) for key in state)
        assert (48, 32) in shapes  # half of the embedding, and no full one
        assert (96, 32) not in shapes


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "layout",
    [
        Layout("w", (6, 10), (("tp", Shard(0)),)),
        Layout("w", (6, 10), (("tp", Shard(1)),), packing=((1, (4, 6)),)),
        Layout("w", (6, 10), (("tp", Shard(0)), ("dp", Shard(1)))),
        Layout("w", (6, 10), (("tp", Shard(0)),), packing=((0, (2, 4)), (1, (2, 8)))),
        Layout("w", (6, 9), (("tp", Shard(1)),), padding=((1, 3),)),
        Layout("w", (6, 2), (("tp", Shard(1)),), padding=((1, 4),)),
        Layout("w", ()),
    ],
    ids=str,
)
def test_file_slice_equals_the_shard_of_the_layout(tmp_path: Path, layout: Layout, rank: int) -> None:
    full = torch.randn(layout.shape)
    save_file({"w": full}, tmp_path / "w.safetensors")
    mesh = Mesh({"dp": 2, "tp": 2}, rank=rank)
    read = SafetensorsSource(tmp_path).read("w", layout, mesh)
    assert read.untyped_storage().nbytes() == 4 * read.numel()  # the piece, and nothing that it was cut from
    assert read.is_contiguous()
    assert torch.equal(read, layout.local(full, mesh))
    assert torch.equal(read, MappingSource({"w": full}).read("w", layout, mesh))


def test_shards_with_an_index_are_read_by_the_index(tmp_path: Path, message: Messages) -> None:
    state = saved(tmp_path, "mlp")
    (tmp_path / "model.safetensors").unlink()
    save_file({"fc1.weight": state["fc1.weight"], "fc2.weight": state["fc2.weight"]}, tmp_path / "a.safetensors")
    save_file({"fc1.bias": state["fc1.bias"]}, tmp_path / "b.safetensors")
    with pytest.raises(slapo.WeightsError) as error:
        SafetensorsSource(tmp_path)
    message(error, "2 safetensors files")
    weight_map = {"fc1.weight": "a.safetensors", "fc2.weight": "a.safetensors", "fc1.bias": "b.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = on_meta("mlp")
    slapo.build(slapo.create_schedule(model), weights=str(tmp_path))
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())

    index.write_text(json.dumps({"weight_map": {**weight_map, "fc1.bias": "../b.safetensors"}}))
    with pytest.raises(slapo.WeightsError) as error:
        SafetensorsSource(tmp_path)
    message(error, "'fc1.bias'", "'../b.safetensors'")
    index.write_text(json.dumps({"weight_map": {**weight_map, "fc3.bias": "b.safetensors"}}))
    with pytest.raises(slapo.WeightsError) as error:
        SafetensorsSource(tmp_path)
    message(error, "b.safetensors", "fc3.bias")


def test_one_tied_name_suffices() -> None:
    state = real("gpt2", seed=5).state_dict()
    embedding = state.pop("transformer.wte.weight")
    model = on_meta("gpt2")
    slapo.build(slapo.create_schedule(model), weights=state)
    assert torch.equal(model.transformer.wte.weight, embedding)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_weights_are_cast_to_the_parameters_dtype() -> None:
    state = {key: tensor.bfloat16() for key, tensor in real("mlp", seed=5).state_dict().items()}
    for model in (on_meta("mlp"), real("mlp")):
        slapo.build(slapo.create_schedule(model), weights=state)
        assert model.fc1.weight.dtype == torch.float32
        assert torch.equal(model.fc1.weight, state["fc1.weight"].float())


@pytest.mark.parametrize("make", [on_meta, real], ids=["meta", "real"])
def test_everything_wrong_with_weights_is_listed_and_nothing_changes(make: object, message: Messages) -> None:
    state = real("mlp", seed=5).state_dict()
    state["fc3.weight"] = state.pop("fc1.bias")
    state["fc2.weight"] = torch.ones(4, 7)
    model = make("mlp")  # type: ignore[operator]
    tensors = dict(model.named_parameters())
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    schedule = slapo.create_schedule(model)
    with pytest.raises(slapo.WeightsError) as error:
        slapo.build(schedule, weights=state)
    message(error, "missing: fc1.bias", "wrong shape: fc2.weight", "unexpected: fc3.weight")
    assert not schedule.is_sealed
    for name, tensor in model.named_parameters():
        assert tensor is tensors[name]
        assert tensor.is_meta or torch.equal(tensor, before[name])


def test_overwritten_values_come_back_when_building_fails_later() -> None:
    model = real("mlp")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    schedule = slapo.create_schedule(model)
    with pytest.raises(ValueError, match="no optimizer today"):
        slapo.build(schedule, weights=real("mlp", seed=5).state_dict(), optimizer=failing_factory)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    slapo.build(schedule)


def failing_factory(parameters: object) -> torch.optim.Optimizer:
    raise ValueError("no optimizer today")


@pytest.mark.parametrize(
    ("weights", "word"),
    [
        ("nowhere/at/all", "no such file"),
        (3, "int"),
        ({"fc1.weight": [1]}, "other objects"),
        ({"fc1.weight": torch.empty(8, 6, device="meta")}, "meta device"),
    ],
)
def test_invalid_weights_are_refused(weights: object, word: str, message: Messages) -> None:
    with pytest.raises(slapo.WeightsError) as error:
        slapo.build(slapo.create_schedule(on_meta("mlp")), weights=weights)  # type: ignore[arg-type]
    message(error, word)


def test_an_empty_directory_and_a_damaged_file_are_refused(tmp_path: Path, message: Messages) -> None:
    with pytest.raises(slapo.WeightsError) as error:
        SafetensorsSource(tmp_path)
    message(error, "no *.safetensors file")
    (tmp_path / "model.safetensors").write_bytes(b"not at all")
    with pytest.raises(slapo.WeightsError, match="cannot be read"):
        SafetensorsSource(tmp_path)


def test_truncated_and_missing_files_are_named_together(tmp_path: Path, message: Messages) -> None:
    state = saved(tmp_path, "mlp")
    (tmp_path / "model.safetensors").unlink()
    names = {name: f"model-0000{number}-of-00003.safetensors" for number, name in enumerate(state, start=1)}
    for name, file in names.items():
        save_file({name: state[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    first, second, third = (tmp_path / file for file in names.values())
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(second.read_bytes()[:20])
    third.unlink()
    with pytest.raises(slapo.WeightsError) as caught:
        SafetensorsSource(tmp_path)
    message(caught, first.name, second.name, third.name)


def test_a_shard_is_converted_by_slices_into_the_dtype_of_its_parameter(tmp_path: Path) -> None:
    full = torch.randn(6, 4)
    save_file({"w": full.bfloat16()}, tmp_path / "model.safetensors")
    layout, mesh = Layout("w", (6, 4), (("tp", Shard(1)),)), Mesh({"tp": 2}, rank=1)
    read = SafetensorsSource(tmp_path).read_as("w", layout, mesh, torch.float64, window=Window((2, 2), (3, 0)))
    assert torch.equal(read, full.bfloat16().double()[3:5, 2:])
