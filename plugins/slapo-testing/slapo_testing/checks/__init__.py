"""List the checks in running order; checks that start processes are last."""

from __future__ import annotations

from slapo_testing.check import Check
from slapo_testing.checks.atomicity import (
    faults_roll_back,
    preconditions_mutate_nothing,
    rejected_cases_change_nothing,
    undo_is_exact,
)
from slapo_testing.checks.declarations import documentation, entry_point_agrees, json_round_trip, light_import
from slapo_testing.checks.equivalence import (
    deepcopy_runs_on_itself,
    forward_and_gradients_on_1_rank,
    forward_and_gradients_on_2_ranks,
    mesh_of_one_is_free,
)

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = tuple(
    Check(function)
    for function in (
        entry_point_agrees,
        documentation,
        json_round_trip,
        preconditions_mutate_nothing,
        rejected_cases_change_nothing,
        faults_roll_back,
        undo_is_exact,
        deepcopy_runs_on_itself,
        mesh_of_one_is_free,
        forward_and_gradients_on_1_rank,
        forward_and_gradients_on_2_ranks,
        light_import,
    )
)
