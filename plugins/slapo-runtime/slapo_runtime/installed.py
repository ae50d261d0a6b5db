"""Check and show the installed version of a runtime, without importing it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from slapo_core.errors import BuildError, warn_user
from slapo_core.hookspecs import Fact, Problem


@dataclass(frozen=True)
class Runtime:
    """A distribution that a dialect runs on.

    Args:
        distribution: e.g. ``"megatron-core"``.
        plugin: the distribution of the dialect, whose metadata has the oldest version, e.g. ``"slapo-megatron"``.
        target: e.g. ``"megatron"``.
        tested: the newest version that the plugin's tests have run on, e.g. ``"0.19"``; newer ones get a warning.
    """

    distribution: str
    plugin: str
    target: str
    tested: str

    @property
    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    @property
    def wanted(self) -> SpecifierSet:
        """The versions required by the plugin's metadata: ``>=0.16``."""
        lines = [Requirement(line) for line in requires(self.plugin) or ()]
        return next(one.specifier for one in lines if one.name == self.distribution)

    @property
    def is_untested(self) -> bool:
        """Whether the installed version is newer than the newest tested one."""
        found, tested = Version(self.version or "0"), Version(self.tested).release
        return found.release[: len(tested)] > tested

    def require(self) -> None:
        """Require an installed version, and warn of an untested one.

        Raises:
            BuildError: the runtime is not installed, or too old.
        """
        found = self.version
        if found is None:
            raise BuildError(
                f"target '{self.target}' needs {self.distribution}, which is not installed",
                hint=f"pip install {self.plugin}",
            )
        if not self.wanted.contains(found, prereleases=True):
            raise BuildError(
                f"target '{self.target}' runs {self.distribution} {self.wanted}, and {found} is installed",
                hint=f"pip install '{self.distribution}{self.wanted}'",
            )
        if self.is_untested:
            warn_user(self._untested())

    def facts(self) -> Iterator[Fact | Problem]:
        """Yield the lines of ``slapo doctor`` about the version."""
        found = self.version
        yield Fact(self.distribution, found or "not installed")
        if found is None:
            yield Problem(f"{self.distribution} is not installed", f"pip install {self.plugin}")
        elif not self.wanted.contains(found, prereleases=True):
            yield Problem(
                f"this plugin runs {self.distribution} {self.wanted}; installed is {found}",
                f"pip install '{self.distribution}{self.wanted}'",
            )
        elif self.is_untested:
            yield Problem(self._untested(), f"pip install '{self.distribution}=={self.tested}.*'")

    def _untested(self) -> str:
        return (
            f"{self.distribution} {self.version} is newer than the newest version that {self.plugin} is tested with, "
            f"{self.tested}"
        )
