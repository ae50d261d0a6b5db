"""Random numbers that are none of torch's: constants to a graph."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["drawn_back", "generators"]


def generators() -> tuple[Any, ...]:
    """The states of Python's and NumPy's generators."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.getstate(),)
    kind, key, *rest = numpy.get_state()
    return random.getstate(), (kind, key.tobytes(), *rest)


@contextlib.contextmanager
def drawn_back() -> Iterator[None]:
    """At the end, the generators are as they were: what was drawn meanwhile will be drawn again."""
    numpy: Any = sys.modules.get("numpy.random")
    before, state = random.getstate(), numpy.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.set_state(state)
