"""Settings of a checkpoint's groups go to the groups that can have them; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from slapo_core import BuildError
from slapo_runtime.weights.optimizer_groups import matched_settings
from tests.messages import Messages


def group(names: str, **settings: Any) -> dict[str, Any]:
    return {"params": names.split(), "hyperparameters": settings}


def matched(
    saved: list[dict[str, Any]],
    present: list[dict[str, Any]],
    *,
    states: str = "a b c",
    frozen: str = "",
    scheduled: Collection[str] = (),
) -> list[dict[str, Any]]:
    return matched_settings(saved, present, states=states.split(), frozen=frozen.split(), scheduled=scheduled)


def test_the_same_groups_take_the_settings_of_the_checkpoint() -> None:
    saved = [group("a b", lr=0.1), group("", lr=0.5), group("c", lr=0.2)]
    assert matched(saved, [group("b a", lr=1), group("", lr=2), group("c", lr=3)]) == [
        {"lr": 0.1},
        {"lr": 0.5},
        {"lr": 0.2},
    ]


def test_reordered_groups_take_the_settings_of_their_parameters() -> None:
    saved = [group("a b", lr=0.1), group("c", lr=0.2)]
    assert matched(saved, [group("c", lr=1), group("a b", lr=1)]) == [{"lr": 0.2}, {"lr": 0.1}]


def test_divided_groups_take_common_settings(message: Messages) -> None:
    saved = [group("a b c", lr=0.1, wd=0.0)]
    assert matched(saved, [group("a b", lr=1, wd=0.0), group("c", lr=1, wd=0.0)]) == [{"lr": 0.1, "wd": 0.0}] * 2
    with pytest.raises(BuildError) as error:
        matched(saved, [group("a b", lr=1, wd=0.3), group("c", lr=1, wd=0.0)])
    message(error, "groups 0 and 1", "'wd' = 0.3 and 0.0")
    apart = [group("a b", lr=1, wd=0.3), group("c", lr=1, wd=0.0)]
    assert matched(saved, apart, scheduled=("wd",)) == [{"lr": 0.1, "wd": 0.0}] * 2, (
        "the runtime says what becomes of it"
    )


def test_groups_that_were_joined_need_one_value(message: Messages) -> None:
    present = [group("a b c", lr=1)]
    assert matched([group("a b", lr=0.1), group("c", lr=0.1)], present) == [{"lr": 0.1}]
    with pytest.raises(BuildError) as error:
        matched([group("a b", lr=0.1), group("c", lr=0.2)], present, scheduled=("lr",))
    message(error, "'a' and 'c'", "'lr' = 0.1 for the first and 0.2")


def test_frozen_parameters_may_be_in_no_group() -> None:
    assert matched([group("a b", lr=0.1)], [group("a b frozen", lr=1)], frozen="frozen") == [{"lr": 0.1}]
    assert matched([group("a b frozen", lr=0.1)], [group("a b", lr=1)], states="a b") == [{"lr": 0.1}]


def test_other_parameters_are_refused(message: Messages) -> None:
    with pytest.raises(BuildError) as error:
        matched([group("a b", lr=0.1)], [group("b c", lr=1)])
    message(error, "only in the checkpoint: a", "only in this optimizer: c")
