"""The configuration of a runtime, completed: values by dotted keys, why each was filled in, and what is refused."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from slapo_core.errors import BuildError


class Options:
    """What the user gave, filled in by the schedule and the arguments of ``build``.

    Problems are collected, and raised together by :meth:`check`: a user with a new configuration sees all of them.

    Args:
        values: as the user gave them: nested dictionaries, which are copied. A value None is as if it was not given.
        name: of the configuration, for messages: ``"config"``, or the path of a file. ``""`` where the first part of a
            key is the name of an option of ``build``.
        origins: why values were filled in, of an earlier plan.

    Attributes:
        values: nested dictionaries.
        origins: key -> why it was filled in, or ``"left out: ..."``.
        notes: key -> what the plan says about a value that was given, e.g. that no test has run it.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "", origins: Mapping[str, str] | None = None) -> None:
        self.values: dict[str, Any] = _copied(values)
        self.name = name
        self.origins = dict(origins or {})
        self.notes: dict[str, str] = {}
        self._problems: list[tuple[str, str]] = []

    # -- read -----------------------------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; ``default`` where there is none, or something on the way is not a dictionary."""
        value: Any = self.values
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value

    def given(self, key: str) -> bool:
        """Whether the user gave a value; not one that was filled in."""
        return self.get(key) is not None and key not in self.origins

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Every key that holds no further keys, sorted, with its value."""
        yield from _leaves(self.values, "")

    def place(self, key: str) -> str:
        """The place of a key, for messages: ``"'zero_optimization.stage' of ds.json"``."""
        if self.name:
            return f"'{key}' of {self.name}"
        option, _, rest = key.partition(".")
        return f"'{rest}' of {option}" if rest else option

    # -- complete -------------------------------------------------------------------------------------------------

    def fill(self, key: str, value: Any, why: str) -> Any:
        """Set a value, note why, and return it."""
        *way, name = key.split(".")
        inner = self.values
        for one in way:
            if not isinstance(inner.get(one), dict):
                inner[one] = {}
            inner = inner[one]
        inner[name] = value
        self.origins[key] = why
        return value

    def default(self, key: str, value: Any, why: str) -> Any:
        """Set a value where none is given, and return that which holds."""
        found = self.get(key)
        return self.fill(key, value, why) if found is None else found

    def own(self, key: str, value: Any, why: str, hint: str = "leave it out") -> Any:
        """Set a value that the schedule or ``build`` decides; one that says something else is a problem.

        Args:
            key: of the value.
            value: that holds.
            why: what decides it, e.g. ``"'tp' of the mesh"``.
            hint: what to do about another one.
        """
        found = self.get(key)
        if found is None:
            return self.fill(key, value, why)
        if found != value:
            self.refuse(key, f"is {found!r}, but is {value!r} by {why}", hint)
        return value

    def agree(self, *keys: str) -> Any:
        """Let places that say the same have one value: that of the places where it is given.

        Returns:
            the value; None where it is given nowhere.
        """
        said = {key: self.get(key) for key in keys if self.get(key) is not None}
        if not said:
            return None
        first, value = next(iter(said.items()))
        for key in keys:
            if key not in said:
                self.fill(key, value, f"as {self.place(first)}")
            elif said[key] != value:
                self.refuse(first, f"is {value!r}, but {self.place(key)} is {said[key]!r}", "say it once")
        return value

    def leave_out(self, key: str, why: str) -> None:
        """Take a key out of what the runtime is given, and note why; nothing where it is not given."""
        *way, name = key.split(".")
        inner: Any = self.values
        for one in way:
            inner = inner.get(one) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and name in inner:
            del inner[name]
            self.origins[key] = f"left out: {why}"

    # -- refuse ---------------------------------------------------------------------------------------------------

    def refuse(self, key: str, problem: str, hint: str = "") -> None:
        """Note a problem with the value of a key: ``"is 3, but ..."``."""
        self._problems.append((f"{self.place(key)} {problem}", hint))

    def refuse_unknown(self, key: str, names: Collection[str], known: Collection[str], runtime: str) -> None:
        """Note a problem for every name below a key that the runtime does not read, with the nearest that it does.

        Args:
            key: of the names; ``""`` at the top.
            names: that are given.
            known: that the runtime reads.
            runtime: its name and version, e.g. ``"DeepSpeed 0.19.7"``.
        """
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
                nearest = f"; did you mean '{close[0]}'?" if close else f"; it has {', '.join(sorted(known))}"
                place = self.place(f"{key}.{name}" if key else str(name))
                self._problems.append((f"{runtime} does not read {place}{nearest}", ""))

    def check(self, runtime: str) -> None:
        """
        Args:
            runtime: its name, for the message.

        Raises:
            BuildError: all problems that were noted, each with its hint.
        """
        if len(self._problems) == 1:
            (problem, hint) = self._problems[0]
            raise BuildError(f"{runtime} cannot be run with these options: {problem}", hint=hint or None)
        if self._problems:
            lines = [f"{problem}{f' ({hint})' if hint else ''}" for problem, hint in self._problems]
            raise BuildError("\n  - ".join([f"{runtime} cannot be run with these options:", *lines]))


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items() if item is not None}
    return copy.copy(value) if isinstance(value, (list, tuple, set)) else value


def _leaves(values: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name in sorted(values):
        value, key = values[name], f"{before}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value
