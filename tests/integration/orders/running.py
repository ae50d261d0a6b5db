"""Apply drawn schedules where the mesh is only declared, and verify them on ranks, many in one launch."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_core.errors import SlapoError, VerifyError
from slapo_runtime.launcher import preload_modules, run_ranks
from tests.integration.orders.drawing import Draw, Undo
from tests.integration.orders.families import batch_of, model_of

__all__ = ["Result", "preload", "run"]

AT_ONCE, SECONDS = 10, 180.0
REFUSALS = (
    slapo.ArgumentError, slapo.PreconditionError, slapo.ApplyError, slapo.TraceError, slapo.StaleError,
    slapo.PathError,
)  # fmt: skip
_WAITING = datetime.timedelta(seconds=150)


@dataclass
class Result:
    """What came out of one schedule.

    Args:
        name: of the draw or pair.
        outcome: ``"verified"``, ``"accepted"`` (and not verified yet), ``"refused"`` (at a step), ``"wrong"``
            (accepted, and other numbers come out), or ``"broken"`` (accepted, and an error later).
        at: the step that was refused.
        before: the steps before it.
        text: of the error.
        seconds: of processor time, on rank 0.
    """

    name: str
    outcome: str
    at: str = ""
    before: tuple[str, ...] = ()
    text: str = ""
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """The refusal without names, so that it can be counted."""
        return reason(self.text)


def reason(text: str) -> str:
    """An error's message without what differs from place to place."""
    lines = text.splitlines() or [""]
    text = " ".join(lines[:2]).replace(":   - ", ": ") if lines[0].endswith(":") else lines[0]
    text = text.partition(": cannot apply")[2].partition(": ")[2] or text
    text = re.sub(r"#\d+ ", "", text)
    text = re.sub(r"/\S+:\d+", "FILE", text)
    text = re.sub(r"'[^']*'", "'..'", text)
    return text[:160]


@dataclass(frozen=True)
class Applied:
    """A schedule that was accepted, on its way to the ranks."""

    name: str
    family: str
    tp: int
    document: str
    records: tuple[str, ...]


def preload() -> None:
    """Let the server of the ranks import what every launch needs."""
    names = ("bert", "gpt2", "llama", "opt", "t5", "vit")
    preload_modules(*(f"transformers.models.{name}.modeling_{name}" for name in names))
    preload_modules("tests.integration.orders.running", "slapo_tp", "torch._dynamo", "torchao.quantization.qat")


def applied(each: Draw) -> Applied | Result:
    """Apply a schedule to an abstract mesh.

    Returns:
        what the ranks need, or the result where a step was refused.
    """
    start, calls = time.process_time(), []
    batch = batch_of(each.family)
    sch = slapo.create_schedule(model_of(each.family), mesh={"tp": each.tp}, example_inputs=batch)
    for call in each.calls:
        before = len(sch.records)
        try:
            if isinstance(call, Undo):
                sch.undo(to=before - call.steps)
                assert len(sch.records) == before - call.steps
                del calls[len(calls) - call.steps :]
                continue
            call.apply(sch)
            calls.append(str(call))
            assert len(sch.records) == before + 1, f"{call} made {len(sch.records) - before} records"
        except REFUSALS as error:
            text, outcome = f"{type(error).__name__}: {error}", "refused"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            text, outcome = f"{type(error).__name__}: {error}\n{_line(error)}", "broken"
        else:
            continue
        return Result(each.name, outcome, str(call), tuple(calls), text, time.process_time() - start)
    try:
        document = sch.to_json()
    except Exception as error:  # noqa: BLE001
        return Result(each.name, "broken", "to_json", tuple(calls), f"{type(error).__name__}: {error}")
    return Applied(each.name, each.family, each.tp, document, tuple(map(str, sch.records)))


def run(
    draws: Sequence[Draw], *, at_once: int = AT_ONCE, timeout: float = SECONDS, verify: bool = True
) -> Iterator[Result]:
    """Apply and verify schedules; results come as they are there.

    Args:
        draws: the schedules.
        at_once: how many of one mesh size are verified in one launch of ranks.
        timeout: of a schedule in a launch, in seconds.
        verify: False only applies them; what was accepted then is ``"accepted"``.
    """
    waiting: dict[int, list[Applied]] = {}
    for each in draws:
        found = applied(each)
        if isinstance(found, Result):
            yield found
            continue
        if not verify:
            yield Result(found.name, "accepted", before=found.records)
            continue
        group = waiting.setdefault(found.tp, [])
        group.append(found)
        if len(group) == at_once:
            yield from _launch(waiting.pop(found.tp), timeout)
    for group in waiting.values():
        yield from _launch(group, timeout)


