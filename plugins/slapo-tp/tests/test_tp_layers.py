"""Split layers on real processes: outputs, all gradients and three optimizer steps are those of the reference model."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.errors import InputError
from slapo_testing import run_ranks

from .checks import CLOSE, differs_from_untouched, rand, same_as_untouched

pytestmark = pytest.mark.ranks

STATISTICS = ("weight", "bias", "running_mean", "running_var")
IDS = torch.tensor([[0, 9, 5, 4], [4, 3, 3, 0]])


def pair(*, bias: bool = True, features: int = 6, hidden: int = 12) -> nn.Module:
    return nn.Sequential(nn.Linear(features, hidden, bias=bias), nn.GELU(), nn.Linear(hidden, features, bias=bias))


def split_pair(sch: slapo.Schedule) -> None:
    names = ["weight"] if sch["0"].module.bias is None else ["weight", "bias"]
    sch["0"].shard(names, axis=0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def check_linear_pairs() -> None:
    same_as_untouched(pair, split_pair, (rand(4, 6),))
    same_as_untouched(pair, split_pair, (rand(2, 3, 6),), optimizer=functools.partial(torch.optim.AdamW, lr=0.01))
    same_as_untouched(pair, split_pair, (rand(1, 6),))
    same_as_untouched(pair, split_pair, (rand(6),))
    same_as_untouched(pair, split_pair, (rand(0, 6),))
    same_as_untouched(pair, split_pair, (rand(6, 4).t(),))
    same_as_untouched(functools.partial(pair, features=7), split_pair, (rand(5, 7),))
    same_as_untouched(functools.partial(pair, bias=False), split_pair, (rand(3, 6),))


def test_a_column_and_row_split_pair_is_the_untouched_pair() -> None:
    run_ranks(check_linear_pairs, world_size=2)


def check_four_ranks() -> None:
    same_as_untouched(pair, split_pair, (rand(4, 6),))
    same_as_untouched(
        functools.partial(embedding, None, rows=12),
        lambda sch: sch["0"].shard("weight", axis=0).sync("forward"),
        (IDS,),
    )


def test_four_ranks_compute_what_one_does() -> None:
    run_ranks(check_four_ranks, world_size=4)


def check_negative_controls() -> None:
    def no_reduction(sch: slapo.Schedule) -> None:
        sch["0"].shard(["weight", "bias"], axis=0).sync("backward")
        sch["2"].shard("weight", axis=1)

    def no_gradient_reduction(sch: slapo.Schedule) -> None:
        sch["0"].shard(["weight", "bias"], axis=0)
        sch["2"].shard("weight", axis=1).sync("forward")

    def packed_cut_through(sch: slapo.Schedule) -> None:
        sch["0"].shard(["weight", "bias"], axis=0, packed=2).sync("backward")
        sch["2"].shard("weight", axis=1).sync("forward")

    for wrong in (no_reduction, no_gradient_reduction, packed_cut_through):
        differs_from_untouched(pair, wrong, (rand(4, 6),))


def test_a_schedule_that_leaves_a_sync_out_is_noticed_by_these_tests() -> None:
    run_ranks(check_negative_controls, world_size=2)


def check_single_layers() -> None:
    def column(sch: slapo.Schedule) -> None:
        sch["0"].shard(["weight", "bias"], axis=0).sync("forward").sync("backward")

    def in_two_calls(sch: slapo.Schedule) -> None:
        sch["0"].shard("weight", axis=0).shard("bias", axis=0)
        sch["0"].sync("fwd_post", "all_gather").sync("bwd_post", "all_reduce")

    linear = functools.partial(nn.Sequential, nn.Linear(5, 8), nn.Tanh())
    same_as_untouched(linear, column, (rand(3, 5),))
    same_as_untouched(linear, in_two_calls, (rand(3, 5),))
    for bias in (True, False):
        same_as_untouched(functools.partial(convolutions, bias), split_convolutions, (rand(2, 4, 5, 5),))
    same_as_untouched(convolution_in_time, gather_channels, (rand(2, 4, 9),))
    for groups, packed in ((4, 1), (8, 1), (8, 2)):
        steps = functools.partial(split_with_groups, packed=packed)
        same_as_untouched(functools.partial(with_groups, groups), steps, (rand(2, 4, 7),))
    same_as_untouched(subclasses, split_subclasses, (rand(3, 5),))


def with_groups(groups: int) -> nn.Module:
    """Between two layers without groups, as in inverted residuals and in the convolutions of speech encoders."""
    grouped = nn.Conv1d(8, 16, 3, padding=1, groups=groups)
    return nn.Sequential(nn.Conv1d(4, 8, 1), nn.GELU(), grouped, nn.BatchNorm1d(16), nn.SiLU(), nn.Conv1d(16, 4, 1))


def split_with_groups(sch: slapo.Schedule, packed: int) -> None:
    sch["0"].shard(["weight", "bias"], axis=0, packed=packed).sync("backward")
    sch["2"].shard(["weight", "bias"], axis=0, packed=packed)
    sch["3"].shard(STATISTICS, axis=0, packed=packed)
    sch["5"].shard("weight", axis=1, packed=packed).sync("forward")


class ScaledLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class LowRank(nn.Linear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.a, self.b = nn.Parameter(torch.randn(2, self.in_features)), nn.Parameter(torch.randn(self.out_features, 2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input @ self.a.t() @ self.b.t()


def subclasses() -> nn.Module:
    return nn.Sequential(LowRank(5, 8), nn.Tanh(), ScaledLinear(8, 6, bias=False))


def split_subclasses(sch: slapo.Schedule) -> None:
    sch["0"].shard(["weight", "bias"], axis=0).shard("b", axis=0).sync_gradient("a").sync("backward")
    sch["2"].shard("weight", axis=1).sync("forward")


def convolutions(bias: bool) -> nn.Module:
    first = nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", bias=bias)
    return nn.Sequential(first, nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 3, stride=2, bias=bias))


def split_convolutions(sch: slapo.Schedule) -> None:
    names = ["weight"] if sch["0"].module.bias is None else ["weight", "bias"]
    sch["0"].shard(names, axis=0).sync("backward")
    sch["1"].shard(STATISTICS, axis=0)
    sch["3"].shard("weight", axis=1).sync("forward")


def convolution_in_time() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 6, 3))


def gather_channels(sch: slapo.Schedule) -> None:
    sch["0"].shard(["weight", "bias"], axis=0).sync("forward").sync("backward")


def test_split_linear_and_convolution_layers_are_the_untouched_layers() -> None:
    run_ranks(check_single_layers, world_size=2)


class Bottleneck(nn.Module):
    """A block of WideResNet, with the names that torchvision gives."""

    def __init__(self, features: int = 4, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(features, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, features, 1, bias=False), nn.BatchNorm2d(features)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x
        return self.relu(out)


def wide_resnet() -> nn.Sequential:
    return nn.Sequential(Bottleneck(), Bottleneck())


def split_wide_resnet(sch: slapo.Schedule) -> None:
    for block in sch["*"]:
        block["conv1"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        block["bn1"].shard(STATISTICS, axis=0)
        block["conv2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def check_wide_resnet() -> None:
    torch.manual_seed(0)
    size, images = dist.get_world_size(), rand(4, 4, 3, 3)
    plain, other = wide_resnet().double(), wide_resnet().double()
    sch = slapo.create_schedule(copy.deepcopy(plain), mesh={"tp": size}, example_inputs=(images,))
    before = {name: getattr(sch["0.bn1"].module, name) for name in STATISTICS}
    split_wide_resnet(sch)
    norm = sch["0.bn1"].module
    assert {tuple(getattr(norm, name).shape) for name in STATISTICS} == {(8 // size,)}
    assert norm.num_features == 8 // size
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = slapo.verify(sch)
    assert report.steps_verified == len(sch.records) == 10

    for model in (plain, sch.model):
        model(images)
    state = slapo.state_dict(sch)
    torch.testing.assert_close(state, dict(plain.state_dict()), **CLOSE)
    again = slapo.create_schedule(other, mesh={"tp": size}, example_inputs=(images,))
    split_wide_resnet(again)
    slapo.load_state_dict(again, state)
    torch.testing.assert_close(again.model.eval()(images), plain.eval()(images), **CLOSE)
    sch.undo(to=0)
    assert norm.num_features == 8
    assert [getattr(norm, name) is tensor for name, tensor in before.items()] == [True] * 4


@pytest.mark.parametrize("size", [2, 4])
def test_a_sharded_wide_resnet_keeps_the_running_statistics_of_the_plain_one(size: int) -> None:
    run_ranks(check_wide_resnet, world_size=size)


def check_batch_norms() -> None:
    def sharded(sch: slapo.Schedule) -> None:
        names = ["weight"] if sch["0"].module.bias is None else ["weight", "bias"]
        sch["0"].shard(names, axis=0).sync("backward")
        sch["1"].shard([name for name in STATISTICS if getattr(sch["1"].module, name) is not None], axis=0)
        sch["1"].sync("forward")

    for layer, norm, shape in (
        (nn.Linear(6, 4), nn.BatchNorm1d(4), (5, 6)),
        (nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, affine=False), (3, 2, 7)),
        (nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4, track_running_stats=False), (3, 2, 5, 5)),
        (nn.Conv3d(2, 4, 2, bias=False), nn.BatchNorm3d(4, momentum=None), (3, 2, 3, 3, 3)),
    ):
        same_as_untouched(functools.partial(nn.Sequential, layer, norm), sharded, (rand(*shape),))


def test_batch_norms_of_all_axes_follow_their_layer_and_gather_channels() -> None:
    run_ranks(check_batch_norms, world_size=2)


def embedding(padding: int | None, rows: int = 10, cls: type[nn.Embedding] = nn.Embedding) -> nn.Module:
    return nn.Sequential(cls(rows, 6, padding_idx=padding))


class Scaled(nn.Embedding):
    """As Gemma's and BART's embedding of words."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * torch.tensor(self.embedding_dim**0.5, dtype=self.weight.dtype)


