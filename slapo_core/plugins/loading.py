"""Import one plugin object so that whatever goes wrong stays with that plugin."""

from __future__ import annotations

import contextlib
import inspect
import io
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

from slapo_core.plugins.model import Entry
from slapo_core.plugins.tampering import ImportGuard
from slapo_core.spec.kinds import KINDS
from slapo_core.spec.reserved import CORE_DISTRIBUTION

__all__ = ["ImportFailed", "PluginWarning", "RuleViolated", "class_violations", "load"]

_Result = TypeVar("_Result")


class PluginWarning(UserWarning):
    """A plugin does something that it should not, or that has no effect, and that slapo could contain."""


class ImportFailed(Exception):  # noqa: N818 - internal, becomes BrokenPluginError
    """The import raised; the cause is chained."""


class RuleViolated(Exception):  # noqa: N818 - internal, becomes RejectedPluginError
    """The object breaks a rule, or its import did.

    Args:
        violation: which.
        whole_distribution: whether nothing of that distribution is to be trusted any more.
    """

    def __init__(self, violation: str, *, whole_distribution: bool = False) -> None:
        self.whole_distribution = whole_distribution
        super().__init__(violation)


def load(entry: Entry) -> Any:
    """Import what ``entry`` points to and hold it against the rules of its kind.

    What the plugin prints becomes a `PluginWarning`; changes it made to slapo or to `torch.nn.Module` are taken back.

    Raises:
        ImportFailed: the import raised anything but KeyboardInterrupt.
        RuleViolated: the object breaks a rule, or its import tampered with slapo.
    """
    base = KINDS[entry.kind].base
    if base is not None:
        pkgutil.resolve_name(base)  # what slapo itself imports is no change made by the plugin
    loaded = _guarded(entry, lambda: pkgutil.resolve_name(entry.value if ":" in entry.value else f"{entry.value}:"))
    # The checks touch code of the plugin too (metaclasses, descriptors): the same guard.
    violations = _guarded(entry, lambda: class_violations(loaded, entry))
    if violations:
        raise RuleViolated("; ".join(violations))
    return loaded


def class_violations(loaded: Any, entry: Entry) -> list[str]:
    """Every rule of its kind that a loaded object breaks, in words.

    Args:
        loaded: what the entry point gave.
        entry: the entry point, of a kind in `KINDS`.
    """
    declared = KINDS[entry.kind].base
    if declared is None:
        return [] if isinstance(loaded, ModuleType) else [f"must be a module (got {loaded!r})"]
    base = pkgutil.resolve_name(declared)
    is_class = isinstance(loaded, type)
    if not (is_class and issubclass(loaded, base)):
        got = f"class {loaded.__qualname__}" if is_class else f"an instance of {type(loaded).__qualname__}"
        return [f"must be a subclass of {base.__module__}.{base.__qualname__} (got {got})"]
    violations = []
    missing = sorted(getattr(loaded, "__abstractmethods__", ()))
    if missing:
        violations.append(f"class {loaded.__qualname__} does not define {', '.join(missing)}()")
    name = inspect.getattr_static(loaded, "name", None)
    if name != entry.name:
        what = f"{loaded.__qualname__}.name"
        violations.append(f"{what} must be '{entry.name}', the name of its entry point (got {name!r})")
    return violations + (_primitive_violations(loaded) if entry.kind == "primitives" else [])


def _primitive_violations(cls: type) -> list[str]:
    from slapo_core.spec.equivalence import Equivalence

    violations = []
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        got = "no dataclass of its own" if parameters is None else "a dataclass that is not frozen"
        violations.append(f"class {cls.__qualname__} must be decorated with @dataclass(frozen=True) (got {got})")
    equivalence = inspect.getattr_static(cls, "equivalence", None)
    if not isinstance(equivalence, (Equivalence, property)):
        violations.append(f"{cls.__qualname__}.equivalence must be an Equivalence (got {equivalence!r})")
    return violations


def _guarded(entry: Entry, action: Callable[[], _Result]) -> _Result:
    """Run code of a plugin: output captured, errors contained, tampering taken back."""
    guard = ImportGuard() if entry.distribution != CORE_DISTRIBUTION else None
    output = io.StringIO()
    failure: BaseException | None = None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), _no_stdin():
        try:
            result = action()
        except KeyboardInterrupt:
            if guard is not None:
                guard.restore()
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like must not end the user's process
            failure = error
    changes = guard.restore() if guard is not None else []
    if output.getvalue().strip():
        warnings.warn(_printed(entry, output.getvalue().strip()), PluginWarning, stacklevel=5)
    if changes:
        shown = "; ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")
        raise RuleViolated(f"its import changed slapo: {shown} (put back)", whole_distribution=True) from failure
    if failure is not None:
        raise ImportFailed(f"{type(failure).__name__}: {failure}") from failure
    return result


@contextlib.contextmanager
def _no_stdin() -> Iterator[None]:
    """An import that asks the user for input must not hang: it finds the end of the input."""
    before = sys.stdin
    sys.stdin = io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before


def _printed(entry: Entry, text: str) -> str:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return f"plugin {entry.label} printed while '{entry.value}' was imported: {shown!r}"
