"""Hold the user's settings against what is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from packaging.utils import canonicalize_name

from slapo_core.errors import PluginConfigError
from slapo_core.plugins.config import ALLOW, DISABLE, Settings, close_matches
from slapo_core.plugins.model import Plugin
from slapo_core.spec.reserved import CORE_DISTRIBUTION

__all__ = ["settings_violations", "suggestions"]


def settings_violations(settings: Settings, plugins: Sequence[Plugin]) -> Iterator[PluginConfigError]:
    """Everything that is wrong with the settings: malformed, of a plugin that is not installed, or not met.

    Args:
        settings: what was read.
        plugins: what is installed, whatever its state.
    """
    installed = {plugin.name: plugin for plugin in plugins}
    yield from settings.errors
    named = [(ALLOW, name) for name in sorted(settings.allow or ())]
    named += [(DISABLE, name) for name in sorted(settings.disabled)]
    named += [(f"[tool.slapo] prefer in {settings.pyproject}", name) for name in settings.prefer]
    for setting, name in named:
        if name not in installed and name != CORE_DISTRIBUTION:
            message = f"{setting} names '{name}', but no plugin of that name is installed"
            close = suggestions(name, plugins)
            hint = f"did you mean {' or '.join(close)}?" if close else "`slapo plugins list` shows what is"
            yield PluginConfigError(message, hint=hint)
    for line in settings.require:
        error = _unmet(line, f"[tool.slapo] require in {settings.pyproject}", installed)
        if error is not None:
            yield error


def suggestions(name: str, plugins: Sequence[Plugin]) -> list[str]:
    """The plugins that ``name`` may mean: those whose namespace it is, else those of a similar name."""
    owners = [plugin.name for plugin in plugins if name in plugin.namespaces]
    return owners or close_matches(name, [plugin.name for plugin in plugins])


def _unmet(line: str, where: str, installed: Mapping[str, Plugin]) -> PluginConfigError | None:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion

    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return PluginConfigError(f"{where}: {line!r} is not a requirement", hint='require = ["slapo-tp>=0.1"]')
    name = canonicalize_name(requirement.name)
    plugin = installed.get(name)
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
    message = f"{where} needs {line}, which is {plugin.state}: {plugin.reason}"
    return PluginConfigError(message, plugin=plugin.label, hint=plugin.remedy)
