"""Train an unmodified GPT-2 by Megatron-core on four processes, tensor-parallel in two stages and in replicas with the
distributed optimizer, and compare both with the same run unscheduled, without Megatron.

    python examples/gpt_megatron.py                 # three runs, the comparison and the plot
    python examples/gpt_megatron.py --text my.txt   # on your own text
    python examples/gpt_megatron.py --quick         # a few steps of a tiny model, which is not verified

The script starts ``torchrun`` for the scheduled runs by itself. It ends with status 1 if the loss curves part. Megatron
wants a GPU for each process. Where there is none at all, what it asks of CUDA is answered for the CPU by the stand-in
that the tests have, ``tests/cpu_megatron.py``: enough to see it train, and to compare, and not to judge its speed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from common import next_token_batches as batches
from gpt_3d import make_model, schedule_gpt

import slapo_core as slapo

RUNS = {"pp2_tp2": ({"dp": 1, "pp": 2, "tp": 2}, False), "dp2_pp2": ({"dp": 2, "pp": 2, "tp": 1}, True)}
"""The scheduled runs: the mesh, and whether the optimizer is Megatron's distributed one."""

PROCESSES, MICROBATCHES = 4, 4
REPOSITORY = Path(__file__).resolve().parents[1]

OPTIMIZER = {"optimizer": "adam", "lr": 5e-4, "min_lr": 5e-5, "weight_decay": 0.1, "clip_grad": 1.0, "adam_eps": 1e-6}
"""As Megatron's ``OptimizerConfig`` calls them. Biases and scales of norms have no weight decay, as always there."""

WARMUP, DECAY = 5, 50
"""Steps of the learning rate's way up, and up to its end."""

SCHEDULER = {"lr_warmup_steps": WARMUP, "lr_decay_steps": DECAY, "lr_decay_style": "cosine"}
"""As Megatron's ``OptimizerParamScheduler`` calls them."""


def device() -> torch.device:
    """That of this process: a GPU of its own, or the CPU, with Megatron made to run there."""
    if torch.cuda.is_available():
        found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(found)
        return found
    return torch.device("cpu")


def run_on_cpu() -> None:
    """Let the stand-in of the tests answer what Megatron asks of CUDA."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.cpu_megatron import install

    install()


def learning_rate(step: int) -> float:
    """That of Megatron's scheduler, which takes its first step when it is made."""
    low, high = OPTIMIZER["min_lr"], OPTIMIZER["lr"]
    if step <= WARMUP:
        return high * step / WARMUP
    done = min((step - WARMUP) / (DECAY - WARMUP), 1.0)
    return low + (high - low) * 0.5 * (math.cos(math.pi * done) + 1.0)


def run_plain(options: argparse.Namespace) -> None:
    """The model as its author wrote it, in an ordinary PyTorch loop, without Megatron."""
    model = make_model(options.vocab_size, options.layers).to(device()).train()
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": OPTIMIZER["weight_decay"]},
        {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], eps=OPTIMIZER["adam_eps"])
    clip = OPTIMIZER["clip_grad"]
    common.run_plain(options, model, optimizer, batches, max_grad_norm=clip, learning_rate=learning_rate)


def run_scheduled(options: argparse.Namespace, name: str) -> None:
    """The same model under a schedule, by Megatron; this runs in every process that torchrun starts."""
    torch.set_num_threads(1)
    mesh, distributed = RUNS[name]
    if device().type == "cpu":
        run_on_cpu()
    model = make_model(options.vocab_size, options.layers).to(device()).train()
    example = common.on(device(), {key: one[:2] for key, one in batches(options, seed=3, steps=1)[0].items()})
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=example)
    schedule_gpt(sch)
    if not options.quick:
        report = slapo.verify(sch, example)
        if dist.get_rank() == 0:
            print(report, flush=True)
    engine = slapo.build(
        sch,
        target="megatron",
        optimizer_config={**OPTIMIZER, "use_distributed_optimizer": distributed},
        ddp_config={"use_distributed_optimizer": distributed},
        scheduler=SCHEDULER,
        microbatches=MICROBATCHES,
    )
    if dist.get_rank() == 0:
        print(engine.plan, flush=True)
    common.run_engine(options, name, sch, engine, batches, states=states_of, device=device())


def states_of(engine: Any) -> Iterator[Any]:
    """Of Megatron's optimizers, which it keeps one in the other."""
    for one in engine.megatron.optimizer.chained_optimizers:
        yield from one.optimizer.state.values()


def compare(options: argparse.Namespace) -> int:
    """Print the runs side by side, plot them, and give the exit status."""
    return common.compare(options, tuple(RUNS), "The same GPT-2 on one process, and by Megatron on four")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(parser, "gpt_megatron", RUNS)
    parser.add_argument(
        "--batch-size", type=int, default=8, help="sequences a step, a multiple of 8 (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=6, help="blocks of the model (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="4 steps of a tiny model, not verified")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.length, options.vocab_size, options.layers = 4, 16, 600, 2
    return options


def launch(options: argparse.Namespace) -> int:
    """All runs on what this machine has, said aloud, and the comparison."""
    if torch.cuda.is_available():
        if torch.cuda.device_count() < PROCESSES:
            print(
                f"the scheduled runs take {PROCESSES} GPUs, and this machine has {torch.cuda.device_count()}; on its "
                f"CPU: CUDA_VISIBLE_DEVICES= python {' '.join(sys.argv)}",
                file=sys.stderr,
            )
            return 2
        print(f"Megatron-core runs on {PROCESSES} GPUs")
    elif not (REPOSITORY / "tests" / "cpu_megatron.py").exists():
        print(
            "Megatron-core wants a GPU for each process; the stand-in for CUDA is in the repository: run it there",
            file=sys.stderr,
        )
        return 2
    else:
        print(
            "NO GPU IS HERE: Megatron-core runs on the CPU, by the stand-in for CUDA that the tests have "
            "(tests/cpu_megatron.py)"
        )
    return common.launch(options, __file__, tuple(RUNS), PROCESSES, batches) or compare(options)


def main(options: argparse.Namespace) -> int:
    """What the role says; without one, all runs and the comparison."""
    if options.role == "plain":
        run_plain(options)
    elif options.role is not None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "nccl":
            device()  # before the groups are made: each process has its own
        common.together(lambda: run_scheduled(options, options.role), backend)
    else:
        return launch(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(parsed()))
