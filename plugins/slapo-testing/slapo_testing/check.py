"""Checks, and the error of a failed check."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

CaseT = TypeVar("CaseT")
"""The subject of a check: a `Case` or a `DialectCase`."""


class CheckError(AssertionError):
    """A primitive or dialect breaks a promise of its kind.

    Args:
        violation: the mistake.
        required: the required result.
        got: the actual result.
        hint: the correction.
    """

    def __init__(self, violation: str, *, required: str, got: str, hint: str) -> None:
        self.violation, self.required, self.got, self.hint = violation, required, got, hint
        self.check: str | None = None
        self.case: str | None = None
        super().__init__(violation)

    def __str__(self) -> str:
        subject = f"{self.case} fails {self.check}: " if self.check else ""
        got = self.got.replace("\n", "\n            ")
        return f"{subject}{self.violation}\n  required: {self.required}\n  got:      {got}\n  hint:     {self.hint}"


class NotApplicable(Exception):  # noqa: N818 - an outcome, not an error
    """A check does not apply to a case, with the reason; pytest skips the test."""


@dataclass(frozen=True)
class Check(Generic[CaseT]):
    """A check of one promise of all primitives or all dialects.

    Args:
        function: raises `CheckError` for a broken promise, `NotApplicable` if the case does not apply.
    """

    function: Callable[[CaseT], None]

    @property
    def name(self) -> str:
        """Name of the check, e.g. ``"undo_is_exact"``."""
        return self.function.__name__

    @property
    def description(self) -> str:
        """First line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    def __call__(self, case: CaseT) -> None:
        """Run the check.

        Raises:
            CheckError: a broken promise, or an unexpected exception, which is chained.
            NotApplicable: the check does not apply to the case.
        """
        try:
            self.function(case)
        except CheckError as error:
            error.check, error.case = self.name, str(case)
            raise
        except NotApplicable:
            raise
        except Exception as cause:
            unexpected = CheckError(
                f"{type(cause).__name__} was raised",
                required=self.description,
                got=str(cause),
                hint="see the chained traceback; if the case is wrong, correct its arguments",
            )
            unexpected.check, unexpected.case = self.name, str(case)
            raise unexpected from cause
