"""Complete the configuration of a runtime: values by dotted keys, their origins, and refused values."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from slapo_core.errors import BuildError

_SHOWN = 12
"""Names in a message."""


class Options:
    """The user's options, completed from the schedule and the arguments of ``build``.

    Problems are collected, and raised together by :meth:`check`: a user with a new configuration sees all of them.

    Args:
        values: the user's: nested dictionaries, which are copied. None counts as not given.
        name: of the configuration, for messages: ``"config"``, or the path of a file. ``""`` where the first part of a
            key is the name of an option of ``build``.
        origins: why values were filled in, of an earlier plan.

    Attributes:
        values: nested dictionaries.
        origins: key -> why it was filled in, or ``"left out: ..."``.
        notes: key -> a note of the plan about a given value, e.g. that no test has run it.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "", origins: Mapping[str, str] | None = None) -> None:
        self.values: dict[str, Any] = _copied(values)
        self.name = name
        self.origins = dict(origins or {})
        self.notes: dict[str, str] = {}
        self._problems: list[tuple[str, str]] = []

    # -- read -----------------------------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or ``default`` where there is none."""
        value: Any = self.values
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value

    def given(self, key: str) -> bool:
        """Return whether the user gave a value."""
        return self.get(key) is not None and key not in self.origins

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys without further keys, sorted, with their values."""
        yield from sorted(flat(self.values)) if self.values else ()

    def place(self, key: str) -> str:
        """Return a key with its file, for messages: ``"'zero_optimization.stage' of ds.json"``."""
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
        """Set a value where none is given, and return the one in force."""
        found = self.get(key)
        return self.fill(key, value, why) if found is None else found

    def own(self, key: str, value: Any, why: str, hint: str = "leave it out") -> Any:
        """Set a value of the schedule or ``build``; refuse a different one.

        Args:
            key: of the value.
            value: in force.
            why: its origin, e.g. ``"'tp' of the mesh"``.
            hint: the fix for a different value.
        """
        found = self.get(key)
        if found is None:
            return self.fill(key, value, why)
        if found != value:
            self.refuse(key, f"is {found!r}, but is {value!r} by {why}", hint)
        return value

    def agree(self, *keys: str) -> Any:
        """Set synonymous keys to their one given value; different values are a problem.

        Returns:
            the value; None if none is given.
        """
        given = {key: self.get(key) for key in keys if self.get(key) is not None}
        if not given:
            return None
        first, value = next(iter(given.items()))
        for key in keys:
            if key not in given:
                self.fill(key, value, f"as {self.place(first)}")
            elif given[key] != value:
                self.refuse(first, f"is {value!r}, but {self.place(key)} is {given[key]!r}", "say it once")
        return value

    def leave_out(self, key: str, why: str) -> None:
        """Remove a key from the runtime's configuration, and note why, if it is given."""
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
        """Note a problem for every unknown name below a key, with the closest known one.

        Args:
            key: of the names; ``""`` at the top.
            names: the given ones.
            known: the names that the runtime reads.
            runtime: its name and version, e.g. ``"DeepSpeed 0.19.7"``.
        """
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
                some = f"; it has {', '.join(sorted(known))}" if len(known) <= _SHOWN else ""
                nearest = f"; did you mean '{close[0]}'?" if close else some
                place = self.place(f"{key}.{name}" if key else str(name))
                self._problems.append((f"{runtime} does not read {place}{nearest}", ""))

    def check(self, runtime: str) -> None:
        """Raise all problems, each with its hint.

        Args:
            runtime: its name, for the message.

        Raises:
            BuildError: there are problems.
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


def flat(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested mappings, by dotted keys: ``("zero_optimization.stage", 1)``.

    In their order: the user's values come before those that a dialect filled in because of them.
    """
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for name in value:
            key = repr(name) if "." in name else name
            yield from flat(value[name], f"{before}.{key}" if before else key)
    else:
        yield before, value
