"""Find unknown keys of a configuration: keys that the installed DeepSpeed does not read.

DeepSpeed parses a dictionary that records each read, so that no table of DeepSpeed's keys is needed here.
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
"""Arguments of the optimizer and the scheduler, which refuse unknown ones themselves."""


def _noting(name: str) -> Any:
    """Return a method of ``dict`` that records its key as read."""

    def method(self: ReadRecorder, key: str, *default: Any) -> Any:
        self.last = str(key)
        self.read.add(self.last)
        return getattr(dict, name)(self, key, *default)

    return method


def _noting_all(name: str) -> Any:
    """Return a method of ``dict`` that records that all keys are read."""

    def method(self: ReadRecorder) -> Any:
        self.is_iterated = True
        return getattr(dict, name)(self)

    return method


class ReadRecorder(dict[str, Any]):
    """A dictionary that records its read keys, as do the dictionaries inside.

    Attributes:
        read: names of read keys, given or not.
        is_iterated: whether all keys were read at once: by a loop, or by ``**``.
        last: the last key that was read.
    """

    __getitem__, get, pop = _noting("__getitem__"), _noting("get"), _noting("pop")
    setdefault, __contains__ = _noting("setdefault"), _noting("__contains__")
    __iter__, values, items = _noting_all("__iter__"), _noting_all("values"), _noting_all("items")

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({key: ReadRecorder(one) if isinstance(one, Mapping) else one for key, one in values.items()})
        self.read: set[str] = set()
        self.is_iterated = False
        self.last = ""
        self._given = dict(dict.items(self))

    def keys(self) -> Any:
        """Return the dictionary itself: a test for a key reads that key, a loop all keys."""
        return self

    def __copy__(self) -> ReadRecorder:
        return self

    def __deepcopy__(self, memo: Any) -> ReadRecorder:
        return self

    def unread(self, before: str = "") -> Iterator[tuple[str, list[str], set[str]]]:
        """Yield each section with unread keys: its prefix, the unread names, the read names.

        A section with no or all keys read was passed on, to a function or to pydantic, which checks it.
        """
        if self.is_iterated or not self.read:
            return
        names = [name for name in self._given if name not in self.read]
        if names:
            yield before, names, self.read
        for name, value in self._given.items():
            if isinstance(value, ReadRecorder) and name in self.read and f"{before}{name}" not in _READ_LATER:
                yield from value.unread(f"{before}{name}.")


def refuse_by_deepspeed(config: Options, device: str, without: str) -> None:
    """Note DeepSpeed's own refusals, in its words, and every key that it does not read.

    Args:
        config: filled in.
        device: type of the model's device.
        without: a key withheld from DeepSpeed: the total number of samples, which it would compare with the number of
            ranks of this process, which may have no group yet.

    Raises:
        BuildError: DeepSpeed cannot be used.
    """
    import_deepspeed(device)
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    recorder = ReadRecorder({key: copy.deepcopy(value) for key, value in config.values.items() if key != without})
    try:
        with quietly():
            DeepSpeedConfig(recorder)
    except ValidationError as error:
        for one in error.errors():
            inside = one["loc"] if one["loc"][:1] and one["loc"][0] in config.values else (recorder.last, *one["loc"])
            place = ".".join(map(str, inside))
            config.refuse(place, f"is refused by DeepSpeed: {one['msg']} (got {one['input']!r})")
        return
    except Exception as error:
        reason = f"is refused by DeepSpeed: {type(error).__name__}: {error}"
        if recorder.last not in config.values:  # it compares several
            config.check("DeepSpeed")
            raise BuildError(f"{config.name} {reason}") from error
        config.refuse(recorder.last, reason)
        return
    for key, names, known in recorder.unread():
        config.refuse_unknown(key.removesuffix("."), names, known, "DeepSpeed")
