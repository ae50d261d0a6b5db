"""The docstring of a primitive: what users read in the REPL, in the stubs and in ``slapo primitives NAME``."""

from __future__ import annotations

import dataclasses
import inspect
import re

from slapo_core.testing.case import Case
from slapo_core.testing.check import CheckError

__all__ = ["documentation", "documentation_violations"]


def documentation(case: Case) -> None:
    """The docstring is a sentence, tells every argument, and shows the rewrite."""
    cls = type(case.value())
    violations = documentation_violations(cls)
    if violations:
        raise CheckError(
            f"the docstring of {cls.__qualname__} is incomplete",
            required="a first line that is a sentence, 'name: text' for every field, 'rewrite: before -> after'",
            got="; ".join(violations),
            hint=f"complete the docstring in {cls.__module__}; `slapo primitives core.checkpoint` shows a complete one",
        )


def documentation_violations(cls: type) -> list[str]:
    """What is missing in the docstring of a primitive's class, in words."""
    own = vars(cls).get("__doc__")
    # A dataclass without a docstring is given its signature as one.
    if not own or own.startswith(f"{cls.__name__}("):
        return ["it has no docstring"]
    text = inspect.cleandoc(own)
    violations = []
    first = text.partition("\n")[0].strip()
    if not re.match(r"[^\W\d_]", first) or not first.endswith(".") or len(first.split()) < 2:
        violations.append(f"the first line is no sentence: {first!r}")
    undocumented = [field.name for field in dataclasses.fields(cls) if not _tells(text, field.name.rstrip("_"))]
    if undocumented:
        violations.append(f"no 'name: text' for {', '.join(map(repr, undocumented))}")
    rewrite = re.search(r"^\s*rewrite:(.*)", text, flags=re.MULTILINE | re.DOTALL)
    if rewrite is None:
        violations.append("there is no 'rewrite:' block")
    elif not re.search(r"\S\s*->\s*\S", rewrite[1].strip().partition("\n\n")[0]):
        violations.append("the 'rewrite:' block shows no 'before -> after'")
    return violations


def _tells(text: str, field: str) -> bool:
    return (
        re.search(rf"^[ \t]+{re.escape(field)}(?:\s*\([^)\n]*\))?:[ \t]*\n?[ \t]*[^\s:]", text, re.MULTILINE)
        is not None
    )
