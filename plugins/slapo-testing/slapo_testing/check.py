"""Define checks, and the error of a plugin that fails one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

CaseT = TypeVar("CaseT")
"""The subject of a check: a `Case` of a primitive, a `DialectCase` of a dialect."""


class CheckError(AssertionError):
    """A primitive or dialect does not keep a promise that all of its kind make.

    Args:
        violation: the mistake.
        required: the required result.
        got: the result found instead.
        hint: the code that keeps the promise.
    """

    def __init__(self, violation: str, *, required: str, got: str, hint: str) -> None:
        self.violation, self.required, self.got, self.hint = violation, required, got, hint
        self.check: str | None = None
        self.case: str | None = None
        super().__init__(violation)

    def __str__(self) -> str:
        subject = f"{self.case} fails {self.check}: " if self.check else ""
        got = self.got.replace("\n", "\n            ")
        return f"{subject}{self.violation}\n  required: {self.required}\n  got:      {got}\n  way out:  {self.hint}"


class NotApplicable(Exception):  # noqa: N818 - an outcome, not an error
    """A check has nothing to look at in this case; the text says why. In pytest the test is skipped."""


@dataclass(frozen=True)
class Check(Generic[CaseT]):
    """One promise that every primitive, or every dialect, makes, as something to run.

    Args:
        function: raises `CheckError` where the promise is not kept, `NotApplicable` where there is nothing to see.
    """

    function: Callable[[CaseT], None]

    @property
    def name(self) -> str:
        """E.g. ``"undo_is_exact"``."""
        return self.function.__name__

    @property
    def description(self) -> str:
        """One line."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    def __call__(self, case: CaseT) -> None:
        """Run the check.

        Raises:
            CheckError: the promise is not kept, or the plugin raised where it must not; the cause is chained.
            NotApplicable: the case gives the check nothing to look at.
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
                hint="the chained traceback shows where; if the case is wrong, correct its arguments",
            )
            unexpected.check, unexpected.case = self.name, str(case)
            raise unexpected from cause
