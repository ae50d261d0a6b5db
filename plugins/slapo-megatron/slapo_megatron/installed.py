"""Is Megatron-core there, and in a version that this plugin knows? Asked without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from slapo_core import BuildError

__all__ = ["found_version", "require_megatron", "window"]


def window() -> SpecifierSet:
    """The versions of Megatron-core that this plugin is made for, as its own metadata says: ``>=0.16,<0.20``."""
    wanted = [Requirement(line) for line in requires("slapo-megatron") or ()]
    return next(one.specifier for one in wanted if one.name == "megatron-core")


def found_version() -> str | None:
    """The version that is installed; None where it is not."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return None


def require_megatron() -> None:
    """
    Raises:
        BuildError: Megatron-core is not installed, or in a version that this plugin was not made for.
    """
    found, wanted = found_version(), window()
    if found is None:
        raise BuildError(
            "target 'megatron' needs megatron-core, which is not installed", hint="pip install slapo-megatron"
        )
    if not wanted.contains(found, prereleases=True):
        raise BuildError(
            f"target 'megatron' runs megatron-core {wanted}, and {found} is installed",
            hint=f"pip install 'megatron-core{wanted}'",
        )
