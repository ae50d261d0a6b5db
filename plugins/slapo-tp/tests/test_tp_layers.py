"""Split layers on real processes: outputs, all gradients and three optimiser steps are those of the untouched model."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.testing import run_ranks

from .checks import differs_from_untouched, rand, same_as_untouched

pytestmark = pytest.mark.ranks

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


def convolutions(bias: bool) -> nn.Module:
    first = nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", bias=bias)
    return nn.Sequential(first, nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 3, stride=2, bias=bias))


def split_convolutions(sch: slapo.Schedule) -> None:
    names = ["weight"] if sch["0"].module.bias is None else ["weight", "bias"]
    sch["0"].shard(names, axis=0).sync("backward")
    sch["1"].shard(["weight", "bias", "running_mean", "running_var"], axis=0).shard_attribute("num_features")
    sch["3"].shard("weight", axis=1).sync("forward")


def convolution_in_time() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 6, 3))


def gather_channels(sch: slapo.Schedule) -> None:
    sch["0"].shard(["weight", "bias"], axis=0).sync("forward").sync("backward")


def test_split_linear_and_convolution_layers_are_the_untouched_layers() -> None:
    run_ranks(check_single_layers, world_size=2)


def embedding(padding: int | None, rows: int = 10) -> nn.Module:
    return nn.Sequential(nn.Embedding(rows, 6, padding_idx=padding))


def check_embeddings() -> None:
    def by_vocabulary(sch: slapo.Schedule) -> None:
        sch["0"].shard("weight", axis=0).sync("fwd_post", "all_reduce")

    def by_features(sch: slapo.Schedule) -> None:
        sch["0"].shard("weight", axis=1).sync("fwd_post", "all_gather", axis=-1)

    for padding in (None, 0, 3, 7):
        for apply in (by_vocabulary, by_features):
            same_as_untouched(functools.partial(embedding, padding), apply, (IDS,))
    same_as_untouched(functools.partial(embedding, None), by_vocabulary, (torch.tensor(7),))
    sch = slapo.create_schedule(embedding(None), mesh={"tp": 2})
    by_vocabulary(sch)
    for unknown in (10, -1):
        with pytest.raises(IndexError):
            sch.model(torch.tensor([unknown]))


def test_a_split_embedding_is_the_untouched_embedding_and_still_refuses_unknown_ids() -> None:
    run_ranks(check_embeddings, world_size=2)
