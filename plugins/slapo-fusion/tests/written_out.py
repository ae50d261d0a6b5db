"""Operations as people write them out, each a module: what the ready patterns find, and what they must not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FOUND", "NOT_FOUND", "Written"]

Q, K, V = (torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3))
CAUSAL = torch.ones(6, 6).tril().view(1, 1, 6, 6)
PADDING = torch.zeros(2, 1, 6, 6).masked_fill(
    torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(4)) < 0.4, -3e38
)
LOW = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1).expand(2, 1, 6, 6)
X, Y = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(5)), torch.randn(2, 6, 8)
COS, SIN = torch.randn(6, 8), torch.randn(6, 8)


class Written(nn.Module):
    """``function(self, *inputs)`` as the forward of a module with the usual layers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.norm, self.dropout, self.softmax = nn.LayerNorm(8), nn.Dropout(0.1), nn.Softmax(dim=-1)
        self.gelu, self.silu = nn.GELU(), nn.SiLU()
        self.register_buffer("causal", CAUSAL)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def nano_gpt(self: Written, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(self.causal[:, :, : q.size(2), : q.size(2)] == 0, float("-inf"))
    att = self.dropout(F.softmax(att, dim=-1))
    return att @ v


def timm(self: Written, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 8**-0.5
    attn = (q @ k.transpose(-2, -1)).softmax(dim=-1)
    return self.dropout(attn) @ v


def llama(self: Written, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.2, training=self.training), v)


def t5(self: Written, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT) + bias
    scores = scores + mask
    return F.dropout(F.softmax(scores.float(), dim=-1).to(v.dtype), 0.1, self.training) @ v


def gpt_j(self: Written, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.where(self.causal > 0, torch.matmul(q, k.mT) / math.sqrt(8.0), torch.finfo(q.dtype).min)
    return self.dropout(self.softmax(scores).type(v.dtype)) @ v


def codegen(self: Written, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((torch.matmul(q, k.mT) + mask) / 2.5, -1) @ v


def falcon(self: Written, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT
    scores /= 2.5
    return F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def in_batches(self: Written, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) / 3.0, dim=-1), v)


def _rms_llama(self: Written, x: Tensor) -> Tensor:
    kind, x = x.dtype, x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return self.weight * x.to(kind)


def _rms_gemma(self: Written, x: Tensor) -> Tensor:
    fine = x.float()
    fine = fine * torch.rsqrt(fine.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (fine * (1.0 + self.weight.float())).type_as(x)


def _rms_t5(self: Written, x: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(self.weight.dtype)


def _rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def _rotate_neighbors(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _qkv(self: Written, x: Tensor) -> Tensor:
    return self.first(x) + self.second(x) * self.third(x)


def repeated(x: Tensor, groups: int) -> Tensor:
    batch, heads, length, size = x.shape
    wide = x[:, :, None, :, :].expand(batch, heads, groups, length, size)
    return wide.reshape(batch, heads * groups, length, size)


def llama_shared(self: Written, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.where(self.causal > 0, 0.0, torch.finfo(q.dtype).min)
    return llama(self, q, repeated(k, 2), repeated(v, 2), mask)


Case = tuple[str, Callable[..., Any], tuple[Tensor, ...]]

FOUND: dict[str, Case] = {
    "nanoGPT": ("fusion.sdpa", nano_gpt, (Q, K, V)),
    "timm": ("fusion.sdpa", timm, (Q, K, V)),
    "LLaMA": ("fusion.sdpa", llama, (Q, K, V, PADDING)),
    "T5": ("fusion.sdpa", t5, (Q, K, V, torch.randn(1, 4, 6, 6), PADDING)),
    "GPT-J": ("fusion.sdpa", gpt_j, (Q, K, V)),
    "CodeGen": ("fusion.sdpa", codegen, (Q, K, V, PADDING)),
    "Falcon": ("fusion.sdpa", falcon, (Q, K, V, PADDING)),
    "scale by a size": (
        "fusion.sdpa",
        lambda self, q, k, v: (q @ k.mT * q.size(-1) ** -0.5).masked_fill(self.causal == 0, -1e9).softmax(-1) @ v,
        (Q, K, V),
    ),
    "root of a size, mask": (
        "fusion.sdpa",
        lambda self, q, k, v, mask: F.softmax(q @ k.mT / q.shape[-1] ** 0.5 + mask, dim=-1) @ v,
        (Q, K, V, PADDING),
    ),
    "a scale of each head": (
        "fusion.sdpa",
        lambda self, q, k, v: F.softmax(q @ k.mT * self.weight[:4].view(4, 1, 1), dim=-1) @ v,
        (Q, K, V),
    ),
    "a scale of each key": (
        "fusion.sdpa",
        lambda self, q, k, v: F.softmax(q @ k.mT * self.weight[:6], dim=-1) @ v,
        (Q, K, V),
    ),
    "in batches": ("fusion.sdpa", in_batches, (Q, K, V)),
    "causal, nanoGPT": ("fusion.causal_sdpa", nano_gpt, (Q, K, V)),
    "causal, LLaMA with shared heads": ("fusion.causal_sdpa", llama_shared, (Q, K[:, :2], V[:, :2])),
    "RMSNorm of LLaMA": ("fusion.rms_norm", _rms_llama, (X,)),
    "RMSNorm of Gemma": ("fusion.rms_norm", _rms_gemma, (X,)),
    "RMSNorm of T5": ("fusion.rms_norm", _rms_t5, (X,)),
    "RMSNorm by a power": (
        "fusion.rms_norm",
        lambda self, x: self.weight * (x * torch.pow(x.square().mean(dim=-1, keepdim=True) + 1e-5, -0.5)),
        (X,),
    ),
    "RMSNorm by a root": (
        "fusion.rms_norm",
        lambda self, x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5),
        (X,),
    ),
    "gelu_new": ("fusion.gelu_tanh", lambda self, x: _new(x), (X,)),
    "gelu_fast": ("fusion.gelu_tanh", lambda self, x: _fast(x), (X,)),
    "gelu_python_tanh": (
        "fusion.gelu_tanh",
        lambda self, x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        (X,),
    ),
    "gelu_python": ("fusion.gelu", lambda self, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), (X,)),
    "bias, gelu": ("fusion.bias_gelu", lambda self, x: F.gelu(x @ self.first.weight.t() + self.bias), (X,)),
    "bias first, nn.GELU": ("fusion.bias_gelu", lambda self, x: self.gelu(self.bias + x), (X,)),
    "linear, gelu_new": ("fusion.bias_gelu", lambda self, x: _new(self.first(x)), (X,)),
    "linear, quick_gelu": (
        "fusion.bias_gelu",
        lambda self, x: (lambda y: y * torch.sigmoid(1.702 * y))(self.first(x)),
        (X,),
    ),
    "bias, dropout, residual, norm": (
        "fusion.bias_dropout_add_norm",
        lambda self, x, y: self.norm(self.dropout(x + self.bias) + y),
        (X, Y),
    ),
    "dropout, residual, norm": (
        "fusion.bias_dropout_add_norm",
        lambda self, x, y: F.layer_norm(y + F.dropout(x, 0.3, self.training), (8,), self.weight, self.bias),
        (X, Y),
    ),
    "residual, norm": ("fusion.bias_dropout_add_norm", lambda self, x, y: self.norm(x + y), (X, Y)),
    "residual, norm of rows": (
        "fusion.bias_dropout_add_norm",
        lambda self, x, y: (lambda z: self.norm(z.reshape(-1, z.size(-1))))(self.dropout(x) + y),
        (X, Y),
    ),
    "SwiGLU": ("fusion.swiglu", lambda self, x: self.silu(self.first(x)) * self.second(x), (X,)),
    "SwiGLU by a sigmoid": ("fusion.swiglu", lambda self, x, y: y * (x * torch.sigmoid(x)), (X, Y)),
    "SwiGLU of halves": ("fusion.swiglu", lambda self, x: (lambda a, b: b * F.silu(a))(*x.chunk(2, -1)), (X,)),
    "SwiGLU with projections": (
        "fusion.swiglu_projections",
        lambda self, x: F.silu(self.first(x)) * self.second(x),
        (X,),
    ),
    "rotary, halves": ("fusion.rotary", lambda self, x: x * COS.to(x) + _rotate_half(x) * SIN.to(x), (X,)),
    "rotary, neighbors": ("fusion.rotary", lambda self, x, c, s: x * c + _rotate_neighbors(x) * s, (X, COS, SIN)),
    "QKV": ("fusion.qkv", _qkv, (X,)),
}
"""What is found once, by this pattern."""


def _attention(step: Callable[[Tensor], Tensor], *, dim: int = -1) -> Callable[..., Any]:
    return lambda self, q, k, v: F.softmax(step(q @ k.mT * 0.3), dim=dim) @ v


NOT_FOUND: dict[str, Case] = {
    "softmax over the queries": ("fusion.sdpa", _attention(lambda s: s, dim=-2), (Q, K, V)),
    "soft cap": ("fusion.sdpa", _attention(lambda s: torch.tanh(s / 30.0) * 30.0), (Q, K, V)),
    "attention sink": (
        "fusion.sdpa",
        lambda self, q, k, v: F.softmax(torch.cat([q @ k.mT, q[..., :1]], -1), dim=-1)[..., :-1] @ v,
        (Q, K, V),
    ),
    "head mask": ("fusion.sdpa", lambda self, q, k, v: (F.softmax(q @ k.mT, dim=-1) * self.bias[0]) @ v, (Q, K, V)),
    "weights on the right": ("fusion.sdpa", lambda self, q, k, v: v.mT @ F.softmax(q @ k.mT, dim=-1), (Q, K, V)),
    "no mask, so not causal": ("fusion.causal_sdpa", timm, (Q, K, V)),
    "a bias and a mask": ("fusion.causal_sdpa", t5, (Q, K, V, torch.randn(1, 4, 6, 6), LOW)),
    "RMSNorm over another axis": (
        "fusion.rms_norm",
        lambda self, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
        (X,),
    ),
    "RMSNorm of a fourth power": (
        "fusion.rms_norm",
        lambda self, x: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6),
        (X,),
    ),
    "centerd, so LayerNorm": (
        "fusion.rms_norm",
        lambda self, x: (
            (x - x.mean(-1, keepdim=True))
            * torch.rsqrt((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-6)
        ),
        (X,),
    ),
    "divided by the sum of squares": (
        "fusion.rms_norm",
        lambda self, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
        (X,),
    ),
    "tanh with another constant": (
        "fusion.gelu_tanh",
        lambda self, x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.0447 * torch.pow(x, 3.0)))),
        (X,),
    ),
    "tanh with another factor": (
        "fusion.gelu_tanh",
        lambda self, x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
        (X,),
    ),
    "tanh of a square": (
        "fusion.gelu_tanh",
        lambda self, x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 2.0)))),
        (X,),
    ),
    "erf without the root": ("fusion.gelu", lambda self, x: x * 0.5 * (1.0 + torch.erf(x / 2.0)), (X,)),
    "gelu without a bias": ("fusion.bias_gelu", lambda self, x: F.gelu(x @ self.first.weight), (X,)),
    "relu of a sum": ("fusion.bias_gelu", lambda self, x: F.relu(x + self.bias), (X,)),
    "norm without residual": ("fusion.bias_dropout_add_norm", lambda self, x: self.norm(self.dropout(x)), (X,)),
    "residual behind the norm": ("fusion.bias_dropout_add_norm", lambda self, x, y: self.norm(x) + y, (X, Y)),
    "gated by gelu": ("fusion.swiglu", lambda self, x, y: F.gelu(x) * y, (X, Y)),
    "gated by a sigmoid": ("fusion.swiglu", lambda self, x, y: torch.sigmoid(x) * y, (X, Y)),
    "another one's projection": (
        "fusion.swiglu_projections",
        lambda self, x, y: F.silu(self.first(x)) * self.second(y),
        (X, Y),
    ),
    "rotary the other way": (
        "fusion.rotary",
        lambda self, x, c, s: x * c + torch.cat((x[..., 4:], -x[..., :4]), dim=-1) * s,
        (X, COS, SIN),
    ),
    "rotary without the negation": (
        "fusion.rotary",
        lambda self, x, c, s: x * c + torch.cat((x[..., 4:], x[..., :4]), dim=-1) * s,
        (X, COS, SIN),
    ),
    "two layers of one value": ("fusion.qkv", lambda self, x: self.first(x) + self.second(x), (X,)),
    "three layers of two values": (
        "fusion.qkv",
        lambda self, x, y: self.first(x) + self.second(x) + self.third(y),
        (X, Y),
    ),
}
"""What is close to a pattern, and another function."""
