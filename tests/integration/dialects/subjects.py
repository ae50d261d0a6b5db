"""What runtimes train in the tests, and the same training without schedule and runtime, in one process.

BERT, GPT-2, LLaMA and T5 of four blocks in float32, without dropout, all with tied embeddings. The gradients are
clipped in every step, and AdamW's epsilon is large enough that gradients which are zero do not become steps.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from tests.integration.pipelines.models import FAMILIES, Family
from tests.integration.zoo.tensor_parallel import split

__all__ = [
    "EPSILON",
    "LEARNING_RATE",
    "MAX_GRAD_NORM",
    "STEPS",
    "SUBJECTS",
    "WEIGHT_DECAY",
    "Batch",
    "Subject",
    "Trained",
    "adamw",
    "train_plain",
]

Batch = dict[str, torch.Tensor]

STEPS = 3
LEARNING_RATE = 1e-2
MAX_GRAD_NORM = 0.25
"""Below the norm of every step: :func:`train_plain` makes sure of it."""


EPSILON = 1e-4
WEIGHT_DECAY = 0.1
"""Of everything that has several axes, as Megatron does by itself."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    matrices = [one for one in parameters if one.dim() > 1]
    vectors = [one for one in parameters if one.dim() <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPSILON, weight_decay=WEIGHT_DECAY)


@dataclass(frozen=True)
class Subject:
    """A model to train.

    Args:
        name: e.g. ``"bert"``.
        family: the model in float64 and deeper.
        depth: how many blocks it has.
    """

    name: str
    family: Family
    depth: int = 4

    @property
    def blocks(self) -> tuple[str, ...]:
        """Their paths, in the order in which they run; T5 has as many in the encoder as in the decoder."""
        paths, half = self.family.blocks, self.depth // 2
        return paths[: self.depth] if self.name != "t5" else paths[:half] + paths[len(paths) // 2 :][:half]

    def make(self) -> nn.Module:
        """The model with its first values, the same in every process, in training mode."""
        deep: Any = self.family.make()
        config = copy.deepcopy(deep.config)
        config.tie_word_embeddings = True
        if self.name == "t5":
            config.num_layers = config.num_decoder_layers = self.depth // 2
        else:
            config.num_hidden_layers = self.depth
        torch.manual_seed(5)
        model = type(deep)(config).float().train()
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        return model

    def batch(self, step: int, replica: int, samples: int = 4) -> Batch:
        """What a replica is given in a step; a half of the samples are padded."""
        return self.family.batch(samples, 100 * step + replica, True)

    @staticmethod
    def samples(micro_batches: int) -> int:
        """Of a replica's batch: every micro-batch has two or more."""
        return max(4, 2 * micro_batches)

    def tensor_parallel(self, sch: slapo.Schedule) -> None:
        """Split attentions and MLPs over ``tp``, as Megatron-LM does."""
        attentions, products = split(sch)
        expected = self.depth * 3 // 2 if self.name == "t5" else self.depth
        assert (attentions, products) == (expected, self.depth), (attentions, products)

    def sequence_parallel(self, sch: slapo.Schedule) -> None:
        """LLaMA with pieces of the sequence between the pairs of matrices, and its tied words split over ``tp``."""
        assert self.name == "llama", self.name
        sch["model.embed_tokens"].shard("weight", axis=0)
        for layer in sch["model.layers.*"]:
            attention, mlp = layer["self_attn"], layer["mlp"]
            for name in ("q_proj", "k_proj", "v_proj"):
                attention[name].shard("weight", axis=0)
            attention.sync("fwd_pre", "all_gather", axis=1, inputs=("hidden_states",))
            attention["o_proj"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
            for name in ("gate_proj", "up_proj"):
                mlp[name].shard("weight", axis=0)
            mlp.sync("fwd_pre", "all_gather", axis=1)
            mlp["down_proj"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
            for name in ("input_layernorm", "post_attention_layernorm"):
                layer[name].sync_gradient("weight")
        sch["model.layers.0"].sync("fwd_pre", "reduce_scatter", axis=1, inputs=("hidden_states",))
        sch["model.norm"].sync_gradient("weight")
        sch["lm_head"].sync("fwd_pre", "all_gather", axis=1).sync("fwd_post", "all_gather")

    def cuts(self, stages: int) -> list[str]:
        """The blocks after which the model is cut, for so many stages: ``sch[path].pipeline_split()``."""
        each = len(self.blocks) // stages
        return [self.blocks[number] for number in range(each - 1, len(self.blocks) - 1, each)]


SUBJECTS = {name: Subject(name, FAMILIES[name]) for name in ("bert", "gpt2", "llama", "t5")}


@dataclass(frozen=True)
class Trained:
    """What came out of a training of the reference model.

    Args:
        losses: of each step, by replica: the mean over its micro-batches.
        gradients: of each step, before clipping: the means over replicas and micro-batches, by every name of the
            parameter.
        norms: of each step, the L2 norm of all of them.
        evaluated: the loss after the last step of each replica's next batch, in evaluation mode.
        state: the state dict after the last step.
    """

    losses: tuple[tuple[float, ...], ...]
    gradients: tuple[dict[str, torch.Tensor], ...]
    norms: tuple[float, ...]
    evaluated: tuple[float, ...]
    state: dict[str, torch.Tensor]


@functools.cache
def train_plain(subject: Subject, *, replicas: int = 1, micro_batches: int = 1, samples: int = 4) -> Trained:
    """Train a subject as its author would, over the same micro-batches; kept for the next one who asks.

    Args:
        subject: what is trained.
        replicas: whose batches are trained on together.
        micro_batches: into which the batch of each replica is cut.
        samples: of each replica's batch.
    """
    model = subject.make()
    optimizer = adamw(model.parameters())
    losses, gradients, norms = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(
            tuple(_backward(model, subject.batch(step, replica, samples), micro_batches) for replica in range(replicas))
        )
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= replicas
        named = model.named_parameters(remove_duplicate=False)
        gradients.append({key: one.grad.clone() for key, one in named if one.grad is not None})
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        assert norms[-1] > 2 * MAX_GRAD_NORM, norms
        optimizer.step()
    model.eval()
    with torch.no_grad():
        evaluated = tuple(float(model(**subject.batch(STEPS, replica, samples)).loss) for replica in range(replicas))
    return Trained(tuple(losses), tuple(gradients), tuple(norms), evaluated, model.state_dict())


def _backward(model: nn.Module, batch: Batch, count: int) -> float:
    losses = []
    for number in range(count):
        loss = model(**{key: tensor.chunk(count)[number] for key, tensor in batch.items()}).loss
        (loss / count).backward()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())
