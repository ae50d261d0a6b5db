"""Models for the automatic schedule: their cases, the schedules, and what the reference model gives."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

import slapo_core as slapo
from tests.integration.zoo import losses
from tests.integration.zoo.architectures import Architecture, CannotMake, architectures
from tests.integration.zoo.independent import Exactly, continued, dtype_of, made_exact, run
from tests.integration.zoo.resizing import at_other_sizes
from tests.integration.zoo.shrinking import VOCABULARY
from tests.integration.zoo.subjects import call
from tests.integration.zoo.tensor_parallel import split as split_by_names
from tests.integration.zoo.torch_models import TORCH_MODELS
from tests.support.odd_models import ODD_MODELS
from tests.support.trap_models import TRAP_MODELS

__all__ = ["SCHEDULES", "Case", "Reference", "cases", "drawn", "kind_of", "line_of"]

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


class Reference:
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
        raise CannotMake(f"running: {type(failed).__name__}: {line_of(failed)}") from failed

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


def line_of(error: BaseException) -> str:
    """The message of an error in a line."""
    return " ".join(str(getattr(error, "message", error)).split())[:300]
