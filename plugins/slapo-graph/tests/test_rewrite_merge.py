"""``merge``: parallel projections become one, and state dicts keep the reference names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from tests.messages import Messages
from tests.support.building import adam, bert
from tests.support.reference_weights import load_reference_state_dict, reference_state_dict


class Attention(nn.Module):
    """Heads of unequal number for queries and for keys and values; projections called out of order."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, size, bias=bias) for size in (16, 8, 8))
        self.out = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.v(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        query, key = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k))
        groups = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2)
        mixed = torch.softmax(scores, -1) @ value.repeat_interleave(groups, 1)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Attention(bias) for _ in range(2)]).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


X = torch.linspace(-1, 1, 48).reshape(2, 3, 8).double()


def merged(bias: bool = True, linears: tuple[str, ...] = ("q", "k", "v")) -> tuple[nn.Module, slapo.Schedule]:
    schedule = slapo.create_schedule(Model(bias), example_inputs=X)
    schedule["layers.*"].trace()
    schedule["layers.*"].merge(linears, name="qkv")
    return schedule.model, schedule


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("linears", [("q", "k", "v"), ("v", "q", "k"), ("k", "v")])
def test_outputs_gradients_and_optimizer_steps_are_the_same(bias: bool, linears: tuple[str, ...]) -> None:
    _, schedule = merged(bias, linears)
    rows = sum({"q": 16, "k": 8, "v": 8}[name] for name in linears)
    assert schedule["layers.0.qkv"].module.weight.shape == (rows, 8)
    assert schedule["layers.0.k"].module.weight is None
    slapo.verify(schedule, X)


def test_state_dicts_keep_the_untouched_names_and_load() -> None:
    plain = Model().state_dict()
    model, schedule = merged()
    out = reference_state_dict(schedule)
    assert list(out) == list(plain)
    assert all(torch.equal(out[name], plain[name]) for name in plain)
    other = {name: torch.randn_like(tensor) for name, tensor in plain.items()}
    load_reference_state_dict(schedule, other)
    fresh = Model()
    fresh.load_state_dict(other)
    torch.testing.assert_close(model(X), fresh(X))
    assert all(torch.equal(tensor, other[name]) for name, tensor in reference_state_dict(schedule).items())


def test_an_engine_trains_saves_and_resumes_and_transformers_reads_it(tmp_path: Path) -> None:
    tokens = torch.arange(12).reshape(2, 6)
    torch.manual_seed(0)
    model: Any = bert()
    untouched = copy.deepcopy(model)
    schedule = slapo.create_schedule(model, example_inputs={"input_ids": tokens})
    schedule["bert.encoder.layer.*.attention.self"].trace()
    schedule["bert.encoder.layer.*.attention.self"].merge(("query", "key", "value"))
    engine = slapo.build(schedule, optimizer=adam)
    plain = slapo.build(slapo.create_schedule(untouched), optimizer=adam)
    for each in (engine, plain):
        torch.manual_seed(1)
        for _ in range(3):
            each.train_step({"input_ids": tokens, "labels": tokens})
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
    engine.save(tmp_path / "checkpoints")
    engine.export(tmp_path / "exported")
    again = type(model).from_pretrained(tmp_path / "exported")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in engine.state_dict().items())
    engine.load(tmp_path / "checkpoints")


def test_other_modes_are_recorded_after_the_merge() -> None:
    model, _ = merged()
    plain = Model().eval()
    for x in (X, X[:1, :2], X.float()):
        ours, theirs = model.eval().to(x.dtype), plain.to(x.dtype)
        torch.testing.assert_close(ours(x), theirs(x))
    with torch.no_grad():
        torch.testing.assert_close(model(X.float()), plain(X.float()))
    assert model.layers[0].k.weight is None  # type: ignore[union-attr, index]


