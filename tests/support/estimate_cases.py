"""A hundred schedules of five families of models, to hold estimates against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from tests.integration.zoo.tensor_parallel import split

__all__ = ["CASES", "FAMILIES", "OPTIMIZERS", "Case"]

FAMILIES = ("bert", "gpt2", "llama", "t5", "resnet")
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "AdamW, one by one": partial(torch.optim.AdamW, lr=1e-3, foreach=False),
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "SGD, momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}


class Block(nn.Module):
    """Two convolutions, and the way around them."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        inside = width // stride
        self.first = nn.Conv2d(inside, width, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.last = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(width)
        self.around = nn.Conv2d(inside, width, 1, stride=stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.last_norm(self.last(y)) + self.around(x))


class ResNet(nn.Module):
    """A small residual network that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList([Block(32, 1), Block(64, 2), Block(64, 1), Block(128, 2)])
        self.head = nn.Linear(128, 100)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


@dataclass(frozen=True)
class Case:
    """A schedule, and the step that it is trained with.

    Args:
        family: of the model.
        tp: ranks that share it.
        checkpointed: how many of its layers are: ``"none"``, ``"some"``, ``"all"``.
        dtype: of the model.
        optimizer: one of ``OPTIMIZERS``.
        batch: samples.
        length: tokens of a sample; pixels along an image's side.
        tied: whether input and output embeddings are one.
        mask: ``"none"``, ``"ones"`` or ``"padded"``.
        kv_heads: of 8 heads; only LLaMA has others.
        attention: ``"sdpa"`` or ``"eager"``.
        accumulate: micro-batches of a step, each of ``batch`` samples.
        frozen: whether input embeddings are (of images: the first convolution).
    """

    family: str
    tp: int = 1
    checkpointed: str = "none"
    dtype: str = "float32"
    optimizer: str = "AdamW"
    batch: int = 2
    length: int = 64
    tied: bool = True
    mask: str = "none"
    kv_heads: int = 8
    attention: str = "sdpa"
    accumulate: int = 1
    frozen: bool = False

    def model(self) -> nn.Module:
        """On the default device."""
        model = _MAKERS[self.family](self).to(getattr(torch, self.dtype)).train()
        if self.frozen:
            first: Any = model.stem if isinstance(model, ResNet) else model.get_input_embeddings()  # type: ignore[operator]
            first.requires_grad_(False)
        return model

    def inputs(self) -> Any:
        """One batch."""
        torch.manual_seed(0)
        samples = self.batch * self.accumulate
        if self.family == "resnet":
            images = torch.randn(samples, 3, self.length, self.length, dtype=getattr(torch, self.dtype))
            return {"x": images, "labels": torch.zeros(samples, dtype=torch.long)}
        ids = torch.randint(3, 900, (samples, self.length))
        batch = {"input_ids": ids, "labels": ids.clone()}
        if self.mask != "none":
            mask = torch.ones_like(ids)
            if self.mask == "padded":
                mask[-1, self.length // 2 :] = 0
            batch["attention_mask"] = mask
        return batch

    def schedule(self, sch: slapo.Schedule) -> None:
        """Split over the ranks, and checkpoint."""
        if self.tp > 1:
            split_convolutions(sch) if self.family == "resnet" else split(sch)
        layers = [path for pattern in _LAYERS[self.family] for path in _paths(sch, pattern)]
        share = {"none": 0, "some": len(layers) // 2, "all": len(layers)}[self.checkpointed]
        for path in layers[:share]:
            sch[path].checkpoint()

    @property
    def mesh(self) -> dict[str, int] | None:
        return {"tp": self.tp} if self.tp > 1 else None


def split_convolutions(sch: slapo.Schedule) -> None:
    """The first convolution of each block by its output, with its norm; the last by its input."""
    for block in sch["blocks.*"]:
        node: Any = block
        node["first"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        node["first_norm"].shard(["weight", "bias", "running_mean", "running_var"], axis=0)
        node["last"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def _paths(sch: slapo.Schedule, pattern: str) -> list[str]:
    return [node.path for node in sch[pattern]]


_LAYERS = {
    "bert": ("bert.encoder.layer.*",),
    "gpt2": ("transformer.h.*",),
    "llama": ("model.layers.*",),
    "t5": ("encoder.block.*", "decoder.block.*"),
    "resnet": ("blocks.*",),
}


def _config(case: Case, config: Any, **settings: Any) -> Any:
    made = config(**settings)
    made._attn_implementation = case.attention
    return made


def _bert(case: Case) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        _config(
            case, BertConfig,
            hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
            vocab_size=1000, tie_word_embeddings=case.tied,
        )
    )  # fmt: skip


def _gpt2(case: Case) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        _config(
            case, GPT2Config,
            n_embd=128, n_layer=4, n_head=8, vocab_size=1000, use_cache=False, tie_word_embeddings=case.tied,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def _llama(case: Case) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        _config(
            case, LlamaConfig,
            hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=case.kv_heads, vocab_size=1000, use_cache=False, tie_word_embeddings=case.tied,
        )
    )  # fmt: skip


def _t5(case: Case) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        _config(
            case, T5Config,
            d_model=128, d_ff=512, d_kv=16, num_layers=3, num_heads=8, vocab_size=1000, use_cache=False,
            tie_word_embeddings=case.tied, decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


_MAKERS = {"bert": _bert, "gpt2": _gpt2, "llama": _llama, "t5": _t5, "resnet": lambda case: ResNet()}


def _cases() -> list[Case]:
    """A hundred: twenty of each family, through the settings at different paces."""
    found = []
    optimizers, lengths, batches = list(OPTIMIZERS), (64, 33, 128), (2, 1, 3)
    for family in FAMILIES:
        for number in range(20):
            tp = (1, 2, 4, 8)[number % 4]
            found.append(
                Case(
                    family,
                    tp=tp,
                    checkpointed=("none", "all", "some")[number % 3],
                    dtype=("float32", "bfloat16")[(number // 2) % 2],
                    optimizer=optimizers[(number // 3) % 4],
                    batch=batches[(number // 4) % 3],
                    length=lengths[(number // 5) % 3] if family != "resnet" else (32, 17)[number % 2],
                    tied=number % 5 != 4,
                    mask=("none", "ones", "padded")[(number // 3) % 3],
                    kv_heads=2 if family == "llama" and tp <= 2 else 8,
                    attention="eager" if number % 6 == 5 else "sdpa",
                    accumulate=2 if number % 7 == 3 else 1,
                    frozen=number % 9 == 4,
                )
            )
    return found


CASES = tuple(_cases())
