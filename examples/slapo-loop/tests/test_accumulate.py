"""`accumulate` keeps the promises of every dialect, and cuts batches into as many pieces as it was told."""

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import DialectCase, parametrize_dialect_checks


@parametrize_dialect_checks([DialectCase("accumulate", config={"micro_batches": 3}, rejects=[{"micro_batches": 0}])])
def test_accumulate(check):
    check()


def cross_entropy(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize(("micro_batches", "sizes"), [(1, [10]), (2, [5, 5]), (3, [4, 4, 2]), (64, [1] * 10)])
def test_a_batch_is_cut_into_pieces_that_are_weighed_by_their_size(micro_batches, sizes):
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    features, labels = torch.randn(10, 6).double(), torch.arange(10) % 3
    whole = cross_entropy(model(features), (features, labels)).detach()
    engine = slapo.build(
        slapo.create_schedule(model),
        target="accumulate",
        optimizer=make_optimizer,
        loss=cross_entropy,
        micro_batches=micro_batches,
    )
    seen = []
    engine.module.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    result = engine.train_step((features, labels))
    assert seen == sizes
    torch.testing.assert_close(result.loss, whole)


def test_the_plan_and_a_bad_option():
    sch = slapo.create_schedule(nn.Linear(2, 2))
    with pytest.raises(slapo.BuildError) as caught:
        slapo.build(sch, target="accumulate", micro_batches=0)
    assert str(caught.value) == "target 'accumulate' takes micro_batches, an int >= 1 (got {'micro_batches': 0})"
    engine = slapo.build(sch, target="accumulate", micro_batches=4)
    assert str(engine.plan) == "plan for target 'accumulate'\n  one optimizer step for 4 micro-batches"
