"""Small models of the families that pipelines are tried with: eight blocks each, in float64, without dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["FAMILIES", "Family"]

WORDS, LENGTH, WIDTH = 32, 6, 16


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Args:
        name: e.g. ``"bert"``.
        kind: encoder, decoder, encoder-decoder, vision or CNN.
        make: the model, the same every time.
        batch: so many samples, by a seed; with or without what may be left out.
        blocks: their paths, in the order in which they run.
    """

    name: str
    kind: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int, bool], dict[str, Any]]
    blocks: tuple[str, ...]

    def cuts(self, stages: int) -> list[str]:
        """After these blocks, for so many stages."""
        each = len(self.blocks) // stages
        return [self.blocks[number] for number in range(each - 1, len(self.blocks) - 1, each)]


def _numbered(pattern: str, count: int = 8) -> tuple[str, ...]:
    return tuple(pattern.format(number) for number in range(count))


def _made(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(5)
        return make().double().train()

    return made


def _words(samples: int, seed: int, full: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (samples, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": torch.randint(3, WORDS, (samples, LENGTH), generator=generator)}
    if full:
        mask = torch.ones(samples, LENGTH, dtype=torch.long)
        mask[::2, -2:] = 0
        batch["attention_mask"] = mask
    return batch


def _pictures(samples: int, seed: int, full: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(samples, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"pixel_values": pictures, "labels": torch.randint(0, 5, (samples,), generator=generator)}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=8,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=16,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=16,
            n_embd=WIDTH,
            n_layer=8,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=8,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=16,
            word_embed_proj_dim=WIDTH,
            dropout=0.0,
            use_cache=False,
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            use_cache=False,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=WIDTH,
            d_kv=8,
            d_ff=32,
            num_layers=4,
            num_heads=2,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=8,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=8,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class Residual(nn.Module):
    """Two convolutions with batch norms, around which the input goes."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        is_same = stride == 1 and width == out
        self.down = None if is_same else nn.Sequential(nn.Conv2d(width, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(torch.relu_(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return torch.relu_(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        sizes = [(8, 8, 1), (8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 16, 1), (16, 16, 1), (16, 16, 1)]
        self.layers = nn.Sequential(*(Residual(*size) for size in sizes))
        self.head = nn.Linear(16, 5)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.layers(self.stem(pixel_values)).mean((2, 3)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "bert",
            "encoder",
            _made(_bert),
            _words,
            _numbered("bert.encoder.layer.{}"),
        ),
        Family("gpt2", "decoder", _made(_gpt2), _words, _numbered("transformer.h.{}")),
        Family(
            "opt",
            "decoder",
            _made(_opt),
            _words,
            _numbered("model.decoder.layers.{}"),
        ),
        Family(
            "llama",
            "decoder",
            _made(_llama),
            _words,
            _numbered("model.layers.{}"),
        ),
        Family(
            "t5",
            "encoder-decoder",
            _made(_t5),
            _words,
            (*_numbered("encoder.block.{}", 4), *_numbered("decoder.block.{}", 4)),
        ),
        Family("vit", "vision", _made(_vit), _pictures, _numbered("vit.layers.{}")),
        Family("resnet", "CNN", _made(ResNet), _pictures, _numbered("layers.{}")),
    )
}
