"""Functions that remember their results (``functools.lru_cache``) must not remember those of a recording."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

__all__ = ["caches_kept"]

_Cache = type(functools.lru_cache(abs))


@contextlib.contextmanager
def caches_kept(root: nn.Module) -> Iterator[None]:
    """Empty, at the end, every cache that took up something meanwhile, in the code of ``root`` and what lies below it.

    Known are those in the classes and in the files where the classes are written, decorated once more or not.
    """
    caches = {id(cache): (cache, cache.cache_info().misses) for cache in _caches(root)}
    try:
        yield
    finally:
        for cache, misses in caches.values():
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _caches(root: nn.Module) -> Iterable[Any]:
    classes = {cls for module in root.modules() for cls in type(module).__mro__}
    files = {cls.__module__ for cls in classes if cls.__module__.partition(".")[0] not in ("torch", "builtins")}
    for holder in (*(sys.modules.get(name) for name in files), *(cls for cls in classes if cls.__module__ in files)):
        for value in list(vars(holder).values()) if holder is not None else ():
            value = getattr(value, "__func__", value)  # of a static method or a class method
            if isinstance(value, _Cache):
                yield value
            elif isinstance(value, types.FunctionType):
                for cell in value.__closure__ or ():
                    with contextlib.suppress(ValueError):  # an empty cell
                        if isinstance(cell.cell_contents, _Cache):
                            yield cell.cell_contents
