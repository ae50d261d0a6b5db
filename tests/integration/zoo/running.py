"""Run the checks over many models, each in a process with a limit of time."""

from __future__ import annotations

import multiprocessing
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.integration.zoo.architectures import CannotMake
from tests.integration.zoo.checks import CHECKS, run_checks
from tests.integration.zoo.pipelines import PIPELINES
from tests.integration.zoo.subjects import subject, subjects
from tests.integration.zoo.tracing import TRACING

__all__ = ["COLUMNS", "Row", "check_all", "split_all"]

_ALL = {**CHECKS, **TRACING, **PIPELINES}
COLUMNS = tuple(_ALL)
"""Every check of one process."""

TIME_LIMIT = 240
BATCH = 12


@dataclass
class Row:
    """What came out of one model.

    Args:
        name: of the subject.
        model: the class's name.
        seconds: what the checks took.
        skipped: why there is no tiny instance; None if there is.
        results: check -> ``"ok"``, or a word, a colon, and the reason.
    """

    name: str
    model: str
    seconds: float
    skipped: str | None
    results: dict[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> dict[str, str]:
        return {check: result for check, result in self.results.items() if result.startswith("FAILED")}


def check_all(tasks: Sequence[tuple[str, Sequence[str]]], *, workers: int) -> Iterator[Row]:
    """Run checks of one process, in ``workers`` processes; rows come in the order in which they are done.

    Args:
        tasks: the name of a model and the columns to fill, each.
        workers: processes.
    """
    import transformers.models.bert.modeling_bert  # noqa: F401 (once, before the processes are forked)

    with multiprocessing.get_context("fork").Pool(workers, _quiet, maxtasksperchild=8) as pool:
        yield from pool.imap_unordered(_check, tasks)


def split_all(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Split every model over two ranks and verify it; many models share one start of the ranks."""
    from slapo_core.errors import SlapoError
    from slapo_runtime.launcher import preload_modules, run_ranks
    from tests.integration.zoo.tensor_parallel import verify_on_ranks

    preload_modules("tests.integration.zoo.tensor_parallel", "transformers.models.bert.modeling_bert")
    for start in range(0, len(names), BATCH):
        part = names[start : start + BATCH]
        try:
            answers = run_ranks(verify_on_ranks, part, world_size=2, timeout=300)
        except SlapoError as error:
            if len(part) == 1:
                yield part[0], f"FAILED: {error}"
                continue
            for name in part:  # one of them ends the ranks: by themselves
                yield from split_all([name])
            continue
        for name in part:
            same = len({answer[name] for answer in answers}) == 1
            yield name, answers[0][name] if same else f"FAILED: ranks disagree: {[a[name] for a in answers]}"


def _check(task: tuple[str, Sequence[str]]) -> Row:
    name, columns = task
    model = next(each.model for each in subjects() if each.name == name)
    start = time.monotonic()
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(TIME_LIMIT)
    try:
        results = run_checks(subject(name), {column: _ALL[column] for column in columns})
    except CannotMake as reason:
        return Row(name, model, time.monotonic() - start, str(reason))
    except TimeoutError as reason:
        return Row(name, model, time.monotonic() - start, None, {"time": f"FAILED: {reason}"})
    except Exception as error:  # noqa: BLE001 - one model must not end the run of all others: it is a row that failed
        return Row(name, model, time.monotonic() - start, None, {"run": f"FAILED: {type(error).__name__}: {error}"})
    finally:
        signal.alarm(0)
    return Row(name, model, time.monotonic() - start, None, results)


def _too_late(*_: Any) -> None:
    raise TimeoutError(f"the checks took more than {TIME_LIMIT} s")


def _quiet() -> None:
    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
