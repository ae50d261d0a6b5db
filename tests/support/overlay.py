"""A virtual environment of its own that borrows the packages of this one: made in a moment, written to freely."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Overlay"]


class Overlay:
    """A virtual environment in ``directory``.

    What is installed there comes before what this process's environment has; both are seen by Python, pip and mypy.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        venv.create(directory, with_pip=False, symlinks=True)
        self.site_packages = next((directory / "lib").glob("python*/site-packages"))
        borrowed = sysconfig.get_path("purelib")
        (self.site_packages / "borrowed.pth").write_text(f"import site; site.addsitedir({borrowed!r})\n")

    @property
    def python(self) -> str:
        return str(self.directory / "bin" / "python")

    def run(
        self, *command: str, cwd: Path, environ: Mapping[str, str] | None = None, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python <command>`` of the environment, without this process's ``SLAPO_*`` and ``PYTHONPATH``."""
        dropped = ("SLAPO_", "PYTHONPATH", "PYTEST_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        scripts = os.pathsep.join([str(self.directory / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        variables = {**inherited, "PATH": scripts, "VIRTUAL_ENV": str(self.directory), **(environ or {})}
        done = subprocess.run(
            [self.python, *command], cwd=cwd, env=variables, capture_output=True, text=True, timeout=600
        )
        if check:
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done

    def slapo(self, *arguments: str, cwd: Path, check: bool = False) -> subprocess.CompletedProcess[str]:
        """Run the command ``slapo`` there."""
        return self.run("-m", "slapo_core.cli.main", *arguments, cwd=cwd, check=check)

    def pip_install(self, *arguments: str, cwd: Path) -> None:
        """``pip install`` without the network: everything that is needed must be there."""
        options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
        self.run("-m", "pip", "install", *options, *arguments, cwd=cwd, check=True)
