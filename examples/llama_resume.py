"""Train an unmodified LLaMA in a job that is killed three times, and goes on under another layout each time; and
compare its loss curve with that of one uninterrupted process.

    python examples/llama_resume.py                    # all of it, the comparison and the plot
    python examples/llama_resume.py --legs tp2 fsdp2   # killed once
    python examples/llama_resume.py --text my.txt      # on your own text
    python examples/llama_resume.py --quick            # a few steps of a tiny model

The job starts under FSDP2, goes on tensor-parallel, then under DeepSpeed's ZeRO-2, and ends in a pipeline of
tensor-parallel stages. It saves a checkpoint every few steps. The script kills all of its processes at once (SIGKILL):
the steps since the last checkpoint are lost, and trained again. It ends with status 1 if the loss curves part.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from common import next_token_batches as batches
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_core as slapo
from slapo_models import llama


@dataclass(frozen=True)
class Leg:
    """The job between two kills.

    Args:
        mesh: sizes by mesh dimension.
        target: of ``build``.
        config: its options.
    """

    mesh: dict[str, int]
    target: str = "torch"
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        return math.prod(self.mesh.values())


LEGS = {
    "fsdp2": Leg({"dp": 2, "tp": 1}, config={"data_parallel": "fsdp"}),
    "tp2": Leg({"tp": 2}),
    "ZeRO-2": Leg({"dp": 2, "tp": 1}, "deepspeed", {"config": {"zero_optimization": {"stage": 2}}}),
    "pp2 x tp2": Leg({"pp": 2, "tp": 2}, config={"microbatches": 2}),
}
"""In their order, unless the command line has another one; the last one is not killed."""

LEARNING_RATE, EPSILON, CLIP, WARMUP = 1e-3, 1e-6, 1.0, 10
RUN = "resumed"  # the name of the job's results


def kills(options: argparse.Namespace) -> list[int]:
    """The steps after which the job is killed."""
    return [options.steps * number // len(options.legs) + 1 for number in range(1, len(options.legs))]


def make_model(options: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    """A LLaMA with random weights, the same in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocab_size, hidden_size=options.width, intermediate_size=options.width * 2,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).train()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1)


def factor(step: int, steps: int) -> float:
    """Of the learning rate: a warmup, then half a cosine."""
    return min((step + 1) / WARMUP, (1 + math.cos(math.pi * step / steps)) / 2)


def run_plain(options: argparse.Namespace) -> None:
    """The model as its author wrote it, in an ordinary PyTorch loop."""
    model = make_model(options, common.device_of(options))
    optimizer = make_optimizer(model.parameters())

    def rate(step: int) -> float:
        return LEARNING_RATE * factor(step, options.steps)

    common.run_plain(options, model, optimizer, batches, max_grad_norm=CLIP, learning_rate=rate)


def run_leg(
    options: argparse.Namespace, name: str, device: torch.device, seen: Callable[[int], None] = lambda step: None
) -> None:
    """Train from the newest complete checkpoint to the last step; this runs in every process of a leg.

    Args:
        options: of the command line.
        name: of the leg.
        device: of the model.
        seen: called after each step with the number of steps.
    """
    torch.set_num_threads(1)
    leg, checkpoints, first = LEGS[name], options.output / "checkpoints", dist.get_rank() == 0
    data = batches(options, seed=1, steps=options.steps)
    sch = slapo.create_schedule(make_model(options, device), mesh=leg.mesh, example_inputs=common.on(device, data[0]))
    llama(sch, kernels=False, stages=leg.mesh.get("pp", 1))
    engine: Any = slapo.build(
        sch,
        target=leg.target,
        optimizer=make_optimizer,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: factor(step, options.steps)
        ),
        max_grad_norm=CLIP,
        **leg.config,
    )
    if checkpoints.exists():
        engine.load(checkpoints)
    done = engine.steps

    def own(batch: common.Batch) -> common.Batch:
        """The rows of this replica."""
        mine = {key: rows.chunk(sch.mesh.size("dp"))[sch.mesh.rank("dp")] for key, rows in batch.items()}
        return common.on(device, mine)

    bar = tqdm(data[done:], desc=f"{name}, {leg.processes} processes", disable=not first)
    for step, batch in enumerate(bar, start=done + 1):
        start = time.perf_counter()
        loss = common.mean_over_replicas(engine.train_step(own(batch)).loss, sch.mesh)
        if first:
            row = {"step": step, "leg": name, "loss": loss, "seconds": time.perf_counter() - start}
            with journal(options).open("a") as file:
                file.write(json.dumps(row) + "\n")
        seen(step)
        if step % options.every == 0 and step < options.steps:
            engine.save(checkpoints, keep=2)
    evaluated = [engine.eval_step(own(batch)).loss for batch in batches(options, seed=2, steps=4, held_out=True)]
    held_out = [common.mean_over_replicas(loss, sch.mesh) for loss in evaluated]
    memory: list[Any] = [None] * leg.processes
    dist.all_gather_object(memory, common.memory_of(engine.module, engine.optimizer.state.values()))
    weights = engine.state_dict(rank0_only=True)
    if first:
        rows = {row["step"]: row for row in steps_of(options)}  # of a step that was trained twice, the second one
        losses, seconds = ([rows[step][key] for step in sorted(rows)] for key in ("loss", "seconds"))
        common.write_result(options, RUN, losses, seconds, held_out, memory, weights, explain=sch.explain())
    engine.close()


