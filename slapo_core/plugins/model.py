"""What the registry knows about a plugin: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slapo_core.errors import (
    BrokenPluginError,
    ConflictingPluginError,
    DisabledPluginError,
    IncompatiblePluginError,
    PluginError,
    RejectedPluginError,
)
from slapo_core.spec.kinds import KINDS

__all__ = ["LOCAL_VERSION", "Entry", "Plugin", "State", "core_label", "noun"]

State = Literal["ok", "broken", "incompatible", "rejected", "conflict", "disabled"]

_ERRORS: dict[State, tuple[type[PluginError], str]] = {
    "broken": (BrokenPluginError, "is broken"),
    "conflict": (ConflictingPluginError, "is in conflict"),
    "disabled": (DisabledPluginError, "is installed but disabled"),
    "incompatible": (IncompatiblePluginError, "is incompatible"),
    "rejected": (RejectedPluginError, "was rejected"),
}

LOCAL_VERSION = "local"
"""The version of what was registered in this process."""


def noun(kind: str) -> str:
    """A kind in the singular, for messages: ``"primitives"`` as ``"primitive"``."""
    return "hooks module" if kind == "hooks" else kind.removesuffix("s")


def core_label(version: str | None) -> str:
    """slapo-core with its version, for messages; ``version`` is None where it runs from a bare source tree."""
    return f"slapo-core {version or '(version unknown)'}"


@dataclass(frozen=True)
class Entry:
    """One name that one distribution provides.

    Args:
        kind: e.g. ``"primitives"``.
        name: the full name, e.g. ``"tp.shard"``.
        value: where the object is, e.g. ``"slapo_tp.shard:Shard"``.
        distribution: e.g. ``"slapo-tp"``.
        version: e.g. ``"0.1.0"``; ``"local"`` for what was registered in this process.
    """

    kind: str
    name: str
    value: str
    distribution: str
    version: str

    @property
    def bare(self) -> str:
        """``"shard"`` of ``"tp.shard"``; for kinds without namespaces the name itself."""
        return self.name if self._is_whole else self.name.rpartition(".")[2]

    @property
    def namespace(self) -> str | None:
        """``"tp"`` of ``"tp.shard"``; None for kinds without namespaces."""
        return self.name.partition(".")[0] if "." in self.name and not self._is_whole else None

    @property
    def _is_whole(self) -> bool:
        return self.kind in KINDS and KINDS[self.kind].dotted

    @property
    def label(self) -> str:
        """The distribution with its version, e.g. ``"slapo-tp 0.1.0"``."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Plugin:
    """One installed distribution that provides something to slapo.

    Args:
        name: canonical, e.g. ``"slapo-tp"``.
        version: None where its metadata cannot be read.
        state: ``ok``, ``broken``, ``incompatible``, ``rejected``, ``conflict`` or ``disabled``.
        reason: why it is not ok, or a remark on one that is; None when there is nothing to say.
        remedy: what to do about the reason.
        source: its metadata directory, or ``"this process"``.
        entries: what it provides, as far as it could be read, sorted.
        shadows: metadata directories of the same distribution further down ``sys.path``, which are not used.
    """

    name: str
    version: str | None
    state: State
    reason: str | None = None
    remedy: str | None = None
    source: str = ""
    entries: tuple[Entry, ...] = ()
    shadows: tuple[str, ...] = ()

    def provides(self, kind: str) -> tuple[str, ...]:
        """The full names of one kind that it provides, sorted."""
        return tuple(sorted({entry.name for entry in self.entries if entry.kind == kind}))

    @property
    def namespaces(self) -> set[str]:
        """The namespaces of its names: at most one, unless it is rejected."""
        return {entry.namespace for entry in self.entries if entry.namespace is not None}

    @property
    def label(self) -> str:
        """The distribution with its version, e.g. ``"slapo-tp 0.1.0"``."""
        return f"{self.name} {self.version}" if self.version else self.name

    @property
    def usable(self) -> bool:
        """Whether its names can be used; in ``conflict``, all but the names concerned."""
        return self.state in ("ok", "conflict")

    def error(self, subject: str, *, path: str | None = None) -> PluginError:
        """The error of its state, which is not ``ok``.

        Args:
            subject: what was asked for, the beginning of the message.
            path: the node where it was asked for.
        """
        error, state = _ERRORS[self.state]
        return error(f"{subject} {state}: {self.reason}", path=path, plugin=self.label, hint=self.remedy)
