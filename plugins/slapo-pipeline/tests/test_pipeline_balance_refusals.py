"""What ``pipeline_split(stages=N)`` refuses at once, with the numbers and the call to write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_core as slapo
from tests.messages import Messages


class Stack(nn.Module):
    """Blocks in a list, run as ``order`` says."""

    def __init__(self, count: int = 4, order=None) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.order = order if order is not None else range(count)

    def forward(self, x):
        for index in self.order:
            x = self.layer[index](x)
        return x


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.short = Stack(), Stack(), nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.short[0](self.second(self.first(x)))


INPUTS = (torch.zeros(2, 4),)


def refusal(model, stages, *, path="", inputs=INPUTS, mesh=None, before=(), **arguments):
    sch = slapo.create_schedule(model, example_inputs=inputs, mesh=mesh)
    for each in before:
        sch[each].pipeline_split()
    records = sch.records
    with pytest.raises(slapo.PreconditionError) as caught:
        (sch[path] if path else sch.root).pipeline_split(stages=stages, **arguments)
    assert sch.records == records
    return str(caught.value)


def test_more_stages_than_blocks(message: Messages):
    message(refusal(Stack(4), 5), "4 blocks in 'layer'", "5 stages", "pipeline_split(stages=4)")
    sch = slapo.create_schedule(Stack(4))
    sch["layer"].pipeline_split(stages=4)
    assert sch.records[-1].primitive.after == ("0", "1", "2")


def test_containers_without_blocks_or_with_several_lists_are_refused(message: Messages):
    message(refusal(nn.Linear(4, 4), 2), "Linear", "no list of blocks")
    message(refusal(Two(), 2), "'first.layer' (4), 'second.layer' (4)", "sch['first.layer'].pipeline_split(stages=2)")


def test_a_short_list_without_parameters_does_not_compete_with_the_blocks():
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = Stack(3)
            self.classifier = nn.Sequential(nn.ReLU(), nn.Dropout(), nn.Linear(4, 2))

        def forward(self, x):
            return self.classifier(self.stages(x))

    sch = slapo.create_schedule(Classifier())
    sch.pipeline_split(stages=3)
    assert sch.records[-1].primitive.after == ("stages.layer.0", "stages.layer.1")


def test_wrong_arguments_are_refused_and_one_stage_is_not_cut(message: Messages):
    message(refusal(Stack(), 0), "stages=0", "1 or more")
    sch = slapo.create_schedule(Stack())
    with pytest.raises(slapo.ArgumentError, match="argument 'balance' must be"):
        sch.pipeline_split(stages=2, balance="memory")
    with pytest.raises(slapo.PreconditionError, match="belong to stages="):
        sch["layer.0"].pipeline_split(balance="flops")
    sch.pipeline_split(stages=1)
    assert sch.records[-1].primitive.after == ()
    assert "one stage: nothing to cut" in sch.explain()


def test_stages_that_do_not_fit_the_mesh(message: Messages):
    message(refusal(Stack(8), 6, mesh={"pp": 4}), "6 stages", "'pp' of size 4", "pipeline_split(stages=8)")
    message(refusal(Stack(8), 1, mesh={"pp": 2}), "1 stage ", "'pp' of size 2")
    for stages in (2, 4, 8):  # virtual stages
        slapo.create_schedule(Stack(8), mesh={"pp": 2}).pipeline_split(stages=stages)
    # Cuts elsewhere add to these: how many stages there are in all, build says.
    sch = slapo.create_schedule(Two(), mesh={"pp": 2})
    sch["first"].pipeline_split()
    sch["second"].pipeline_split(stages=3)


def test_cuts_among_the_blocks(message: Messages):
    message(refusal(Stack(), 2, before=["layer.1"]), "already", "'layer.1'")
    sch = slapo.create_schedule(Stack())
    sch.pipeline_split(stages=2)
    with pytest.raises(slapo.PreconditionError) as caught:
        sch["layer"].pipeline_split(stages=2)
    message(caught, "already", "'layer.1'")


@pytest.mark.parametrize("balance", ["parameters", "flops"])
def test_blocks_that_do_not_run_in_turn(balance, message: Messages):
    message(refusal(Stack(3, (0, 1, 2, 1)), 2, balance=balance), "'layer.1' more than once")
    message(refusal(Stack(3, (0, 2, 1)), 2, balance=balance), "'layer.2' before 'layer.1'")
    message(refusal(Stack(3, (0, 1)), 2, balance=balance), "not call 'layer.2'")


def test_a_model_that_cannot_run(message: Messages):
    assert ": without values the model raises RuntimeError: " in refusal(
        Stack(), 2, inputs=(torch.zeros(2, 5),), balance="flops"
    )


def test_a_saved_cut_that_is_not_there(message: Messages):
    def refused(after):
        sch = slapo.create_schedule(Stack())
        with pytest.raises(slapo.PreconditionError) as caught:
            sch.pipeline_split(stages=3, after=after)
        return caught

    message(refused(("layer.0",)), "2 cuts", "1: layer.0")
    message(refused(("layer.0", "layer.3")), "'layer.3'", "'layer.0' to 'layer.2'")
    message(refused(("layer.2", "layer.0")), "got layer.2, layer.0")
    message(refused(("layer.0", "layer.0")), "got layer.0, layer.0")
