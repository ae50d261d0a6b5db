"""What the user says about plugins: environment variables and ``[tool.slapo]`` of the nearest pyproject.toml.

Reading never raises: what is malformed becomes one of `Settings.errors`, raised when the registry is first used, so
that ``slapo plugins list`` can show the plugins together with the mistake.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from slapo_core.errors import PluginConfigError
from slapo_core.spec.reserved import CORE_DISTRIBUTION

__all__ = ["Settings", "close_matches", "nearest_pyproject", "read_settings"]

ALLOW = "SLAPO_PLUGINS"
DISABLE = "SLAPO_DISABLE_PLUGINS"
STRICT = "SLAPO_STRICT_PLUGINS"
TRACE = "SLAPO_TRACE_PLUGINS"
_TABLE_KEYS = ("prefer", "require")


@dataclass(frozen=True)
class Settings:
    """The user's settings, in canonical distribution names.

    Args:
        allow: `SLAPO_PLUGINS`: the only plugins to use besides slapo-core; None when unset or empty.
        disabled: `SLAPO_DISABLE_PLUGINS`.
        strict: `SLAPO_STRICT_PLUGINS=1`: any plugin that is not ok is an error at first use.
        trace: `SLAPO_TRACE_PLUGINS=1`: print every hook call.
        require: requirement strings of ``[tool.slapo] require``, e.g. ``"slapo-tp>=0.1"``.
        prefer: distributions of ``[tool.slapo] prefer``, the first that provides an ambiguous bare name wins.
        pyproject: the file that ``require`` and ``prefer`` come from; None without one.
        errors: what is malformed.
    """

    allow: frozenset[str] | None = None
    disabled: frozenset[str] = frozenset()
    strict: bool = False
    trace: bool = False
    require: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    pyproject: str | None = None
    errors: tuple[PluginConfigError, ...] = ()

    def switched_off(self, distribution: str) -> tuple[str, str] | None:
        """The setting that switches a distribution off, in words, and the way to switch it on; None if it is on."""
        if distribution == CORE_DISTRIBUTION:
            return None
        if distribution in self.disabled:
            return f"{DISABLE} names it", f"remove {distribution} from {DISABLE}"
        if self.allow is not None and distribution not in self.allow:
            return f"{ALLOW} does not name it", f"add {distribution} to {ALLOW}"
        return None


def read_settings(environ: Mapping[str, str], project: Path | None) -> Settings:
    """The settings in force.

    Args:
        environ: environment variables, e.g. ``os.environ``.
        project: the directory from which the nearest ``pyproject.toml`` is searched upwards; None for none.
    """
    errors: list[PluginConfigError] = []
    allow = _names(environ.get(ALLOW, ""))
    disabled = frozenset(_names(environ.get(DISABLE, "")))
    if CORE_DISTRIBUTION in disabled:
        errors.append(
            PluginConfigError(
                f"{DISABLE} names {CORE_DISTRIBUTION}, which cannot be disabled",
                hint=f"remove it; {ALLOW}={CORE_DISTRIBUTION} switches off everything else",
            )
        )
    pyproject = nearest_pyproject(project) if project is not None else None
    table = _tool_table(pyproject, errors) if pyproject is not None else {}
    return Settings(
        allow=frozenset(allow) if allow else None,
        disabled=disabled,
        strict=_flag(environ, STRICT, errors),
        trace=_flag(environ, TRACE, errors),
        require=_strings(table, "require", pyproject, errors),
        prefer=tuple(map(canonicalize_name, _strings(table, "prefer", pyproject, errors))),
        pyproject=str(pyproject) if pyproject is not None and table else None,
        errors=tuple(errors),
    )


def close_matches(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of ``known`` that ``name`` may be a misspelling of, best first."""
    import difflib

    return difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)


def nearest_pyproject(directory: Path) -> Path | None:
    """The ``pyproject.toml`` in ``directory`` or the closest directory above it."""
    for folder in (directory, *directory.parents):
        candidate = folder / "pyproject.toml"
        if os.path.isfile(candidate):
            return candidate
    return None


def _names(text: str) -> list[str]:
    return [canonicalize_name(part) for part in re.split(r"[,\s]+", text) if part]


def _flag(environ: Mapping[str, str], name: str, errors: list[PluginConfigError]) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        errors.append(PluginConfigError(f"{name} must be 0 or 1 (got {value!r})", hint=f"{name}=1"))
    return value == "1"


def _tool_table(path: Path, errors: list[PluginConfigError]) -> Mapping[str, Any]:
    try:
        content = path.read_bytes()
        if b"slapo" not in content:
            return {}
        import tomllib

        table = tomllib.loads(content.decode("utf-8")).get("tool", {}).get("slapo", {})
    except (OSError, ValueError, AttributeError) as error:
        errors.append(PluginConfigError(f"{path} cannot be read: {error}", hint="correct the file"))
        return {}
    if not isinstance(table, dict):
        errors.append(PluginConfigError(f"tool.slapo in {path} must be a table (got {table!r})", hint="[tool.slapo]"))
        return {}
    for key in table:
        if key not in _TABLE_KEYS:
            close = close_matches(key, _TABLE_KEYS) or list(_TABLE_KEYS)
            errors.append(
                PluginConfigError(
                    f"[tool.slapo] in {path} has no key '{key}'", hint=f"did you mean {' or '.join(close)}?"
                )
            )
    return table


def _strings(table: Mapping[str, Any], key: str, path: Path | None, errors: list[PluginConfigError]) -> tuple[str, ...]:
    value = table.get(key, [])
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    errors.append(
        PluginConfigError(
            f"[tool.slapo] {key} in {path} must be a list of distributions (got {value!r})",
            hint=f'{key} = ["slapo-tp"]',
        )
    )
    return ()
