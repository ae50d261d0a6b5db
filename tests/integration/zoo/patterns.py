"""The ready patterns of slapo-fusion on real models: how often each is found, and whether its replacement is right."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import slapo_core as slapo
from tests.integration.zoo.architectures import CannotMake
from tests.integration.zoo.checks import blocks
from tests.integration.zoo.operations import OPERATIONS, count_operations
from tests.integration.zoo.subjects import Subject, subject, subjects

__all__ = ["REPLACED", "PatternRow", "look_at_all", "patterns_in"]

REPLACED = ("fusion.sdpa", "fusion.rms_norm", "fusion.gelu", "fusion.gelu_tanh")
"""The patterns that have a replacement."""

TIME_LIMIT = 120


@dataclass
class PatternRow:
    """What came out of one model.

    Args:
        name: of the subject.
        model: the class's name.
        skipped: why nothing was looked for; None if something was.
        blocks: how many were traced, and how many there are.
        found: pattern -> how often it was found, and how often the operation is there by the crude count.
        replaced: pattern -> how many matches were replaced.
        refused: pattern -> why matches could not be replaced.
        missed: pattern -> the nearest miss in the first block where it was found less often than counted.
        verified: ``"ok"``, why ``verify`` refused, or ``""`` where nothing was replaced.
    """

    name: str
    model: str
    skipped: str | None = None
    blocks: tuple[int, int] = (0, 0)
    found: dict[str, tuple[int, int]] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)
    verified: str = ""


def patterns_in(subject: Subject) -> PatternRow:
    """Trace every block of a model with ``flatten=True``, find every pattern, replace what can be, and verify."""
    row = PatternRow(subject.name, subject.model)
    try:
        subject.check_that_it_runs()
    except CannotMake as error:
        row.skipped = str(error)
        return row
    model, batch = subject.given()
    sch = slapo.create_schedule(model, example_inputs=batch)
    found: Counter[str] = Counter()
    there: Counter[str] = Counter()
    paths = blocks(model)
    traced = 0
    for path in paths:
        try:
            sch[path].trace(flatten=True)
        except slapo.SlapoError as error:
            row.skipped = row.skipped or f"cannot be traced: {_line(error)}"
            continue
        traced += 1
        node = sch[path]
        graph: Any = node.graph
        present = count_operations(node.module, graph.first.recorded.graph)
        there.update(present)
        for name in OPERATIONS:
            matches = node.find(name)
            found[name] += len(matches)
            if len(matches) < present[name] and name not in row.missed:
                row.missed[name] = _nearest(node, name) if not matches else f"{len(matches)} of {present[name]}"
        for name in REPLACED:
            _replace(node, name, row)
    row.blocks = (traced, len(paths))
    row.found = {name: (found[name], there[name]) for name in OPERATIONS if found[name] or there[name]}
    if traced:
        row.skipped = None
    if row.replaced:
        try:
            slapo.verify(sch, batch)
            row.verified = "ok"
        except slapo.VerifyError as error:
            row.verified = _line(error)
    return row


def _replace(node: Any, name: str, row: PatternRow) -> None:
    count = len(node.find(name))
    if not count:
        return
    try:
        node.replace(match=name)
        row.replaced[name] = row.replaced.get(name, 0) + count
    except slapo.SlapoError as error:
        row.refused.setdefault(name, _line(error))


def _nearest(node: Any, name: str) -> str:
    try:
        node.checkpoint(match=name)
    except slapo.SlapoError as error:
        text = _line(error)
        return text.partition("closest candidate: ")[2] or text
    raise AssertionError(f"{name} was not found, and yet checkpointed")


def _line(error: BaseException) -> str:
    return " ".join(str(getattr(error, "message", error)).split())[:300]


def look_at_all(names: Sequence[str], *, workers: int) -> Iterator[PatternRow]:
    """:func:`patterns_in` for models by name, in ``workers`` processes; rows come as they are done."""
    import transformers.models.bert.modeling_bert  # noqa: F401 (once, before the processes are forked)

    with multiprocessing.get_context("fork").Pool(workers, _quiet, maxtasksperchild=8) as pool:
        yield from pool.imap_unordered(_look, names)


def _look(name: str) -> PatternRow:
    model = next(each.model for each in subjects() if each.name == name)
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(TIME_LIMIT)
    try:
        return patterns_in(subject(name))
    except Exception as error:  # noqa: BLE001
        return PatternRow(name, model, skipped=f"{type(error).__name__}: {_line(error)}")
    finally:
        signal.alarm(0)


def _too_late(*_: Any) -> None:
    raise TimeoutError(f"took longer than {TIME_LIMIT} s")


def _quiet() -> None:
    import logging

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
