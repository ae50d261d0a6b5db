"""The kit of dialects can fail: for every check there are bad dialects that it catches, and a good one passes all."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slapo_core.plugins import use_registry
from slapo_testing import (
    DIALECT_CHECKS,
    CheckError,
    DialectCase,
    FakeDistribution,
    FakeEnvironment,
    NotApplicable,
    parametrize_dialect_checks,
)
from tests.messages import Messages
from tests.support import kit_dialects as kit, kit_engines as engines
from tests.support.building import sgd
from tests.support.kit_primitives import prose
from tests.tiers import sampled

pytestmark = pytest.mark.ranks

CHECK = {check.name: check for check in DIALECT_CHECKS}
OPTIONS: dict[str, Any] = {"config": {"bucket": 3}, "rejects": [{"bucket": "many"}]}


def case(faulty: type, **options: Any) -> DialectCase:
    """A case of a dialect, or of the good dialect with another engine; one optimizer is enough to find a fault."""
    target = faulty if issubclass(faulty, kit.Good) else kit.WITH[faulty]
    return DialectCase(target, name=faulty.__name__, optimizers=[sgd], **OPTIONS, **options)


GOOD = [check.name for check in DIALECT_CHECKS if check.name not in ("entry_point_agrees", "light_import")]


@parametrize_dialect_checks([DialectCase(kit.Good, **OPTIONS)], checks=GOOD)
def test_a_good_dialect_passes(check: Any) -> None:
    check()


@pytest.mark.breadth
@parametrize_dialect_checks([DialectCase(kit.TakesTheTensors, name="takes_tensors", **OPTIONS)], checks=GOOD)
def test_a_good_dialect_with_tensors_of_its_own_passes(check: Any) -> None:
    check()


DP = {"meshes": [{"dp": 2}]}
TP = {"meshes": [{"tp": 2}]}

CAUGHT = [
    ("entry_point_agrees", case(kit.Good), "no installed distribution provides 'good'"),
    ("plan_changes_nothing", case(kit.CheckDraws), "torch's RNG state: advanced"),
    ("plan_changes_nothing", case(kit.PlanMarksTheModel), "planned: added (True)"),
    ("plan_changes_nothing", case(kit.PlanFillsInTheOptions), "the options given: {'bucket': 3} -> "),
    ("plan_is_the_same_again", case(kit.PlanCounts), "a different plan"),
    ("plan_is_the_same_again", case(kit.PlanForgetsDefaults), "lacks option 'bucket'"),
    ("plan_is_the_same_again", case(kit.PlanSaysNothing), "no list of actions"),
    ("unknown_option_is_refused", case(kit.IgnoresOptions), "no_such_option=1 was accepted"),
    ("unknown_option_is_refused", case(kit.RefusesWithoutWords), "does not name the option"),
    ("bad_options_are_refused", case(kit.AcceptsBadValues), "bucket='many' of rejects= was accepted"),
    ("bad_options_are_refused", case(kit.RaisesAnotherError), "by another error"),
    (
        "failed_build_changes_nothing",
        case(engines.SwallowsErrors),
        "swallows the error raised by the optimizer",
    ),
    ("failed_build_changes_nothing", case(kit.MarksTheModelFirst), "built_by: added ('good')"),
    ("failed_build_changes_nothing", case(engines.HidesErrors), "factory is lost"),
    ("wrong_optimizer_is_refused", case(engines.CallsTheFactory), "does not return an optimizer"),
    ("engine_has_every_member", case(engines.WithoutLoad), "the engine lacks load"),
    ("engine_has_every_member", case(engines.WithoutRank0Only), "state_dict() of the engine"),
    ("module_keeps_the_paths", case(engines.WrapsTheModule), "no 'up', 'act', 'down'"),
    (
        "without_optimizer_it_only_evaluates",
        case(engines.TrainsWithoutOptimizer),
        "without an optimizer is not refused",
    ),
    ("without_optimizer_it_only_evaluates", case(engines.RefusesWithoutWayOut), "is refused without a hint"),
    ("closed_engine_says_so", case(engines.StaysOpen), "closed engine is not refused"),
    ("closed_engine_says_so", case(engines.EndsTheProcessGroup), "close() destroys the caller's process group"),
    ("step_result_is_complete", case(engines.GivesTheGraph), "result of train_step()"),
    ("step_result_is_complete", case(engines.GivesANormAlways), "grad_norm=tensor(0.)"),
    ("training_is_that_of_the_plain_model", case(engines.KeepsGradients), "the loss of step 3: "),
    ("scheduled_model_trains_the_same", case(engines.TrainsKnownNamesOnly), "the loss of step 2: "),
    ("tied_weights_stay_tied", case(kit.Unties), "two layers that share a weight"),
    ("frozen_parameters_stay", case(kit.TrainsEverything), "with frozen parameters"),
    ("clipping_is_that_of_plain_training", case(engines.ClipsAfterTheStep), "with clipped gradients"),
    (
        "evaluation_mode_is_left_for_training",
        case(engines.TrainsInTheModeItFinds),
        "for a model in evaluation mode",
    ),
    (
        "evaluation_mode_is_left_for_training",
        case(engines.PutsEverythingIntoTrainingMode),
        "with a module in evaluation mode",
    ),
    (
        "accumulation_equals_the_full_batch_or_is_refused",
        case(engines.TakesTheBatchWhole),
        "accumulate=2 call the model 3 times",
    ),
    ("accumulation_equals_the_full_batch_or_is_refused", case(engines.SumsMicroBatches), "with accumulate=2"),
    ("learning_rate_is_scheduled_or_refused", case(engines.ForgetsTheScheduler), "with lr_scheduler="),
    ("loss_weights_count", case(engines.IgnoresTheWeights), "with loss_weight= and accumulate=2"),
    ("batches_of_every_type", case(engines.TakesMappingsOnly), "TypeError was raised"),
    ("labels_are_left_to_the_loss", case(engines.IgnoresTheLoss), "TypeError was raised"),
    ("eval_step_equals_the_plain_model", case(engines.KeepsTheGraph), "output: requires a gradient"),
    ("eval_step_equals_the_plain_model", case(engines.EvaluatesInTrainingMode), "the loss: "),
    ("eval_step_changes_nothing", case(engines.StaysInEvaluationMode), "the mode of modules"),
    ("eval_step_changes_nothing", case(engines.ForgetsTheModeOnErrors), "batch that the model does not take"),
    ("state_dict_is_the_reference_models", case(engines.GivesLiveNames), "got:      up.weight, up.bias, down.weight"),
    (
        "state_dict_is_the_reference_models",
        case(engines.GivesLiveTensors),
        "during further training",
    ),
    ("loaded_state_is_trained_on", case(engines.LoadsIntoNewParameters), "after load_state_dict()"),
    ("loaded_state_is_trained_on", case(engines.LoadsNothing), "differs from the state dict of load_state_dict()"),
    ("bad_state_dict_changes_nothing", case(engines.LoadsWhatFits), "without a tensor is not refused"),
    ("checkpoint_resumes_exactly", case(engines.SavesNoOptimizer), "resumed with sgd"),
    ("checkpoint_is_read_by_other_targets", case(engines.HasItsOwnFormat), "WeightsError was raised"),
    ("meta_model_is_given_its_values", case(kit.InitializesItself), "than for target 'torch'"),
    ("weights_are_read", case(kit.KeepsItsValues), "(from a mapping)"),
    ("unsupported_mesh_is_refused", case(kit.SupportsText), "supports is not a set"),
    ("replicas_train_as_one_process", case(engines.AveragesNothing, **DP), "replicas of 'up.weight' differ"),
    ("replicas_train_as_one_process", case(engines.EvaluatesOnTheFirstRank, **DP), "(evaluation)"),
    (
        "replicas_train_as_one_process",
        case(kit.InitializesByRank, **DP),
        "on the mesh {'dp': 2}, rank 1",
    ),
    ("replicas_train_as_one_process", case(engines.SavesOnItsOwn, **DP), "returns 7 tensors on rank 1"),
    (
        "split_model_trains_as_one_process",
        case(engines.ClipsByItself, **TP),
        "differ between ranks",
    ),
    (
        "diverged_replicas_are_found",
        case(engines.ComparesNothing, **DP),
        "check_replicas() does not name",
    ),
    (
        "diverged_replicas_are_found",
        case(engines.SavesElsewhere, **DP),
        "save() does not name",
    ),
    (
        "another_batch_on_a_rank_is_refused",
        case(engines.CallsTheModelItself, **TP),
        "is not refused on rank 0",
    ),
    (
        "failure_on_one_rank_ends_the_build_on_all",
        case(engines.MakesNoOptimizer, **DP),
        "is not refused correctly on rank 0",
    ),
    ("other_options_on_a_rank_are_refused", case(kit.PlanHidesValues, **DP), "another option on rank 1"),
]


@pytest.mark.parametrize(
    ("check", "case", "word"), sampled(CAUGHT), ids=[f"{c}-{case.label}" for c, case, _ in sampled(CAUGHT)]
)
def test_a_bad_dialect_is_caught(check: str, case: DialectCase, word: str, message: Messages) -> None:
    with pytest.raises(CheckError) as caught:
        CHECK[check](case)
    text = str(caught.value)
    assert word in text
    message(prose(text), f"{case} fails {check}: ")
    assert re.search(r"\n  required: .+\n  got:      .+\n(?s:.*)  hint:     .+", text), text


SHOWS_ELSEWHERE = {  # what is built, trained or saved wrongly is wrong wherever that is looked at
    "WithoutLoad",
    "KeepsGradients",
    "TakesMappingsOnly",
    "TrainsKnownNamesOnly",
    "GivesLiveNames",
    "SavesNoOptimizer",
    "InitializesItself",
}
ON_RANKS = {
    "unsupported_mesh_is_refused",
    "replicas_train_as_one_process",
    "split_model_trains_as_one_process",
    "diverged_replicas_are_found",
    "another_batch_on_a_rank_is_refused",
    "failure_on_one_rank_ends_the_build_on_all",
    "other_options_on_a_rank_are_refused",
}
NOT_ON_A_BENCH = {"entry_point_agrees", "light_import"}
FIRST = {check: case for check, case, _ in reversed(CAUGHT) if check not in ON_RANKS | NOT_ON_A_BENCH}


@pytest.mark.breadth
@pytest.mark.parametrize("check", [check for check, case in FIRST.items() if case.label not in SHOWS_ELSEWHERE])
def test_only_the_fitting_check_catches_a_fault(check: str) -> None:
    """None of the nine following checks does, each of which has faults of its own."""
    start = [*FIRST].index(check)
    tried = [*FIRST, *FIRST][start : start + 10]
    assert [name for name in tried if fails(CHECK[name], FIRST[check])] == [check]


def fails(check: Any, faulty: DialectCase) -> bool:
    try:
        check(faulty)
    except CheckError:
        return True
    except NotApplicable:
        return False
    return False


def test_every_check_has_a_negative_control() -> None:
    assert {check for check, _, _ in CAUGHT} | {"light_import"} == set(CHECK)


def dist(value: str, source: str = "") -> FakeDistribution:
    points = {"slapo.v1.dialects": {"good": value}}
    return FakeDistribution("good-dist", "1.0", points, {"good_dist": source}, ("slapo-core",))


def test_an_entry_point_that_agrees_passes(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(dist("tests.support.kit_dialects:Good"))
    with use_registry(fake_distributions.registry()):
        CHECK["entry_point_agrees"](case(kit.Good))


def test_an_entry_point_of_another_class_is_caught(fake_distributions: FakeEnvironment) -> None:
    source = "from tests.support.kit_dialects import Good\nclass Other(Good): pass\n"
    fake_distributions.install(dist("good_dist:Other", source))
    with use_registry(fake_distributions.registry()):
        with pytest.raises(CheckError) as caught:
            CHECK["entry_point_agrees"](case(kit.Good))
        assert "'good' of good-dist 1.0 loads another class" in str(caught.value)
        with pytest.raises(CheckError) as caught:
            CHECK["plan_changes_nothing"](case(kit.Good))
    assert "'good' is not the class of the case" in str(caught.value)


def test_an_import_that_is_not_light_is_caught(fake_distributions: FakeEnvironment) -> None:
    source = "print('hello')\nfrom tests.support.kit_dialects import Good\nclass Loud(Good): pass\n"
    (fake_distributions.directory / "loud_dialect.py").write_text(source)
    import loud_dialect

    with pytest.raises(CheckError, match="loud_dialect is not light"):
        CHECK["light_import"](DialectCase(loud_dialect.Loud))
