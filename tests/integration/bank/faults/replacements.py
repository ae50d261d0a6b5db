"""Layers put in by ``replace`` that are nearly, but not quite, what stood there."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integration.bank.faults.changing import as_copy_with, changed_by, mistake_at
from tests.integration.bank.places import ACTIVATIONS, ATTENTIONS, DROPOUTS, HEADS, NORMS

WITH_BIAS = {model: path for model, path in NORMS.items() if model in ("bert", "gpt2", "vit")}
WITHOUT_BIAS = {model: path for model, path in NORMS.items() if model in ("llama", "qwen3", "t5")}
_DROPS = "dropout is off in the plain comparison; "


class OnAlways(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, training=True)


class OwnMask(nn.Module):
    """Drops without the random number generator that everybody draws from, and forgets to scale."""

    def forward(self, input: Tensor) -> Tensor:
        return input if not self.training else F.dropout(input, self.p) * (1 - self.p)


class NoWeight(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        return hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 1e-6).to(dtype)


class NoBias(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) - self.bias


class Transposed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.t(), self.bias)


class NotCenterd(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input, self.normalized_shape, self.weight, self.eps) + self.bias


class WithoutMask(nn.Module):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs["attention_mask"] = None
        return super().forward(hidden_states, *args, **kwargs)


class WithoutMaskOfT5(nn.Module):
    def forward(self, hidden_states: Tensor, mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(hidden_states, mask=None, **kwargs)


class TakesPositionsFromZero(nn.Module):
    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        turned = (cos.roll(1, 1), sin.roll(1, 1))
        return super().forward(hidden_states, turned, *args, **kwargs)


def causal(old: nn.Module) -> nn.Module:
    made = copy.deepcopy(old)
    made.is_causal = not made.is_causal
    made.__class__ = type("Causal", (_MaskedOtherwise, type(old)), {})
    return made


class _MaskedOtherwise(nn.Module):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_causal:
            kwargs["attention_mask"] = None
        else:
            length = hidden_states.shape[1]
            least = torch.finfo(hidden_states.dtype).min
            kwargs["attention_mask"] = torch.full((length, length), least, dtype=hidden_states.dtype).triu(1)[
                None, None
            ]
        return super().forward(hidden_states, *args, **kwargs)


def other_activation(old: nn.Module) -> nn.Module:
    """The kin that is taken for it: tanh for the exact GELU and the other way round, GELU for SiLU and ReLU."""
    name = type(old).__name__
    return nn.GELU(approximate="tanh") if name == "GELUActivation" else nn.GELU()


def quick_gelu(old: nn.Module) -> nn.Module:
    class QuickGELU(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input * torch.sigmoid(1.702 * input)

    return QuickGELU()


_EPS = {"eps": lambda old: old + 1e-5, "variance_epsilon": lambda old: old + 1e-5}

dropout_identity = mistake_at(
    "dropout replaced by nothing", "the distribution of outputs in training", DROPOUTS, lambda old: nn.Identity(),
    by_hand=_DROPS + "nothing is dropped", dropout=0.1,
)  # fmt: skip
dropout_half = mistake_at(
    "dropout of another probability", "the distribution of outputs in training", DROPOUTS, lambda old: nn.Dropout(0.5),
    by_hand=_DROPS + "half is dropped, not a tenth", dropout=0.1,
)  # fmt: skip
dropout_on = mistake_at(
    "dropout left on in evaluation", "outputs in evaluation are random", DROPOUTS, changed_by(OnAlways),
    by_hand=_DROPS + "it drops in evaluation", dropout=0.1,
)  # fmt: skip
dropout_unscaled = mistake_at(
    "dropout that does not scale", "the mean of outputs in training is a tenth smaller", DROPOUTS, changed_by(OwnMask),
    by_hand=_DROPS + "what is kept is not divided by 1 - p", dropout=0.1,
)  # fmt: skip
activation = mistake_at("another activation function", "outputs", ACTIVATIONS, other_activation)
quick = mistake_at("an approximation that nobody declared", "outputs, by a percent", ACTIVATIONS, quick_gelu)
eps = mistake_at("norm with another eps", "outputs, slightly", NORMS, as_copy_with(**_EPS))
no_weight = mistake_at("RMSNorm without its weight", "outputs", WITHOUT_BIAS, changed_by(NoWeight))
no_bias = mistake_at("LayerNorm without its bias", "outputs", WITH_BIAS, changed_by(NoBias))
not_centerd = mistake_at(
    "RMSNorm in the place of LayerNorm", "outputs", WITH_BIAS,
    lambda old: NotCenterd(old.normalized_shape, eps=old.eps),
)  # fmt: skip
fresh_weight = mistake_at(
    "a new layer with values of its own", "outputs", {"bert": HEADS["bert"], "vit": HEADS["vit"]},
    lambda old: _Fresh(old), kind="layers", arguments={"drop": ["weight", "bias"]},
)  # fmt: skip
transposed = mistake_at(
    "transposed weight", "outputs", {"bert": "cls.predictions.transform.dense"},
    lambda old: Transposed(old.in_features, old.out_features), kind="whole",
)  # fmt: skip
linear_bias = mistake_at(
    "linear layer without its bias", "outputs; the bias gets no gradient", {"bert": HEADS["bert"], "vit": HEADS["vit"]},
    lambda old: nn.Linear(old.in_features, old.out_features, bias=False), kind="layers", arguments={"drop": ["bias"]},
)  # fmt: skip
unmasked = mistake_at(
    "attention without its mask", "outputs: later words are seen",
    {model: ATTENTIONS[model] for model in ("gpt2", "llama", "qwen3")}, changed_by(WithoutMask),
)  # fmt: skip
wrong_causal = mistake_at(
    "wrong causal flag", "outputs: later words are hidden, or seen",
    {model: ATTENTIONS[model] for model in ("bert", "gpt2", "llama", "qwen3", "vit")}, causal,
)  # fmt: skip
wrong_positions = mistake_at(
    "rotary positions shifted in a layer", "outputs", {model: ATTENTIONS[model] for model in ("llama", "qwen3")},
    changed_by(TakesPositionsFromZero),
)  # fmt: skip


class _Fresh(nn.Module):
    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        self.inner = nn.Linear(old.in_features, old.out_features)
        with torch.no_grad():
            self.inner.weight.fill_(1 / math.sqrt(old.in_features))

    def forward(self, input: Tensor) -> Tensor:
        return self.inner(input)
