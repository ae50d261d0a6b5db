"""What the installed DeepSpeed reads of a configuration, and what it refuses: a key that it does not read is unknown.

It reads a dictionary that records every key it is asked for, so that no table of DeepSpeed's keys is kept here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError
from slapo_deepspeed.runtime import import_deepspeed, quietly

if TYPE_CHECKING:
    from slapo_runtime.options import Options

_READ_LATER = ("optimizer.params", "scheduler.params")
"""The optimizer and the scheduler take them as arguments, and refuse others."""


def _noting(name: str) -> Any:
    """Return a method of ``dict`` that notes the key it is asked for."""

    def method(self: Watched, key: str, *default: Any) -> Any:
        self.last = str(key)
        self.read.add(self.last)
        return getattr(dict, name)(self, key, *default)

    return method


def _noting_all(name: str) -> Any:
    """Return a method of ``dict`` that notes that everything is read."""

    def method(self: Watched) -> Any:
        self.is_iterated = True
        return getattr(dict, name)(self)

    return method


class Watched(dict[str, Any]):
    """A dictionary that records which of its keys are read; so do those inside.

    Attributes:
        read: names of keys that were asked for, given or not.
        is_iterated: whether all were read at once: by a loop, or by ``**``.
        last: the key of the outermost one that was asked for last.
    """

    __getitem__, get, pop = _noting("__getitem__"), _noting("get"), _noting("pop")
    setdefault, __contains__ = _noting("setdefault"), _noting("__contains__")
    __iter__, values, items = _noting_all("__iter__"), _noting_all("values"), _noting_all("items")

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({key: Watched(one) if isinstance(one, Mapping) else one for key, one in values.items()})
        self.read: set[str] = set()
        self.is_iterated = False
        self.last = ""
        self._given = dict(dict.items(self))

    def keys(self) -> Any:
        """Itself: a test for a key reads that one, a loop all."""
        return self

    def __copy__(self) -> Watched:
        return self

    def __deepcopy__(self, memo: Any) -> Watched:
        return self

    def unread(self, before: str = "") -> Iterator[tuple[str, list[str], set[str]]]:
        """Give every key below which something was not read, with the names of that, and those that were read.

        A dictionary of which nothing was read, or all, is left to who took it: to a function, to pydantic.
        """
        if self.is_iterated or not self.read:
            return
        names = [name for name in self._given if name not in self.read]
        if names:
            yield before, names, self.read
        for name, value in self._given.items():
            if isinstance(value, Watched) and name in self.read and f"{before}{name}" not in _READ_LATER:
                yield from value.unread(f"{before}{name}.")


def let_deepspeed_read(config: Options, device: str, without: str) -> None:
    """Note what DeepSpeed itself refuses, in its words, and every key that it does not read.

    Args:
        config: filled in.
        device: the type of the model's device.
        without: a key that DeepSpeed is not shown: the total number of samples, which it would check by the number of
            ranks of this process, which may have no group yet.

    Raises:
        BuildError: DeepSpeed cannot be used.
    """
    import_deepspeed(device)
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    watched = Watched({key: copy.deepcopy(value) for key, value in config.values.items() if key != without})
    try:
        with quietly():
            DeepSpeedConfig(watched)
    except ValidationError as error:
        for one in error.errors():
            inside = one["loc"] if one["loc"][:1] and one["loc"][0] in config.values else (watched.last, *one["loc"])
            place = ".".join(map(str, inside))
            config.refuse(place, f"is refused by DeepSpeed: {one['msg']} (got {one['input']!r})")
        return
    except Exception as error:
        reason = f"is refused by DeepSpeed: {type(error).__name__}: {error}"
        if watched.last not in config.values:  # it compares several
            config.check("DeepSpeed")
            raise BuildError(f"{config.name} {reason}") from error
        config.refuse(watched.last, reason)
        return
    for key, names, known in watched.unread():
        config.refuse_unknown(key.removesuffix("."), names, known, "DeepSpeed")
