"""Where DeepSpeed keeps weights and the optimizer's state: masters, partitions, schedulers; what is wrong is found."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_testing import preload_modules, run_ranks
from tests.integration.deepspeed.states import IN_BFLOAT16, LOW, all_cases
from tests.messages import Messages

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "slapo_tp", "slapo_pipeline")

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every case gave, by rank."""
    return run_ranks(all_cases, tmp_path_factory.mktemp("states"), world_size=2, timeout=1800)


@pytest.mark.parametrize("case", LOW)
def test_masters_are_what_is_saved_and_loaded(found: Found, case: str) -> None:
    for rank in found:
        one, is_low = rank[case].get(), case in IN_BFLOAT16
        assert one["types"] == {"torch.bfloat16" if is_low else "torch.float32"}, "those of the reference model"
        assert one["differing"] == [], "closed, loaded and resumed to the last bit"
        assert one["replicas"] == "fine"
        assert one["rounded"] == is_low, "masters are given, not what the forward rounds them to"
        assert "torch.float32" in one["trained"]


def test_a_scheduler_goes_on_where_it_was(found: Found) -> None:
    for rank in found:
        wanted, resumed = rank["schedulers"]["rates"]
        assert wanted == resumed
        assert wanted[0] < wanted[1] < 0.02
        assert rank["schedulers"]["steps"] == [4, 4]
        told, without, torch_told, cold = rank["schedulers"]["told"]
        assert told == "fine"
        for text in (without, torch_told):
            assert "ignored, unknown to this engine" in text
            assert text.endswith(": lr_scheduler")
        assert "no state of a learning-rate scheduler" in cold
        assert "WarmupLR" in cold


def test_a_checkpoint_from_before_the_first_step_takes_the_state_away(found: Found) -> None:
    for rank in found:
        assert rank["before the first step"] == {form: [] for form in ("ZeRO-0 dp2", "ZeRO-1 dp2", "ZeRO-3 dp2")}


def test_deepspeeds_own_optimizer_and_that_of_a_factory_load_from_each_other(found: Found) -> None:
    for rank in found:
        assert rank["own optimizer"] == {"ZeRO-3 dp2": [], "torch tp2": []}


def test_numbers_of_steps_that_one_flat_tensor_cannot_hold(found: Found, message: Messages) -> None:
    ((text, is_unchanged),) = {rank["steps"]["late"] for rank in found}
    message(text, "BuildError: ", "2.0 for 'embedding.weight'", "5.0 for 'blocks.2.norm.weight'")
    assert is_unchanged
    ((text, is_unchanged),) = {rank["steps"]["never"] for rank in found}
    message(text, "no optimizer state", "blocks.2.norm.weight")
    assert not is_unchanged


def test_misplaced_state_changes_training(found: Found) -> None:
    """The comparison that every other test here relies on."""
    for rank in found:
        faults = rank["faults"].get()
        assert faults["nullcontext"] == ("fine", 0)
        text, differing = faults["masters_left_alone"]
        assert text.startswith("RankMismatchError: 'embedding.weight' no longer matches ")
        assert differing > 20
        assert faults["moments_of_another"] == ("fine", 22), "only the next steps show it"


def test_changed_copies_are_named_and_mended(found: Found) -> None:
    name = "blocks.0.up.weight"
    for rank in found:
        for what, (text, repaired, again, left) in rank["corrupted"].items():
            assert (repaired, again, left) == (repaired, "fine", [])
            assert text.startswith(("ReplicaError: ", "RankMismatchError: "))
            assert repaired != "fine"
            assert "'blocks.0.norm.weight::exp_avg'" in text if "moment" in what else f"'{name}'" in text
        everywhere = rank["corrupted"]["ZeRO-1 dp2 on (0, 1)"][0]
        assert "no longer matches its main copy" in everywhere
        assert "next optimizer step will overwrite it" in everywhere


def test_an_engine_ends_and_its_state_stays(found: Found) -> None:
    for rank in found:
        assert rank["ends"]["optimizer"] == (True, None, None)
        closed, without = rank["ends"]["steps"]
        assert closed.startswith("BuildError: the engine is closed")
        assert without.startswith("BuildError: this engine cannot train: ")
        assert rank["ends"]["evaluated"] == []