class Shifted(Scaled):
    """Not zero for a row of zeros."""

    def forward(self, ids: torch.Tensor, shift: float = 1.5) -> torch.Tensor:
        return super().forward(ids).cos() + shift


class Positions(nn.Embedding):
    """As BART's embedding of positions: the ids are not those that it is given."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.arange(ids.shape[-1]).expand_as(ids) + 2)


class Twice(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + super().forward(ids.flip(0))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = Scaled(11, 6, padding_idx=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(ids=x)


def check_embeddings() -> None:
    def by_vocabulary(sch: slapo.Schedule) -> None:
        sch["0"].shard("weight", axis=0).sync("fwd_post", "all_reduce")

    def by_features(sch: slapo.Schedule) -> None:
        sch["0"].shard("weight", axis=1).sync("fwd_post", "all_gather", axis=-1)

    for padding in (None, 0, 3, 7):
        for apply in (by_vocabulary, by_features):
            same_as_untouched(functools.partial(embedding, padding), apply, (IDS,))
    same_as_untouched(functools.partial(embedding, None), by_vocabulary, (torch.tensor(7),))
    for cls, padding in ((Scaled, 3), (Shifted, None), (Positions, None)):
        same_as_untouched(functools.partial(embedding, padding, cls=cls), by_vocabulary, (IDS,))
    same_as_untouched(functools.partial(embedding, 3, cls=Scaled), by_features, (IDS,))
    same_as_untouched(Named, lambda sch: sch["words"].shard("weight", axis=0, pad=True).sync("forward"), (IDS,))
    sch = slapo.create_schedule(embedding(None, cls=Twice), mesh={"tp": 2})
    by_vocabulary(sch)
    with pytest.raises(InputError, match="2 lookups"):
        sch.model(IDS)
    sch = slapo.create_schedule(embedding(None), mesh={"tp": 2})
    by_vocabulary(sch)
    for unknown in (10, -1):
        with pytest.raises(IndexError):
            sch.model(torch.tensor([unknown]))


def test_a_split_embedding_is_the_untouched_embedding_and_still_refuses_unknown_ids() -> None:
    run_ranks(check_embeddings, world_size=2)
