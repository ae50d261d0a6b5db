"""`parametrize_checks` and `parametrize_dialect_checks`: a pytest test for each check and case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from slapo_core.errors import ArgumentError
from slapo_testing.case import Case
from slapo_testing.check import Check, NotApplicable

if TYPE_CHECKING:
    from slapo_testing.dialects.case import DialectCase


class _Labeled(Protocol):
    @property
    def label(self) -> str: ...


CaseT = TypeVar("CaseT", bound=_Labeled)


@dataclass(frozen=True)
class BoundCheck(Generic[CaseT]):
    """A check bound to a case; call it."""

    check: Check[CaseT]
    case: CaseT

    def __call__(self) -> None:
        """Run the check; skip the test, with the reason, if it does not apply."""
        import pytest

        __tracebackhide__ = True
        try:
            self.check(self.case)
        except NotApplicable as reason:
            pytest.skip(str(reason))

    def __repr__(self) -> str:
        return f"{self.check.name}({self.case})"


def parametrize_checks(cases: Iterable[Case], *, checks: Iterable[str] | None = None) -> Callable[[Any], Any]:
    """Parametrize a test function by ``check``, for each check of each case.

    Example::

        @parametrize_checks([Case(Freeze("weight"), model=lambda: nn.Linear(4, 4), inputs=lambda: torch.randn(2, 4))])
        def test_freeze(check):
            check()

    Args:
        cases: at least one.
        checks: names of the checks to run; default: all of ``slapo_testing.CHECKS``.

    Raises:
        ArgumentError: no case, an object that is not a `Case`, or an unknown check.
    """
    from slapo_testing.checks import CHECKS

    listed = _require_cases("parametrize_checks", cases, Case, example="Freeze(...), ...")
    return _parametrize(listed, _select(CHECKS, checks))


def parametrize_dialect_checks(
    cases: Iterable[DialectCase], *, checks: Iterable[str] | None = None
) -> Callable[[Any], Any]:
    """Parametrize a test by dialect checks, as :func:`parametrize_checks`.

    Example::

        @parametrize_dialect_checks([DialectCase("accumulate", config={"micro_batches": 3})])
        def test_accumulate(check):
            check()

    Args:
        cases: at least one.
        checks: names of the checks to run; default: all of ``slapo_testing.DIALECT_CHECKS``.

    Raises:
        ArgumentError: no case, an object that is not a `DialectCase`, or an unknown check.
    """
    from slapo_testing.dialects.case import DialectCase
    from slapo_testing.dialects.checks import DIALECT_CHECKS

    listed = _require_cases("parametrize_dialect_checks", cases, DialectCase, example='"mine"')
    return _parametrize(listed, _select(DIALECT_CHECKS, checks))


def case_labels(cases: Iterable[_Labeled]) -> list[str]:
    """Return the label of each case; repeated labels are numbered: ``freeze``, ``freeze-2``."""
    seen: Counter[str] = Counter()
    labels = []
    for case in cases:
        label = case.label
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label}-{seen[label]}")
    return labels


def _require_cases(function: str, cases: Iterable[CaseT], kind: type[CaseT], *, example: str) -> list[CaseT]:
    listed, name = list(cases), kind.__name__
    if not listed:
        raise ArgumentError(f"{function} needs at least one {name}", hint=f"{function}([{name}(...)])")
    for case in listed:
        if not isinstance(case, kind):
            raise ArgumentError(f"{function} takes {name} objects (got {case!r})", hint=f"{name}({example})")
    return listed


def _select(checks: Sequence[Check[CaseT]], names: Iterable[str] | None) -> Sequence[Check[CaseT]]:
    """Return the checks with these names, in running order; None selects all."""
    if names is None:
        return checks
    wanted = set(names)
    unknown = sorted(wanted - {check.name for check in checks})
    if unknown:
        raise ArgumentError(f"unknown check '{unknown[0]}'", hint=", ".join(check.name for check in checks))
    return [check for check in checks if check.name in wanted]


def _parametrize(cases: Sequence[CaseT], checks: Sequence[Check[CaseT]]) -> Callable[[Any], Any]:
    import pytest

    parameters = [
        pytest.param(BoundCheck(check, case), id=f"{label}-{check.name}")
        for label, case in zip(case_labels(cases), cases, strict=True)
        for check in checks
    ]
    return pytest.mark.parametrize("check", parameters)
