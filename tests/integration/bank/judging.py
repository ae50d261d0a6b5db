"""Whether the steps that an error names are the ones to blame."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slapo_core.errors import RankMismatchError, SlapoError
from tests.integration.bank.steps import Wrong

__all__ = ["blames_rightly"]

OTHERS = 2  # so many innocent steps may be named beside the guilty one


def blames_rightly(wrong: Wrong, made: Sequence[range], error: SlapoError, *, refused: int | None) -> bool:
    """Whether an error points at the mistake.

    - of a wrong step: it is among the steps named, with at most two others; or the one that left a partial sum;
    - of a missing one: all that are named stand at its pair of layers, or at most three of which one does, or the
      message suggests the call to add, at the right path;
    - of a change that no step made: the message says so, or names the place;
    - of ranks that disagree: the place is named.

    Args:
        wrong: the case.
        made: for each of its steps, the positions of the records it made.
        error: what was raised.
        refused: the position of the step that was refused; None if all were applied.
    """
    text = str(error)
    if wrong.anywhere:
        return True
    if any(_suggests(text, path, call) for path, call in wrong.add):
        return True
    if refused is not None:
        return refused in wrong.guilty or wrong.steps[refused].path in wrong.near or _mentions(text, wrong)
    if isinstance(error, RankMismatchError):
        return _mentions(text, wrong)
    named = {int(found.group(1)) - 1: found.group(2) for found in re.finditer(_RECORD, "\n".join(_steps(error, text)))}
    guilty = {position for number in wrong.guilty for position in made[number]}
    missing = [line for line in text.splitlines() if line.lstrip().startswith("missing: ")]
    if any(f"missing: #{position + 1} " in line for line in missing for position in guilty):
        return True
    if guilty & named.keys() and len(named.keys() - guilty) <= OTHERS:
        return True
    if wrong.outside and ("outside of the schedule" in text or _mentions(text, wrong)):
        return True
    if not wrong.near or not named:
        return False
    close = [path for path in named.values() if path in wrong.near]
    return len(close) == len(named) or (bool(close) and len(named) <= OTHERS + 1)


_RECORD = re.compile(r"#(\d+) [^\n]* at '([^']*)'")


def _suggests(text: str, path: str, call: str) -> bool:
    """Whether a text has a call at a path, or at a glob that selects it."""
    places = re.findall(rf"sch\['([^']*)'\]\.{re.escape(call)}", text)
    return any(re.fullmatch(re.escape(place).replace(r"\*", "[^.]*"), path) for place in places)


def _steps(error: SlapoError, text: str) -> Sequence[str]:
    steps = getattr(error, "steps", None)
    return steps if steps is not None else [line for line in text.splitlines() if "#" in line]


def _mentions(text: str, wrong: Wrong) -> bool:
    paths = (*wrong.near, *(wrong.steps[position].path for position in wrong.guilty))
    return any(f"'{path}'" in text or f"'{path}." in text for path in paths)
