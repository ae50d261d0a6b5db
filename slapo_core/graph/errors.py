"""What the recording of a forward ends with where it cannot go on."""

from __future__ import annotations

from slapo_core.graph.location import Location

__all__ = ["NeedsValues", "Untraceable"]


class Untraceable(Exception):  # noqa: N818 - not an error of the user's; TraceError is
    """A forward does what a static graph cannot say.

    Args:
        problem: what it does, e.g. ``"branches on the values of a tensor"``.
        location: the line of the model.
        hint: what to try.
    """

    def __init__(self, problem: str, location: Location, hint: str | None = None) -> None:
        super().__init__(f"{problem} ({location[0]}:{location[1]})")
        self.problem, self.location, self.hint = problem, location, hint


class NeedsValues(Untraceable):
    """A forward does what a run on tensors without values cannot follow; one on real tensors may."""
