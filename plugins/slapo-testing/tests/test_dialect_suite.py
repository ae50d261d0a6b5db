"""The kit of dialects in use: target "torch" passes it, and its cases say what they need."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import (
    DIALECT_CHECKS,
    CheckError,
    DialectCase,
    FakeDistribution,
    FakeEnvironment,
    NotApplicable,
    parametrize_checks,
    parametrize_dialect_checks,
)
from slapo_testing.conformance import check_plugin
from tests.messages import Messages
from tests.support import kit_dialects as kit
from tests.support.building import gpt2

pytestmark = pytest.mark.ranks

CHECK = {check.name: check for check in DIALECT_CHECKS}
ON_RANKS = {
    "unsupported_mesh_is_refused",
    "replicas_train_as_one_process",
    "split_model_trains_as_one_process",
    "diverged_replicas_are_found",
    "another_batch_on_a_rank_is_refused",
    "failure_on_one_rank_ends_the_build_on_all",
    "other_options_on_a_rank_are_refused",
}


@parametrize_dialect_checks([DialectCase("torch", config={"bucket_cap_mb": 1}, rejects=[{"bucket_size": 1}])])
def test_torch(check: Any) -> None:
    check()


def gpt2_without_cache() -> nn.Module:
    model = gpt2()
    model.config.use_cache = False  # type: ignore[union-attr]
    return model


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(96, (4, 8))
    return {"input_ids": ids, "labels": ids}


def checkpoint_layers(sch: Any) -> None:
    sch["transformer.h.*"].checkpoint()


@parametrize_dialect_checks(
    [DialectCase("torch", model=gpt2_without_cache, batch=tokens, schedule=checkpoint_layers, name="gpt2")],
    checks=set(CHECK) - ON_RANKS - {"light_import"},
)
def test_a_model_of_transformers_with_dropout_and_tied_weights(check: Any) -> None:
    check()


@pytest.mark.breadth
@parametrize_dialect_checks([DialectCase("torch", dtype=torch.float32)], checks=set(CHECK) - ON_RANKS)
def test_single_precision(check: Any) -> None:
    check()


WITHOUT_ENGINES = {
    "bad_options_are_refused",
    "entry_point_agrees",
    "light_import",
    "plan_changes_nothing",
    "plan_is_the_same_again",
    "unknown_option_is_refused",
}


def test_checks_without_engines_run_where_engines_cannot() -> None:
    case = DialectCase("torch", rejects=[{"bucket_size": 1}], unavailable="there is no GPU here")
    done, told = set(), set()
    for name in set(CHECK) - {"light_import"}:
        try:
            CHECK[name](case)
            done.add(name)
        except NotApplicable as reason:
            told.add(str(reason))
    assert done == WITHOUT_ENGINES - {"light_import"}
    assert told == {"there is no GPU here"}
    with pytest.raises(CheckError, match="was accepted"):
        CHECK["bad_options_are_refused"](dataclasses.replace(case, rejects=[{"bucket_cap_mb": 1}]))


# -- cases ----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str, str]] = {
    "target": (nn.Linear, "got <class 'torch.nn.modules.linear.Linear'>", 'DialectCase("torch")'),
    "rejects": ({"bucket": 0}, "got {'bucket': 0}", "rejects=[{'bucket': 0}]"),
    "model": (nn.Linear(2, 2), "got a Linear", "model=lambda: ..."),
    "batch": (torch.ones(2), "got a Tensor", "batch=lambda: ..."),
    "optimizers": ((), "got ()", "optimizers=[make_adamw]"),
    "meshes": ([{"data": 2}], "got {'data': 2}", 'meshes=[{"dp": 2}]'),
}


@pytest.mark.parametrize("field", REFUSED)
def test_invalid_cases_are_refused_with_the_call(field: str, message: Messages) -> None:
    value, word, hint = REFUSED[field]
    with pytest.raises(slapo.ArgumentError) as caught:
        DialectCase(**{"target": "torch", field: value})
    message(caught, f"DialectCase: {field} ", word)
    assert caught.value.hint == hint


def test_case_shows_its_dialect_and_options() -> None:
    assert (DialectCase("torch").label, str(DialectCase("torch"))) == ("torch", "target 'torch'")
    case = DialectCase(kit.Good, config={"bucket": 3}, name="mine")
    assert (case.label, str(case)) == ("mine", "target 'good' with bucket=3")


def test_kits_refuse_each_others_cases(message: Messages) -> None:
    with pytest.raises(slapo.ArgumentError) as caught:
        parametrize_dialect_checks([])
    message(caught, "parametrize_dialect_checks", "at least one DialectCase")
    with pytest.raises(slapo.ArgumentError, match=r"^parametrize_dialect_checks takes DialectCase "):
        parametrize_dialect_checks(["torch"])  # type: ignore[list-item]
    with pytest.raises(slapo.ArgumentError, match=r"^parametrize_checks takes Case "):
        parametrize_checks([DialectCase("torch")])  # type: ignore[list-item]
    with pytest.raises(slapo.ArgumentError, match="unknown check 'undo_is_exact'") as caught:
        parametrize_dialect_checks([DialectCase("torch")], checks=["undo_is_exact"])
    assert str(caught.value.hint).startswith("entry_point_agrees, ")


SKIPPED = {
    "scheduled_model_trains_the_same": "no schedule=",
    "bad_options_are_refused": "no rejects=",
    "replicas_train_as_one_process": "none of the case",
    "failure_on_one_rank_ends_the_build_on_all": "no meshes=",
    "other_options_on_a_rank_are_refused": "no meshes=",
}


@pytest.mark.parametrize("check", SKIPPED)
def test_checks_that_do_not_apply_have_a_reason(check: str, message: Messages) -> None:
    with pytest.raises(NotApplicable) as caught:
        CHECK[check](DialectCase("torch", model=gpt2, batch=tokens, meshes=[]))
    message(caught, SKIPPED[check])


class Handmade(nn.Module):
    """Its parameter is filled by the constructor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(x @ self.weight, y)


