"""The loss of real models from hidden states instead of logits: one line, against the plain model."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_loss import deferred_values
from slapo_loss.deferred_values import ForwardCall
from tests.integration.zoo.architectures import Architecture, CannotMake
from tests.integration.zoo.shrinking import VOCABULARY

__all__ = ["KINDS", "LossRow", "cases", "compare_all", "compare_on_ranks"]

KINDS = ("causal", "sequence to sequence", "masked")
_CHANGES = {"gpt_neo": (("attention_types", [[["global", "local"], 1]]),), "mamba2": (("num_heads", 8),)}
_TASKS = dict(zip(KINDS, ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM"), strict=True))
TIME_LIMIT = 90
TOGETHER = 10


@dataclass
class LossRow:
    """What came out of one model.

    Args:
        kind: of `KINDS`.
        name: the model type.
        model: the class's name.
        skipped: why there is no tiny instance, or why the plain model does not run; None if it does.
        head: path of the head.
        dtype: ``"float64"``, or ``"float32"`` where the model does not run in float64.
        results: by the number of ranks: ``"loss"``: taken from the hidden states; ``"logits: f"``: the logits were
            computed, for a function f; ``"unused: ..."``; ``"refused: ..."`` at the step; ``"raises: ..."`` when
            it runs; ``"WRONG: ..."``.
    """

    kind: str
    name: str
    model: str
    skipped: str | None = None
    head: str = ""
    dtype: str = ""
    results: dict[int, str] = field(default_factory=dict)


@cache
def cases() -> dict[str, tuple[str, Architecture]]:
    """Every model of transformers with a loss of a vocabulary: "kind/model type" -> kind and model."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, tuple[str, Architecture]] = {}
    seen: set[str] = set()
    for kind, task in _TASKS.items():
        names = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for name in sorted(names, key=lambda name: (len(name), name)):
            model = names[name] if isinstance(names[name], str) else names[name][0]
            if model not in seen:
                seen.add(model)
                found[f"{kind}/{name}"] = kind, Architecture(name, model, _CHANGES.get(name, ()))
    return dict(sorted(found.items()))


def compare_all(names: Sequence[str], world_size: int) -> Iterator[LossRow]:
    """:func:`compare_on_ranks` for models by their names in `cases`; many share a launch."""
    from slapo_runtime.launcher import preload_modules, run_ranks

    preload_modules("tests.integration.zoo.losses", "transformers.models.bert.modeling_bert")
    for start in range(0, len(names), TOGETHER):
        part = names[start : start + TOGETHER]
        try:
            answers = run_ranks(compare_on_ranks, part, world_size=world_size, timeout=TIME_LIMIT * 3)
        except slapo.SlapoError as error:
            if len(part) > 1:  # one of them ends the ranks: each by itself
                for name in part:
                    yield from compare_all([name], world_size)
                continue
            kind, architecture = cases()[part[0]]
            result = f"WRONG: the ranks ended: {_line(error)}"
            answers = [[LossRow(kind, architecture.name, architecture.model, results={world_size: result})]]
        for rows in zip(*answers, strict=True):
            row = next((one for one in rows if "WRONG" in one.results.get(world_size, "")), rows[0])
            if len({one.results.get(world_size, "").partition(":")[0] for one in rows}) > 1 and "WRONG" not in str(row):
                row.results[world_size] = f"WRONG: the ranks differ: {[one.results for one in rows]}"
            yield row


def compare_on_ranks(names: Sequence[str]) -> list[LossRow]:
    """On every rank: one line, and the vocabulary split over the ranks, against the plain model."""
    import torch.distributed as dist
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    return [_row(name, dist.get_world_size() if dist.is_initialized() else 1) for name in names]