def _launch(group: Sequence[Applied], timeout: float) -> list[Result]:
    """One start of the ranks; the schedule that ends them is run again by itself, and the others after it."""
    with tempfile.TemporaryDirectory(prefix="slapo-orders-") as folder:
        spool = Path(folder) / "results"
        try:
            return run_ranks(
                verify_each, tuple(group), str(spool), world_size=group[0].tp, timeout=timeout * len(group)
            )[0]
        except SlapoError as error:
            rows = spool.read_text().splitlines() if spool.exists() else []
            found = [Result(**{**row, "before": tuple(row["before"])}) for row in map(json.loads, rows)]
            if len(group) == 1:
                text = f"{type(error).__name__}: {error}"
                return [Result(group[0].name, "broken", "the ranks", group[0].records, text)]
    rest = group[len(found) :]
    return found + [result for part in (rest[:1], rest[1:]) if part for result in _launch(part, timeout)]


def verify_each(group: Sequence[Applied], spool: str | None = None) -> list[Result]:
    """On every rank: replay and verify each, and take it back; the same results on all of them.

    Args:
        group: for as many ranks as there are.
        spool: a file that the first rank adds results to.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.distributed_c10d._set_pg_timeout(_WAITING, dist.distributed_c10d._get_default_group())
    results = []
    for each in group:
        everywhere: list[Result] = [_verified(each)] * dist.get_world_size()
        dist.all_gather_object(everywhere, everywhere[0])
        worst = next((one for one in everywhere if one.outcome != "verified"), everywhere[0])
        results.append(dataclasses.replace(worst, seconds=sum(one.seconds for one in everywhere)))
        if spool is not None and dist.get_rank() == 0:
            with Path(spool).open("a") as file:
                file.write(json.dumps(dataclasses.asdict(results[-1])) + "\n")
    return results


def _verified(each: Applied) -> Result:
    start = time.process_time()
    at, text, outcome = "", "", "verified"
    try:
        torch._dynamo.reset()
        at = "replay"
        batch, model = batch_of(each.family), model_of(each.family)
        sch = slapo.replay(model, each.document, example_inputs=batch, mesh={"tp": each.tp})
        assert tuple(map(str, sch.records)) == each.records, "the records are others"
        at = "verify"
        report = slapo.verify(sch, batch, optimizer_steps=1, blame_seconds=0)
        text = "; ".join((*report.notes, *report.not_compared))
        at = "undo"
        sch.undo(to=0)
        problem = _left_over(model, each.family)
        if problem:
            outcome, text = "wrong", problem
    except VerifyError as error:
        outcome = "broken" if " raises " in error.message.partition(":")[0] else "wrong"
        text = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        outcome, text = "broken", f"{type(error).__name__}: {error}\n{_line(error)}"
    if outcome == "verified":
        at = ""
    return Result(each.name, outcome, at, each.records, text[:3000], time.process_time() - start)


def _left_over(model: torch.nn.Module, family: str) -> str:
    """What undoing everything has left of the steps."""
    fresh = model_of(family)
    modules = dict(model.named_modules())
    for path, module in fresh.named_modules():
        if type(modules.get(path)) is not type(module):
            return f"after undo(to=0) '{path}' is a {type(modules.get(path)).__name__}"
        if "forward" in modules[path].__dict__:
            return f"after undo(to=0) '{path}' has a forward of its own"
        if modules[path]._forward_hooks or modules[path]._forward_pre_hooks:
            return f"after undo(to=0) '{path}' has hooks"
    if len(modules) != len(dict(fresh.named_modules())):
        return "after undo(to=0) there are modules more"
    expected = fresh.state_dict()
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, expected[name]):
            return f"after undo(to=0) '{name}' has other values"
    return ""


def _line(error: BaseException) -> str:
    """Where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return "; ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames[-6:])
