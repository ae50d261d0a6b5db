"""Tiny models of the families, and what their full schedules promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import slapo_models

IDS = torch.arange(32).reshape(2, 16) * 5 % 96
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
EAGER = {"attn_implementation": "eager"}


@dataclass(frozen=True)
class Family:
    """A family, its tiny model and what its schedule promises.

    Args:
        schedule: the function of slapo_models.
        make: gives the model, the same each time.
        layers: glob of its layers.
        paper: lines of schedule in the paper's table; None of a model that is not there.
        kernels: pattern -> matches in each layer.
        batch: one batch.
        loss: of the output and the batch, where the model gives none.
        compiled: whether the schedule takes ``compiler``.
        backward: all-reduces of the backward of a layer.
    """

    schedule: Callable[..., None]
    make: Callable[[], nn.Module]
    layers: str
    paper: int | None
    kernels: Mapping[str, tuple[int, ...]]
    batch: Any = dataclasses.field(default_factory=lambda: TOKENS)
    loss: Callable[[Any, Any], Tensor] | None = None
    compiled: bool = True
    backward: int = 2

    def collectives(self, path: str) -> dict[tuple[str, str], int]:
        """How many of each phase and kind the layer at ``path`` has."""
        if path.startswith("decoder."):
            return {("forward", "all_reduce"): 3, ("backward", "all_reduce"): 4}
        if path.startswith("layer"):
            return {("forward", "all_reduce"): 1, ("forward", "all_gather"): 1, ("backward", "all_reduce"): 2}
        return {("forward", "all_reduce"): 2, ("backward", "all_reduce"): self.backward}

    def apply(self, sch: Any, **options: Any) -> None:
        """The full schedule, its regions grouped and not compiled."""
        self.schedule(sch, **({"compiler": "eager"} if self.compiled else {}), **options)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES, **EAGER, intermediate_size=48, max_position_embeddings=32))  # type: ignore[no-any-return]


def roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    return RobertaForMaskedLM(RobertaConfig(**SIZES, **EAGER, intermediate_size=48, max_position_embeddings=34))  # type: ignore[no-any-return]


def gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, **EAGER, use_cache=False))  # type: ignore[no-any-return]


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": 32}
    return OPTForCausalLM(OPTConfig(**SIZES, **sizes, **EAGER, use_cache=False))  # type: ignore[no-any-return]


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, **EAGER, decoder_start_token_id=0, use_cache=False))  # type: ignore[no-any-return]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"intermediate_size": 48, "num_key_value_heads": 4, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **sizes, **EAGER, use_cache=False))  # type: ignore[no-any-return]


GROUPED = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32, **EAGER}


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=8, use_cache=False))  # type: ignore[no-any-return]


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16, tie_word_embeddings=True, use_cache=False))  # type: ignore[no-any-return]


def gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**GROUPED, head_dim=16, sliding_window=8, use_cache=False))  # type: ignore[no-any-return]


def gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    types = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return Gemma3ForCausalLM(Gemma3TextConfig(**GROUPED, **types, head_dim=16, use_cache=False))  # type: ignore[no-any-return]


EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "use_cache": False, "experts_implementation": "batched_mm"}
"""Grouped products of a CPU have no float64."""


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**EXPERTS, num_local_experts=4))  # type: ignore[no-any-return]


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, **sizes))  # type: ignore[no-any-return]


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 48, "image_size": 16, "patch_size": 4, "num_labels": 7}
    drops = {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
    return ViTForImageClassification(ViTConfig(**sizes, **drops, **EAGER))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """One block of a residual network, by torchvision's names."""

    def __init__(self, inputs: int, planes: int, *, widen: int, stride: int) -> None:
        super().__init__()
        width, outputs = planes * widen, planes * 4
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)  # type: ignore[no-any-return]


