"""A virtual environment that holds what some wheels declare, and nothing else of the environment of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["CleanEnvironment", "build_wheels"]

_LEFT_OUT = ("build", "dist", "*.egg-info", "__pycache__", ".*", "paper", "node_modules")


def build_wheels(projects: Sequence[Path], directory: Path) -> tuple[Path, ...]:
    """The wheels of some source directories, built of copies: a build may leave files behind."""
    copies = []
    for project in projects:
        keep = (project / "slapo_core").is_dir()  # the root of the repository holds other projects as well
        parts = ["slapo_core", "README.md", "LICENSE", "pyproject.toml"] if keep else sorted(os.listdir(project))
        copy = directory / "sources" / project.name
        for part in parts:
            source = project / part
            if source.is_dir():
                shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns(*_LEFT_OUT))
            else:
                copy.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, copy / part)
        copies.append(str(copy))
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(directory))
    _run([sys.executable, "-m", "pip", "wheel", *options, *copies], cwd=directory)
    return tuple(sorted(directory.glob("*.whl")))


class CleanEnvironment:
    """What ``pip install`` of some requirements makes on another machine, where ours come from wheels.

    What they require of others is linked from this process's environment, requirement by requirement: a package that
    is installed here but declared by none of them is not to be seen.

    Attributes:
        own: the distributions that were installed from wheels.

    Args:
        wheels: of this repository; those that are required, directly or not, are installed.
        directory: for the environment, and the working directory of what it runs.
        requirements: e.g. ``"slapo-tp[test]"``; without any, every wheel without its extras.
    """

    def __init__(self, wheels: Sequence[Path], directory: Path, *requirements: str) -> None:
        self.directory = directory
        venv.create(directory / "env", with_pip=False, symlinks=True)
        self.bin = directory / "env" / "bin"
        self.site_packages = next((directory / "env" / "lib").glob("python*/site-packages"))
        own = {canonicalize_name(wheel.name.split("-")[0]): wheel for wheel in wheels}
        needed = _closure(own, [Requirement(text) for text in requirements or own])
        self.own = needed & own.keys()
        for name in sorted(needed - own.keys()):
            self._link(name)
        self._pip("install", "--no-deps", "--no-index", "--quiet", *(str(own[name]) for name in sorted(self.own)))
        if not requirements:  # for parts of it, the requirements are those that were followed here
            self._pip("check")

    def python(self, *arguments: str) -> str:
        """What ``python <arguments>`` of the environment prints, run in a directory outside of the repository."""
        return _run([str(self.bin / "python"), *arguments], cwd=self.directory, bin=self.bin)

    def fails(self, *arguments: str) -> str:
        """What ``python <arguments>`` prints, as :meth:`python` does, where it must end with an error."""
        return _run([str(self.bin / "python"), *arguments], cwd=self.directory, bin=self.bin, succeeds=False)

    def script(self, name: str, code: str) -> str:
        """What a file with ``code`` prints."""
        (self.directory / name).write_text(code, encoding="utf-8")
        return self.python(name)

    def variables(self) -> dict[str, str]:
        """The environment variables of what runs there."""
        return _variables(self.bin)

    def _link(self, name: str) -> None:
        found = distribution(name)
        for part in sorted({file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}):
            source, target = Path(str(found.locate_file(part))), self.site_packages / part
            if source.exists() and not target.exists():
                target.symlink_to(source)

    def _pip(self, *arguments: str) -> None:
        _run([sys.executable, "-m", "pip", "--python", str(self.bin / "python"), *arguments], cwd=self.directory)


def _closure(own: Mapping[str, Path], wanted: list[Requirement]) -> set[str]:
    """The names of everything that some requirements need, and that this in turn needs; ours by their wheels."""
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            found = _metadata_of(own[name]) if name in own else distribution(name)
            wanted += _requirements(found, set(requirement.extras))
    return {name for name, _ in seen}


def _metadata_of(wheel: Path) -> PathDistribution:
    (info,) = (part for part in ZipPath(wheel).iterdir() if part.name.endswith(".dist-info"))
    return PathDistribution(info)


def _requirements(found: Distribution, extras: set[str]) -> Iterator[Requirement]:
    for text in found.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in extras or {""}):
            yield requirement


def _run(command: Sequence[str], *, cwd: Path, bin: Path | None = None, succeeds: bool = True) -> str:
    done = subprocess.run(command, cwd=cwd, env=_variables(bin), capture_output=True, text=True, timeout=600)
    assert (done.returncode == 0) == succeeds, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout if succeeds else done.stdout + done.stderr


def _variables(bin: Path | None) -> dict[str, str]:
    dropped = ("SLAPO_", "PYTHONPATH", "PYTEST_", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    if bin is not None:
        variables["PATH"] = f"{bin}{os.pathsep}{variables['PATH']}"
    variables["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    return variables
