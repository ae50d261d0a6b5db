"""``slapo doctor``: examine the installation, and show fixes of its problems."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import Version

from slapo_core.errors import PluginError
from slapo_core.hookspecs import Fact, Problem
from slapo_core.plugins.manager import HookManager
from slapo_core.plugins.metadata import core_requirements

if TYPE_CHECKING:
    from slapo_core.plugins.metadata import Plugin
    from slapo_core.plugins.registry import Registry


TESTED_TORCH = ("2.11.0", "2.15.0")
"""The oldest and newest torch that tests, or a part of them, were run with: docs/results/torch_versions.md has all."""


@dataclass(frozen=True)
class Report:
    """The facts and problems of an environment."""

    facts: tuple[Fact, ...]
    problems: tuple[Problem, ...]


def print_report(report: Report) -> None:
    """Print facts, then problems with their fixes."""
    width = max(len(fact.what) for fact in report.facts) + 2
    for fact in report.facts:
        print(f"{fact.what:<{width}}{fact.value}")
    count = len(report.problems)
    print(f"\n{count} problem{'s' if count != 1 else ''}:" if count else "\nnothing is wrong")
    for number, problem in enumerate(report.problems, start=1):
        print(f"{number}. {problem.message}")
        if problem.hint:
            print(f"   fix: {problem.hint}")


def diagnose(registry: Registry, *, ask: Sequence[str] = ()) -> Report:
    """Examine this environment.

    Args:
        registry: the installed plugins.
        ask: distributions whose ``slapo_doctor`` hook is called.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what plugins print is not part of the report
        registry.load_all()
    found = [*_python(registry), *_torch(), *_processors(), *_settings(registry)]
    for plugin in registry.plugins:
        found += _plugin(plugin)
    for distribution in dict.fromkeys(ask):
        found += _answers(registry, distribution)
    return Report(
        tuple(item for item in found if isinstance(item, Fact)),
        tuple(item for item in found if isinstance(item, Problem)),
    )


def _python(registry: Registry) -> Iterator[Fact | Problem]:
    yield Fact("python", f"{platform.python_version()} ({sys.executable})")
    yield Fact("platform", platform.platform())
    yield Fact("slapo-core", registry.core_version or "not installed")
    if registry.core_version is None:
        yield Problem("slapo-core runs from a source tree without being installed", "pip install -e .")


def _torch() -> Iterator[Fact | Problem]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Fact("torch", f"cannot be imported: {error}")
        yield Problem(f"torch cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    build = torch.version.cuda or torch.version.hip
    version = f"{torch.__version__} ({f'for {build}' if build else 'CPU only'})"
    yield Fact("torch", version)
    yield from _torch_version(torch.__version__)
    devices = []
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda index: str(kind))
        names = [name_of(index) for index in range(torch.accelerator.device_count())]
        devices = [f"{index}: {name}" for index, name in enumerate(names)]
    yield Fact("devices", ", ".join(devices) or "none")
    known = {"gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available, "nccl": dist.is_nccl_available}
    backends = [name for name, available in known.items() if dist.is_available() and available()]
    yield Fact("backends", ", ".join(backends) or "none")
    if not backends:
        yield Problem(
            "this torch has no torch.distributed backend: no schedule can run on several processes",
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu",
        )


def _torch_version(version: str) -> Iterator[Fact | Problem]:
    """Report a version outside of the requirements as a problem, an untested newer one as a warning."""
    for required in map(Requirement, core_requirements()):
        if required.name == "torch" and not required.specifier.contains(version, prereleases=True):
            yield Problem(f"slapo-core needs {required}; installed is torch {version}", f'pip install "{required}"')
    oldest, newest = TESTED_TORCH
    yield Fact("tested torch", f"{oldest} to {newest}")
    if Version(version).release > Version(newest).release:
        yield Fact("warning", f"torch {version} is newer than {newest}, the newest version tested")


def _processors() -> Iterator[Fact | Problem]:
    """Report processors and threads; more threads than processors are a problem."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    value = os.environ.get("OMP_NUM_THREADS")
    yield Fact("cpus", str(cpus))
    yield Fact("threads", f"OMP_NUM_THREADS={'(unset)' if value is None else value}")
    if value is None:
        return
    if not value.isdecimal() or int(value) < 1:
        yield Problem(f"OMP_NUM_THREADS must be a positive integer (got {value!r})", "export OMP_NUM_THREADS=1")
    elif int(value) > cpus:
        message = f"OMP_NUM_THREADS={value}, but this process may use {cpus} processors"
        yield Problem(message, f"export OMP_NUM_THREADS={cpus}")


def _settings(registry: Registry) -> Iterator[Fact | Problem]:
    yield Fact("disabled plugins", ", ".join(registry.disabled) or "none")
    error = registry.settings_error
    if error is not None:
        yield Problem(error.message, error.hint)


def _plugin(plugin: Plugin) -> Iterator[Fact | Problem]:
    yield Fact(f"plugin {plugin.name}", f"{plugin.version or '-'} {plugin.state} ({plugin.source})")
    if plugin.state not in ("ok", "disabled"):
        yield Problem(f"plugin {plugin.label} is {plugin.state}: {plugin.reason}", plugin.remedy)


def _answers(registry: Registry, distribution: str) -> Iterator[Fact | Problem]:
    """Ask one distribution's ``slapo_doctor`` hook; its failure is a problem too."""
    hooks = HookManager(registry)  # one manager each: one that fails must not silence another
    try:
        hooks.activate(distribution)
        items = hooks.collect("slapo_doctor", (Fact, Problem), _RIGHT)
    except PluginError as error:
        yield Problem(error.message, error.hint)
        return
    for _, item in items:
        if isinstance(item, Fact):
            yield Fact(f"{distribution}: {item.what}", item.value)
        elif isinstance(item, Problem):
            yield Problem(f"{distribution}: {item.message}", item.hint)


_RIGHT = 'yield slapo_core.Problem("the problem", hint="the command that fixes it")'
