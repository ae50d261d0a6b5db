"""What a training step costs whose parameters are sharded over two replicas, against ``fully_shard`` by hand.

Both have the same units, and take steps in turn on two real ranks (gloo), one thread each.

    python benchmarks/sharded_step.py            # writes results/sharded_step.json
    python benchmarks/sharded_step.py --pairs 5  # whether it runs; nothing is kept
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import ratio_of_medians, save
from step_cost import HIDDEN, Stack, loss_of
from torch.distributed.fsdp import fully_shard

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

ALLOWED = 1.02  # of the median of the ratio; the interval contains 1.0
PAIRS = 40
BATCH, LENGTH = 2, 64
Step = Callable[[], torch.Tensor]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def make_model() -> Stack:
    torch.manual_seed(0)
    return Stack()


def by_hand(x: torch.Tensor, count: int) -> Step:
    """A step as one writes it: the same units, gradients reduced with the last micro-batch."""
    model: Any = make_model()
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, part in enumerate(x.chunk(count), start=1):
            model.set_requires_gradient_sync(number == count)
            loss = loss_of(model(part))
            (loss / count).backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).mean()

    return step


def scheduled(x: torch.Tensor, count: int) -> Step:
    sch = slapo.create_schedule(make_model(), mesh={"dp": 2}, example_inputs=(x,))
    sch["encoder.layer.*"].fully_shard()
    engine = slapo.build(sch, optimizer=adamw, loss=loss_of, accumulate=count)
    return lambda: engine.train_step(x).loss


def measure(count: int, pairs: int) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds, and seconds of processor time, of steps in turn: of slapo's first, then by hand."""
    torch.set_num_threads(1)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
    steps = [scheduled(x, count), by_hand(x, count)]
    for _ in range(3):
        own, other = (float(step()) for step in steps)
        assert abs(own - other) < 1e-5 * abs(other), (own, other)
    seconds: list[list[float]] = [[], []]
    cpu: list[list[float]] = [[], []]
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            dist.barrier()
            start, own_cpu = time.perf_counter(), time.process_time()
            steps[which]()
            dist.barrier()
            seconds[which].append(time.perf_counter() - start)
            cpu[which].append(time.process_time() - own_cpu)
    return seconds, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="steps of each, in turn")
    options = parser.parse_args()
    preload_modules("torch.distributed.fsdp", "slapo_torch.sharded_data", "transformers.models.bert.modeling_bert")
    rows = []
    for count in (1, 2):
        seconds, cpu = run_ranks(measure, count, options.pairs, world_size=2, timeout=1800)[0]
        row: dict[str, Any] = {"question": f"a step of {count} micro-batches under fully_shard, to one by hand"}
        row |= {"by_hand_ms": 1e3 * statistics.median(seconds[1]), "allowed": ALLOWED}
        row |= {"seconds": ratio_of_medians(*seconds), "cpu": ratio_of_medians(*cpu)}
        rows.append(row)
        for kind in ("seconds", "cpu"):
            low, high = row[kind]["interval_95"]
            print(f"{row['question']}: {kind} {row[kind]['ratio']:.3f} ({low:.3f}, {high:.3f})", flush=True)
    if options.pairs >= PAIRS:
        save("sharded_step", rows)


if __name__ == "__main__":
    main()
