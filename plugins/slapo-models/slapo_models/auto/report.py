"""The report of an automatic schedule: split parameters, and full matrices with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slapo_core.internals import fold_paths


@dataclass(frozen=True)
class AutoReport:
    """The result of :func:`slapo_models.auto`.

    Args:
        split: paths of the parameters that are split.
        left_whole: path of a matrix that every rank has in full -> the reason.
        assumptions: about values that the recorded forward read.
        notes: about kernels, stages and checkpoints.
    """

    split: tuple[str, ...]
    left_whole: Mapping[str, str]
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def repeated(self, stands: Mapping[str, str]) -> AutoReport:
        """Return the report of a model of more blocks, without notes.

        Args:
            stands: path of a parameter or buffer -> path in this report.
        """
        return AutoReport(
            tuple(path for path, own in stands.items() if own in self.split),
            {path: self.left_whole[own] for path, own in stands.items() if own in self.left_whole},
            self.assumptions,
        )

    def __str__(self) -> str:
        lines = [f"split: {len(self.split)} parameters; left whole: {len(self.left_whole)} matrices"]
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.left_whole.items():
            by_reason.setdefault(reason, []).append(path)
        for reason, paths in by_reason.items():
            lines.append(f"  left whole: {_folded(paths)}: {reason}")
        lines += [f"  assumption: {each}" for each in self.assumptions]
        lines += [f"  {each}" for each in self.notes]
        return "\n".join(lines)


def _folded(paths: list[str]) -> str:
    by_shape: dict[tuple[str, ...], list[str]] = {}
    for path in paths:
        key = tuple("*" if level.isdigit() else level for level in path.split("."))
        by_shape.setdefault(key, []).append(path)
    return ", ".join(fold_paths(each) for each in by_shape.values())
