"""Plugin distributions for tests: metadata directories and modules on disk, without mocks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slapo_core.plugins import Registry


@dataclass(frozen=True)
class FakeDistribution:
    """A distribution to write into a directory, as by an installer.

    Args:
        name: e.g. ``"acme-slapo"``.
        version: e.g. ``"1.0"``; None omits the field of METADATA.
        entry_points: group -> name -> value, e.g. ``{"slapo.v1.primitives": {"acme.pad": "acme_slapo:Pad"}}``.
        modules: source text by dotted module name; ``"acme_slapo.pad"`` becomes ``acme_slapo/pad.py``.
        requires: ``Requires-Dist`` lines.
        files: further or replaced files of the metadata directory by name; None omits the file.
    """

    name: str
    version: str | None = "1.0"
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    files: Mapping[str, bytes | None] = field(default_factory=dict)

    def install(self, directory: Path) -> Path:
        """Write the distribution into ``directory``; return its metadata directory."""
        escaped = self.name.replace("-", "_")
        info = directory / f"{escaped}-{self.version or '0'}.dist-info"
        info.mkdir(parents=True)
        files: dict[str, bytes | None] = {
            "METADATA": self._metadata().encode(),
            "entry_points.txt": self._entry_points().encode(),
            "INSTALLER": b"pip\n",
            **self.files,
        }
        for name, content in files.items():
            if content is not None:
                (info / name).write_bytes(content)
        for module, source in self.modules.items():
            self._write_module(directory, module, source)
        return info

    def _metadata(self) -> str:
        lines = ["Metadata-Version: 2.1", f"Name: {self.name}"]
        lines += [f"Version: {self.version}"] if self.version is not None else []
        return "\n".join([*lines, *(f"Requires-Dist: {line}" for line in self.requires), "", ""])

    def _entry_points(self) -> str:
        lines = []
        for group, points in self.entry_points.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
        return "\n".join(lines)

    def _write_module(self, directory: Path, module: str, source: str) -> None:
        parts = module.split(".")
        is_package = any(other.startswith(f"{module}.") for other in self.modules)
        path = (
            directory.joinpath(*parts, "__init__.py") if is_package else directory.joinpath(*parts).with_suffix(".py")
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


class FakeEnvironment:
    """A directory of fake distributions, for this process or on the ``sys.path`` of another.

    Args:
        directory: the directory; put it on ``sys.path`` to import from it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def install(self, *distributions: FakeDistribution) -> None:
        """Write distributions into the directory."""
        for distribution in distributions:
            distribution.install(self.directory)

    def registry(
        self, environ: Mapping[str, str] | None = None, *, with_installed: bool = False, **options: Any
    ) -> Registry:
        """Discover the registry of the directory.

        Args:
            environ: the ``SLAPO_*`` variables; default: none.
            with_installed: whether to include the distributions of this environment.
            options: as for `Registry.discover`.
        """
        path = [str(self.directory), *(sys.path if with_installed else [])]
        return Registry.discover(path=path, environ=environ or {}, **options)

    def run(
        self, *arguments: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python <arguments>`` with the directory first on ``sys.path``."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLAPO_")}
        path = [str(self.directory), *filter(None, [inherited.get("PYTHONPATH")])]
        variables = {**inherited, "PYTHONPATH": os.pathsep.join(path), **(environ or {})}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=variables, cwd=cwd or self.directory, capture_output=True, text=True)

    def slapo(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the command ``slapo`` in another process; options as for `run`."""
        return self.run("-m", "slapo_core.cli.main", *arguments, **options)

    def forget_modules(self) -> None:
        """Remove modules of the directory from ``sys.modules``."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(self.directory)):
                del sys.modules[name]


def primitive_source(name: str, *, cls: str = "Thing", before: Iterable[str] = (), body: Iterable[str] = ()) -> str:
    """Return the source of a module with one valid primitive that does nothing.

    Args:
        name: full name of the primitive, e.g. ``"acme.pad"``.
        cls: name of the class.
        before: lines at the top of the module, run at import.
        body: lines of the class, e.g. further fields.
    """
    lines = [
        "from dataclasses import dataclass",
        "from slapo_core.primitive import Equivalence",
        "from slapo_core.primitive import Primitive",
        *before,
        "@dataclass(frozen=True)",
        f"class {cls}(Primitive):",
        '    """Do nothing.',
        "",
        "    rewrite: ``y = f(x)`` -> ``y = f(x)``",
        '    """',
        f"    name = {name!r}",
        "    equivalence = Equivalence.EXACT",
        *(f"    {line}" for line in body),
        "    def apply(self, node, edit):",
        "        return None",
    ]
    return "\n".join(lines) + "\n"
