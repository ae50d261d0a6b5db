"""The automatic schedule, model by model: what it splits, what it sends, and whether it is right."""

from __future__ import annotations

import copy
import datetime
import json
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch

import slapo_core as slapo
from slapo_runtime.private import set_timeout
from tests.integration.zoo.architectures import CannotMake
from tests.integration.zoo.automatic_cases import SCHEDULES, Reference, cases, kind_of, line_of
from tests.integration.zoo.checks import blocks
from tests.integration.zoo.independent import Collectives, differences, train, ungathered
from tests.integration.zoo.subjects import copied

__all__ = ["Judgment", "judge_all", "judge_on_ranks", "plant_on_ranks"]

TIME_LIMIT = 60
TOGETHER = 12
_WAITING = datetime.timedelta(seconds=40)


@dataclass
class Judgment:
    """What came out of one model.

    Args:
        name: of the case, e.g. ``"causal: llama"``.
        kind: ``"causal"``, ``"encoder"``, ``"encoder-decoder"``, ``"vision"``, ``"audio"``, ``"experts"``,
            ``"torch"`` or ``"odd"``.
        model: the class's name.
        ranks: along ``tp``.
        skipped: why there is no tiny instance, or why the reference model does not run; None if it does.
        result: ``"equal"``, ``"WRONG: ..."``: other numbers without an error; ``"raises: ..."`` when it runs;
            ``"no schedule: ..."`` where making it raised.
        share: elements of weights (parameters of two axes or more) in repeated blocks that are split, of all of them.
        steps: applied steps by their names.
        collectives: of the repeated block with the most, a call: forward, backward, sums of gradients of parameters.
        megatron: forward and backward of such a block with Megatron-LM's schedule.
        elsewhere: collectives of a training step outside of repeated blocks.
        left_whole: path -> reason.
        verified: what ``slapo.verify`` said: ``"ok"`` or its error; ``""``: not asked.
        refused: checks whose sequence the ranks do not divide, with sequence parallelism.
        seconds: of the processor, for all of it, on one rank.
    """

    name: str
    kind: str
    model: str
    ranks: int
    skipped: str | None = None
    result: str = ""
    share: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)
    collectives: tuple[int, int, int] = (0, 0, 0)
    megatron: tuple[int, int] = (2, 2)
    elsewhere: int = 0
    left_whole: dict[str, str] = field(default_factory=dict)
    verified: str = ""
    refused: list[str] = field(default_factory=list)
    seconds: float = 0.0


def share(sch: slapo.Schedule, used: Set[str]) -> float:
    """Elements of weights that are split over ``tp``, of all weights of two axes or more in repeated blocks.

    Args:
        sch: the schedule.
        used: names of parameters that get a gradient; others do not count.
    """
    prefixes = tuple(f"{path}." for path in blocks(sch.model))
    total = done = 0
    for name, parameter in sch.model.named_parameters():
        if not name.startswith(prefixes) or parameter.dim() < 2 or name not in used:
            continue
        path, _, own = name.rpartition(".")
        layout = sch[path].layout(own)
        size = torch.Size(layout.shape).numel()
        total += size
        done += size if layout.is_sharded else 0
    return done / total if total else 0.0


def megatron(used: Set[str]) -> tuple[int, int]:
    """Collectives of a layer, forward and backward, as Megatron-LM has them.

    Two and two for attention and MLP; a router sends the gradient of its weights for the experts, shared experts are
    one more MLP, and a cross-attention has two inputs.

    Args:
        used: names of parameters that get a gradient.
    """
    text = " ".join(used).lower()
    forward = backward = 2
    if "expert" in text:
        backward += 1
    if re.search(r"shared_?(expert|mlp)", text):
        forward, backward = forward + 1, backward + 1
    if re.search(r"cross_?att|encoder_att|encdec|encoder_decoder", text):
        forward, backward = forward + 1, backward + 2
    return forward, backward


