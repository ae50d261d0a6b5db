"""``find`` gives what brute force gives: random graphs and patterns.

More of them: ``python -m plugins.slapo-graph.tests.oracle.comparing 5000``.
"""

from __future__ import annotations

from typing import Any

import pytest

from slapo_graph.patterns import comparison, matcher

from .oracle.brute_force import forms
from .oracle.cases import Call, Case, Choice, random_case
from .oracle.comparing import compare

CASES = range(500)


def test_find_gives_what_brute_force_gives() -> None:
    results = [compare(seed) for seed in CASES]
    assert [result for result in results if isinstance(result, str)] == []
    found = [result for result in results if isinstance(result, int)]
    assert len(found) > 0.95 * len(CASES)  # few patterns are refused
    assert sum(result > 0 for result in found) > 0.4 * len(CASES)


def parts(case: Case) -> list[Any]:
    below: list[Any] = list(case.outputs)
    for value in below:
        below += value.operands if isinstance(value, Call) else getattr(value, "alternatives", ())
    return below


def test_oracle_cases_cover_the_pattern_language() -> None:
    counts = dict.fromkeys(("outputs", "shared", "getitem", "optional", "any_of", "any", "constant", "forms"), 0)
    for case in map(random_case, CASES):
        below = parts(case)
        calls = [value for value in below if isinstance(value, Call)]
        counts["outputs"] += len(case.outputs) > 1
        counts["shared"] += len(set(map(id, calls))) < len(calls)
        counts["getitem"] += any(call.operation == "getitem" for call in calls)
        counts["any"] += any(call.operation == "any" for call in calls)
        counts["constant"] += any(call.constant == "any constant" for call in calls)
        counts["optional"] += any(isinstance(value, Choice) and value.is_optional for value in below)
        counts["any_of"] += any(isinstance(value, Choice) and not value.is_optional for value in below)
        counts["forms"] += len(forms(case)) > 2
    assert min(counts.values()) >= 15, counts


BROKEN = {
    "commutative in one order": (matcher.AlternativeMatcher, "_orders", lambda was: lambda *args: was(*args)[:1]),
    "constants do not matter": (comparison, "_equal", lambda was: lambda *args: True),
    "wildcards do not matter": (matcher, "_is_one_value", lambda was: lambda *args: True),
    "nodes in two matches": (matcher.AlternativeMatcher, "first_at", lambda was: lambda *args: was(*args[:3], set())),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_brute_force_sees_a_wrong_find(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = BROKEN[fault]
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    assert any(isinstance(compare(seed), str) for seed in CASES)
