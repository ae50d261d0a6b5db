"""Modules put in by ``replace`` that compute something else always, at times, or only backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integration.bank.faults.changing import as_copy_with, changed_by, first_tensor, mistake_at, on_first
from tests.integration.bank.places import ATTENTIONS, BLOCKS, MLPS, NORMS

FIRST_BLOCKS = {model: paths[-1] for model, paths in BLOCKS.items()}


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


class Scaled(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return on_first(super().forward(*args, **kwargs), lambda x: x * (1 + 1e-3))


class ScaledBackward(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return on_first(super().forward(*args, **kwargs), lambda x: _Gradient.apply(x, 1 + 1e-3))


class Detached(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return on_first(super().forward(*args, **kwargs), lambda x: x.detach())


class InNoGrad(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return super().forward(*args, **kwargs)


class DetachedWeight(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weight = self._parameters["weight"]
        self._parameters["weight"] = weight.detach()
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters["weight"] = weight


class DetachedResidual(nn.Module):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(hidden_states, *args, **kwargs)
        return on_first(output, lambda x: x - hidden_states + hidden_states.detach())


class WrongInEvaluation(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        factor = 1.0 if self.training else 1.001
        return on_first(super().forward(*args, **kwargs), lambda x: x * factor)


class WrongWithoutGradients(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        factor = 1.0 if torch.is_grad_enabled() else 1.001
        return on_first(super().forward(*args, **kwargs), lambda x: x * factor)


class WrongFromTheSecondStep(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        seen = self.__dict__.setdefault("seen", [])
        if self.training:
            seen.append(1)
        factor = 1.001 if len(seen) > 1 and self.training else 1.0
        return on_first(output, lambda x: x * factor)


class KeepsItsFirstEvaluation(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if torch.is_grad_enabled():
            return output
        kept = self.__dict__.setdefault("kept", first_tensor(output).clone())
        return on_first(output, lambda x: kept if kept.shape == x.shape else x)


class KeepsItsWeightOfTheFirstEvaluation(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weight = self._parameters["weight"]
        if torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        kept = self.__dict__.setdefault("kept", weight.detach().clone())
        self._parameters["weight"] = kept.to(weight.dtype)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters["weight"] = weight


class UsesTheWeightItWasMadeWith(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weight = self._parameters["weight"]
        kept = self.__dict__.setdefault("kept", weight.detach().clone()).to(weight.dtype)
        self._parameters["weight"] = weight + (kept - weight).detach()
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters["weight"] = weight


class WrongInSingle(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        factor = 1.01 if first_tensor(output).dtype == torch.float32 else 1.0
        return on_first(output, lambda x: x * factor)


class WrongInBfloat16(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        factor = 1.5 if first_tensor(output).dtype == torch.bfloat16 else 1.0
        return on_first(output, lambda x: x * factor)


class ComputesInHalf(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return on_first(super().forward(*args, **kwargs), lambda x: x.to(torch.bfloat16).to(x.dtype))


class WrongForLargerBatches(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        factor = 1.01 if first_tensor(output).shape[0] > 2 else 1.0
        return on_first(output, lambda x: x * factor)


class WrongForABatchOfOne(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        factor = 1.01 if first_tensor(output).shape[0] == 1 else 1.0
        return on_first(output, lambda x: x * factor)


class MixesTheBatch(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return on_first(super().forward(*args, **kwargs), lambda x: x + 1e-3 * x.mean(0, keepdim=True))


class WrongOnOneRank(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        factor = 1.001 if dist.get_rank() == 1 else 1.0
        return on_first(super().forward(*args, **kwargs), lambda x: x * factor)


class WrongGradientOnOneRank(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        factor = 1.001 if dist.get_rank() == 1 else 1.0
        return on_first(super().forward(*args, **kwargs), lambda x: _Gradient.apply(x, factor))


class NanAtTimes(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return on_first(output, lambda x: torch.where(x == x.max(), torch.nan, x))


class Raises(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this kernel was not built for this machine")


class ReturnsOneMore(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return (*output, None) if isinstance(output, tuple) else (output, None)


_at_norms = {
    "a module scaled by 1 + 1e-3": (Scaled, "outputs"),
    "gradient scaled in backward only": (ScaledBackward, "gradients, not outputs"),
    "output detached": (Detached, "gradients of layers before are lost"),
    "forward in a no_grad region": (InNoGrad, "gradients of the module and before are lost"),
    "a weight that gets no gradient": (DetachedWeight, "the gradient of one weight is lost"),
    "wrong in evaluation only": (WrongInEvaluation, "outputs in evaluation"),
    "wrong where gradients are off": (WrongWithoutGradients, "outputs in evaluation"),
    "wrong from the second step on": (WrongFromTheSecondStep, "outputs and weights after a step"),
    "keeps its first output of an evaluation": (KeepsItsFirstEvaluation, "outputs in evaluation after a step"),
    "keeps its weight of the first evaluation": (
        KeepsItsWeightOfTheFirstEvaluation,
        "outputs in evaluation after a step",
    ),
    "uses the weight it was made with": (UsesTheWeightItWasMadeWith, "outputs after a step"),
    "wrong in single precision only": (WrongInSingle, "outputs in the model's own type"),
    "computes in a coarser type": (ComputesInHalf, "outputs, by a rounding of 4e-3"),
    "wrong for larger batches only": (WrongForLargerBatches, "outputs of a batch of four"),
    "wrong for a batch of one only": (WrongForABatchOfOne, "outputs of a batch of one"),
    "samples of a batch are mixed": (MixesTheBatch, "outputs"),
    "wrong on one rank only": (WrongOnOneRank, "outputs; the ranks drift apart"),
    "wrong gradient on one rank only": (WrongGradientOnOneRank, "gradients; the ranks drift apart"),
    "NaN for some inputs": (NanAtTimes, "outputs"),
    "a module that raises": (Raises, "it does not run"),
}

scaled, scaled_backward, detached, in_no_grad, detached_weight, in_evaluation, without_gradients, second_step, \
    first_evaluation, first_weight, made_with, in_single, in_half, larger, one, mixed, one_rank, one_gradient, \
    not_a_number, raising = (
    mistake_at(name, breaks, NORMS, changed_by(mixin)) for name, (mixin, breaks) in _at_norms.items()
)  # fmt: skip

scaled_mlp = mistake_at("a whole MLP scaled by 1 + 1e-3", "outputs", MLPS, changed_by(Scaled), kind="layers")
detached_residual = mistake_at(
    "residual detached", "gradients of layers before lack the straight path",
    {model: FIRST_BLOCKS[model] for model in ("bert", "llama", "qwen3", "gpt2", "t5", "vit")},
    changed_by(DetachedResidual), kind="layers",
)  # fmt: skip
in_bfloat16 = mistake_at(
    "wrong in bfloat16 only", "outputs in the model's own type", NORMS, changed_by(WrongInBfloat16), dtype="bfloat16"
)
one_more = mistake_at(
    "another structure of the output", "it does not run", NORMS, changed_by(ReturnsOneMore), at_most=1
)
other_scale = mistake_at(
    "attention scaled otherwise", "outputs", {m: p for m, p in ATTENTIONS.items() if m != "t5"},
    as_copy_with(scaling=lambda old: old * 1.01),
)  # fmt: skip
