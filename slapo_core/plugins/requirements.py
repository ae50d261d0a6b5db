"""Raise what the state of a plugin, or a setting about it, stands for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from slapo_core.errors import (
    BrokenPluginError,
    ConflictingPluginError,
    DisabledPluginError,
    IncompatiblePluginError,
    PluginConfigError,
    PluginError,
    RejectedPluginError,
)
from slapo_core.plugins.config import Settings, check_names
from slapo_core.plugins.model import Plugin, State
from slapo_core.spec.reserved import CORE_DISTRIBUTION, canonical_distribution

__all__ = ["first_settings_error", "raise_for_state", "settings_errors"]

_ERRORS: dict[State, tuple[type[PluginError], str]] = {
    "broken": (BrokenPluginError, "is broken"),
    "conflict": (ConflictingPluginError, "is in conflict"),
    "disabled": (DisabledPluginError, "is installed but disabled"),
    "incompatible": (IncompatiblePluginError, "is incompatible"),
    "rejected": (RejectedPluginError, "was rejected"),
}


def raise_for_state(plugin: Plugin, subject: str, *, path: str | None = None) -> NoReturn:
    """Raise the error of a plugin's state.

    Args:
        plugin: one whose state is not ``ok``.
        subject: what was asked for, the beginning of the message.
        path: the node where it was asked for.
    """
    error, state = _ERRORS[plugin.state]
    raise error(f"{subject} {state}: {plugin.reason}", path=path, plugin=plugin.label, hint=plugin.remedy)


def first_settings_error(settings: Settings, plugins: Iterable[Plugin]) -> PluginConfigError | None:
    """What is wrong with the settings, the first thing; None if nothing is."""
    return next(iter(settings_errors(settings, tuple(plugins))), None)


def settings_errors(settings: Settings, plugins: tuple[Plugin, ...]) -> list[PluginConfigError]:
    """Everything that is wrong with the settings, given what is installed."""
    installed = {plugin.name: _namespaces(plugin) for plugin in plugins}
    errors = [*settings.errors, *check_names(settings, installed)]
    for line in settings.require:
        error = _requirement_error(line, settings, {plugin.name: plugin for plugin in plugins})
        if error is not None:
            errors.append(error)
    return errors


def _namespaces(plugin: Plugin) -> set[str]:
    return {entry.namespace for entry in plugin.entries if entry.namespace is not None}


def _requirement_error(line: str, settings: Settings, plugins: dict[str, Plugin]) -> PluginConfigError | None:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion

    where = f"[tool.slapo] require in {settings.pyproject}"
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return PluginConfigError(f"{where}: {line!r} is not a requirement", hint='require = ["slapo-tp>=0.1"]')
    name = canonical_distribution(requirement.name)
    plugin = plugins.get(name)
    if plugin is None:
        if name == CORE_DISTRIBUTION:
            return None
        return PluginConfigError(f"{where} needs {line}, which is not installed", hint=f'pip install "{line}"')
    try:
        fits = requirement.specifier.contains(plugin.version or "", prereleases=True)
    except InvalidVersion:
        fits = False
    if not fits:
        return PluginConfigError(f"{where} needs {line}; installed is {plugin.label}", hint=f'pip install "{line}"')
    if plugin.usable:
        return None
    return PluginConfigError(
        f"{where} needs {line}, which is {plugin.state}: {plugin.reason}", plugin=plugin.label, hint=plugin.remedy
    )