def journal(options: argparse.Namespace) -> Path:
    """A line for each step that was trained."""
    return Path(options.output, "steps.jsonl")


def steps_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The complete lines of the journal."""
    lines = journal(options).read_text().splitlines(keepends=True) if journal(options).exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def store_of(options: argparse.Namespace, name: str) -> Path:
    """The file by which the processes of a leg find each other."""
    return Path(options.output, f"store-{name}").resolve()


def start(options: argparse.Namespace, name: str) -> list[subprocess.Popen[bytes]]:
    """The processes of a leg."""
    size, this = LEGS[name].processes, [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--role", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "WORLD_SIZE": str(size)}
    store_of(options, name).unlink(missing_ok=True)
    return [
        subprocess.Popen(this, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)
    ]


def train_and_kill(options: argparse.Namespace) -> int:
    """Every leg after the other; the status is not 0 if one ended by itself, or failed."""
    for name, last in zip(options.legs, [*kills(options), None], strict=True):
        processes = start(options, name)
        try:
            while last is not None and max((row["step"] for row in steps_of(options)), default=0) < last:
                if any(process.poll() is not None for process in processes):
                    print(f"a process of {name} ended before step {last}", file=sys.stderr)
                    return 1
                time.sleep(0.02)
        finally:
            if last is not None:
                for process in processes:
                    process.kill()
            status = [process.wait() for process in processes]
        if last is None:
            return max(map(abs, status))
        print(f"killed {name} after step {last}")
    return 0


def compare(options: argparse.Namespace) -> int:
    """Print the runs side by side, plot them, and give the exit status."""
    rows = steps_of(options)
    first = {name: min(row["step"] for row in rows if row["leg"] == name) for name in options.legs}
    for name, step in first.items():
        print(f"{name}: from step {step} to {max(row['step'] for row in rows if row['leg'] == name)}")
    print(f"{len(rows) - len({row['step'] for row in rows})} steps were trained again after a kill")
    marks = {step - 1: name for name, step in first.items()}
    return common.compare(options, [RUN], "A LLaMA whose job is killed and resumed, and one process", marks)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(parser, "llama_resume", LEGS)
    parser.add_argument("--legs", nargs="+", default=list(LEGS), choices=LEGS, help="default: all")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the hidden states (default: %(default)s)")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="12 steps of a tiny model")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.length, options.vocab_size, options.width, options.every = 12, 16, 600, 32, 2
    return options


def main(options: argparse.Namespace) -> int:
    """What the role says; without one, all runs and the comparison."""
    if options.role == "plain":
        run_plain(options)
    elif options.role is not None:
        run = functools.partial(run_leg, options, options.role)
        rendezvous = {"init_method": f"file://{store_of(options, options.role)}", "rank": int(os.environ["RANK"])}
        common.together(run, options, shared=False, world_size=LEGS[options.role].processes, **rendezvous)
    else:
        journal(options).unlink(missing_ok=True)
        shutil.rmtree(options.output / "checkpoints", ignore_errors=True)
        done = common.launch(options, __file__, (), 1, batches)
        return done or train_and_kill(options) or compare(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(parsed()))
