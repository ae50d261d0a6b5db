"""One process: meshes of one rank, dry meshes, attributes, ties, records, undo."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core import MeshError
from slapo_core.internals import Internals
from slapo_runtime.ranks.consistency import obligations
from tests.messages import Messages


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.fc1, self.fc2 = nn.Linear(8, 24), nn.Linear(24, 8)
        self.norm = nn.LayerNorm(8)
        self.decoder = nn.Linear(8, 20)
        self.decoder.weight = self.words.weight
        self.num_heads = 4

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(self.fc2(self.fc1(self.words(ids)))))


def apply(sch: Any) -> None:
    sch["words"].shard("weight", axis=0).sync("forward")
    sch["fc1"].shard(["weight", "bias"], axis=0, packed=3).sync("backward")
    sch["fc2"].shard("weight", axis=1, packed=3).sync("forward")
    sch["decoder"].shard("bias", axis=0).sync("backward").sync("forward")
    sch.shard_attribute("num_heads")


def facts(model: nn.Module) -> dict[str, Any]:
    """Everything that undo has to bring back, tensors by identity and value."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[path] = (
            type(module),
            {key: value for key, value in vars(module).items() if not key.startswith("_")},
            [list(vars(module)[key]) for key in sorted(vars(module)) if key.endswith("_hooks")],
            {name: id(tensor) for name, tensor in module._parameters.items()},
            {name: tensor.detach().clone().tolist() for name, tensor in module.named_parameters(recurse=False)},
        )
    return found


def test_second_step_of_a_primitive_reads_no_signature_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply_at(path: str) -> None:
        sch[path].shard(["weight", "bias"], axis=0).sync("bwd_post", op="all_reduce")

    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 32), nn.Linear(8, 32)), mesh={"tp": 2})
    apply_at("0")
    monkeypatch.setattr(inspect, "signature", lambda *_, **__: pytest.fail("a signature is read for each step"))
    apply_at("1")
    assert len(sch.records) == 4


def test_steps_on_one_rank_are_recorded_without_effect() -> None:
    model = Model()
    before = facts(model)
    sch = slapo.create_schedule(model, mesh={"tp": 1})
    apply(sch)
    assert facts(model) == before
    assert len(sch.records) == 10
    effects = {effect for record in sch.records for effect in record.edits}
    assert effects >= {
        "weight (24, 8) stays, tp: S(0), packed (8, 8, 8) on axis 0",
        "forward hook OutputHook, inactive (nothing to do on this mesh)",
        "mesh_dim 'tp' has one rank: nothing to split",
        "mesh_dim 'tp' has one rank: nothing to synchronize",
        "mesh_dim 'tp' has one rank: nothing to divide",
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_abstract_mesh_gives_this_ranks_shards(rank: int, message: Messages) -> None:
    model = Model()
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model, mesh={"tp": 2}, rank=rank)
    apply(sch)
    own = slice(10 * rank, 10 * rank + 10)
    assert torch.equal(model.words.weight, reference.words.weight[own])
    assert model.decoder.weight is model.words.weight
    assert torch.equal(model.decoder.bias, reference.decoder.bias[own])
    # packed=3: a half of each of three matrices of eight rows
    rows = torch.cat([torch.arange(start + 4 * rank, start + 4 * rank + 4) for start in (0, 8, 16)])
    assert torch.equal(model.fc1.weight, reference.fc1.weight[rows])
    assert torch.equal(model.fc1.bias, reference.fc1.bias[rows])
    assert torch.equal(model.fc2.weight, reference.fc2.weight[:, rows])
    assert torch.equal(model.fc2.bias, reference.fc2.bias)
    assert (model.words.num_embeddings, model.words.embedding_dim) == (10, 8)
    assert (model.decoder.in_features, model.decoder.out_features) == (8, 10)
    assert (model.fc1.in_features, model.fc1.out_features) == (8, 12)
    assert (model.fc2.in_features, model.fc2.out_features) == (12, 8)
    assert model.num_heads == 2
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    with pytest.raises(MeshError) as refused:
        model(torch.tensor([1]))
    message(refused, "2 ranks", "torchrun --nproc-per-node 2 ")