def test_uninitializable_model_is_not_a_fault_of_the_dialect() -> None:
    case = DialectCase("torch", model=Handmade)
    with pytest.raises(NotApplicable, match="initialized on the meta device"):
        CHECK["meta_model_is_given_its_values"](case)
    CHECK["weights_are_read"](case)
    CHECK["failed_build_changes_nothing"](case)


def test_runtime_gets_the_process_group_that_it_needs() -> None:
    check = CHECK["training_is_that_of_the_plain_model"]
    with pytest.raises(CheckError, match="process group has not"):
        check(DialectCase(kit.NeedsAGroup))
    check(DialectCase(kit.NeedsAGroup, needs_process_group=True))
    assert not torch.distributed.is_initialized()


def test_fields_that_cannot_be_pickled_are_named(message: Messages) -> None:
    with pytest.raises(CheckError) as caught:
        CHECK["replicas_train_as_one_process"](DialectCase("torch", schedule=lambda sch: None))
    # What it got instead is in words of pickle's, which differ from version to version.
    message(str(caught.value).partition("  got: ")[0], "target 'torch'", "replicas_train_as_one_process", "schedule")


def test_failure_of_one_task_on_ranks_does_not_hide_others() -> None:
    case = DialectCase(kit.AveragesOnOneRankOnly, meshes=[{"dp": 2}])
    with pytest.raises(CheckError) as caught:
        CHECK["replicas_train_as_one_process"](case)
    assert "the mesh {'dp': 2}\n" in str(caught.value)
    assert "ZeroDivisionError: rank 1 is not thought of" in str(caught.value)
    CHECK["unsupported_mesh_is_refused"](case)


# -- slapo plugins check --------------------------------------------------------------------------------------

MINE = """
from tests.support.kit_dialects import Good


class Mine(Good):
    name = "mine"
"""

CASES = """

def slapo_cases():
    from slapo_testing import DialectCase

    return [DialectCase(Mine, config={"bucket": 3})]
"""


def mine(source: str) -> FakeDistribution:
    points = {"slapo.v1.dialects": {"mine": "slapo_mine:Mine"}}
    return FakeDistribution("slapo-mine", "1.0", points, {"slapo_mine": source}, ("slapo-core>=0.1",))


def test_shipped_cases_of_a_dialect_run(fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_distributions.install(mine(MINE + CASES))
    few = ("entry_point_agrees", "plan_is_the_same_again", "bad_options_are_refused", "light_import")
    monkeypatch.setattr("slapo_testing.conformance.DIALECT_CHECKS", [CHECK[name] for name in few])
    registry = fake_distributions.registry(with_installed=True)
    plugin = registry.plugin("slapo-mine")
    assert plugin is not None
    assert [f"{item.subject}: {item.check}: {item.outcome}" for item in check_plugin(plugin, registry)] == [
        "slapo-mine: state: passed",
        "slapo-mine: light_import: passed",
        "mine: load: passed",
        "mine [mine]: entry_point_agrees: passed",
        "mine [mine]: plan_is_the_same_again: passed",
        "mine [mine]: bad_options_are_refused: skipped",
    ]


def test_dialect_without_cases_is_reported_as_unchecked(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(mine(MINE))
    registry = fake_distributions.registry()
    last = list(check_plugin(registry.plugins[0], registry))[-1]
    assert (last.subject, last.check, last.outcome) == ("mine", "cases", "skipped")
    message(last.message, "slapo_mine", "slapo_cases()")
