"""Every refusal, with its whole message: what is wrong, and the call to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import slapo_core as slapo
from slapo_core import ArgumentError, PreconditionError

MESHES = pytest.mark.parametrize("mesh", [{"tp": 1}, {"tp": 2}], ids=["one rank", "two ranks"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 64)
        self.out = nn.Linear(64, 16)
        self.plain = nn.Linear(16, 16, bias=False)
        self.odd = nn.Linear(16, 7)
        self.conv1d = Conv1D(48, 16)
        self.conv = nn.Conv2d(4, 8, 3)
        self.grouped = nn.Conv2d(4, 8, 3, groups=2)
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
    (
        lambda s: s["fc"].shard("weight", axis=2),
        "cannot apply shard('weight', axis=2) at 'fc': 'weight' has 2 axes (64, 16); use axis=0 or axis=1",
    ),
    (
        lambda s: s["fc"].shard("bias", axis=-3),
        "cannot apply shard('bias', axis=-3) at 'fc': 'bias' has 1 axis (64,); use axis=0",
    ),
    (
        lambda s: s["fc"].shard("wieght", axis=0),
        "cannot apply shard('wieght', axis=0) at 'fc': this Linear has no parameter or buffer 'wieght'; did you mean "
        "'weight'? it has 'weight' (64, 16), 'bias' (64,)",
    ),
    (
        lambda s: s["plain"].shard(["weight", "bias"], axis=0),
        "cannot apply shard(('weight', 'bias'), axis=0) at 'plain': 'bias' is None in this Linear; leave 'bias' out",
    ),
    (
        lambda s: s.shard("weight", axis=0),
        "cannot apply shard('weight', axis=0) at the root: this Model has no parameter or buffer of its own; its "
        "children have some: sch['fc'].shard(...)",
    ),
    (
        lambda s: s["lazy"].shard("weight", axis=0),
        "cannot apply shard('weight', axis=0) at 'lazy': 'weight' has no shape yet; run the model once before, or give "
        "the layer its input size",
    ),
    (
        lambda s: s["scalar"].shard("scale", axis=0),
        "cannot apply shard('scale', axis=0) at 'scalar': 'scale' is a scalar and has no axis; leave 'scale' out",
    ),
    (
        lambda s: s["fc"].shard([], axis=0),
        "cannot apply shard((), axis=0) at 'fc': it names no parameter; write shard(\"weight\", axis=0)",
    ),
    (
        lambda s: s["fc"].shard(["weight", "weight"], axis=0),
        "cannot apply shard(('weight', 'weight'), axis=0) at 'fc': 'weight' is named 2 times; name each parameter once",
    ),
    (
        lambda s: s["fc"].shard("weight", axis=0).shard("weight", axis=1),
        "cannot apply shard('weight', axis=1) at 'fc': 'weight' is split over mesh_dim 'tp' already, on axis 0 by #1 "
        "shard('weight', axis=0) at 'fc'; remove this call, or name another mesh_dim",
    ),
    (
        lambda s: s["fc"].shard(["weight", "bias"], axis=1),
        "cannot apply shard(('weight', 'bias'), axis=1) at 'fc': 'bias' lies along the weight's output axis 0, not "
        'along its axis 1; use shard(["weight", "bias"], axis=0), or shard("weight", axis=1): the whole bias is then '
        "added once, by sync",
    ),
    (
        lambda s: s["conv1d"].shard(["weight", "bias"], axis=0),
        "cannot apply shard(('weight', 'bias'), axis=0) at 'conv1d': 'bias' lies along the weight's output axis 1, not "
        'along its axis 0; use shard(["weight", "bias"], axis=1), or shard("weight", axis=0): the whole bias is then '
        "added once, by sync",
    ),
    (
        lambda s: s["fc"].shard("weight", axis=1).shard("bias", axis=0),
        "cannot apply shard('bias', axis=0) at 'fc': the weight is split on its input axis, so the whole bias is added "
        "once, by sync; leave 'bias' out",
    ),
    (
        lambda s: s["fc"].shard("bias", axis=0).shard("weight", axis=1),
        "cannot apply shard('weight', axis=1) at 'fc': the bias is split already, which belongs to the weight's output "
        "axis; use axis=0",
    ),
    (
        lambda s: s["conv1d"].shard("weight", axis=1, packed=(16, 16)),
        "cannot apply shard('weight', axis=1, packed=(16, 16)) at 'conv1d': axis 1 of 'weight' has 48 elements, but "
        "packed=(16, 16) gives 32; packed lists the size of each matrix on that axis, in elements",
    ),
    (
        lambda s: s["conv1d"].shard("weight", axis=1, packed=5),
        "cannot apply shard('weight', axis=1, packed=5) at 'conv1d': axis 1 of 'weight' has 48 elements, which "
        "packed=5 does not divide; give the size of each matrix, such as packed=(768, 256, 256)",
    ),
    (
        lambda s: s["conv"].shard("weight", axis=3),
        "cannot apply shard('weight', axis=3) at 'conv': axis 3 of 'weight' is a kernel axis of nn.Conv2d; use axis=0 "
        "(output) or axis=1 (input)",
    ),
    (
        lambda s: s["grouped"].shard("weight", axis=0),
        "cannot apply shard('weight', axis=0) at 'grouped': nn.Conv2d with groups=2 cannot be split; only groups=1 can",
    ),
    (
        lambda s: s["normed"].shard("weight", axis=1),
        "cannot apply shard('weight', axis=1) at 'normed': nn.Embedding with max_norm=1.0 rescales rows by their norm "
        "while it runs; only max_norm=None can be split",
    ),
    (
        lambda s: s["counted"].shard("weight", axis=0),
        "cannot apply shard('weight', axis=0) at 'counted': nn.Embedding with scale_grad_by_freq=True counts the ids "
        "of all rows; use axis=1",
    ),
    (
        lambda s: s["words"].shard("weight", axis=1),
        "cannot apply shard('weight', axis=1) at 'words': 'table' of 'tied' is the same tensor, and what Module does "
        "with it is not known; if it works with a piece, write sch['tied'].shard('table', axis=1) instead of this",
    ),
    (
        lambda s: s["frozen"].shard("weight", axis=1),
        "cannot apply shard('weight', axis=1) at 'frozen': the forward of 'frozen' was changed, and splitting this "
        "axis has to change it too; shard first, then apply the other step",
    ),
    (
        lambda s: s["fc"].checkpoint().shard("weight", axis=1),
        "cannot apply shard('weight', axis=1) at 'fc': the forward of 'fc' was changed by #1 checkpoint() at 'fc', and "
        "splitting this axis has to change it too; shard first, then apply the other step",
    ),
]


@MESHES
@pytest.mark.parametrize(("act", "message"), SHARD, ids=[message[13:90] for _, message in SHARD])
def test_shard_says_what_to_write_instead(act: Callable[[Any], object], message: str, mesh: dict[str, int]) -> None:
    assert refusal(act, mesh) == message


def test_shard_names_sizes_that_can_be_divided() -> None:
    assert refusal(lambda s: s["odd"].shard(["weight", "bias"], axis=0), {"tp": 2}) == (
        "cannot apply shard(('weight', 'bias'), axis=0) at 'odd':\n"
        "  - axis 0 of 'weight' has 7 elements, not divisible by tp size 2; sizes that work: 6 or 8\n"
        "  - axis 0 of 'bias' has 7 elements, not divisible by tp size 2; sizes that work: 6 or 8"
    )
    assert refusal(lambda s: s["conv1d"].shard("weight", axis=1, packed=(32, 11, 5)), {"tp": 8}) == (
        "cannot apply shard('weight', axis=1, packed=(32, 11, 5)) at 'conv1d':\n"
        "  - matrix 2 of 3 on axis 1 of 'weight' has 11 elements, not divisible by tp size 8; sizes that work: 8 or "
        "16\n"
        "  - matrix 3 of 3 on axis 1 of 'weight' has 5 elements, not divisible by tp size 8; sizes that work: 8"
    )


def split_pair(s: Any) -> Any:
    s["fc"].shard(["weight", "bias"], axis=0)
    s["out"].shard("weight", axis=1)
    return s


SYNC = [
    (
        lambda s: s["fc"].sync("fwd_post", "all_reduce"),
        "cannot apply sync('fwd_post', op='all_reduce') at 'fc': nothing was split over mesh_dim 'tp' on this module "
        'or below it: its output is whole on every rank, not a partial sum; write shard("weight", axis=1) before, '
        "which makes it one",
    ),
    (
        lambda s: s["fc"].sync("forward"),
        "cannot apply sync('forward') at 'fc': nothing was split over mesh_dim 'tp' on this module or below it; write "
        'shard("weight", axis=...) before',
    ),
    (
        lambda s: split_pair(s).sync("forward"),
        "cannot apply sync('forward') at the root: what the output of this Model is cannot be told from its own "
        'weight; use sync("fwd_post", "all_reduce") for a partial sum, sync("fwd_post", "all_gather") for a piece',
    ),
    (
        lambda s: split_pair(s)["fc"].sync("fwd_pre"),
        "cannot apply sync('fwd_pre') at 'fc': mode 'fwd_pre' needs an op; use sync(\"fwd_pre\", \"all_reduce\")",
    ),
    (
        lambda s: split_pair(s)["fc"].sync("bwd_post", "reduce_scatter", axis=1),
        "cannot apply sync('bwd_post', op='reduce_scatter', axis=1) at 'fc': the gradient of an input that passes "
        "unchanged has that input's shape, which reduce_scatter would change; use "
        'sync("fwd_pre", "all_gather", axis=1), whose backward is the reduce_scatter',
    ),
    (
        lambda s: split_pair(s)["fc"].sync("fwd_post", "all_reduce"),
        "cannot apply sync('fwd_post', op='all_reduce') at 'fc': the weight is split on its output axis, so each rank "
        'has other features, which all_reduce would add up; use sync("fwd_post", "all_gather")',
    ),
    (
        lambda s: s["conv"].shard(["weight", "bias"], axis=0).sync("fwd_post", "all_gather"),
        "cannot apply sync('fwd_post', op='all_gather') at 'conv': the output is split on axis -3, not on axis -1; use "
        'sync("fwd_post", "all_gather", axis=-3)',
    ),
    (
        lambda s: split_pair(s)["out"].sync("fwd_post", "all_gather"),
        "cannot apply sync('fwd_post', op='all_gather') at 'out': the output is a partial sum of the whole output on "
        'each rank, which all_gather would not add up; use sync("fwd_post", "all_reduce"), or '
        'sync("fwd_post", "reduce_scatter", axis=...)',
    ),
    (
        lambda s: split_pair(s)["out"].sync("fwd_post", "reduce_scatter"),
        "cannot apply sync('fwd_post', op='reduce_scatter') at 'out': the bias that the layer left out is whole, and "
        'cannot be added to a piece of the output features; use sync("fwd_post", "reduce_scatter", axis=...) with '
        "another axis, such as the sequence",
    ),
    (
        lambda s: split_pair(s).sync("fwd_post", "all_reduce"),
        "cannot apply sync('fwd_post', op='all_reduce') at the root: 'out' gives a partial sum and left its bias out, "
        'which only a sync there adds; use sch[\'out\'].sync("fwd_post", "all_reduce")',
    ),
    (
        lambda s: split_pair(s)["out"].sync("forward").sync("forward"),
        "cannot apply sync('forward') at 'out': step #3 sync('forward') at 'out' is the same sync; remove this call",
    ),
    (
        lambda s: split_pair(s)["out"].sync("forward").sync("fwd_post", "reduce_scatter", axis=1),
        "cannot apply sync('fwd_post', op='reduce_scatter', axis=1) at 'out': the output is synchronised already, by "
        "#3 sync('forward') at 'out'; remove one of the two",
    ),
    (
        lambda s: split_pair(s)["fc"].sync("fwd_pre", "all_gather", axis=1).sync("backward"),
        "cannot apply sync('backward') at 'fc': the gradient of the input is synchronised already, by #3 "
        "sync('fwd_pre', op='all_gather', axis=1) at 'fc'; remove one of the two",
    ),
    (
        lambda s: split_pair(s)["out"].sync("backward"),
        "cannot apply sync('backward') at 'out': the weight is split on its input axis, so each rank's input is "
        "another piece with its own gradient; remove this call; it belongs to the layer that is split on its output "
        "axis",
    ),
    (
        lambda s: s["counted"].shard("weight", axis=1).sync("backward"),
        "cannot apply sync('backward') at 'counted': the inputs of nn.Embedding are ids, which have no gradient; "
        "remove this call",
    ),
    (
        lambda s: split_pair(s)["out"].sync("fwd_post", "all_reduce", axis=1),
        "cannot apply sync('fwd_post', op='all_reduce', axis=1) at 'out': axis=1 means nothing here: only gather and "
        "scatter have one; leave it out",
    ),
    (
        lambda s: split_pair(s)["out"].sync("fwd_post", "all_reduce", inputs=(0,)),
        "cannot apply sync('fwd_post', op='all_reduce', inputs=(0,)) at 'out': inputs=(0,) belongs to built-in ops of "
        "fwd_pre and bwd_post; leave it out",
    ),
    (
        lambda s: split_pair(s)["fc"].sync("backward", outputs=(0,)),
        "cannot apply sync('backward', outputs=(0,)) at 'fc': outputs=(0,) belongs to built-in ops of fwd_post; leave "
        "it out",
    ),
    (
        lambda s: split_pair(s)["fc"].sync("backward", inputs=("x",)),
        "cannot apply sync('backward', inputs=('x',)) at 'fc': forward of Linear has no input 'x'; it has input",
    ),
    (
        lambda s: split_pair(s)["out"].sync("fwd_post", "all_reduce", outputs=(-1,)),
        "cannot apply sync('fwd_post', op='all_reduce', outputs=(-1,)) at 'out': outputs=(-1,) must count from 0; "
        "outputs=(0,)",
    ),
]


@MESHES
@pytest.mark.parametrize(("act", "message"), SYNC, ids=[message[13:110] for _, message in SYNC])
def test_sync_says_what_to_write_instead(act: Callable[[Any], object], message: str, mesh: dict[str, int]) -> None:
    assert refusal(act, mesh) == message


@pytest.mark.parametrize("call", ["shard('weight', axis=0)", "sync('backward')", "shard_attribute('in_features')"])
def test_without_a_mesh_every_primitive_says_how_to_declare_one(call: str) -> None:
    name, arguments = call.rstrip(")").split("(")
    values = {"shard": {"axis": 0}}.get(name, {})

    def act(s: Any) -> None:
        getattr(s["fc"], name)(arguments.split("'")[1], **values)

    assert refusal(act, None) == (
        f"cannot apply {call} at 'fc': it is distributed over mesh_dim 'tp', but the schedule has no mesh; "
        'declare one: create_schedule(model, mesh={"tp": N})'
    )
    assert refusal(act, {"dp": 2}) == (
        f"cannot apply {call} at 'fc': it is distributed over mesh_dim 'tp', but the mesh is {{'dp': 2}}; "
        'add the dimension: create_schedule(model, mesh={"tp": N}), N=1 included'
    )


def test_an_argument_of_the_wrong_type_is_refused_before_anything_is_looked_at() -> None:
    sch = slapo.create_schedule(Model(), mesh={"tp": 2})
    with pytest.raises(ArgumentError, match=r"^tp.sync: argument 'mode' must be .* \(got 'fwd'\)$"):
        sch["fc"].sync("fwd", "all_reduce")
    with pytest.raises(ArgumentError, match=r"^tp.shard: argument 'axis' must be int \(got '0'\)$"):
        sch["fc"].shard("weight", axis="0")


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_the_weights_of_multihead_attention_are_refused_because_it_reads_them_without_calling_anyone() -> None:
    sch = slapo.create_schedule(Attending(), mesh={"tp": 2})
    reason = "nn.MultiheadAttention reads all of its weights in one function, which splits them by embed_dim"
    hint = "write sch['attention'].replace(...) with an attention of separate projections, and shard those"
    with pytest.raises(slapo.PreconditionError) as caught:
        sch["attention.out_proj"].shard("weight", axis=1)
    assert str(caught.value) == (
        f"cannot apply shard('weight', axis=1) at 'attention.out_proj': {reason}, so 'attention.out_proj' is never "
        f"called; {hint}"
    )
    with pytest.raises(slapo.PreconditionError) as caught:
        sch["attention"].shard("in_proj_weight", axis=0, packed=3)
    assert str(caught.value) == (
        f"cannot apply shard('in_proj_weight', axis=0, packed=3) at 'attention': {reason}; {hint}"
    )
    assert sch.records == ()


def test_a_weight_that_is_computed_from_others_is_said_to_stay_as_it_is() -> None:
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    sch = slapo.create_schedule(nn.Sequential(normed), mesh={"tp": 2})
    sch["0"].shard("bias", axis=0)
    assert "the weight of '0' is computed from other tensors" in sch.explain()
