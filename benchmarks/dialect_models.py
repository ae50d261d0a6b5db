"""The models of ``dialects.py``, their sizes, their batches, and the schedules that an engineer gives them."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import slapo_core as slapo

__all__ = ["ADAM", "Setting", "adamw", "batch_of", "make", "schedule"]

SIZES = {
    "cpu": {"model": "bert", "layers": 4, "width": 256, "heads": 4, "batch": 8, "length": 128, "dtype": "float32"},
    "cuda": {"model": "gpt", "layers": 24, "width": 1792, "heads": 14, "batch": 4, "length": 1024, "dtype": "bfloat16"},
    "small": {"layers": 2, "width": 32, "heads": 2, "batch": 8, "length": 16, "vocabulary": 128, "compiler": "eager"},
}
"""What is taken where the command line says nothing."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and where.

    Args:
        model: ``"bert"``, ``"gpt"`` or ``"llama"``.
        layers: how many blocks.
        width: of the hidden states.
        heads: of each attention.
        vocabulary: tokens.
        batch: sequences a step, over all ranks.
        length: tokens a sequence.
        dtype: in which it computes; DeepSpeed and Megatron keep masters of bfloat16, torch does not.
        mesh: of the scheduled model, e.g. ``"dp 2, tp 2"``; the unscheduled one has as many replicas as this has ranks.
        zero: DeepSpeed's ZeRO stage; with stages, the scheduled model has 1 at most. From 1 on, Megatron's optimizer is
            the distributed one.
        micro_batches: that go through a pipeline.
        checkpoint: how many blocks of the scheduled model are computed again in the backward.
        attention: transformers' implementation in the unscheduled model.
        compiler: of the fused regions.
        device: ``"cpu"`` or ``"cuda"``.
    """

    model: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    dtype: str
    mesh: str
    zero: int
    micro_batches: int
    checkpoint: int
    attention: str
    compiler: str
    device: str

    @property
    def sizes(self) -> dict[str, int]:
        """Of the mesh, with one rank along ``tp`` where it has none, since the schedule splits over it."""
        parts = (part.split() for part in self.mesh.split(",") if part)
        return {"tp": 1, **{name: int(size) for name, size in parts}}

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    def size(self, mesh_dim: str) -> int:
        return self.sizes.get(mesh_dim, 1)

    def __str__(self) -> str:
        return f"{self.model}, {self.layers} x {self.width}, {self.batch} x {self.length}, {self.dtype}, {self.mesh}"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", choices=("bert", "gpt", "llama"), help="default: bert on a CPU, gpt on a GPU")
        for name in ("layers", "width", "heads", "batch", "length"):
            parser.add_argument(
                f"--{name}", type=int, help=f"default: {SIZES['cpu'][name]}, {SIZES['cuda'][name]} on a GPU"
            )
        parser.add_argument("--vocabulary", type=int, help="tokens (default: 8192)")
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU")
        parser.add_argument(
            "--mesh",
            nargs="+",
            help='of the scheduled model, e.g. "pp 2, tp 2" (default: "dp 2" "tp 2" "pp 2"; on GPUs, replicas on all)',
        )
        parser.add_argument("--zero", type=int, default=2, choices=range(4), help="stage (default: %(default)s)")
        parser.add_argument("--micro-batches", type=int, default=4, help="of a pipeline (default: %(default)s)")
        parser.add_argument("--checkpoint", type=int, default=0, help="blocks computed again (default: %(default)s)")
        parser.add_argument("--attention", default="sdpa", help="of the unscheduled model (default: %(default)s)")
        parser.add_argument("--compiler", help="of the fused regions (default: inductor)")

    @classmethod
    def fill_in(cls, options: argparse.Namespace) -> None:
        """Give every option that was left out its value."""
        defaults: dict[str, Any] = {"vocabulary": 8192, "compiler": "inductor", **SIZES[options.device]}
        defaults["mesh"] = ["dp 2", "tp 2", "pp 2"] if options.device == "cpu" else [f"dp {torch.cuda.device_count()}"]
        if options.small:
            defaults |= SIZES["small"]
        for name, value in defaults.items():
            if getattr(options, name) is None:
                setattr(options, name, value)


ADAM = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **ADAM)


def make(setting: Setting, device: torch.device, attention: str) -> nn.Module:
    """The same values every time; without dropout, so that losses can be compared."""
    import transformers

    torch.manual_seed(0)
    shared: dict[str, Any] = {"vocab_size": setting.vocabulary, "attn_implementation": attention}
    if setting.model == "gpt":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        config: Any = transformers.GPT2Config(
            n_embd=setting.width,
            n_layer=setting.layers,
            n_head=setting.heads,
            n_positions=setting.length,
            **off,
            **shared,
        )
        kind: Any = transformers.GPT2LMHeadModel
    else:
        shared |= {
            "hidden_size": setting.width,
            "num_hidden_layers": setting.layers,
            "num_attention_heads": setting.heads,
            "max_position_embeddings": max(setting.length, 16),
        }
        if setting.model == "bert":
            off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            config = transformers.BertConfig(intermediate_size=4 * setting.width, **off, **shared)
            kind = transformers.BertForMaskedLM
        else:
            inner = setting.width * 11 // 4
            config = transformers.LlamaConfig(intermediate_size=inner, use_cache=False, **shared)
            kind = transformers.LlamaForCausalLM
    with torch.device(device):
        model: nn.Module = kind(config)
    return model.train()


def batch_of(setting: Setting, device: torch.device, replica: int, replicas: int) -> dict[str, torch.Tensor]:
    """The rows of one of so many replicas."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, setting.vocabulary, (setting.batch, setting.length), generator=generator)
    rows = ids.chunk(replicas)[replica].to(device)
    return {"input_ids": rows, "labels": rows.clone()}


