"""What combining costs: steps of several kinds on one model, and the call of a layer that is traced and sharded.

- Scheduling: tensor parallelism, kernels and checkpointing on the 24 layers of BERT-large, and ``build``, on two ranks
  and on the meta device, against the sum of what each of them, and ``build`` alone, cost. CPU time of a rank.
- Call: one BERT-large layer (4 x 128 tokens) in one graph with sharded parameters and collectives, forward and
  backward, against the same layer written by hand for tensor parallelism; two ranks, one thread each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron_bert import Encoder
from report import interleaved, ratio_of_medians, save
from step_cost import shard_stack
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEncoder

import slapo_core as slapo
from slapo_testing import run_ranks

HIDDEN, HEADS, INNER = 1024, 16, 4096
BATCH, LENGTH = 4, 128


class Layers(nn.Module):
    """transformers' own BERT layers behind a one-argument forward."""

    def __init__(self, layers: int, *, attention: str) -> None:
        super().__init__()
        config = BertConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation=attention,
        )
        self.encoder = BertEncoder(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x).last_hidden_state  # type: ignore[no-any-return]


def kernels(sch: slapo.Schedule) -> None:
    for layer in sch["encoder.layer.*"]:
        layer.trace(flatten=True)
        layer.replace(match="fusion.sdpa")
        layer.fuse("fusion.bias_gelu", compiler="eager")


def checkpoints(sch: slapo.Schedule) -> None:
    sch["encoder.layer.*"].checkpoint()


STEPS: dict[str, Callable[[slapo.Schedule], None]] = {
    "tp": shard_stack,
    "kernels": kernels,
    "checkpoint": checkpoints,
}
ORDERS = (("tp", "kernels", "checkpoint"), ("kernels", "tp", "checkpoint"))


def schedule_seconds(layers: int, steps: Sequence[str], *, build: bool) -> float:
    """CPU time of this rank for a new schedule, its steps and, if asked for, ``build``."""
    with torch.device("meta"):
        model = Layers(layers, attention="eager")
    start = time.process_time()
    sch = slapo.create_schedule(
        model, mesh={"tp": dist.get_world_size()}, example_inputs=torch.empty(BATCH, LENGTH, HIDDEN, device="meta")
    )
    for step in steps:
        STEPS[step](sch)
    if build:
        slapo.build(sch, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss=loss_of).close()
    return time.process_time() - start


def scheduling(layers: int, repeats: int) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    for steps in ORDERS:
        schedule_seconds(layers, steps, build=False)  # caches of torch
    alone, together = [], {steps: [] for steps in ORDERS}
    for _ in range(repeats):
        apart = sum(schedule_seconds(layers, (step,), build=False) for step in STEPS)
        alone.append(apart + schedule_seconds(layers, (), build=True))
        for steps in ORDERS:
            together[steps].append(schedule_seconds(layers, steps, build=True))
    for steps, seconds in together.items():
        yield {
            "question": f"{', '.join(steps)} and build / the sum of each alone",
            **ratio_of_medians(seconds, alone),
            "alone_s": statistics.median(alone),
            "allowed": 1.2,
        }


def scheduling_on_a_rank(layers: int, repeats: int) -> list[dict[str, Any]]:
    return list(scheduling(layers, repeats))


def loss_of(output: torch.Tensor, batch: Any = None) -> torch.Tensor:
    return output.square().mean()


def call(pairs: int, traced: bool) -> dict[str, Any]:
    """On every rank: a scheduled layer against the one written by hand, the same weights, the same collectives."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = Layers(1, attention="sdpa"), torch.randn(BATCH, LENGTH, HIDDEN)
    sch = slapo.create_schedule(model, mesh={"tp": dist.get_world_size()}, example_inputs=x)
    shard_stack(sch)
    if traced:
        sch["encoder.layer.0"].trace(flatten=True)
    hand = Encoder(layers=1, hidden=HIDDEN, heads=HEADS, inner=INNER, ranks=dist.get_world_size())
    hand.load(model.encoder)
    ours, theirs = model.encoder.layer[0], hand.layers[0]
    difference = (ours(x) - theirs(x)).abs().max().item()
    assert difference < 1e-4, f"the two do not compute the same: {difference}"

    def run(module: nn.Module) -> Callable[[], None]:
        given = x.clone().requires_grad_()

        def both() -> None:
            module(given).square().mean().backward()
            dist.barrier()

        return both

    by_schedule, by_hand = run(ours), run(theirs)
    for _ in range(3):
        by_schedule()
        by_hand()
    return ratio_of_medians(*interleaved(by_schedule, by_hand, pairs=pairs, clock=time.perf_counter))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="interleaved pairs of calls (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of scheduling (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="two layers, once: only whether it runs; nothing is kept")
    options = parser.parse_args()
    layers, repeats, pairs = (2, 1, 2) if options.small else (24, options.repeats, options.pairs)
    rows = []
    for traced in (True, False):
        question = f"call of a {'traced, ' if traced else ''}sharded layer / by hand"
        rows.append(
            {"question": question, "allowed": 1.03, **run_ranks(call, pairs, traced, world_size=2, timeout=3600)[0]}
        )
    rows += run_ranks(scheduling_on_a_rank, layers, repeats, world_size=2, timeout=3600)[0]
    for row in rows:
        low, high = row["interval_95"]
        print(f"{row['question']:<64} {row['ratio']:.3f} (95 %: {low:.3f} to {high:.3f})   allowed {row['allowed']}")
    if not options.small:
        save("combination_cost", rows)


if __name__ == "__main__":
    main()
