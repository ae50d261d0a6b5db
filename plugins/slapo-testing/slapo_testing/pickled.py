"""Send values to other processes, with the files of their modules."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import slapo_core
from slapo_runtime.rank_process import make_importable
from slapo_testing.check import CheckError

_IMPORTED = ("torch", *(name.replace("-", "_") for name in slapo_core.DISTRIBUTIONS))
"""Packages that ranks import by name."""


@dataclass(frozen=True)
class Pickled:
    """Pickled values, and the files of the modules of their classes and functions.

    Args:
        payload: a pickled dictionary.
        origins: ``(name, file)`` of each module: test files are not on ``sys.path``.
    """

    payload: bytes
    origins: tuple[tuple[str, str], ...]

    def unpack(self) -> dict[str, Any]:
        """Return the dictionary, in another process."""
        for name, file in self.origins:
            make_importable(name, file)
        contents: dict[str, Any] = pickle.loads(self.payload)
        return contents


def pack(contents: Mapping[str, Any]) -> Pickled:
    """Pack the fields of a case.

    Raises:
        CheckError: a field cannot be pickled.
    """
    for field, value in contents.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise CheckError(
                f"the case's {field} cannot be sent to other processes",
                required="classes and functions defined at the top level of a module, no lambdas or inner functions",
                got=f"{type(error).__name__}: {error}",
                hint="move the class or function to the top level of a module; model= and inputs= or batch= may be "
                "lambdas, because their results are sent",
            ) from error
    buffer = io.BytesIO()
    pickler = _NamingPickler(buffer)
    pickler.dump(dict(contents))
    return Pickled(buffer.getvalue(), pickler.origins())


class _NamingPickler(pickle.Pickler):
    """A pickler that records the modules of classes and functions."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._modules: dict[str, None] = {}

    def reducer_override(self, value: Any) -> Any:
        # Called for objects of other than built-in types, also for classes and functions.
        module = getattr(value if isinstance(value, type) else type(value), "__module__", None)
        for name in (module, getattr(value, "__module__", None)):
            if isinstance(name, str):
                self._modules.setdefault(name, None)
        return NotImplemented

    def origins(self) -> tuple[tuple[str, str], ...]:
        found = []
        for name in self._modules:
            file = getattr(sys.modules.get(name), "__file__", None)
            if name != "__main__" and file is not None and name.partition(".")[0] not in _IMPORTED:
                found.append((name, os.path.abspath(file)))
        return tuple(found)