def judge_on_ranks(names: Sequence[str], schedule: str, verified: Sequence[str] = ()) -> list[Judgment]:
    """On every rank: schedule each model, and compare it with its reference model, until ranks part.

    Args:
        names: of `cases`.
        schedule: of `SCHEDULES`.
        verified: those that ``slapo.verify`` looks at too.
    """
    import torch.distributed as dist

    _quiet()
    found = []
    for name in names:
        found.append(_judge(name, schedule, name in verified, dist.get_world_size()))
        try:
            dist.monitored_barrier(timeout=_WAITING)
        except RuntimeError:  # the ranks parted, and must not meet in the next model
            break
    return found


def _judge(name: str, schedule: str, verify: bool, ranks: int) -> Judgment:
    case = cases()[name]
    row = Judgment(name, name.partition(":")[0], case.model, ranks)
    start = time.process_time()
    previous = signal.signal(signal.SIGPROF, _too_late)
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)  # of the processor
    try:
        reference = Reference(case, ranks, schedule)
        row.kind = kind_of(case, reference.model, reference.batch)
        _compare(reference, row, SCHEDULES[schedule], verify)
    except CannotMake as reason:
        row.skipped = str(reason)
    except TimeoutError as error:
        row.result = f"raises: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    row.seconds = round(time.process_time() - start, 1)
    return row


def _compare(reference: Reference, row: Judgment, schedule: Callable[..., dict[str, str]], verify: bool) -> None:
    try:
        sch, row.left_whole = _scheduled(reference, row.ranks, schedule, everywhere=verify)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - a row of the table
        row.result = f"no schedule: {line_of(error)}"
        return
    row.share = round(share(sch, reference.used), 4)
    row.megatron = megatron(reference.used)
    row.steps = dict(Counter(record.name for record in sch.records))
    try:
        if verify:
            row.verified = _verify(sch, reference.example)
        wrong = _wrong(reference, sch, row)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001
        row.result = f"raises: {type(error).__name__}: {line_of(error)}"
        return
    first = {re.split(r": |, ", one)[0] + one.split(": ")[-2].split()[0]: one for one in reversed(wrong)}  # of a kind
    row.result = f"WRONG: {'; '.join(reversed(first.values()))}"[:600] if wrong else "equal"


def _scheduled(
    reference: Reference, ranks: int, schedule: Callable[..., dict[str, str]], *, everywhere: bool
) -> tuple[slapo.Schedule, dict[str, str]]:
    """Schedule a model on rank 0 and replay the steps on the others; or on every rank by itself."""
    import torch.distributed as dist

    sch = slapo.create_schedule(reference.make(), mesh={"tp": ranks}, example_inputs=reference.example)
    set_timeout(sch.mesh.group("tp"), _WAITING)
    if everywhere:
        return sch, schedule(sch)
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            left_whole = schedule(sch)
            answer = [(sch.to_json(), left_whole)]
        except Exception as error:  # noqa: BLE001 - raised again on every rank
            answer = [f"{type(error).__name__}: {line_of(error)}"]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], str):
        raise RuntimeError(answer[0])
    document, left_whole = answer[0]
    if dist.get_rank() != 0:
        slapo.replay(sch, json.loads(document))
    return sch, left_whole


def _verify(sch: slapo.Schedule, batch: Any) -> str:
    try:
        slapo.verify(sch, batch, optimizer_steps=1)
    except slapo.VerifyError as error:
        return f"differs: {line_of(error)}"
    except slapo.SlapoError as error:
        return f"not compared: {line_of(error)}"
    return "ok"


def _wrong(reference: Reference, sch: slapo.Schedule, row: Judgment | None = None) -> list[str]:
    """What differs from the reference model: gathered parameters, each check, and three steps of AdamW."""
    model = sch.model
    wrong, refused = ungathered(sch, reference.model), list[str]()
    for number, (label, check, expected) in enumerate(reference.results):
        if number == 0 and row is not None:
            with Collectives(model, blocks(model)) as sent:
                found = check(model)
            row.collectives, row.elsewhere = sent.per_call(), sent.elsewhere
        else:
            try:
                found = check(model)
            except slapo.ArgumentError as error:  # the same on every rank, before anything is sent
                if reference.multiple == 1 or "are not divisible by" not in error.message:
                    raise
                refused.append(label)
                continue
        wrong += [f"{label}: {one}" for one in differences(sch, found, expected)]
    kept = copied(reference.model)
    if row is not None:
        row.refused = refused
    steps = reference.trained[:1] * 3 if any("evaluation" not in label for label in refused) else reference.trained
    expected = train(kept, steps, loss=reference.has_loss)
    found = train(model, steps, loss=reference.has_loss)
    return [*wrong, *differences(sch, found, expected)]


