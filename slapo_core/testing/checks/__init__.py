"""The checks, in the order in which they are run: cheap ones first, those that start processes last."""

from __future__ import annotations

from slapo_core.testing.check import Check
from slapo_core.testing.checks.deep_copy import deepcopy_runs_on_itself
from slapo_core.testing.checks.documentation import documentation
from slapo_core.testing.checks.entry_point import entry_point_agrees
from slapo_core.testing.checks.faults import faults_roll_back
from slapo_core.testing.checks.json_round_trip import json_round_trip
from slapo_core.testing.checks.light_import import light_import
from slapo_core.testing.checks.mesh_of_one import mesh_of_one_is_free
from slapo_core.testing.checks.one_rank import forward_and_gradients_on_1_rank
from slapo_core.testing.checks.preconditions import preconditions_mutate_nothing
from slapo_core.testing.checks.rejections import rejected_cases_change_nothing
from slapo_core.testing.checks.two_ranks import forward_and_gradients_on_2_ranks
from slapo_core.testing.checks.undo import undo_is_exact

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
