"""What a training step of a built model costs: against the plain model, and against hand-written tensor parallelism."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron_bert import Encoder
from report import interleaved, ratio_of, save
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEncoder

import slapo_core as slapo
from slapo_testing import run_ranks

LAYERS, HIDDEN, HEADS, INNER = 4, 512, 8, 2048
BATCH, LENGTH = 4, 128
LEARNING_RATE = 1e-4


class Stack(nn.Module):
    """transformers' own BERT layers behind a one-argument forward."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )
        self.encoder = BertEncoder(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x).last_hidden_state


def loss_of(output: torch.Tensor, batch: Any = None) -> torch.Tensor:
    return output.square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def plain_step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = sgd(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()

    return step


def unscheduled(pairs: int) -> dict[str, float]:
    """A built model without primitives against the same model in a plain loop."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain, scheduled = Stack(), Stack()
    scheduled.load_state_dict(plain.state_dict())
    engine = slapo.build(slapo.create_schedule(scheduled), optimizer=sgd, loss=loss_of)
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    reference = plain_step(plain, x)
    for _ in range(3):
        reference()
        engine.train_step(x)
    return ratio_of(*interleaved(lambda: engine.train_step(x), reference, pairs=pairs, clock=time.perf_counter))


def shard_stack(sch: slapo.Schedule) -> None:
    for layer in sch["encoder.layer.*"]:
        for projection in ("query", "key", "value"):
            layer[f"attention.self.{projection}"].shard(["weight", "bias"], axis=0)
        layer["attention.self"].sync("bwd_post", "all_reduce")
        layer["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def tensor_parallel(pairs: int) -> dict[str, float]:
    """On every rank: a scheduled encoder against the hand-written one, the same weights, the same collectives."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Stack()
    sch = slapo.create_schedule(model, mesh={"tp": dist.get_world_size()})
    shard_stack(sch)
    engine = slapo.build(sch, optimizer=sgd, loss=loss_of)
    hand = Encoder(layers=LAYERS, hidden=HIDDEN, heads=HEADS, inner=INNER, ranks=dist.get_world_size())
    hand.load(engine.module.encoder)
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    difference = (engine.module(x) - hand(x)).abs().max().item()
    assert difference < 1e-4, f"the two do not compute the same: {difference}"
    reference = plain_step(hand, x)
    for _ in range(3):
        reference()
        engine.train_step(x)

    def together(step: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            step()
            dist.barrier()

        return run

    times = interleaved(
        together(lambda: engine.train_step(x)), together(reference), pairs=pairs, clock=time.perf_counter
    )
    return ratio_of(*times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60, help="interleaved pairs of steps (default: %(default)s)")
    options = parser.parse_args()
    rows = [
        {"what": "no primitive / plain model", "allowed": 1.02, **unscheduled(options.pairs)},
        {
            "what": "tensor parallel on 2 ranks / hand-written",
            "allowed": 1.03,
            **run_ranks(tensor_parallel, options.pairs, world_size=2, timeout=600)[0],
        },
    ]
    for row in rows:
        print(
            f"{row['what']:<44} ratio {row['ratio']:.3f} "
            f"(quartiles {row['quartile_1']:.3f} to {row['quartile_3']:.3f}, {row['pairs']} pairs; "
            f"allowed {row['allowed']})"
        )
    save("step_cost", rows)


if __name__ == "__main__":
    main()