def test_undo_brings_back_tensors_attributes_hooks_and_forwards() -> None:
    model = Model()
    before = facts(model)
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    apply(sch)
    assert facts(model) != before
    sch.undo(to=0)
    assert facts(model) == before


def test_a_fault_after_any_edit_leaves_the_model_as_it_was() -> None:
    from slapo_tp import Shard, ShardAttribute, Sync

    steps = [
        ("words", Shard("weight", axis=0)),
        ("fc1", Shard(("weight", "bias"), axis=0)),
        ("fc2", Shard("weight", axis=1)),
        ("fc2", Sync("forward")),
        ("", ShardAttribute("num_heads")),
    ]
    model = Model()
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    faults = 0
    for path, primitive in steps:
        before = facts(model)
        for last in range(1, 20):

            def fail(count: int, last: int = last) -> None:
                if count == last:
                    raise KeyboardInterrupt

            try:
                Internals(sch).apply(Internals(sch).node(path), primitive, after_edit=fail)
            except KeyboardInterrupt:
                faults += 1
                assert facts(model) == before
            else:
                break
    assert len(sch.records) == len(steps)
    assert faults == 4 + 3 + 3 + 1 + 1  # the edits of each step


def test_shapes_are_right_on_meta() -> None:
    with torch.device("meta"):
        model = Model()
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    apply(sch)
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == {
        "words.weight": (10, 8),
        "fc1.weight": (12, 8),
        "fc1.bias": (12,),
        "fc2.weight": (8, 12),
        "fc2.bias": (8,),
        "norm.weight": (8,),
        "norm.bias": (8,),
        "decoder.bias": (10,),
    }
    assert all(parameter.is_meta for parameter in model.parameters())


def test_unknown_layer_types_are_noted_in_the_record() -> None:
    sch = slapo.create_schedule(Model(), mesh={"tp": 2})
    sch["norm"].shard("weight", axis=0)
    assert sch.records[-1].edits == (
        "weight (8,) -> (4,), tp: S(0)",
        "unknown layer type LayerNorm: only the tensor was sharded; its forward and size attributes are unchanged "
        "(slapo_tp.register_layer names it)",
    )
    sch["fc1"].shard("weight", axis=0)
    assert sch.records[-1].edits[-1] == "the bias of 'fc1' is still full: shard('bias', axis=0) belongs to this"


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.t() + self.bias


class OwnEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


def test_a_subclass_that_calls_the_forward_of_its_base_class_is_of_its_type(message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(Scaled(8, 4), Scaled(4, 8, bias=False)), mesh={"tp": 2})
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["0"].shard("weight", axis=1)
    message(refused, "adds its bias on every rank")
    sch["0"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["1"].shard("weight", axis=1).sync("forward")
    assert (sch["0"].module.out_features, sch["1"].module.in_features) == (4, 4)  # its own forward may read them
    assert "forward" not in sch["0"].module.__dict__


def test_subclass_with_other_forward_gets_only_its_tensor_sharded(message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(OwnEmbedding(6, 8), OwnLinear(8, 4)), mesh={"tp": 2})
    sch["1"].shard("weight", axis=1)
    assert sch["1"].module.in_features == 8
    assert "forward" not in sch["1"].module.__dict__
    assert sch.records[-1].edits[-1].startswith("unknown layer type OwnLinear: only the tensor was sharded")
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["0"].shard("weight", axis=0)
    message(refused, "OwnEmbedding does not call that of nn.Embedding", "axis=1")
    sch["0"].shard("weight", axis=1)


def test_a_weight_sharded_without_its_bias_is_refused_before_it_runs(message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 4), nn.Conv1d(4, 8, 1)), mesh={"tp": 2})
    sch["0"].shard("weight", axis=0)
    sch["1"].shard("weight", axis=0).sync("forward")
    (first, _) = obligations(sch)
    message(str(first), "#1 shard", "'bias' is still full", 'sch[\'0\'].shard(["weight", "bias"], axis=0)')
    sch["1"].shard("bias", axis=0)  # in a step of its own, and behind another one
    sch["0"].shard("bias", axis=0)
    assert not obligations(sch)


