"""What goes with a checkpoint beside weights and optimizer: schedulers, the scale of the loss, counters."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slapo_core import BuildError
from slapo_deepspeed.state import read_extra_state, used_extra_state, write_extra_state
from tests.messages import Messages


def engine(scheduler: Any = None, **scaler: Any) -> Any:
    """As much of DeepSpeed's engine as is asked."""
    return SimpleNamespace(
        global_steps=0, global_samples=0, skipped_steps=0, lr_scheduler=scheduler, optimizer=SimpleNamespace(**scaler)
    )


def scheduler(last: int) -> torch.optim.lr_scheduler.MultiStepLR:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    made = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5, 5], gamma=0.5)
    for _ in range(last):
        optimizer.step()
        made.step()
    return made


def through_json(found: Any) -> Any:
    return json.loads(json.dumps(found))


def test_a_scheduler_of_torch_comes_back_with_the_kinds_of_its_values() -> None:
    saved = through_json(read_extra_state(engine(scheduler(4))))
    assert saved["counters"] == {"global_steps": 0, "global_samples": 0, "skipped_steps": 0}
    other = scheduler(0)
    write_extra_state(engine(other), saved)
    wanted = scheduler(4).state_dict()
    assert other.state_dict() == wanted
    assert type(other.milestones) is type(scheduler(0).milestones), "a Counter with numbers as keys"


def test_scheduler_state_that_is_not_json_is_refused(message: Messages) -> None:
    wrong = SimpleNamespace(state_dict=lambda: {"lr_lambdas": [object()]})
    with pytest.raises(BuildError) as caught:
        read_extra_state(engine(wrong))
    message(caught, "SimpleNamespace", "object")


def test_a_dynamic_loss_scale_is_saved() -> None:
    before = SimpleNamespace(cur_scale=256.0, cur_iter=7, last_overflow_iter=-1, dynamic=True)
    saved = through_json(read_extra_state(engine(loss_scaler=before)))
    assert saved["loss_scale"] == {"cur_scale": 256.0, "cur_iter": 7, "last_overflow_iter": -1}
    after = SimpleNamespace(cur_scale=65536.0, cur_iter=0, last_overflow_iter=-1, dynamic=True)
    fresh = engine(loss_scaler=after)
    assert used_extra_state(fresh) == ["loss_scale", "counters"]
    write_extra_state(fresh, saved)
    assert (after.cur_scale, after.cur_iter) == (256.0, 7)
    fixed = engine(loss_scaler=SimpleNamespace(cur_scale=1.0, dynamic=False))
    assert used_extra_state(fixed) == ["counters"]
    assert "loss_scale" not in read_extra_state(fixed)
