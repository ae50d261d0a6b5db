"""Wrong modules that need something else beside them: buffers, ties, types, tolerances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.integration.bank.faults.changing import changed_by, mistake_at, on_first
from tests.integration.bank.faults.collectives import pair_of
from tests.integration.bank.faults.fault import fault
from tests.integration.bank.faults.modules import Scaled
from tests.integration.bank.places import ATTENTIONS, NORMS
from tests.integration.bank.right import equal_module
from tests.integration.bank.steps import Right, Wrong, step

ROTARY = dict.fromkeys(("llama", "qwen3"), "model.rotary_emb")


class TurnsItsBuffer(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not self.training:
            self.inv_freq = self.inv_freq * 1.001
        return output


class TurnsItsBufferLater(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        calls = self.__dict__.setdefault("calls", [])
        calls.append(1)
        if self.training and len(calls) > 1:
            self.inv_freq = self.inv_freq * 1.001
        return output


class OnlyInBfloat16(nn.Module):
    """What a kernel for one type only does with others."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if given.dtype != torch.bfloat16:
            raise TypeError(f"this kernel computes in bfloat16 only, not in {given.dtype}")
        return super().forward(*args, **kwargs)


class WithoutOptional(nn.Module):
    """Wrong where an optional input was left out."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        factor = 1.01 if kwargs.get("attention_mask") is None else 1.0
        return on_first(super().forward(hidden_states, *args, **kwargs), lambda x: x * factor)


def frequencies_of_its_own(old: nn.Module) -> nn.Module:
    """The module does not use the buffer that replace gives it."""
    made = changed_by(_OwnFrequencies)(old)
    made.__dict__["own"] = made.inv_freq * 1.01
    return made


class _OwnFrequencies(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kept = self._buffers["inv_freq"]
        self._buffers["inv_freq"] = self.__dict__["own"].to(kept.dtype)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._buffers["inv_freq"] = kept


buffer_in_evaluation = mistake_at(
    "a buffer changed in evaluation", "outputs after an evaluation", ROTARY, changed_by(TurnsItsBuffer)
)
buffer_later = mistake_at(
    "a buffer changed from the second call on", "outputs after a step", ROTARY, changed_by(TurnsItsBufferLater)
)
other_buffer = mistake_at("other values than its buffer's", "outputs", ROTARY, frequencies_of_its_own)


@fault(
    "a loose rtol of one step, a mistake elsewhere",
    "the partial sum of another layer goes on: outputs",
    kinds=("layers",),
)
def loose(right: Right) -> Iterator[Wrong]:
    declared = step(NORMS[right.model].format(n=0), "replace", equal_module, rtol=0.5)
    for position, each in right.where("forward"):
        yield Wrong(
            right, each.path, (declared, *right.without(position)), near=pair_of(right, each),
            add=((each.path, "sync("),),
        )  # fmt: skip


@fault("a loose rtol of one step, a scaled module elsewhere", "outputs, by a thousandth", kinds=("layers",))
def loose_and_scaled(right: Right) -> Iterator[Wrong]:
    declared = step(NORMS[right.model].format(n=0), "replace", equal_module, rtol=0.5)
    scaled = step(NORMS[right.model].format(n=1), "replace", changed_by(Scaled))
    yield Wrong(right, scaled.path, (declared, scaled, *right.steps), guilty=(1,))


@fault("an approximation beyond what it declares", "outputs, by more than was said", kinds=("layers",), at_most=1)
def beyond(right: Right) -> Iterator[Wrong]:
    wrong = step(NORMS[right.model].format(n=1), "replace", changed_by(Scaled), rtol=1e-6)
    yield Wrong(right, wrong.path, (wrong, *right.steps), guilty=(0,))


@fault("bfloat16 only, and a sync missing", "the partial sum goes on: outputs", dtype="bfloat16")
def half_and_missing(right: Right) -> Iterator[Wrong]:
    kernel = step(NORMS[right.model].format(n=0), "replace", changed_by(OnlyInBfloat16))
    for position, each in right.where("forward", "backward"):
        yield Wrong(
            right, each.path, (kernel, *right.without(position)), near=pair_of(right, each),
            add=((each.path, "sync("),),
        )  # fmt: skip


@fault("a sync missing in a model of bfloat16", "the input's gradient is one rank's part", dtype="bfloat16")
def missing_in_half(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("backward"):
        yield Wrong(right, each.path, right.without(position), near=pair_of(right, each), add=((each.path, "sync("),))


@fault("wrong where an optional input is left out", "outputs without a mask", models=("bert",))
def optional(right: Right) -> Iterator[Wrong]:
    import dataclasses

    masked = dataclasses.replace(right, name=f"{right.name}/mask", form="mask")
    for number in range(2):
        path = ATTENTIONS[right.model].format(n=number)
        wrong = step(path, "replace", changed_by(WithoutOptional))
        yield Wrong(masked, path, masked.inserted(0, wrong), guilty=(0,))


@fault(
    "an attribute that is read from the configuration",
    "the module cuts its pieces as if they were whole",
    models=("gpt2", "t5"),
)
def stale(right: Right) -> Iterator[Wrong]:
    paths = {
        "gpt2": ("transformer.h.0.attn", "transformer.h.1.attn"),
        "t5": ("decoder.block.0.layer.1.EncDecAttention",),
    }
    for path in paths[right.model]:
        wrong = step(path, "replace", changed_by(_Stale))
        near = tuple(each.path for each in right.steps if each.path.startswith(path))
        yield Wrong(right, path, right.inserted(0, wrong), guilty=(0,), near=near)


class _Stale(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "split_size"):
            kept, self.split_size = self.split_size, self.config.hidden_size
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.split_size = kept
        kept, self.n_heads = self.n_heads, 4
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.n_heads = kept
