"""Is DeepSpeed there, and in a version that this plugin knows? Asked without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from slapo_core import BuildError

__all__ = ["found_version", "require_deepspeed", "window"]


def window() -> SpecifierSet:
    """The versions of DeepSpeed that this plugin is made for, as its own metadata says: ``>=0.19,<0.20``."""
    wanted = [Requirement(line) for line in requires("slapo-deepspeed") or ()]
    return next(one.specifier for one in wanted if one.name == "deepspeed")


def found_version() -> str | None:
    """The version that is installed; None where it is not."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return None


def require_deepspeed() -> None:
    """
    Raises:
        BuildError: DeepSpeed is not installed, or in a version that this plugin was not made for.
    """
    found, wanted = found_version(), window()
    if found is None:
        raise BuildError(
            "target 'deepspeed' needs DeepSpeed, which is not installed", hint="pip install slapo-deepspeed"
        )
    if not wanted.contains(found, prereleases=True):
        raise BuildError(
            f"target 'deepspeed' runs DeepSpeed {wanted}, and {found} is installed",
            hint=f"pip install 'deepspeed{wanted}'",
        )
