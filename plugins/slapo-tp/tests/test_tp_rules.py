"""Every refusal, with its whole message: what is wrong, and the call to write instead; on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import slapo_core as slapo
from slapo_core import ArgumentError, PreconditionError
from tests.messages import Messages


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 64)
        self.out = nn.Linear(64, 16)
        self.plain = nn.Linear(16, 16, bias=False)
        self.odd = nn.Linear(16, 7)
        self.conv1d = Conv1D(48, 16)
        self.conv = nn.Conv2d(4, 8, 3)
        self.grouped = nn.Conv2d(4, 8, 3, groups=4)
        self.norm, self.bare = nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)
        self.words = nn.Embedding(20, 8)
        self.normed = nn.Embedding(20, 8, max_norm=1.0)
        self.counted = nn.Embedding(20, 8, scale_grad_by_freq=True)
        self.lazy = nn.LazyLinear(4)
        self.scalar = nn.Module()
        self.scalar.scale = nn.Parameter(torch.tensor(1.0))
        self.tied = nn.Module()
        self.tied.table = self.words.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.forward = lambda x: x  # type: ignore[method-assign]


def refusal(act: Callable[[Any], object], mesh: dict[str, int] | None) -> str:
    sch = slapo.create_schedule(Model(), mesh=mesh)
    with pytest.raises(PreconditionError) as refused:
        act(sch)
    return str(refused.value)


SHARD = [
    (lambda s: s["fc"].shard("weight", axis=2), "'fc'", "has 2 axes (64, 16)"),
    (lambda s: s["fc"].shard("bias", axis=-3), "'fc'", "has 1 axis (64,)"),
    (lambda s: s["fc"].shard("wieght", axis=0), "'fc'", "did you mean 'weight'"),
    (lambda s: s["plain"].shard(["weight", "bias"], axis=0), "'plain'", "'bias' is None"),
    (lambda s: s.shard("weight", axis=0), "the root", "sch['fc'].shard(...)"),
    (lambda s: s["lazy"].shard("weight", axis=0), "'lazy'", "no shape"),
    (lambda s: s["scalar"].shard("scale", axis=0), "'scalar'", "'scale' is a scalar"),
    (lambda s: s["fc"].shard([], axis=0), "'fc'", "no parameter"),
    (lambda s: s["fc"].shard(["weight", "weight"], axis=0), "'fc'", "'weight' is named 2 times"),
    (lambda s: s["fc"].shard("weight", axis=0).shard("weight", axis=1), "'fc'", "#1 shard('weight', axis=0) at 'fc'"),
    (lambda s: s["fc"].shard(["weight", "bias"], axis=1), "'fc'", "output axis 0"),
    (lambda s: s["conv1d"].shard(["weight", "bias"], axis=0), "'conv1d'", "output axis 1"),
    (lambda s: s["fc"].shard("weight", axis=1).shard("bias", axis=0), "'fc'", "leave 'bias' out"),
    (lambda s: s["fc"].shard("bias", axis=0).shard("weight", axis=1), "'fc'", "the bias is split already"),
    (lambda s: s["conv1d"].shard("weight", axis=1, packed=(16, 16)), "'conv1d'", "gives 32"),
    (lambda s: s["conv1d"].shard("weight", axis=1, packed=5), "'conv1d'", "not divisible by packed=5"),
    (lambda s: s["fc"].shard("weight", axis=1, pad=True), "'fc'", "axis 1 of 'weight' of Linear"),
    (lambda s: s["fc"].shard("weight", axis=0, packed=2, pad=True), "'fc'", "(got packed=2)"),
    (lambda s: s["conv"].shard("weight", axis=0, pad=True), "'conv'", "axis 0 of 'weight' of Conv2d"),
    (lambda s: s["conv1d"].shard("bias", axis=0, pad=True), "'conv1d'", "axis 0 of 'bias' of Conv1D"),
    (lambda s: s["conv"].shard("weight", axis=3), "'conv'", "kernel axis of nn.Conv2d"),
    (lambda s: s["grouped"].shard("weight", axis=0), "'grouped'", '["weight", "bias"]'),
    (lambda s: s["normed"].shard("weight", axis=1), "'normed'", "max_norm=1.0"),
    (lambda s: s["counted"].shard("weight", axis=0), "'counted'", "scale_grad_by_freq=True"),
    (lambda s: s["words"].shard("weight", axis=1), "'words'", "sch['tied'].shard('table', axis=1)"),
    (lambda s: s["frozen"].shard("weight", axis=1), "'frozen'", "forward of 'frozen'"),
    (lambda s: s["norm"].shard(["weight", "bias"], axis=0), "'norm'", "'running_mean', 'running_var' stay full"),
    (lambda s: s["bare"].shard("running_var", axis=0), "'bare'", '["running_mean", "running_var"]'),
]


@pytest.mark.parametrize(("act", "place", "word"), SHARD, ids=[f"{place}, {word}" for _, place, word in SHARD])
def test_shard_says_what_to_write_instead(
    act: Callable[[Any], object], place: str, word: str, message: Messages
) -> None:
    text = message(refusal(act, {"tp": 1}), "cannot apply shard(", f" at {place}: ", word)
    assert refusal(act, {"tp": 2}) == text


def test_shard_names_sizes_that_can_be_divided(message: Messages) -> None:
    odd = refusal(lambda s: s["odd"].shard(["weight", "bias"], axis=0), {"tp": 2})
    message(odd, "axis 0 of 'weight'", "axis 0 of 'bias'", "7 elements", "tp size 2", "6 or 8")
    packed = refusal(lambda s: s["conv1d"].shard("weight", axis=1, packed=(32, 11, 5)), {"tp": 8})
    message(packed, "matrix 2 of 3", "11 elements", "matrix 3 of 3", "5 elements", "tp size 8")


def test_shard_suggests_sizes_in_heads_and_padding(message: Messages) -> None:
    attention = nn.Module()
    attention.num_heads, attention.head_dim, attention.query = 4, 16, nn.Linear(64, 64)
    model = nn.ModuleDict({"attention": attention, "words": nn.Embedding(7, 64), "head": nn.Linear(64, 7)})
    sch = slapo.create_schedule(model, mesh={"tp": 3})
    for path, words in (("attention.query", ("48 or 96", "4 heads ('num_heads')")), ("head", ("6 or 9", "pad=True"))):
        with pytest.raises(slapo.PreconditionError) as refused:
            sch[path].shard("weight", axis=0)
        assert ("vocabulary" in str(refused.value)) == (path == "head")
        message(refused, *words)


STATISTICS = ("weight", "bias", "running_mean", "running_var")


def split_pair(s: Any) -> Any:
    s["fc"].shard(["weight", "bias"], axis=0)
    s["out"].shard("weight", axis=1)
    return s


SYNC = [
    (lambda s: s["fc"].sync("fwd_post", "all_reduce"), "'fc'", "not a partial sum"),
    (lambda s: s["fc"].sync("forward"), "'fc'", "nothing was split"),
    (lambda s: s["norm"].sync("fwd_post", "all_reduce"), "'norm'", "not a partial sum"),
    (lambda s: s["norm"].shard(STATISTICS, axis=0).sync("backward"), "'norm'", "its own shard"),
    (lambda s: s["norm"].shard(STATISTICS, axis=0).sync("fwd_post", "all_reduce"), "'norm'", "all_gather"),
    (lambda s: split_pair(s).sync("forward"), "the root", "output of this Model"),
    (lambda s: split_pair(s)["fc"].sync("fwd_pre"), "'fc'", "needs an op"),
    (lambda s: split_pair(s)["fc"].sync("fwd_post", "split", axis=1), "'fc'", 'sync("fwd_pre", "split", axis=1)'),
    (
        lambda s: split_pair(s)["fc"].sync("bwd_post", "reduce_scatter", axis=1),
        "'fc'",
        'sync("fwd_pre", "all_gather", axis=1)',
    ),
    (lambda s: split_pair(s)["fc"].sync("fwd_post", "all_reduce"), "'fc'", "other features"),
    (
        lambda s: s["conv"].shard(["weight", "bias"], axis=0).sync("fwd_post", "all_gather"),
        "'conv'",
        "axis -3, not on axis -1",
    ),
    (lambda s: split_pair(s)["out"].sync("fwd_post", "all_gather"), "'out'", "all_gather would not add up"),
    (lambda s: split_pair(s)["out"].sync("fwd_post", "reduce_scatter"), "'out'", "bias that the layer left out"),
    (lambda s: split_pair(s).sync("fwd_post", "all_reduce"), "the root", "'out' gives a partial sum"),
    (lambda s: split_pair(s)["out"].sync("forward").sync("forward"), "'out'", "the same sync"),
    (
        lambda s: split_pair(s)["out"].sync("forward").sync("fwd_post", "reduce_scatter", axis=1),
        "'out'",
        "the output is synchronized already",
    ),
    (
        lambda s: split_pair(s)["fc"].sync("fwd_pre", "all_gather", axis=1).sync("backward"),
        "'fc'",
        "the gradient of the input is synchronized already",
    ),
    (lambda s: split_pair(s)["out"].sync("backward"), "'out'", "its own gradient"),
    (lambda s: s["counted"].shard("weight", axis=1).sync("backward"), "'counted'", "ids"),
    (lambda s: split_pair(s)["out"].sync("fwd_post", "all_reduce", axis=1), "'out'", "axis applies only to"),
    (lambda s: split_pair(s)["out"].sync("fwd_post", "all_reduce", inputs=(0,)), "'out'", "inputs=(0,) belongs"),
    (lambda s: split_pair(s)["fc"].sync("backward", outputs=(0,)), "'fc'", "outputs=(0,) belongs"),
    (lambda s: split_pair(s)["fc"].sync("backward", inputs=("x",)), "'fc'", "no input 'x'"),
    (
        lambda s: split_pair(s)["out"].sync("fwd_post", "all_reduce", outputs=(-1,)),
        "'out'",
        "must be non-negative positions",
    ),
]


@pytest.mark.parametrize(("act", "place", "word"), SYNC, ids=[f"{place}, {word}" for _, place, word in SYNC])
def test_sync_says_what_to_write_instead(
    act: Callable[[Any], object], place: str, word: str, message: Messages
) -> None:
    text = message(refusal(act, {"tp": 1}), "cannot apply sync(", f" at {place}: ", word)
    assert refusal(act, {"tp": 2}) == text


@pytest.mark.parametrize("call", ["shard('weight', axis=0)", "sync('backward')", "shard_attribute('in_features')"])
def test_without_a_mesh_every_primitive_says_how_to_declare_one(call: str, message: Messages) -> None:
    name, arguments = call.rstrip(")").split("(")
    values = {"shard": {"axis": 0}}.get(name, {})

    def act(s: Any) -> None:
        getattr(s["fc"], name)(arguments.split("'")[1], **values)

    message(refusal(act, None), f"{call} at 'fc': ", "mesh_dim 'tp'", "no mesh", 'mesh={"tp": N}')
    message(refusal(act, {"dp": 2}), f"{call} at 'fc': ", "mesh_dim 'tp'", "{'dp': 2}", 'mesh={"tp": N}')


def test_arguments_of_wrong_type_are_refused_first(message: Messages) -> None:
    sch = slapo.create_schedule(Model(), mesh={"tp": 2})
    with pytest.raises(ArgumentError) as caught:
        sch["fc"].sync("fwd", "all_reduce")
    message(caught, "tp.sync", "'mode'", "got 'fwd'")
    with pytest.raises(ArgumentError) as caught:
        sch["fc"].shard("weight", axis="0")
    message(caught, "tp.shard", "'axis'", "got '0'")


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_weights_of_multihead_attention_are_refused(
    message: Messages,
) -> None:
    sch = slapo.create_schedule(Attending(), mesh={"tp": 2})
    with pytest.raises(slapo.PreconditionError) as caught:
        sch["attention.out_proj"].shard("weight", axis=1)
    message(caught, "nn.MultiheadAttention", "'attention.out_proj' is never called", "sch['attention'].replace(...)")
    with pytest.raises(slapo.PreconditionError) as caught:
        sch["attention"].shard("in_proj_weight", axis=0, packed=3)
    message(caught, "'in_proj_weight'", "nn.MultiheadAttention", "sch['attention'].replace(...)")
    assert sch.records == ()


def test_parametrized_weights_are_noted() -> None:
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    sch = slapo.create_schedule(nn.Sequential(normed), mesh={"tp": 2})
    sch["0"].shard("bias", axis=0)
    assert "the weight of '0' is computed from other tensors" in sch.explain()