def test_undo_redo_and_replay() -> None:
    model, schedule = merged()
    before = Model().state_dict()
    saved = schedule.to_json()
    weight = schedule["layers.0.qkv"].module.weight
    with schedule.rewound(2):
        assert not hasattr(model.layers[0], "qkv")  # type: ignore[index]
        assert model.layers[0].k.weight is not None  # type: ignore[union-attr, index]
    assert schedule["layers.0.qkv"].module.weight is weight
    schedule.undo(to=0)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    again = slapo.replay(Model(), saved, example_inputs=X)
    torch.testing.assert_close(again.model(X), Model()(X))


def refusal(model: nn.Module, *linears: str, trace: bool = True, **options: Any) -> str:
    schedule = slapo.create_schedule(model, example_inputs=X)
    if trace:
        schedule["layers.0"].trace()
    state = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    with pytest.raises(slapo.PreconditionError) as caught:
        schedule["layers.0"].merge(linears, **options)
    after = model.state_dict(keep_vars=True)
    assert all(id(after[name]) == number and torch.equal(after[name], value) for name, (number, value) in state.items())
    return str(caught.value)


def test_merge_refuses_incompatible_layers(message: Messages) -> None:
    message(refusal(Model(), "q", "k", trace=False), "not traced")
    message(refusal(Model(), "q", "w"), "'w' below 'layers.0'")
    message(refusal(Model(), "q", "q"), "each once")
    message(refusal(Model(), "q", "out"), "[8, 16]")
    message(refusal(Model(), "q", "k", name="out"), "child 'out'")
    mixed = Model()
    mixed.layers[0].k = nn.Linear(8, 8, bias=False).double()  # type: ignore[index, union-attr]
    message(refusal(mixed, "q", "k"), "a bias")
    tied = Model()
    tied.layers[1].k.weight = tied.layers[0].k.weight  # type: ignore[index, union-attr]
    message(refusal(tied, "q", "k"), "'layers.0.k.weight' is tied")
    frozen = Model()
    frozen.layers[0].k.weight.requires_grad_(False)  # type: ignore[index, union-attr]
    message(refusal(frozen, "q", "k"), "requires_grad: True, False")

    class Crossed(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.q(x)) + self.k(x + 1)  # type: ignore[no-any-return]

    crossed = Model()
    crossed.layers[0] = Crossed().double()
    message(refusal(crossed, "q", "k"), "'q', 'k'")


def test_a_merged_projection_is_changed_no_more_under_its_old_name() -> None:
    model, schedule = merged()
    with pytest.raises(slapo.ApplyError, match=r"'layers\.0\.q' is no longer called"):
        schedule["layers.0.q"].checkpoint()
    model(X)
    model.layers[0].q.register_forward_hook(lambda *_: None)  # type: ignore[index, union-attr]
    with pytest.raises(slapo.GuardError, match="'q' got hooks"):
        model(X)


@pytest.mark.ranks
@pytest.mark.parametrize("bias", [True, False])
def test_merged_layer_shards_over_two_ranks(bias: bool) -> None:
    schedule = slapo.create_schedule(Model(bias), mesh={"tp": 2}, example_inputs=X)
    layers: Any = schedule["layers.*"]
    layers.trace()
    layers.merge(("q", "k", "v"), name="qkv")
    names = ["weight", "bias"] if bias else ["weight"]
    layers["qkv"].shard(names, axis=0, packed=(16, 8, 8))
    layers["qkv"].sync("bwd_post", "all_reduce")
    layers["out"].shard("weight", axis=1)
    layers["out"].sync("fwd_post", "all_reduce")
    slapo.verify(schedule, X)


@pytest.mark.ranks
def test_bert_split_over_two_ranks() -> None:
    tokens = torch.arange(12).reshape(2, 6)
    schedule = slapo.create_schedule(bert(), mesh={"tp": 2}, example_inputs={"input_ids": tokens})
    attention: Any = schedule["bert.encoder.layer.*.attention"]
    attention["self"].trace()
    attention["self"].merge(("query", "key", "value"), name="qkv")
    attention["self.qkv"].shard(["weight", "bias"], axis=0, packed=3)
    attention["self.qkv"].sync("bwd_post", "all_reduce")
    attention["output.dense"].shard("weight", axis=1)
    attention["output.dense"].sync("fwd_post", "all_reduce")
    slapo.verify(schedule, {"input_ids": tokens})
