"""Models and two primitives for the tests of building: a split by layout, and a sum over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard as ShardPlacement

import slapo_core as slapo
from slapo_core.layout import Layout


@slapo.register_primitive()
@dataclass(frozen=True)
class Split(slapo.Primitive):
    """Keep this rank's piece of parameters and buffers; ``parts`` matrices lie one after the other on the axis."""

    name = "trial.split"
    equivalence = slapo.Equivalence.REORDERED
    names: tuple[str, ...]
    axis: int = 0
    parts: int = 1

    def apply(self, node: Any, edit: Any) -> None:
        for name in self.names:
            old = node.layout(name)
            sizes = (old.shape[self.axis] // self.parts,) * self.parts
            packing = ((self.axis, sizes),) if self.parts > 1 else ()
            layout = Layout(old.origin, old.shape, (("tp", ShardPlacement(self.axis)),), packing)
            if name in node.parameters:
                edit.set_parameter(node, name, layout.local(node.parameters[name], node.mesh), layout=layout)
            else:
                edit.set_buffer(node, name, layout.local(node.buffers[name], node.mesh), layout=layout)


@slapo.register_primitive()
@dataclass(frozen=True)
class SumOutput(slapo.Primitive):
    """Sum the output of the module over the ranks of ``tp``."""

    name = "trial.sum_output"
    equivalence = slapo.Equivalence.REORDERED

    def apply(self, node: Any, edit: Any) -> None:
        if node.mesh.size("tp") == 1 or node.mesh.is_abstract:
            edit.note("one rank, or none that runs")
            return
        edit.wrap_forward(node, _summed(node.mesh.group("tp")))


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _summed(group: Any) -> Callable[[Any], Any]:
    def wrapper(forward: Any) -> Any:
        def summed(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return AllReduce.apply(forward(module, *args, **kwargs), group)

        return summed

    return wrapper


class Mlp(nn.Module):
    """``loss(x, y)``: two layers and the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.fc2(self.fc1(x).relu()), y)


class Cnn(nn.Module):
    """A classifier with batch statistics, whose forward takes no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=96, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=96, max_position_embeddings=16))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=96, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=96))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "llama": llama,
    "cnn": Cnn,
    "mlp": Mlp,
}

_SPLITS: dict[str, list[tuple[str, Split]]] = {
    "gpt2": [
        ("transformer.wte", Split(("weight",))),
        ("transformer.h.*.attn.c_attn", Split(("weight",), axis=1, parts=3)),
        ("transformer.h.*.attn.c_attn", Split(("bias",), parts=3)),
        ("transformer.h.*.attn.c_proj", Split(("weight",), axis=0)),
    ],
    "bert": [
        ("bert.encoder.layer.*.attention.self.query", Split(("weight", "bias"))),
        ("bert.encoder.layer.*.output.dense", Split(("weight",), axis=1)),
        ("bert.embeddings.word_embeddings", Split(("weight",), axis=1)),
    ],
    "t5": [("shared", Split(("weight",))), ("encoder.block.*.layer.0.SelfAttention.q", Split(("weight",)))],
    "llama": [("model.layers.*.mlp.down_proj", Split(("weight",), axis=1)), ("lm_head", Split(("weight",)))],
    "cnn": [
        ("conv", Split(("weight", "bias"))),
        ("norm", Split(("weight", "bias", "running_mean", "running_var"))),
        ("head", Split(("weight",), axis=1)),
    ],
    "mlp": [("fc1", Split(("weight", "bias"))), ("fc2", Split(("weight",), axis=1)), ("fc2", SumOutput())],
}


def split(schedule: slapo.Schedule, name: str) -> slapo.Schedule:
    """Apply the tensor-parallel steps of the model called ``name``."""
    for path, primitive in _SPLITS[name]:
        schedule[path].apply(primitive)
    return schedule


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


def real(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def batches(count: int, size: int = 8) -> Iterator[dict[str, torch.Tensor]]:
    """Batches for the MLP, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield {
            "x": torch.randn(size, 6, generator=generator),
            "y": torch.randn(size, 4, generator=generator),
        }


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)
