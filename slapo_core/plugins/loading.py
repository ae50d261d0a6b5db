"""Import one plugin object so that whatever goes wrong stays with that plugin."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import reduce
from types import ModuleType
from typing import Any, TypeVar

from slapo_core.plugins.model import Entry
from slapo_core.plugins.tampering import Snapshot
from slapo_core.spec.kinds import KINDS
from slapo_core.spec.reserved import CORE_DISTRIBUTION

__all__ = [
    "SLOW_IMPORT_SECONDS",
    "ImportFailed",
    "ImportReport",
    "PluginWarning",
    "Refused",
    "base_class",
    "class_breaches",
    "load",
]

SLOW_IMPORT_SECONDS = 1.0
"""Imports that take longer are reported by ``slapo plugins check``."""

_Result = TypeVar("_Result")


class PluginWarning(UserWarning):
    """A plugin did something at import that it should not, and that slapo could contain."""


class ImportFailed(Exception):  # noqa: N818 - internal, becomes BrokenPluginError
    """The import raised; the cause is chained."""


class Refused(Exception):  # noqa: N818 - internal, becomes RejectedPluginError
    """The object breaks a rule.

    Args:
        reason: which.
        whole_distribution: whether nothing of that distribution is to be trusted any more.
    """

    def __init__(self, reason: str, *, whole_distribution: bool = False) -> None:
        self.reason = reason
        self.whole_distribution = whole_distribution
        super().__init__(reason)


@dataclasses.dataclass(frozen=True)
class ImportReport:
    """What one import did.

    Args:
        entry: what was imported.
        seconds: wall-clock time of the import.
        output: what it printed to stdout and stderr.
    """

    entry: Entry
    seconds: float
    output: str

    @property
    def slow(self) -> bool:
        return self.seconds > SLOW_IMPORT_SECONDS


def load(entry: Entry) -> tuple[Any, ImportReport]:
    """Import what ``entry`` points to and hold it against the rules of its kind.

    What the plugin prints becomes a `PluginWarning`; changes it made to slapo or to `torch.nn.Module` are taken back.

    Raises:
        ImportFailed: the import raised anything but KeyboardInterrupt.
        Refused: the object breaks a rule, or its import tampered with slapo.
    """
    base = base_class(entry.kind)
    loaded, report = _guarded(entry, lambda: _import(entry.value))
    # The checks touch code of the plugin too (metaclasses, descriptors): the same guard.
    breaches, _ = _guarded(entry, lambda: class_breaches(loaded, entry, base=base))
    if breaches:
        raise Refused("; ".join(breaches))
    return loaded, report


def class_breaches(loaded: Any, entry: Entry, *, base: type | None) -> list[str]:
    """Every rule of its kind that a loaded object breaks, in words.

    Args:
        loaded: what the entry point gave.
        entry: the entry point.
        base: the base class of the kind; None where any object is accepted.
    """
    if entry.kind == "hooks":
        return [] if isinstance(loaded, ModuleType) else [f"must be a module (got {loaded!r})"]
    if base is None:
        return []
    cls = loaded if isinstance(loaded, type) else type(loaded)
    if not isinstance(loaded, type) and (entry.kind == "primitives" or not isinstance(loaded, base)):
        return [f"must be a subclass of {base.__module__}.{base.__qualname__} (got {_describe(loaded)})"]
    if not issubclass(cls, base):
        return [f"must be a subclass of {base.__module__}.{base.__qualname__} (got class {cls.__qualname__})"]
    breaches = []
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        breaches.append(f"class {cls.__qualname__} does not define {', '.join(missing)}()")
    name = inspect.getattr_static(cls, "name", None)
    if name != entry.name:
        breaches.append(f"{cls.__qualname__}.name must be '{entry.name}', the name of its entry point (got {name!r})")
    return breaches + (_primitive_breaches(cls) if entry.kind == "primitives" else [])


def _primitive_breaches(cls: type) -> list[str]:
    from slapo_core.spec.equivalence import Equivalence

    breaches = []
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        got = "no dataclass of its own" if parameters is None else "a dataclass that is not frozen"
        breaches.append(f"class {cls.__qualname__} must be decorated with @dataclass(frozen=True) (got {got})")
    equivalence = inspect.getattr_static(cls, "equivalence", None)
    if not isinstance(equivalence, (Equivalence, property)):
        breaches.append(f"{cls.__qualname__}.equivalence must be an Equivalence (got {equivalence!r})")
    return breaches


def _import(value: str) -> Any:
    module, _, attribute = value.partition(":")
    return reduce(getattr, filter(None, attribute.split(".")), importlib.import_module(module))


def base_class(kind: str) -> type | None:
    """The base class of a kind, e.g. `Primitive`; None where core accepts any object."""
    declared = KINDS[kind].base if kind in KINDS else None
    if declared is None:
        return None
    base = _import(declared)
    if not isinstance(base, type):
        raise TypeError(f"the base of kind '{kind}' must be a class (got {base!r})")
    return base


def _guarded(entry: Entry, action: Callable[[], _Result]) -> tuple[_Result, ImportReport]:
    """Run code of a plugin: output captured, errors contained, tampering taken back."""
    before = Snapshot() if entry.distribution != CORE_DISTRIBUTION else None
    stdout, stderr = io.StringIO(), io.StringIO()
    failure: BaseException | None = None
    result: Any = None
    start = time.perf_counter()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), _no_stdin():
        try:
            result = action()
        except KeyboardInterrupt:
            if before is not None:
                before.restore()
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like must not end the user's process
            failure = error
    seconds = time.perf_counter() - start
    changes = before.restore() if before is not None else []
    output = stdout.getvalue() + stderr.getvalue()
    if output.strip():
        warnings.warn(_printed(entry, output), PluginWarning, stacklevel=5)
    if changes:
        shown = "; ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")
        raise Refused(f"its import changed slapo: {shown} (put back)", whole_distribution=True) from failure
    if failure is not None:
        raise ImportFailed(f"{type(failure).__name__}: {failure}") from failure
    return result, ImportReport(entry, seconds, output)


@contextlib.contextmanager
def _no_stdin() -> Iterator[None]:
    """An import that asks the user for input must not hang: it finds the end of the input."""
    before = sys.stdin
    sys.stdin = io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before


def _printed(entry: Entry, output: str) -> str:
    text = output.strip()
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return f"plugin {entry.label} printed while '{entry.value}' was imported: {shown!r}"


def _describe(value: object) -> str:
    return f"an instance of {type(value).__qualname__}" if not callable(value) else f"{value!r}"
