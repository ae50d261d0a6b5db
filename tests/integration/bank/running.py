"""Run cases on the ranks of one launch after another; what is known already is not run again."""

from __future__ import annotations

import dataclasses
import datetime
import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_core.errors import SlapoError
from slapo_runtime.launcher import preload_modules, run_ranks
from tests.integration.bank.judging import blames_rightly
from tests.integration.bank.models import batch_of, make_model
from tests.integration.bank.oracle import changes, observe
from tests.integration.bank.right import right_schedules
from tests.integration.bank.steps import Right, Step, Wrong, apply_steps
from tests.integration.bank.wrong import wrong_schedules

__all__ = ["CAUGHT", "Result", "preload", "run_all"]

CAUGHT = ("refused at the step", "refused at build", "caught by verify")
BATCH, SECONDS_A_CASE, SECONDS_ALONE = 12, 60.0, 120.0
_TIMEOUT = datetime.timedelta(seconds=25)


@dataclass
class Result:
    """What came out of one schedule.

    Args:
        name: of the case.
        kind: the class of the mistake; "right" for none.
        model: its name.
        outcome: one of :data:`CAUGHT`, ``"agrees"``, ``"missed"``, ``"changes nothing"``, ``"ends the ranks"``.
        blame: whether the right steps were named; None where nothing was raised.
        text: the error, or the notes of the report.
        oracle: what number the mistake changes, as the plain comparison or its author says.
        refused_by_build: what build said, where all steps were applied.
        seconds: of processor time, on rank 0.
    """

    name: str
    kind: str
    model: str
    outcome: str
    blame: bool | None = None
    text: str = ""
    oracle: str = ""
    refused_by_build: str = ""
    seconds: float = 0.0

    @property
    def is_wrong_verdict(self) -> bool:
        """Whether a mistake was missed, or a right schedule refused."""
        return self.outcome not in (*CAUGHT, "agrees", "changes nothing")


def preload() -> None:
    """Let the server of the ranks import what every launch needs."""
    names = ("bert", "gpt2", "llama", "qwen3", "t5", "vit")
    preload_modules(*(f"transformers.models.{name}.modeling_{name}" for name in names))
    preload_modules("tests.integration.bank.running", "slapo_tp")


def run_all(names: Sequence[str], journal: Path | None = None, *, workers: int = 2) -> Iterator[Result]:
    """Run cases, many in each launch; results come launch by launch.

    Args:
        names: of right and wrong schedules.
        journal: results found in this file are not run again; new ones are added, one a line.
        workers: launches at the same time; ranks wait for each other much of theirs.
    """
    preload()
    done = _read(journal)
    yield from (done[name] for name in names if name in done)
    launches = list(_launches([name for name in names if name not in done]))
    with ThreadPoolExecutor(workers) as pool:
        for found in pool.map(lambda each: _launch(each[0], alone=each[1]), launches):
            if journal is not None:
                with journal.open("a") as file:
                    file.writelines(json.dumps(dataclasses.asdict(result)) + "\n" for result in found)
            yield from found


