"""List the checks of dialects in running order; checks that start processes are last."""

from __future__ import annotations

import functools
from collections.abc import Callable

from slapo_testing.check import Check, NotApplicable
from slapo_testing.dialects.bench import DialectBench, open_bench
from slapo_testing.dialects.case import DialectCase
from slapo_testing.dialects.checks.building import (
    bad_options_are_refused,
    closed_engine_says_so,
    engine_has_every_member,
    entry_point_agrees,
    failed_build_changes_nothing,
    light_import,
    module_keeps_the_paths,
    plan_changes_nothing,
    plan_is_the_same_again,
    unknown_option_is_refused,
    without_optimizer_it_only_evaluates,
    wrong_optimizer_is_refused,
)
from slapo_testing.dialects.checks.ranks import (
    another_batch_on_a_rank_is_refused,
    diverged_replicas_are_found,
    failure_on_one_rank_ends_the_build_on_all,
    other_options_on_a_rank_are_refused,
    replicas_train_as_one_process,
    split_model_trains_as_one_process,
    unsupported_mesh_is_refused,
)
from slapo_testing.dialects.checks.state import (
    bad_state_dict_changes_nothing,
    checkpoint_is_read_by_other_targets,
    checkpoint_resumes_exactly,
    loaded_state_is_trained_on,
    meta_model_is_given_its_values,
    state_dict_is_the_reference_models,
    weights_are_read,
)
from slapo_testing.dialects.checks.training import (
    accumulation_equals_the_full_batch_or_is_refused,
    batches_of_every_type,
    clipping_is_that_of_plain_training,
    eval_step_changes_nothing,
    eval_step_equals_the_plain_model,
    evaluation_mode_is_left_for_training,
    frozen_parameters_stay,
    labels_are_left_to_the_loss,
    learning_rate_is_scheduled_or_refused,
    loss_weights_count,
    scheduled_model_trains_the_same,
    step_result_is_complete,
    tied_weights_stay_tied,
    training_is_that_of_the_plain_model,
)

__all__ = ["DIALECT_CHECKS"]


def _check(function: Callable[[DialectBench], None]) -> Check[DialectCase]:
    @functools.wraps(function)
    def run(case: DialectCase) -> None:
        if case.unavailable is not None and function not in _WITHOUT_ENGINES:
            raise NotApplicable(case.unavailable)
        with open_bench(case) as bench:
            function(bench)

    return Check(run)


_WITHOUT_ENGINES = (plan_changes_nothing, plan_is_the_same_again, unknown_option_is_refused, bad_options_are_refused)
_ON_A_BENCH = (
    plan_changes_nothing,
    plan_is_the_same_again,
    unknown_option_is_refused,
    bad_options_are_refused,
    failed_build_changes_nothing,
    wrong_optimizer_is_refused,
    engine_has_every_member,
    module_keeps_the_paths,
    without_optimizer_it_only_evaluates,
    closed_engine_says_so,
    step_result_is_complete,
    training_is_that_of_the_plain_model,
    scheduled_model_trains_the_same,
    tied_weights_stay_tied,
    frozen_parameters_stay,
    clipping_is_that_of_plain_training,
    evaluation_mode_is_left_for_training,
    accumulation_equals_the_full_batch_or_is_refused,
    learning_rate_is_scheduled_or_refused,
    loss_weights_count,
    batches_of_every_type,
    labels_are_left_to_the_loss,
    eval_step_equals_the_plain_model,
    eval_step_changes_nothing,
    state_dict_is_the_reference_models,
    loaded_state_is_trained_on,
    bad_state_dict_changes_nothing,
    checkpoint_resumes_exactly,
    checkpoint_is_read_by_other_targets,
    meta_model_is_given_its_values,
    weights_are_read,
    unsupported_mesh_is_refused,
    replicas_train_as_one_process,
    split_model_trains_as_one_process,
    diverged_replicas_are_found,
    another_batch_on_a_rank_is_refused,
    failure_on_one_rank_ends_the_build_on_all,
    other_options_on_a_rank_are_refused,
)

DIALECT_CHECKS: tuple[Check[DialectCase], ...] = (
    Check(entry_point_agrees),
    *map(_check, _ON_A_BENCH),
    Check(light_import),
)
