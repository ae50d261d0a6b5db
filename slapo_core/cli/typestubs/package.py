"""The stub package: its files, where it is written, and whether it is up to date."""

from __future__ import annotations

import base64
import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slapo_core.cli.typestubs.vocabulary import Omission, vocabulary_source
from slapo_core.plugins.registry import Registry

__all__ = ["STUB_PACKAGE", "StubPackage", "make_stubs"]

STUB_PACKAGE = "slapo_core-stubs"
"""The directory that type checkers look for (PEP 561)."""


@dataclass(frozen=True)
class StubPackage:
    """The files of the stub package, by path below it."""

    files: Mapping[str, str]
    omissions: tuple[Omission, ...]

    @property
    def vocabulary(self) -> str:
        """The file that depends on what is installed."""
        return self.files["_vocabulary.pyi"]

    def write(self, directory: Path) -> Path:
        """Write the package into ``directory``; returns its own directory.

        Files of an earlier one are replaced.
        """
        package = directory / STUB_PACKAGE
        for name, text in self.files.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        return package

    def install(self, site_packages: Path, version: str) -> Path:
        """Write the package with its metadata, so that ``pip uninstall slapo-core-stubs`` removes it."""
        for old in site_packages.glob("slapo_core_stubs-*.dist-info"):
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
        package = self.write(site_packages)
        info = site_packages / f"slapo_core_stubs-{version}.dist-info"
        info.mkdir()
        summary = "Types of the slapo schedule language as installed here, made by `slapo stubs`"
        metadata = f"Metadata-Version: 2.1\nName: slapo-core-stubs\nVersion: {version}\nSummary: {summary}\n"
        (info / "METADATA").write_text(metadata, "utf-8")
        (info / "INSTALLER").write_text("slapo\n", "utf-8")
        written = [*(package / name for name in self.files), info / "METADATA", info / "INSTALLER"]
        rows = [_record_row(path, site_packages) for path in written]
        (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,", ""]), "utf-8")
        return package

    def difference(self, directory: Path) -> str:
        """A unified diff from the package in ``directory`` to this one; empty if they are the same."""
        package = directory / STUB_PACKAGE
        diff: list[str] = []
        for name, text in self.files.items():
            path = package / name
            old = path.read_text("utf-8") if path.exists() else ""
            diff += difflib.unified_diff(
                old.splitlines(keepends=True), text.splitlines(keepends=True), f"{path}", f"{name} as installed now"
            )
        return "".join(diff)


def make_stubs(registry: Registry) -> StubPackage:
    """Make the stubs from what is installed; imports every primitive.

    Args:
        registry: what is installed.
    """
    vocabulary, omissions = vocabulary_source(registry)
    return StubPackage({"py.typed": "partial\n", "_vocabulary.pyi": vocabulary}, omissions)


def _record_row(path: Path, root: Path) -> str:
    content = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{path.relative_to(root).as_posix()},sha256={digest},{len(content)}"
