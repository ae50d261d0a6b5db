"""A virtual environment that holds what some wheels declare, and nothing else of the environment of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import PathDistribution, distribution
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
    """``pip install`` of wheels without extras, as it would be on another machine.

    What they require of others is linked from this process's environment, requirement by requirement: a package that
    is installed here but declared by none of them is not to be seen.
    """

    def __init__(self, wheels: Sequence[Path], directory: Path) -> None:
        self.directory = directory
        venv.create(directory / "env", with_pip=False, symlinks=True)
        self.bin = directory / "env" / "bin"
        self.site_packages = next((directory / "env" / "lib").glob("python*/site-packages"))
        own = {canonicalize_name(wheel.name.split("-")[0]) for wheel in wheels}
        for name in sorted(_closure(wheels) - own):
            self._link(name)
        self._pip("install", "--no-deps", "--no-index", "--quiet", *map(str, wheels))
        self._pip("check")

    def python(self, *arguments: str) -> str:
        """What ``python <arguments>`` of the environment prints, run in a directory outside of the repository."""
        return _run([str(self.bin / "python"), *arguments], cwd=self.directory, bin=self.bin)

    def script(self, name: str, code: str) -> str:
        """What a file with ``code`` prints."""
        (self.directory / name).write_text(code, encoding="utf-8")
        return self.python(name)

    def _link(self, name: str) -> None:
        found = distribution(name)
        for part in sorted({file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}):
            source, target = Path(str(found.locate_file(part))), self.site_packages / part
            if source.exists() and not target.exists():
                target.symlink_to(source)

    def _pip(self, *arguments: str) -> None:
        _run([sys.executable, "-m", "pip", "--python", str(self.bin / "python"), *arguments], cwd=self.directory)


def _closure(wheels: Sequence[Path]) -> set[str]:
    """The names of everything that the wheels need, and that this in turn needs."""
    wanted = [requirement for wheel in wheels for requirement in _requirements(_metadata_of(wheel), set())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        requirement = wanted.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            wanted += _requirements(distribution(key[0]), set(requirement.extras))
    return {name for name, _ in seen}


def _metadata_of(wheel: Path) -> PathDistribution:
    (info,) = (part for part in ZipPath(wheel).iterdir() if part.name.endswith(".dist-info"))
    return PathDistribution(info)


def _requirements(found: PathDistribution, extras: set[str]) -> Iterator[Requirement]:
    for text in found.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in extras or {""}):
            yield requirement


def _run(command: Sequence[str], *, cwd: Path, bin: Path | None = None) -> str:
    dropped = ("SLAPO_", "PYTHONPATH", "PYTEST_", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    if bin is not None:
        variables["PATH"] = f"{bin}{os.pathsep}{variables['PATH']}"
    variables["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