@pytest.mark.parametrize("packed", [2, (4, 2, 2)])
def test_a_packed_weight_s_bias_is_asked_for_with_its_sizes(packed: Any) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 8)), mesh={"tp": 2})
    sch["0"].shard("weight", axis=0, packed=packed)
    (first,) = obligations(sch)
    assert str(first).count(f"axis=0, packed={packed})") == 3  # the step's own, and both corrected calls
    assert f"shard('bias', axis=0, packed={packed})" in sch.records[-1].edits[-1]
    sch["0"].shard("bias", axis=0, packed=packed)
    assert not obligations(sch)


class Inverted(nn.Module):
    def __init__(self, groups: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(4, 16, 1), nn.Conv2d(32, 4, 1)
        self.grouped, self.norm = nn.Conv2d(16, 32, 3, padding=1, groups=groups), nn.BatchNorm2d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.grouped(torch.relu(self.up(x))))))


def test_a_convolution_with_groups_is_split_by_groups(message: Messages) -> None:
    sch = slapo.create_schedule(Inverted(), mesh={"tp": 2})
    grouped = sch["grouped"]
    grouped.shard(["weight", "bias"], axis=0)
    sizes = ("groups", "in_channels", "out_channels")
    assert [getattr(grouped.module, name) for name in sizes] == [8, 8, 16]
    assert grouped.module(torch.zeros(1, 8, 2, 2)).shape == (1, 16, 2, 2)
    with pytest.raises(slapo.PreconditionError) as refused:
        grouped.sync("backward")
    message(refused, "the channels are split")
    sch.undo()
    assert [getattr(grouped.module, name) for name in sizes] == [16, 16, 32]
    for axis, names, tp, groups, word in (
        (1, "weight", 2, 16, "axis=0 (channel)"),
        (0, "weight", 2, 16, '["weight", "bias"]'),
        (0, ["weight", "bias"], 4, 2, "2 groups, not divisible by tp size 4"),
        (0, ["weight", "bias"], 2, 2, "one of the 2 groups"),
    ):
        with pytest.raises(slapo.PreconditionError) as refused:
            slapo.create_schedule(Inverted(groups), mesh={"tp": tp})["grouped"].shard(names, axis=axis)
        message(refused, word)


def test_a_saved_schedule_is_the_same_at_another_world_size() -> None:
    sch = slapo.create_schedule(Model(), mesh={"tp": 1})
    apply(sch)
    again = slapo.replay(Model(), sch.to_json(), mesh={"tp": 4})
    assert again.records == sch.records
    assert again.model.fc1.out_features == 6
    assert slapo.replay(Model(), again.to_json(), mesh={"tp": 1}).records == sch.records


def test_two_mesh_dimensions_split_two_axes(message: Messages) -> None:
    model = nn.Sequential(nn.Linear(8, 12))
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model, mesh={"ep": 2, "tp": 2}, rank=1)
    sch["0"].shard(["weight", "bias"], axis=0).shard("weight", axis=1, mesh_dim="ep")
    assert torch.equal(model[0].weight, reference[0].weight[6:, :4])
    assert sch["0"].layout("weight").local_shape(sch.mesh) == (6, 4)
    assert (model[0].out_features, model[0].in_features) == (6, 4)
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["0"].shard("bias", axis=0, mesh_dim="ep")
    message(refused, "mesh_dim='ep') at '0': ", "axis 0 of 'bias'", "mesh_dim 'tp' already")
