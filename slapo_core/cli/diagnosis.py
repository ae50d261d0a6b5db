"""The facts and problems that ``slapo doctor`` reports."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_core.plugins.model import Plugin
    from slapo_core.plugins.registry import Registry

__all__ = ["Problem", "Report", "diagnose"]


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Args:
        what: the fact, with where it was found.
        remedy: the command or edit that mends it; None where only the text can say.
    """

    what: str
    remedy: str | None = None


@dataclass(frozen=True)
class Report:
    """What ``slapo doctor`` found."""

    facts: dict[str, Any]
    problems: tuple[Problem, ...]

    def as_json(self) -> dict[str, Any]:
        """What ``slapo doctor --json`` prints."""
        return {**self.facts, "problems": [asdict(problem) for problem in self.problems]}


def diagnose(registry: Registry, *, ask: Sequence[str] = ()) -> Report:
    """Look over this environment.

    Args:
        registry: what is installed.
        ask: distributions whose ``slapo_doctor`` hook is called; no other plugin is imported.
    """
    facts: dict[str, Any] = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "slapo-core": registry.core_version or "not installed",
        **_torch_facts(),
        "cpus": _cpus(),
        "threads": f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '(unset)')}",
        "settings": _settings(registry),
        "plugins": [
            {"name": plugin.name, "source": plugin.source, "state": plugin.state, "version": plugin.version}
            for plugin in registry.plugins
        ],
    }
    problems = [
        *_version_problems(facts),
        *_settings_problems(registry),
        *_plugin_problems(registry.plugins),
        *_name_problems(registry),
        *_thread_problems(facts),
        *_answers(registry, ask),
    ]
    return Report(facts, tuple(problems))


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return {"torch": f"cannot be imported: {error}", "devices": [], "backends": []}
    devices = []
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        names = [str(kind)] * torch.accelerator.device_count()
        if kind is not None and kind.type == "cuda":
            names = [torch.cuda.get_device_name(index) for index in range(len(names))]
        devices = [f"{index}: {name}" for index, name in enumerate(names)]
    backends = []
    if dist.is_available():
        known = {"gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available, "nccl": dist.is_nccl_available}
        backends = [name for name, available in known.items() if available()]
    build = torch.version.cuda or torch.version.hip
    return {
        "torch": f"{torch.__version__} ({f'for {build}' if build else 'CPU only'})",
        "devices": devices,
        "backends": backends,
    }


def _version_problems(facts: dict[str, Any]) -> Iterator[Problem]:
    if facts["slapo-core"] == "not installed":
        yield Problem("slapo-core runs from a source tree without being installed", "pip install -e .")
    if facts["torch"].startswith("cannot"):
        yield Problem(f"torch {facts['torch']}", "pip install --force-reinstall torch")
        return
    misfit = _torch_misfit(facts["torch"].partition(" ")[0])
    if misfit is not None:
        yield Problem(f"slapo-core needs {misfit}; installed is torch {facts['torch']}", f'pip install "{misfit}"')
    if not facts["backends"]:
        yield Problem(
            "this torch has no torch.distributed backend: no schedule can run on several processes",
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu",
        )


def _torch_misfit(version: str) -> str | None:
    """The requirement on torch that slapo-core declares, if ``version`` is not in it."""
    from packaging.requirements import Requirement

    from slapo_core.plugins.metadata import core_requirements

    for requirement in map(Requirement, core_requirements()):
        if requirement.name == "torch" and not requirement.specifier.contains(version, prereleases=True):
            return f"{requirement.name}{requirement.specifier}"
    return None


def _settings(registry: Registry) -> list[str]:
    settings = registry.settings
    shown = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("SLAPO_")]
    for key, values in (("prefer", settings.prefer), ("require", settings.require)):
        if values:
            shown.append(f"{key} = {json.dumps(list(values))} in {settings.pyproject}")
    return shown


def _settings_problems(registry: Registry) -> Iterator[Problem]:
    error = registry.settings_error
    if error is not None:
        yield Problem(error.message, error.hint)


