"""Where Megatron keeps weights and the optimizer's state: main parameters, shards, schedulers; faults are found."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_testing import preload_modules, run_ranks
from tests.integration.megatron.states import LOW, all_cases
from tests.messages import Messages

pytestmark = pytest.mark.ranks
preload_modules("slapo_tp")

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every case gave, by rank."""
    return run_ranks(all_cases, tmp_path_factory.mktemp("states"), world_size=2, timeout=1800)


@pytest.mark.parametrize("case", LOW)
def test_trained_state_round_trips(found: Found, case: str) -> None:
    dtype = str(LOW[case][2])
    for rank in found:
        one = rank[case]
        assert one["types"] == {dtype}, "those of the reference model"
        assert one["differing"] == [], "closed, loaded and resumed to the last bit"
        assert one["replicas"] == "fine"
        assert "torch.float32" in one["trained"], "main parameters"


def test_a_checkpoint_from_before_the_first_step_takes_the_state_away(found: Found) -> None:
    for rank in found:
        assert rank["before the first step"] == {form: [] for form in ("megatron dp2", "megatron dp2 distributed")}


def test_megatrons_own_optimizer_and_that_of_a_factory_load_from_each_other(found: Found) -> None:
    for rank in found:
        assert len(rank["own optimizer"]) == 3
        for told in rank["own optimizer"].values():
            assert told == ("fine", [])


def test_settings_of_groups_that_do_not_match_are_refused_or_said(found: Found, message: Messages) -> None:
    for case, *words in (
        ("one group into two", "scheduler", "weight_decay of group 1 = 0, not 0.1"),
        (
            "two groups into one",
            "BuildError: group 0 ",
            "'embedding.weight' and 'blocks.0.norm.weight'",
            "'weight_decay'",
        ),
        ("one group into two of a factory", "BuildError: groups 0 and 1 ", "'weight_decay' = 0.0 and 0.1"),
    ):
        (told,) = {rank["other groups"][case] for rank in found}
        message(told, *words)


def test_a_scheduler_goes_on_where_it_was(found: Found) -> None:
    for rank in found:
        wanted, resumed = rank["schedulers"]["rates"]
        assert resumed == wanted
        assert wanted[0] == (0.01, 0.01) > wanted[1], "the last one of the warm-up, the first one of the decay"
        told, longer, without, strict = rank["schedulers"]["told"]
        assert told == "fine"
        assert "lr_decay_steps = 9 (here 90)" in longer
        assert rank["schedulers"]["taken"] == 9
        assert without.endswith(": megatron_scheduler")
        assert strict.startswith("BuildError: Megatron refuses the scheduler")


def test_the_scale_of_the_loss_goes_on_where_it_was(found: Found) -> None:
    for rank in found:
        before, after = rank["scales"]["scale"]
        assert before == after < 2.0**24, "there were overflows"
        assert rank["scales"]["same"]
        assert rank["scales"]["told"] == "fine"


def test_misplaced_state_changes_training(found: Found) -> None:
    """The comparison that every other test here relies on."""
    for rank in found:
        assert rank["faults"]["nullcontext"] == ("fine", 0)
        text, differing = rank["faults"]["masters_left_alone"]
        assert "no longer matches its main copy" in text
        assert differing > 20
        text, differing = rank["faults"]["moments_of_another"]
        assert text == "fine"
        assert differing > 10, "only the next steps show it"


def test_changed_copies_are_named_and_mended(found: Found) -> None:
    for rank in found:
        assert len(rank["corrupted"]) == 4
        for what, (text, repaired, again, left) in rank["corrupted"].items():
            assert (again, left) == ("fine", [])
            assert repaired != "fine"
            assert text.startswith(("ReplicaError: ", "RankMismatchError: "))
            assert "'blocks.0.norm.weight::exp_avg'" in text if what == "a moment" else "'blocks.0.up.weight'" in text
        everywhere = rank["corrupted"]["megatron dp2, torch.bfloat16, on (0, 1)"][0]
        assert "no longer matches its main copy on ranks 0, 1: " in everywhere


def test_an_engine_ends_and_its_state_stays(found: Found) -> None:
    for rank in found:
        assert rank["ends"]["optimizer"] == (True, None, None)
        closed, without = rank["ends"]["steps"]
        assert closed.startswith("BuildError: the engine is closed")
        assert without.startswith("BuildError: this engine cannot train: ")
        assert rank["ends"]["differing"] == []


def test_a_state_without_names_is_trained_and_refused_where_it_would_be_saved(found: Found) -> None:
    for rank in found:
        unsaved, trained = rank["ends"]["unsaved"]
        assert trained == []
        for call, text in zip(("save", "load", "save_sharded"), unsaved, strict=True):
            assert text.startswith(f"BuildError: engine.{call}() cannot express the state"), text
            assert "dist_checkpointing" in text
