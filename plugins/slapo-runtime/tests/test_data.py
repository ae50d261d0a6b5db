"""Replicas share the samples of an epoch, and go on with it under another number of replicas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import slapo_core as slapo
from slapo_core.layout import Mesh
from slapo_runtime.data import ReplicaSampler, sampler

DATA = list(range(37))


def samplers(sizes: dict[str, int], **options: Any) -> list[ReplicaSampler]:
    """One for each rank of a mesh."""
    ranks = range(torch.Size(sizes.values()).numel())
    return [
        sampler(slapo.create_schedule(nn.Linear(1, 1), mesh=Mesh(sizes, rank=rank)), DATA, **options) for rank in ranks
    ]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_replicas_draw_as_torch_and_the_ranks_of_one_draw_the_same(shuffle: bool, drop_last: bool) -> None:
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": 3}
    found = samplers({"dp_replicate": 2, "dp": 2, "pp": 2, "tp": 2}, **options)
    for rank, one in enumerate(found):
        one.set_epoch(2)
        expected = DistributedSampler(DATA, 4, rank // 4, **options)
        expected.set_epoch(2)
        assert list(one) == list(expected)
        assert len(one) == len(expected)


@pytest.mark.parametrize(("before", "after", "workers"), [(2, 3, 0), (3, 1, 1), (4, 4, 0)])
def test_an_epoch_resumes_under_another_number_of_replicas(before: int, after: int, workers: int) -> None:
    seen: Counter[int] = Counter()
    states = []
    for one in samplers({"dp": before}, batch_size=2):
        one.set_epoch(1)
        steps = one.batches(DataLoader(DATA, batch_sampler=one, num_workers=workers))
        for _ in range(3):
            seen.update(next(steps).tolist())
        states.append(one.state_dict())
    assert states == [{"epoch": 1, "position": 6 * before, "samples": 37, "seed": 0}] * before
    assert len(seen) == 6 * before
    for one in samplers({"dp": after}):
        one.load_state_dict(states[0])
        one.set_epoch(1)
        assert len(one) == -(-(37 - 6 * before) // after)
        seen.update(one)
        assert one.state_dict()["position"] == 37
    assert set(seen) == set(DATA)
    assert sum(seen.values()) - len(DATA) == -(37 - 6 * before) % after  # repeated for an equal number on each


@pytest.mark.parametrize(("drop_last", "sizes", "repeated"), [(False, [2, 2, 2, 1], 1), (True, [2, 2, 2], 0)])
def test_batches_of_an_epoch_resume_under_another_number_of_replicas(
    drop_last: bool, sizes: list[int], repeated: int
) -> None:
    """3 replicas take two batches of 4 each; 2 replicas divide the other 13 samples into batches of 2."""
    seen: Counter[int] = Counter()
    for one in samplers({"dp": 3}, batch_size=4, drop_last=drop_last):
        steps = one.batches(DataLoader(DATA, batch_sampler=one))
        seen.update(next(steps).tolist() + next(steps).tolist())
        state = one.state_dict()
    for one in samplers({"dp": 2}, batch_size=2, drop_last=drop_last):
        one.load_state_dict(state)
        assert len(one) == len(sizes)
        found = [batch.tolist() for batch in one.batches(DataLoader(DATA, batch_sampler=one))]
        assert [len(batch) for batch in found] == sizes
        seen.update(number for batch in found for number in batch)
        assert one.state_dict()["position"] == (36 if drop_last else 37)
        assert len(one) == (9 if drop_last else 10)  # of the next epoch
    assert len(seen) == (36 if drop_last else 37)
    assert sum(seen.values()) - len(seen) == repeated


@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_go_on_in_a_resumed_epoch(workers: int) -> None:
    def numbers(data: ReplicaSampler, stop: int) -> list[float]:
        found: list[float] = []
        for _ in data.batches(DataLoader(DATA, batch_sampler=data, num_workers=workers)):
            found.append(torch.rand(()).item())  # dropout
            if len(found) == stop:
                break
        return found

    (data,) = samplers({"dp": 1}, batch_size=8)
    torch.manual_seed(0)
    expected = numbers(data, 5)
    (first,), (second,) = (samplers({"dp": 1}, batch_size=8) for _ in range(2))
    torch.manual_seed(0)
    begun = numbers(first, 2)
    second.load_state_dict(first.state_dict())
    assert begun + numbers(second, 3) == expected


def test_no_sample_is_repeated_where_the_last_round_is_dropped() -> None:
    for one in samplers({"dp": 3}, batch_size=4, drop_last=True):
        found = list(one)
        assert [len(batch) for batch in found] == [4, 4, 4]
        assert len(one) == 3
        assert one.state_dict()["position"] == 36


def test_the_next_epoch_has_another_order() -> None:
    (one,) = samplers({"dp": 1})
    assert sorted(one) == sorted(one) == DATA
    first = list(one)
    one.set_epoch(1)
    assert one.state_dict()["position"] == 0
    assert list(one) != first


def test_invalid_arguments_and_foreign_positions_are_refused() -> None:
    sch = slapo.create_schedule(nn.Linear(1, 1))
    for make, words in (
        (lambda: sampler(sch.model, DATA), "takes the schedule"),
        (lambda: sampler(sch, iter(DATA)), "a dataset with a length"),
        (lambda: sampler(sch, DATA, batch_size=0), "positive integer or None (got 0)"),
        (lambda: sampler(sch, DATA, seed=1).load_state_dict(sampler(sch, DATA).state_dict()), "seed 0 (got 1 here)"),
        (lambda: sampler(sch, DATA[1:]).load_state_dict(sampler(sch, DATA).state_dict()), "samples 37 (got 36 here)"),
        (lambda: next(sampler(sch, DATA).batches(DATA)), "number of samples in a batch"),
    ):
        with pytest.raises(slapo.ArgumentError) as caught:
            make()
        assert words in str(caught.value)


def test_a_last_batch_that_cannot_be_cut_is_warned_of_at_the_first_step(recwarn: pytest.WarningsRecorder) -> None:
    """Of 37 samples the last batch has one, which two micro-batches cannot share."""
    for drop_last in (False, True):
        sch = slapo.create_schedule(nn.Linear(1, 1))
        engine = slapo.build(
            sch, optimizer=torch.optim.Adam, accumulate=2, loss=lambda output, batch: output.square().mean()
        )
        rows = torch.arange(37.0)[:, None]
        data = sampler(sch, rows, batch_size=4, drop_last=drop_last)
        engine.attach("data", data)
        steps = data.batches(DataLoader(rows, batch_sampler=data))
        engine.train_step(next(steps))
        warned = [str(one.message) for one in recwarn if "the last batch of an epoch has 1 samples" in str(one.message)]
        assert len(warned) == 1  # of the first engine
        assert "sampler(..., drop_last=True)" in warned[0]
        if drop_last:
            assert len([engine.train_step(batch) for batch in steps]) == 8
        else:
            with pytest.raises(slapo.BuildError, match="1 samples"):
                [engine.train_step(batch) for batch in steps]
    engine.close()
