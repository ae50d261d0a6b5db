"""`parametrize_checks`: one pytest test for every check of every case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError
from slapo_core.testing.case import Case

if TYPE_CHECKING:
    from slapo_core.testing.check import Check

__all__ = ["BoundCheck", "case_labels", "parametrize_checks"]


@dataclass(frozen=True)
class BoundCheck:
    """A check with the case to run it on; call it."""

    check: Check
    case: Case

    def __call__(self) -> None:
        """Run the check; where the case gives it nothing to look at, the test is skipped with the reason."""
        import pytest

        from slapo_core.testing.check import NotApplicable

        __tracebackhide__ = True
        try:
            self.check(self.case)
        except NotApplicable as reason:
            pytest.skip(str(reason))

    def __repr__(self) -> str:
        return f"{self.check.name}({self.case})"


def parametrize_checks(cases: Iterable[Case], *, checks: Iterable[str] | None = None) -> Callable[[Any], Any]:
    """Give a test function one argument, ``check``, and run it once for every check of every case.

    Example::

        @parametrize_checks([Case(Freeze("weight"), model=lambda: nn.Linear(4, 4), inputs=lambda: torch.randn(2, 4))])
        def test_freeze(check):
            check()

    Args:
        cases: at least one.
        checks: names of the checks to run; default: all of ``slapo_core.testing.CHECKS``.

    Raises:
        ArgumentError: no case, something that is no `Case`, or an unknown check.
    """
    import pytest

    listed, chosen = list(cases), select_checks(checks)
    if not listed:
        raise ArgumentError("parametrize_checks needs at least one Case", hint="parametrize_checks([Case(...)])")
    for case in listed:
        if not isinstance(case, Case):
            raise ArgumentError(f"parametrize_checks takes Case objects (got {case!r})", hint="Case(Freeze(...), ...)")
    parameters = [
        pytest.param(BoundCheck(check, case), id=f"{label}-{check.name}")
        for label, case in zip(case_labels(listed), listed, strict=True)
        for check in chosen
    ]
    return pytest.mark.parametrize("check", parameters)


def select_checks(names: Iterable[str] | None) -> tuple[Check, ...]:
    """The checks of these names, in the order in which they are run; None selects all.

    Raises:
        ArgumentError: there is no check of that name.
    """
    from slapo_core.testing.checks import CHECKS

    if names is None:
        return CHECKS
    wanted = set(names)
    unknown = sorted(wanted - {check.name for check in CHECKS})
    if unknown:
        raise ArgumentError(f"there is no check '{unknown[0]}'", hint=", ".join(check.name for check in CHECKS))
    return tuple(check for check in CHECKS if check.name in wanted)


def case_labels(cases: Iterable[Case]) -> list[str]:
    """The label of each case; the second and later ones of the same label are numbered: ``freeze``, ``freeze-2``."""
    seen: Counter[str] = Counter()
    labels = []
    for case in cases:
        label = case.label
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label}-{seen[label]}")
    return labels
