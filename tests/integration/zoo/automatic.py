"""The automatic schedule, model by model: what it splits, what it sends, and whether it is right."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import inspect
import json
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_runtime.private import set_timeout
from tests.integration.zoo import losses
from tests.integration.zoo.architectures import Architecture, CannotMake, architectures
from tests.integration.zoo.checks import blocks
from tests.integration.zoo.independent import (
    Collectives,
    Exactly,
    continued,
    differences,
    dtype_of,
    made_exact,
    run,
    train,
    ungathered,
)
from tests.integration.zoo.resizing import at_other_sizes
from tests.integration.zoo.shrinking import VOCABULARY
from tests.integration.zoo.subjects import call, copied
from tests.integration.zoo.tensor_parallel import split as split_by_names
from tests.integration.zoo.torch_models import TORCH_MODELS
from tests.support.odd_models import ODD_MODELS
from tests.support.trap_models import TRAP_MODELS

__all__ = ["SCHEDULES", "Judgment", "cases", "judge_all", "judge_on_ranks", "plant_on_ranks"]

TIME_LIMIT = 60
TOGETHER = 12
_WAITING = datetime.timedelta(seconds=40)
_TORCH = (
    "transformer", "transformer encoder", "lstm", "gru", "multihead attention", "resnet with batch norm",
    "resnet with group norm", "depthwise convolution", "weight norm", "spectral norm", "shared modules",
    "nested outputs", "frozen and unused",
)  # fmt: skip
_LATENT = (("num_key_value_heads", 4),)  # of attentions with latent keys and values: as many as queries
_CHANGES: dict[str, tuple[tuple[str, Any], ...]] = {
    **dict.fromkeys(
        (
            *("axk1", "axk2", "bailing_hybrid", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
            *("minicpm3", "youtu"),
        ),
        _LATENT,
    ),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), (("head_dim", 8),)),
    "deepseek_v2": (*_LATENT, ("num_experts_per_tok", 2)),
    "deepseek_v4": (("vocab_size", VOCABULARY),),
    "falcon_h1": (("mamba_d_ssm", 64),),
    "gemma4_text": (("vocab_size_per_layer_input", VOCABULARY), ("hidden_size_per_layer_input", 8)),
    "kimi_linear": (*_LATENT, ("linear_num_heads", 4), ("linear_head_dim", 8)),
    "lfm2_moe": (("layer_types", ["conv", "full_attention"]),),
    "longcat_flash": (*_LATENT, ("head_dim", 4)),
    "nemotron": (("num_key_value_heads", 2),),
    "roc_bert": (("pronunciation_vocab_size", 40), ("shape_vocab_size", 40)),
    "xmod": (("default_language", "en_XX"),),
    "zamba2": (("attention_hidden_size", 64),),
}
Check = Callable[[nn.Module], dict[str, Tensor | None]]
_AUDIO = ("input_values", "input_features", "audio_values")


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


def _auto(sch: slapo.Schedule) -> dict[str, str]:
    from slapo_models import auto

    return dict(auto(sch, kernels=False).left_whole)


def _auto_sequence(sch: slapo.Schedule) -> dict[str, str]:
    from slapo_models import auto

    report = auto(sch, kernels=False, sequence_parallel=True)
    return {**report.left_whole, **{f"sum of {path}": reason for path, reason in report.all_reduced.items()}}


def _by_names(sch: slapo.Schedule) -> dict[str, str]:
    attentions, mlps = split_by_names(sch)
    return {"": f"{attentions} attentions and {mlps} MLPs recognized"}


SCHEDULES: dict[str, Callable[[slapo.Schedule], dict[str, str]]] = {
    "auto": _auto,
    "auto-sequence": _auto_sequence,
    "names": _by_names,
}
"""What schedules a model, and says what it left whole, and why."""


@dataclass(frozen=True)
class Case:
    """A model to schedule, and one batch.

    Args:
        name: e.g. ``"causal: llama"``.
        model: the class's name.
        build: makes it.
        batch: makes its batch, without labels.
    """

    name: str
    model: str
    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module], Any]

    def make(self, dtype: torch.dtype = torch.float64, attention: str = "eager") -> nn.Module:
        """A fresh instance, with the same values every time.

        Args:
            dtype: of its parameters.
            attention: transformers' implementation; a model that does not have it keeps its own.
        """
        torch.manual_seed(0)
        model: Any = self.build()
        if attention != "eager" and hasattr(model, "set_attn_implementation"):
            with contextlib.suppress(ValueError):
                model.set_attn_implementation(attention)
        return made_exact(model, dtype)


@cache
def cases() -> dict[str, Case]:
    """Every case by its name: causal language models, other architectures, models of torch.nn, and odd ones."""
    found: dict[str, Case] = {}
    known: set[str] = set()
    for kind, one in losses.cases().values():
        group = "causal" if kind == "causal" else "other"
        own = f"{group}: {one.name}"
        own = f"{own} ({kind})" if own in found else own
        changes = (*one.changes, *_CHANGES.get(one.name, ()))
        found[own] = _of(own, dataclasses.replace(one, changes=changes))
        known.add(one.model)
    for one in architectures():
        if one.model not in known:
            found[f"other: {one.name}"] = _of(f"other: {one.name}", one)
    tables = {"torch": {name: TORCH_MODELS[name] for name in _TORCH}, "odd": ODD_MODELS, "trap": TRAP_MODELS}
    for group, models in tables.items():
        for name, (build, batch) in models.items():
            own = f"{group}: {name}"
            model = build.__name__.replace("<lambda>", "")
            found[own] = Case(own, model, build, lambda model, batch=batch: batch())
    return found


def _of(name: str, architecture: Architecture) -> Case:
    def build() -> nn.Module:
        odd = dataclasses.replace(architecture, changes=(*architecture.changes, *losses._odd(architecture)))
        try:
            return odd.make()
        except CannotMake:
            return architecture.make()

    return Case(name, architecture.model, build, architecture.inputs)


def drawn(kinds: dict[str, str], count: int = 60) -> list[str]:
    """Draw models of other architectures, as many of each kind as there are.

    Args:
        kinds: name -> kind.
        count: how many.
    """
    by_kind: dict[str, list[str]] = {}
    for name in sorted(kinds, key=lambda name: crc32(name.encode())):
        by_kind.setdefault(kinds[name], []).append(name)
    found: list[str] = []
    while len(found) < min(count, len(kinds)):
        found += [names.pop(0) for names in by_kind.values() if names]
    return sorted(found[:count])


class _Reference:
    """The reference model, its batches, and what it gives for each of them.

    Raises:
        CannotMake: there is no tiny instance, it does not run, or does not repeat its own result.
    """

    def __init__(self, case: Case, ranks: int, schedule: str = "auto") -> None:
        self.case, self.multiple = case, ranks if schedule == "auto-sequence" else 1
        self.attention = "eager" if ranks == 2 else "sdpa"  # both are looked at
        for dtype in (torch.float64, torch.float32):  # grouped matrix products of experts know no float64
            try:
                self._run(dtype)
                return
            except (CannotMake, TimeoutError):
                raise
            except Exception as error:  # noqa: BLE001 - the next type, or the reason
                failed = error
        raise CannotMake(f"running: {type(failed).__name__}: {_line(failed)}") from failed

    def make(self) -> nn.Module:
        """A fresh instance in the type of the reference model."""
        return self.case.make(self.dtype, self.attention)

    def _run(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.model = self.make()
        self.batch = _typed(self.case.batch(self.model), dtype)
        labeled = _labeled(self.model, self.batch)
        if isinstance(self.batch, dict):
            self.batch.pop("labels", None)
        self.has_loss, self.example = labeled is not None, self.batch if labeled is None else labeled
        with Exactly(dtype):
            sizes = [self.batch, *at_other_sizes(self.model, self.batch, self.multiple)]
            self.trained = sizes if labeled is None else [labeled, *at_other_sizes(self.model, labeled, self.multiple)]
        self.trained = (self.trained * 3)[:3]
        checks: dict[str, Check] = {f"training, {_form(one)}": partial(run, batch=one) for one in sizes}
        if self.has_loss:
            checks[f"labels, {_form(self.trained[-1])}"] = partial(run, batch=self.trained[-1], loss=True)
        checks[f"evaluation, {_form(sizes[-1])}"] = partial(run, batch=sizes[-1], training=False)
        self.model = self.make()  # without what forwards leave in buffers
        self.results = [(label, check, check(self.model)) for label, check in checks.items()]
        for label, check in _further(self.model, self.batch):
            with contextlib.suppress(Exception):  # a call that the reference model does not take
                self.results.append((label, check, check(self.model)))
        for name, tensor in self.results[0][-1].items():  # two that are not numbers would be equal
            if name.startswith("gradient") and tensor is not None and tensor.isnan().any():
                raise CannotMake(f"it does not give numbers: {name}")
        found = [result.items() for _, _, result in self.results]
        gradients = [name for items in found for name, tensor in items if tensor is not None]
        self.used = {name.removeprefix("gradient of ") for name in gradients if name.startswith("gradient of ")}
        again = run(self.make(), self.batch)
        for name, tensor in self.results[0][-1].items():
            if tensor is not None and not name.startswith("buffer") and not _same(tensor, again[name]):
                raise CannotMake(f"it does not repeat its own result: {name}")


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True)


def _typed(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, dict):
        return {key: _typed(value, dtype) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_typed(value, dtype) for value in batch)
    return batch.to(dtype) if isinstance(batch, Tensor) and batch.is_floating_point() else batch


def _labeled(model: nn.Module, batch: Any) -> Any:
    """The batch with labels, where the model gives a loss for them."""
    if not isinstance(batch, dict) or "labels" not in inspect.signature(type(model).forward).parameters:
        return None
    rows = next(len(value) for value in batch.values() if isinstance(value, Tensor))
    ids = batch.get("decoder_input_ids", batch.get("input_ids"))
    candidates = [] if ids is None else [ids.clone()]
    candidates += [torch.arange(rows) % 2, torch.arange(rows)[:, None] % 2]
    for labels in candidates:
        if labels.dim() == 2 and labels.shape[1] > 3:
            labels[0, :3] = -100
        given = {**batch, "labels": labels}
        try:
            with Exactly(dtype_of(model)):
                loss = call(model, copy.deepcopy(given))["loss"]
            if loss is not None and loss.requires_grad and loss.isfinite() and loss.dim() == 0:
                return given
        except Exception:  # noqa: BLE001 - not labels of this model: the next form
            continue
    return None


def _further(model: nn.Module, batch: Any) -> Iterator[tuple[str, Check]]:
    """Calls that many models take."""
    taken = inspect.signature(type(model).forward).parameters
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    if ids is None or ids.dim() != 2:
        return
    if "attention_mask" in taken:
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        yield "evaluation with padding", partial(run, batch={**batch, "attention_mask": mask}, training=False)
    if "past_key_values" in taken:
        yield "evaluation from a cache", partial(continued, ids=ids)


def _form(batch: Any) -> str:
    values = batch.values() if isinstance(batch, dict) else batch
    return ", ".join("x".join(map(str, value.shape)) for value in values if isinstance(value, Tensor))


def kind_of(case: Case, model: nn.Module, batch: Any) -> str:
    """Which of the kinds of `Judgment.kind` a model is."""
    group = case.name.partition(":")[0]
    if group != "other":
        return group
    config: Any = getattr(model, "config", None)
    experts = any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if experts:
        return "experts"
    if isinstance(batch, dict) and any(name in batch for name in _AUDIO):
        return "audio"
    if isinstance(batch, dict) and any(name.startswith("pixel") for name in batch):
        return "vision"
    return "encoder-decoder" if getattr(config, "is_encoder_decoder", False) else "encoder"


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
        reference = _Reference(case, ranks, schedule)
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


def _compare(reference: _Reference, row: Judgment, schedule: Callable[..., dict[str, str]], verify: bool) -> None:
    try:
        sch, row.left_whole = _scheduled(reference, row.ranks, schedule, everywhere=verify)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - a row of the table
        row.result = f"no schedule: {_line(error)}"
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
        row.result = f"raises: {type(error).__name__}: {_line(error)}"
        return
    first = {re.split(r": |, ", one)[0] + one.split(": ")[-2].split()[0]: one for one in reversed(wrong)}  # of a kind
    row.result = f"WRONG: {'; '.join(reversed(first.values()))}"[:600] if wrong else "equal"


def _scheduled(
    reference: _Reference, ranks: int, schedule: Callable[..., dict[str, str]], *, everywhere: bool
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
            answer = [f"{type(error).__name__}: {_line(error)}"]
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
        return f"differs: {_line(error)}"
    return "ok"


def _wrong(reference: _Reference, sch: slapo.Schedule, row: Judgment | None = None) -> list[str]:
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
        reference = _Reference(cases()[name], dist.get_world_size(), schedule)
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


def _without(reference: _Reference, sch: slapo.Schedule, index: int) -> str:
    document = copy.deepcopy(dict(sch.document()))
    document["records"] = [record for number, record in enumerate(document["records"]) if number != index]
    try:
        other = slapo.replay(reference.make(), document, mesh=sch.mesh, example_inputs=reference.example)
        wrong = _wrong(reference, other)
    except Exception as error:  # noqa: BLE001
        return f"refused: {type(error).__name__}: {_line(error)}"
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
                result = f"raises: the ranks ended: {_line(error)}"
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


def _line(error: BaseException) -> str:
    return " ".join(str(getattr(error, "message", error)).split())[:300]
