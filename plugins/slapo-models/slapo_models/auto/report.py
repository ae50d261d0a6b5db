"""The report of an automatic schedule: split parameters, and full matrices with the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from slapo_core.internals import fold_paths


@dataclass(frozen=True)
class AutoReport:
    """The result of :func:`slapo_models.auto`.

    Args:
        split: paths of the parameters that are split.
        left_whole: path of a matrix that every rank has in full -> the reason.
        assumptions: about values that the recorded forward read.
        notes: about kernels, stages and checkpoints, and where transformers' plan differs.
        scattered: with ``sequence_parallel``, paths of modules whose sums are reduce-scattered along the sequence.
        all_reduced: with ``sequence_parallel``, path of a module whose sum stays all-reduced -> the reason.
    """

    split: tuple[str, ...]
    left_whole: Mapping[str, str]
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    all_reduced: Mapping[str, str] = field(default_factory=dict)

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

    def completed(self, reasons: Mapping[str, str], notes: Sequence[str]) -> AutoReport:
        """Return the report with more to say.

        Args:
            reasons: path of a matrix -> a text behind its reason, if it is full on every rank.
            notes: further ones.
        """
        left = {path: "; ".join(filter(None, (why, reasons.get(path)))) for path, why in self.left_whole.items()}
        return replace(self, left_whole=left, notes=(*self.notes, *notes))

    def __str__(self) -> str:
        lines = [f"split: {len(self.split)} parameters; left whole: {len(self.left_whole)} matrices"]
        lines += [f"  {each}" for each in by_reason("left whole", self.left_whole)]
        if self.scattered or self.all_reduced:
            sums = len(self.scattered) + len(self.all_reduced)
            lines.append(f"sequence parallel: {len(self.scattered)} of {sums} sums are reduce-scattered")
            lines += [f"  {each}" for each in by_reason("all-reduced", self.all_reduced)]
        lines += [f"  assumption: {each}" for each in self.assumptions]
        lines += [f"  {each}" for each in self.notes]
        return "\n".join(lines)


def by_reason(title: str, reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each reason, with its paths."""
    found: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        found.setdefault(reason, []).append(path)
    return [f"{title}: {_folded(paths)}: {reason}" for reason, paths in found.items()]


def _folded(paths: list[str]) -> str:
    by_shape: dict[tuple[str, ...], list[str]] = {}
    for path in paths:
        key = tuple("*" if level.isdigit() else level for level in path.split("."))
        by_shape.setdefault(key, []).append(path)
    return ", ".join(fold_paths(each) for each in by_shape.values())