BLOCKS = {"bert": "bert.encoder.layer", "gpt": "transformer.h", "llama": "model.layers"}
FUSED = {
    "bert": ("fusion.bias_gelu", "fusion.bias_dropout_add_norm"),
    "gpt": ("fusion.gelu_tanh",),
    "llama": ("fusion.rms_norm", "fusion.rotary", "fusion.swiglu"),
}


def schedule(sch: slapo.Schedule, setting: Setting) -> None:
    """Tensor parallelism as in Megatron-LM; in each block attention replaced, and what lies between products fused."""
    blocks = BLOCKS[setting.model]
    for block in sch[f"{blocks}.*"]:
        _SPLITS[setting.model](block)
        block.trace(flatten=True)
        block.replace(match="fusion.sdpa")
        for pattern in FUSED[setting.model]:
            block.fuse(pattern, name=pattern.partition(".")[2], compiler=setting.compiler)
    for number in range(setting.checkpoint):
        sch[f"{blocks}.{number}"].checkpoint()
    if setting.size("pp") > 1:
        each = setting.layers // setting.size("pp")
        for last in range(each - 1, setting.layers - 1, each):
            sch[f"{blocks}.{last}"].pipeline_split()


def _split_bert(layer: Any) -> None:
    for name in ("query", "key", "value"):
        layer[f"attention.self.{name}"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    for name in ("attention.output.dense", "output.dense"):
        layer[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    for name in ("intermediate.dense", "attention.output.dense", "output.dense"):
        layer[name].decompose()


def _split_gpt(block: Any) -> None:
    block["attn.c_attn"].shard(["weight", "bias"], axis=1, packed=3).sync("bwd_post", "all_reduce")
    block["attn"].shard_attribute(["num_heads", "split_size"])
    block["attn.c_proj"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    block["mlp.c_fc"].shard(["weight", "bias"], axis=1).sync("bwd_post", "all_reduce")
    block["mlp.c_proj"].shard("weight", axis=0).sync("fwd_post", "all_reduce")


def _split_llama(layer: Any) -> None:
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        layer[name].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layer[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")


_SPLITS = {"bert": _split_bert, "gpt": _split_gpt, "llama": _split_llama}
