"""A model carries the steps of one schedule at a time."""

from __future__ import annotations

import copy
import gc

import pytest
from torch import nn

import slapo_core as slapo
from slapo_core.schedule import scheduled_models


def test_a_second_schedule_on_a_scheduled_model_is_refused_and_the_way_out_works() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    slapo.create_schedule(model)  # without steps, two are harmless
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    with pytest.raises(slapo.ArgumentError) as refused:
        slapo.create_schedule(model)
    assert str(refused.value) == (
        "this Sequential carries 1 step of another schedule, which would be taken for the untouched model\n"
        "  hint: go on with that schedule, take it back first with sch.undo(to=0), or make a fresh model"
    )
    sch.undo(to=0)
    slapo.create_schedule(model)["0"].checkpoint()


def test_building_does_not_make_the_model_untouched_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    slapo.build(sch)
    del sch
    with pytest.raises(slapo.ArgumentError, match="carries 1 step of another schedule"):
        slapo.create_schedule(model)


def test_a_step_that_fails_does_not_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(slapo.PreconditionError):
        slapo.create_schedule(model)["0"].annotate("wieght", "key", 1)
    slapo.create_schedule(model)


def test_models_are_forgotten_with_the_last_reference() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    before = len(scheduled_models._STEPS)
    del model, sch
    gc.collect()
    assert len(scheduled_models._STEPS) < before


def test_a_copy_of_the_untouched_model_is_a_model_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    with sch.untouched() as untouched:
        fresh = copy.deepcopy(untouched)
    slapo.create_schedule(fresh)["0"].checkpoint()