def _plugin_problems(plugins: Iterable[Plugin]) -> Iterator[Problem]:
    for plugin in plugins:
        if plugin.state == "disabled":
            continue
        if plugin.state != "ok":
            yield Problem(f"plugin {plugin.label} is {plugin.state}: {plugin.reason}", plugin.remedy)
        for shadow in plugin.shadows:
            yield Problem(
                f"{plugin.name} is installed twice: {plugin.source} is used, {shadow} is not",
                f"pip uninstall {plugin.name}, once for each, and install it again",
            )
        yield from _editable_problems(plugin)


def _editable_problems(plugin: Plugin) -> Iterator[Problem]:
    """An editable installation whose source moved away, or says something else than what was installed."""
    metadata = Path(plugin.source)
    try:
        origin = json.loads((metadata / "direct_url.json").read_text("utf-8"))
        editable = bool(origin["dir_info"]["editable"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # not installed from a directory, or by an installer that does not say
    if not editable:
        return
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    project = Path(url2pathname(urlsplit(origin["url"]).path))
    again = f"pip install -e {project}"
    if not (project / "pyproject.toml").exists():
        remedy = f"pip uninstall {plugin.name}"
        yield Problem(f"{plugin.name} is installed in editable mode from {project}, which is no project now", remedy)
        return
    difference = _stale(project / "pyproject.toml", plugin)
    if difference is not None:
        yield Problem(f"the editable installation of {plugin.name} is out of date: {difference}", again)


def _stale(pyproject: Path, plugin: Plugin) -> str | None:
    """The first difference between a ``pyproject.toml`` and what was installed from it."""
    import tomllib

    from slapo_core.plugins.compat import parse_group

    try:
        project = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError) as error:
        return f"{pyproject} cannot be read: {error}"
    version = project.get("version")
    if version is not None and version != plugin.version:
        return f"{pyproject} says version {version}, installed is {plugin.version}"
    declared = {
        (group[1], name, value)
        for key, entries in project.get("entry-points", {}).items()
        if (group := parse_group(key)) is not None
        for name, value in entries.items()
    }
    installed = {(entry.kind, entry.name, entry.value) for entry in plugin.entries}
    for kind, name, value in sorted(declared ^ installed):
        where = f"in {pyproject}" if (kind, name, value) in declared else "installed"
        return f"'{name} = {value}' ({kind}) is only {where}"
    return None


def _name_problems(registry: Registry) -> Iterator[Problem]:
    for kind, bares in registry.ambiguous.items():
        for bare, full in bares.items():
            owner = registry.resolve(kind, full[0]).distribution if registry.settings_error is None else "DISTRIBUTION"
            yield Problem(
                f"in {kind}, '{bare}' may be {' or '.join(full)}",
                f'write the full name, or [tool.slapo] prefer = ["{owner}"] in pyproject.toml',
            )


def _thread_problems(facts: dict[str, Any]) -> Iterator[Problem]:
    """More threads a process than there are processors: several ranks on one machine then stand in each other's way."""
    value = os.environ.get("OMP_NUM_THREADS")
    if value is None:
        return
    if not value.isdecimal() or int(value) < 1:
        yield Problem(f"OMP_NUM_THREADS must be a positive integer (got {value!r})", "export OMP_NUM_THREADS=1")
    elif int(value) > facts["cpus"]:
        yield Problem(
            f"OMP_NUM_THREADS={value}, but this process may use {facts['cpus']} processors",
            f"export OMP_NUM_THREADS={facts['cpus']}",
        )


def _answers(registry: Registry, ask: Sequence[str]) -> Iterator[Problem]:
    from slapo_core.errors import PluginError
    from slapo_core.plugins.manager import HookManager

    for distribution in dict.fromkeys(ask):  # one manager each: one that fails must not silence another
        hooks = HookManager(registry)
        try:
            hooks.activate(distribution)
            answers = hooks.call("slapo_doctor")
        except PluginError as error:
            yield Problem(error.message, error.hint)
            continue
        for lines in answers:
            yield from (Problem(f"{distribution}: {line}") for line in ([lines] if isinstance(lines, str) else lines))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
