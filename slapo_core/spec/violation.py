"""One reason why a primitive may not be applied, or did not take effect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """A broken rule, with the call that would keep it.

    Args:
        message: what, where, required, got; e.g. ``"axis 0 of 'weight' has 770 elements, not divisible by tp size 4"``.
        hint: the corrected argument or call, e.g. ``"axis=1 (768)"``.
        gradients_only: of ``slapo_check``: only gradients are wrong, so that an engine can evaluate nevertheless.
    """

    message: str
    hint: str | None = None
    gradients_only: bool = False

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}; {self.hint}"