class WideResNet(nn.Module):
    """A wide residual network of four groups of blocks, by torchvision's names.

    Args:
        blocks: of each group.
        planes: of the first group.
        classes: of pictures.
    """

    def __init__(self, blocks: tuple[int, int, int, int] = (1, 1, 1, 1), planes: int = 4, classes: int = 7) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, planes, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(planes)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)
        inputs = planes
        for group, number in enumerate(blocks):
            made = []
            for block in range(number):
                width = planes * 2**group
                made.append(Bottleneck(inputs, width, widen=2, stride=2 if group and not block else 1))
                inputs = width * 4
            setattr(self, f"layer{group + 1}", nn.Sequential(*made))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


def wide_resnet() -> nn.Module:
    torch.manual_seed(0)
    return WideResNet()


def entropy(output: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, torch.arange(len(output)) % output.shape[-1])


TOKENS = {"input_ids": IDS, "labels": IDS.flip(1)}
PICTURES = (torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)),)
LABELED = {"pixel_values": PICTURES[0][:, :, :16, :16], "labels": torch.arange(4)}
ENCODER = {"fusion.sdpa": (1, 1), "fusion.bias_gelu": (1, 1), "fusion.bias_dropout_add_norm": (2, 2)}
LLAMA = {"fusion.sdpa": (1, 1), "fusion.rms_norm": (2, 2), "fusion.rotary": (2, 2), "fusion.swiglu": (1, 1)}
FAMILIES = {
    "bert": Family(slapo_models.bert, bert, "bert.encoder.layer.*", 21, ENCODER),
    "roberta": Family(slapo_models.roberta, roberta, "roberta.encoder.layer.*", 21, ENCODER),
    "gpt": Family(
        slapo_models.gpt,
        gpt,
        "transformer.h.*",
        10,
        {"fusion.sdpa": (1, 1), "fusion.gelu_tanh": (1, 1), "fusion.bias_dropout_add_norm": (1, 1)},
    ),
    "opt": Family(
        slapo_models.opt,
        opt,
        "model.decoder.layers.*",
        10,
        {"fusion.sdpa": (1, 1), "fusion.bias_dropout_add_norm": (1, 1)},
    ),
    "t5": Family(
        slapo_models.t5,
        t5,
        "*coder.block.*",
        11,
        {"fusion.sdpa": (1, 1, 2, 2), "fusion.rms_norm": (2, 2, 3, 3)},
        compiled=False,
    ),
    "llama": Family(
        slapo_models.llama,
        llama,
        "model.layers.*",
        11,
        LLAMA,
    ),
    "mistral": Family(slapo_models.mistral, mistral, "model.layers.*", None, LLAMA),
    "qwen3": Family(slapo_models.qwen3, qwen3, "model.layers.*", None, {**LLAMA, "fusion.rms_norm": (4, 4)}),
    "gemma2": Family(
        slapo_models.gemma2,
        gemma2,
        "model.layers.*",
        None,
        {
            "fusion.rms_norm": (4, 4),
            "fusion.rotary": (2, 2),
            "div, tanh, mul, add, softmax": (1, 1),
            "gelu, mul": (1, 1),
        },
    ),
    "gemma3": Family(
        slapo_models.gemma3,
        gemma3,
        "model.layers.*",
        None,
        {"fusion.sdpa": (1, 1), "fusion.rms_norm": (6, 6), "fusion.rotary": (2, 2), "gelu, mul": (1, 1)},
    ),
    "mixtral": Family(slapo_models.mixtral, mixtral, "model.layers.*", None, LLAMA, backward=3),
    "qwen3_moe": Family(
        slapo_models.qwen3_moe, qwen3_moe, "model.layers.*", None, {**LLAMA, "fusion.rms_norm": (4, 4)}, backward=3
    ),
    "vit": Family(
        slapo_models.vit,
        vit,
        "vit.layers.*",
        None,
        {"fusion.sdpa": (1, 1), "fusion.bias_gelu": (1, 1), "fusion.bias_dropout_add_norm": (1, 1)},
        batch=LABELED,
    ),
    "wide_resnet": Family(
        slapo_models.wide_resnet,
        wide_resnet,
        "layer*.*",
        12,
        {"add, relu": (1, 1, 1, 1)},
        batch=PICTURES,
        loss=entropy,
    ),
}