def _launches(names: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    groups: dict[tuple[int, bool], list[str]] = {}
    for name in names:
        alone = name in _wrong() and _wrong()[name][1].alone
        groups.setdefault((_ranks(name), alone), []).append(name)
    for (_, alone), group in groups.items():
        size = 1 if alone else BATCH
        yield from ((group[start : start + size], alone) for start in range(0, len(group), size))


def _launch(names: Sequence[str], *, alone: bool) -> list[Result]:
    """One start of the ranks; where one case ends them, it is run again by itself, and the rest after it."""
    with tempfile.TemporaryDirectory(prefix="slapo-bank-") as folder:
        spool = Path(folder) / "results"
        limit = SECONDS_ALONE if alone else SECONDS_A_CASE * len(names)
        try:
            answers = run_ranks(run_cases, tuple(names), str(spool), world_size=_ranks(names[0]), timeout=limit)
        except SlapoError as error:
            found = list(_read(spool).values())
            if len(names) == 1:
                kind = _wrong()[names[0]][0] if names[0] in _wrong() else "right"
                return [Result(names[0], kind, _model(names[0]), "ends the ranks", text=str(error)[-3000:])]
        else:
            found = answers[0]
            for position, result in enumerate(found):
                outcomes = {answer[position].outcome for answer in answers}
                if len(outcomes) > 1:
                    result.outcome, result.text = "ranks disagree", f"{sorted(outcomes)}: {result.text}"
    rest = names[len(found) :]
    for part in (rest[:1], rest[1:]):
        if part:
            found += _launch(part, alone=alone or len(part) == 1)
    return found


def _model(name: str) -> str:
    return name.partition("/")[0]


def _read(journal: Path | None) -> dict[str, Result]:
    if journal is None or not journal.exists():
        return {}
    rows = [Result(**json.loads(line)) for line in journal.read_text().splitlines()]
    return {row.name: row for row in rows}


@cache
def _right() -> Mapping[str, Right]:
    return {right.name: right for right in right_schedules()}


@cache
def _wrong() -> Mapping[str, tuple[str, Wrong]]:
    return wrong_schedules()


def _ranks(name: str) -> int:
    return (_wrong()[name][1].right if name in _wrong() else _right()[name]).ranks


# -- on every rank ------------------------------------------------------------------------------------------------


def run_cases(names: Sequence[str], spool: str | None = None, *, compare: bool = True) -> list[Result]:
    """On every rank: run each case.

    Args:
        names: of the cases.
        spool: a file that rank 0 adds results to.
        compare: whether the plain comparison and build run, too.
    """
    warnings.simplefilter("ignore")
    if spool is not None:  # else a case that waits ends the launch
        dist.distributed_c10d._set_pg_timeout(_TIMEOUT, dist.distributed_c10d._get_default_group())
    found = []
    for name in names:
        found.append(_run(name, compare=compare))
        if spool is not None and dist.get_rank() == 0:
            with Path(spool).open("a") as file:
                file.write(json.dumps(dataclasses.asdict(found[-1])) + "\n")
    return found


def _run(name: str, *, compare: bool) -> Result:
    start = time.process_time()
    if name in _wrong():
        kind, wrong = _wrong()[name]
        result = Result(name, kind, wrong.right.model, "")
        _try(wrong, result, build=compare)
        if compare and result.outcome != "refused at the step" and not wrong.by_hand:
            result.oracle = _oracle(wrong)
            if not result.oracle:
                result.outcome = "changes nothing" if result.outcome == "missed" else f"FALSE: {result.outcome}"
        elif wrong.by_hand:
            result.oracle = f"by hand: {wrong.by_hand}"
    else:
        right = _right()[name]
        result = Result(name, "right", right.model, "")
        _try(Wrong(right, "", right.steps), result, build=compare)
        result.outcome = "agrees" if result.outcome == "missed" else f"ALARM: {result.outcome}"
        result.oracle = _same_as_untouched(right) if compare else ""
        if result.oracle:
            result.outcome = f"NOT RIGHT, {result.outcome}"
    result.seconds = time.process_time() - start
    return result


def _try(wrong: Wrong, result: Result, *, build: bool) -> None:
    right, options = wrong.right, {**dict(wrong.right.options), **dict(wrong.options)}
    sch, made, refused = _scheduled(right, wrong.steps, options)
    if refused is not None:
        position, error = refused
        result.outcome, result.text = "refused at the step", f"{type(error).__name__}: {error}"
        result.blame = blames_rightly(wrong, made, error, refused=position)
        return
    batch = batch_of(right.model, right.form, dtype=options.get("dtype", "float32"))
    caught: SlapoError | None = None
    try:
        report = slapo.verify(sch, batch, optimizer_steps=2, **dict(wrong.verify))
    except SlapoError as error:
        caught = error
    else:
        result.text = "; ".join((*report.notes, *report.not_compared))
    refusal = _refused_by_build(wrong, options) if build else None
    if refusal is not None:
        result.refused_by_build = f"{type(refusal).__name__}: {refusal}"
    first = caught or refusal
    result.outcome = "refused at build" if refusal else "caught by verify" if caught else "missed"
    if first is not None:
        result.text = f"{type(first).__name__}: {first}"
        result.blame = blames_rightly(wrong, made, first, refused=None)


def _refused_by_build(wrong: Wrong, options: Mapping[str, Any]) -> SlapoError | None:
    sch, _, _ = _scheduled(wrong.right, wrong.steps, options)
    try:
        slapo.build(sch, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    except SlapoError as error:
        return error
    return None


def _scheduled(
    right: Right, steps: Sequence[Step], options: Mapping[str, Any]
) -> tuple[slapo.Schedule, list[range], tuple[int, SlapoError] | None]:
    """The schedule, the records of each step, and the step that was refused."""
    rank = dist.get_rank()
    sch = slapo.create_schedule(make_model(right.model, **options), mesh={"tp": dist.get_world_size()})
    made: list[range] = []
    for position, each in enumerate(steps):
        try:
            made += [range(r.start, r.stop) for r in apply_steps(sch, [each], rank)]
        except SlapoError as error:
            return _agreed(sch, made, (position, error))
    return _agreed(sch, made, None)


def _agreed(
    sch: slapo.Schedule, made: list[range], refused: tuple[int, SlapoError] | None
) -> tuple[slapo.Schedule, list[range], tuple[int, SlapoError] | None]:
    """What one rank raises ends the program of all; of several refusals the first rank's counts."""
    everywhere: list[tuple[int, SlapoError] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, refused)
    return sch, made, next((found for found in everywhere if found is not None), None)


_SEEN: dict[str, dict[str, torch.Tensor]] = {}  # in a process of the ranks, which ends with its cases


def _observed(right: Right) -> dict[str, torch.Tensor]:
    if right.name not in _SEEN:
        _SEEN[right.name] = observe(right, right.steps, dist.get_rank(), dict(right.options))
    return _SEEN[right.name]


def _oracle(wrong: Wrong) -> str:
    """What the mistake changes on some rank; "" if nothing."""
    expected = _observed(wrong.right)
    options = {**dict(wrong.right.options), **dict(wrong.options)}
    try:
        found = changes(expected, observe(wrong.right, wrong.steps, dist.get_rank(), options))
    except Exception as error:  # noqa: BLE001 - a schedule that cannot run is wrong, whatever it raises
        found = f"raises {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return _somewhere(found)


def _same_as_untouched(right: Right) -> str:
    """What outputs a right schedule changes, at once or after steps of SGD; "" if it is right.

    In double precision and in single, whatever the model's own type: bfloat16 says little of what is right.
    """
    rank, options = dist.get_rank(), {**dict(right.options), "dtype": "float32"}
    plain, split = observe(right, (), rank, options), observe(right, right.steps, rank, options)
    outputs = [
        {name: value for name, value in seen.items() if name.startswith(("output", "evaluated"))}
        for seen in (plain, split)
    ]
    return _somewhere(changes(*outputs))


def _somewhere(found: str | None) -> str:
    everywhere: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return next((f"{text}, on rank {rank}" for rank, text in enumerate(everywhere) if text), "")
