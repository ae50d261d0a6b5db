"""A configuration in the making: what the user gave, and what was filled in, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slapo_core import BuildError
from slapo_deepspeed.config.facts import Facts
from slapo_deepspeed.config.reading import Source

__all__ = ["AUTO", "Draft"]

AUTO = "auto"
"""What configurations for transformers' Trainer say where a value is to be filled in."""


@dataclass
class Draft:
    """Values are found and set by keys with dots, e.g. ``"zero_optimization.stage"``.

    Args:
        config: a copy of the user's, which is filled in.
        source: where it comes from.
        facts: what the schedule and the arguments of ``build`` say.
        origins: key -> why it was filled in.
    """

    config: dict[str, Any]
    source: Source
    facts: Facts
    origins: dict[str, str] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The value; None where there is none, and where it is to be filled in ("auto").

        Raises:
            BuildError: something on the way is no object.
        """
        value: Any = self.config
        for number, name in enumerate(names := key.split(".")):
            if value is None:
                return None
            if not isinstance(value, dict):
                place = ".".join(names[:number])
                raise BuildError(f"{self.source.of(place)} must be an object, {{...}} (got {value!r})")
            value = value.get(name)
        return None if value == AUTO else value

    def fill(self, key: str, value: Any, why: str) -> Any:
        """Set a value, note why, and give it back."""
        *way, name = key.split(".")
        inner = self.config
        for one in way:
            inner = inner.setdefault(one, {})
        inner[name] = value
        self.origins[key] = why
        return value

    def leave_out(self, key: str, why: str) -> None:
        """Take a key out of what DeepSpeed is given, and note why."""
        *way, name = key.split(".")
        inner = self.config
        for one in way:
            inner = inner[one]
        del inner[name]
        self.origins[key] = f"left out: {why}"