def _row(name: str, ranks: int) -> LossRow:
    kind, architecture = cases()[name]
    row = LossRow(kind, architecture.name, architecture.model)
    previous = signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(TIME_LIMIT)
    try:
        plain = _Plain(architecture)
        row.head, row.dtype = plain.head, str(plain.dtype).removeprefix("torch.")
        row.results[ranks] = _compare(plain, ranks)
    except CannotMake as reason:
        row.skipped = str(reason)
    except Exception as error:  # noqa: BLE001 - a row of the table
        row.results[ranks] = f"WRONG: {type(error).__name__}: {_line(error)}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return row


def _too_late(*_: Any) -> None:
    raise TimeoutError(f"took longer than {TIME_LIMIT} s")


class _Plain:
    """The plain model, in float64 where it runs so, and what it gives."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = dataclasses.replace(architecture, changes=(*architecture.changes, *_odd(architecture)))
        failed: list[Exception] = []
        for dtype in (torch.float64, torch.float32):
            self.dtype = dtype
            try:
                model = self.make()
                self.batch = self._batch(model)
                with self.exactly():
                    self.training = _training(model, self.batch)
                    self.evaluation = _evaluation(model, self.batch)
            except CannotMake:
                raise
            except Exception as error:  # noqa: BLE001 - the next type, or the reason
                failed.append(error)
                continue
            break
        else:
            raise CannotMake(f"running: {type(failed[-1]).__name__}: {_line(failed[-1])}")
        head = model.get_output_embeddings()
        self.head = next((path for path, module in model.named_modules() if module is head), "")
        if not self.head:
            raise CannotMake("get_output_embeddings() gives no module of the model")
        weight = head.weight
        others = [(path, module) for path, module in model.named_modules() if module is not head]
        self.tied = [path for path, module in others if getattr(module, "weight", None) is weight]
        bias = getattr(head, "bias", None)
        holders = [path for path, module in others if getattr(module, "bias", None) is bias]
        self.holder = holders[0] if holders and bias is not None else ""

    def make(self) -> Any:
        torch.manual_seed(0)
        model = self.architecture.make()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):  # weights of zeros would hide a difference
                if parameter.is_floating_point() and not parameter.any():
                    parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(number))
        return model.to(self.dtype).train()

    def exactly(self) -> Any:
        """Return a context in which ``float()`` keeps float64."""
        if self.dtype == torch.float32:
            return mock.patch.object(Tensor, "float", Tensor.float)
        return mock.patch.object(Tensor, "float", Tensor.double)

    def _batch(self, model: Any) -> dict[str, Any]:
        batch = self.architecture.inputs(model)
        ids = batch.get("decoder_input_ids", batch.get("input_ids"))
        if ids is None or "labels" not in inspect.signature(type(model).forward).parameters:
            raise CannotMake("its loss is not that of labels")
        labels = ids.clone()
        labels[0, :3] = -100
        batch["labels"] = labels
        return {
            key: value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for key, value in batch.items()
        }


def _odd(architecture: Architecture) -> Iterator[tuple[str, Any]]:
    """Yield a size of the vocabulary that two ranks cannot share evenly."""
    try:
        size = architecture.config().to_dict().get("vocab_size")
    except CannotMake:
        return
    if size == VOCABULARY:
        yield "vocab_size", VOCABULARY - 1


@dataclass
class _Trained:
    loss: Tensor
    gradients: dict[str, Tensor | None]
    outputs: dict[str, Any]


def _training(model: Any, batch: dict[str, Any]) -> _Trained:
    model.train()
    torch.manual_seed(3)
    output = model(**batch)
    loss = output["loss"]
    if loss is None or not loss.requires_grad:
        raise CannotMake("it gives no loss for labels")
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    return _Trained(loss.detach(), gradients, {k: v for k, v in output.items() if isinstance(v, Tensor)})


def _evaluation(model: Any, batch: dict[str, Any]) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        torch.manual_seed(4)
        both = model(**batch), model(**{key: value for key, value in batch.items() if key != "labels"})
    return [one["logits"] for one in both]


def _compare(plain: _Plain, ranks: int) -> str:
    model = plain.make()
    try:
        sch = _schedule(model, plain, ranks)
    except slapo.SlapoError as error:
        return f"refused: {_line(error)}"
    with plain.exactly(), _calls() as calls:
        try:
            found = _training(model, plain.batch)
            evaluated = _evaluation(sch.model, plain.batch)
        except (RuntimeError, slapo.SlapoError) as error:
            return f"raises: {type(error).__name__}: {_line(error)}"
    used = any(call.used for call in calls)
    computed = [by for call in calls for by in call.computed]
    differences = [*_differences(found, plain.training, used)]
    names = ("logits of an evaluation", "logits without labels")
    for name, one, other in zip(names, evaluated, plain.evaluation, strict=True):
        differences += _difference(name, one, other, plain.dtype == torch.float64)
    if differences:
        return f"WRONG: {'; '.join(differences[:4])}"
    if not calls:
        return "unused: the forward of the head is not called"
    return "loss" if used and not computed else f"logits: {', '.join(dict.fromkeys(computed))}"


def _schedule(model: nn.Module, plain: _Plain, ranks: int) -> Any:
    if ranks == 1:
        sch = slapo.create_schedule(model)
    else:
        sch = slapo.create_schedule(model, mesh={"tp": ranks})
        head = sch[plain.head]
        head.shard("weight", axis=0, pad=True)
        if getattr(head.module, "bias", None) is not None:
            (sch[plain.holder] if plain.holder else head).shard("bias", axis=0, pad=True)
        head.sync("bwd_post", "all_reduce")
        for path in plain.tied:
            sch[path].sync("fwd_post", "all_reduce")
    sch[plain.head].linear_cross_entropy()
    return sch


def _differences(found: _Trained, expected: _Trained, used: bool) -> Iterator[str]:
    exact = expected.loss.dtype == torch.float64
    yield from _difference("the loss", found.loss, expected.loss, exact)
    for name, other in expected.gradients.items():
        one = found.gradients[name]
        if (one is None) != (other is None):
            yield f"gradient of {name}: {one is None}, {other is None}"
        elif one is not None and other is not None:
            yield from _difference(f"gradient of {name}", one, _own(other, one.shape), exact)
    for name, value in expected.outputs.items():
        one = found.outputs[name]
        if type(one) is Tensor:
            yield from _difference(f"output {name}", one, value, exact)
        elif not used:
            yield f"output {name} was not computed"


def _own(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Return this rank's rows, those of padding 0."""
    if gradient.shape == shape:
        return gradient
    import torch.distributed as dist

    start = dist.get_rank() * shape[0]
    own = gradient[start : start + shape[0]]
    return torch.cat([own, own.new_zeros(shape[0] - own.shape[0], *shape[1:])])


def _difference(name: str, one: Tensor, other: Tensor, exact: bool) -> Iterator[str]:
    if one.shape != other.shape or one.dtype != other.dtype:
        yield f"{name}: {one.dtype} {tuple(one.shape)}, required {other.dtype} {tuple(other.shape)}"
        return
    tolerance = 1e-12 if exact and one.dtype == torch.float64 else 2e-4
    scale = other.abs().max().item() if other.numel() else 0.0
    if not torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True):
        yield f"{name}: by {(one - other).abs().max().item():.1e} of {scale:.1e}"


@contextmanager
def _calls() -> Iterator[list[ForwardCall]]:
    """Collect the forwards in which logits are deferred."""
    found: list[ForwardCall] = []
    make = deferred_values.LogitsValues.__init__

    def collect(self: Any, hidden: Tensor, head: Any, call: ForwardCall, *rest: Any) -> None:
        make(self, hidden, head, call, *rest)
        if not any(one is call for one in found):
            found.append(call)

    with mock.patch.object(deferred_values.LogitsValues, "__init__", collect):
        yield found


def _line(error: BaseException) -> str:
    return " ".join(str(getattr(error, "message", error)).split())[:300]