_PLANTED = ("tp.sync", "tp.sync_gradient", "tp.shard_attribute", "tp.shard")


def plant_on_ranks(names: Sequence[str], schedule: str) -> dict[str, dict[str, str]]:
    """On every rank: leave one step of each kind out of a model's schedule, and say what the comparison finds.

    Returns:
        name -> kind of step -> ``"seen: ..."``, ``"refused: ..."`` or ``"NOT SEEN: <step>"``.
    """
    import torch.distributed as dist

    _quiet()
    answers: dict[str, dict[str, str]] = {}
    for name in names:
        reference = Reference(cases()[name], dist.get_world_size(), schedule)
        mesh = {"tp": dist.get_world_size()}
        sch = slapo.create_schedule(reference.make(), mesh=mesh, example_inputs=reference.example)
        SCHEDULES[schedule](sch)
        answers[name] = {}
        for kind in _PLANTED:
            of_kind = [record for record in sch.records if record.name == kind]
            if of_kind:
                left_out = of_kind[crc32(name.encode()) % len(of_kind)]
                answers[name][kind] = _without(reference, sch, left_out.index - 1)
            dist.monitored_barrier(timeout=_WAITING)
    return answers


def _without(reference: Reference, sch: slapo.Schedule, index: int) -> str:
    document = copy.deepcopy(dict(sch.document()))
    document["records"] = [record for number, record in enumerate(document["records"]) if number != index]
    try:
        other = slapo.replay(reference.make(), document, mesh=sch.mesh, example_inputs=reference.example)
        wrong = _wrong(reference, other)
    except Exception as error:  # noqa: BLE001
        return f"refused: {type(error).__name__}: {line_of(error)}"
    return f"seen: {wrong[0]}" if wrong else f"NOT SEEN: {sch.records[index]}"


def judge_all(
    names: Sequence[str], ranks: int, schedule: str, *, verified: Sequence[str] = (), together: int = TOGETHER
) -> Iterator[Judgment]:
    """:func:`judge_on_ranks` for many models, several in one launch; one that ends the ranks is judged by itself."""
    from slapo_runtime.launcher import preload_modules, run_ranks

    preload_modules("tests.integration.zoo.automatic", "transformers.models.bert.modeling_bert")
    left = list(names)
    while left:
        part = left[:together]
        try:
            limit = 20 * TIME_LIMIT  # of the clock: another process may have the processor
            answers = run_ranks(judge_on_ranks, part, schedule, verified, world_size=ranks, timeout=limit)
        except slapo.SlapoError as error:
            if len(part) > 1:
                yield from judge_all(part, ranks, schedule, verified=verified, together=1)
            else:
                case, kind = cases()[part[0]], part[0].partition(":")[0]
                result = f"raises: the ranks ended: {line_of(error)}"
                yield Judgment(case.name, kind, case.model, ranks, result=result)
            left = left[len(part) :]
            continue
        for rows in zip(*answers, strict=False):  # fewer than asked for where ranks parted
            left.remove(rows[0].name)
            order = ("WRONG", "raises", "no schedule")
            row = next((one for word in order for one in rows if one.result.startswith(word)), rows[0])
            if len({str(one.steps) for one in rows}) > 1:
                row.result = f"WRONG: the ranks differ: {[one.steps for one in rows]}"
            yield row


def _too_late(*_: Any) -> None:
    raise TimeoutError(f"took more than {TIME_LIMIT} s of the processor")


def _quiet() -> None:
    import torch.distributed as dist
    import transformers

    set_timeout(dist.group.WORLD, 6 * _WAITING)  # rank 0 schedules while the others wait
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
