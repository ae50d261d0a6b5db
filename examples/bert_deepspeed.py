"""Train an unmodified BERT with DeepSpeed on two processes, under ZeRO-2 and in a pipeline, and compare both with the
same run unscheduled, without DeepSpeed.

    python examples/bert_deepspeed.py                 # three runs, the comparison and the plot
    python examples/bert_deepspeed.py --text my.txt   # on your own text
    python examples/bert_deepspeed.py --quick         # a few steps of a small vocabulary

Batches, optimiser, learning rates and clipping are those of ``ds_bert.json``, a configuration as DeepSpeed's own
documentation writes them. The script starts ``torchrun`` for the scheduled runs by itself. It ends with status 1 if the
loss curves part.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpt_3d
import torch
import torch.distributed as dist
from bert_tp import make_model, memory_of, write_result
from masked_text import masked_batches, read_text, sequences, tokenizer_for
from tqdm import tqdm

import slapo_core as slapo

CONFIG = Path(__file__).with_name("ds_bert.json")

RUNS = {"zero2_dp2": ({"dp": 2, "pp": 1}, 2), "pp2_zero1": ({"dp": 1, "pp": 2}, 1)}
"""The scheduled runs: the mesh, and DeepSpeed's ZeRO stage; with a pipeline DeepSpeed has no more than the first."""

PREDICTIONS = 0.15  # of the tokens of each sequence, so that all micro-batches have as many


def schedule_bert(sch: slapo.Schedule) -> None:
    """Every second layer is computed again in the backward; two stages where the mesh has them."""
    sch["bert.encoder.layer.[024]"].checkpoint()
    if sch.mesh.size("pp") > 1:
        sch["bert.encoder"].pipeline_split(stages=2, balance="flops")


def configuration(zero: int = 2) -> dict[str, Any]:
    """``ds_bert.json``, with that ZeRO stage."""
    config = json.loads(CONFIG.read_text())
    config["zero_optimization"]["stage"] = zero
    return config


def batches(options: argparse.Namespace, *, seed: int, steps: int, held_out: bool = False) -> list[dict[str, Any]]:
    text = read_text(options.text)
    tokenizer = tokenizer_for(text, vocab_size=options.vocab_size, directory=options.output)
    rows = sequences(text, tokenizer, length=options.length)
    border = len(rows) - len(rows) // 20
    rows = rows[border:] if held_out else rows[:border]
    return list(
        masked_batches(
            rows,
            batch_size=configuration()["train_batch_size"],
            steps=steps,
            vocab_size=options.vocab_size,
            seed=seed,
            predictions=int(PREDICTIONS * options.length),
        )
    )


def learning_rate(step: int) -> float:
    """That of DeepSpeed's linear ``WarmupLR``, which begins to rise after the second step."""
    scheduler = configuration()["scheduler"]["params"]
    low, high = scheduler["warmup_min_lr"], scheduler["warmup_max_lr"]
    return low + (high - low) * min(max(step - 1, 0) / scheduler["warmup_num_steps"], 1.0)


def run_plain(options: argparse.Namespace) -> None:
    """The model as its author wrote it, in an ordinary PyTorch loop, without DeepSpeed."""
    torch.set_num_threads(1)
    config = configuration()
    settings = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
    model = make_model(options.vocab_size).train()
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    losses, seconds = [], []
    data = batches(options, seed=1, steps=options.steps)
    for step, batch in enumerate(tqdm(data, desc="unscheduled, 1 process")):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        held_out = [model(**batch).loss.item() for batch in batches(options, seed=2, steps=4, held_out=True)]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_result(options, "plain", losses, seconds, held_out, [memory_of(model, optimizer)], weights, explain="")


def run_scheduled(options: argparse.Namespace, name: str) -> None:
    """The same model under a schedule, by DeepSpeed; this runs in every process that torchrun starts."""
    torch.set_num_threads(1)
    first = dist.get_rank() == 0
    mesh, zero = RUNS[name]
    config = configuration(zero)
    model = make_model(options.vocab_size).train()
    example = {key: tensor[:2] for key, tensor in batches(options, seed=3, steps=1)[0].items()}
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=example)
    schedule_bert(sch)
    report = slapo.verify(sch, example)
    if first:
        print(report, flush=True)
    explain = sch.explain()
    engine = slapo.build(sch, target="deepspeed", config=config)
    if first:
        print(engine.plan, flush=True)

    def own(batch: dict[str, Any]) -> dict[str, Any]:
        """The rows of this replica; the ranks of a pipeline both get the whole batch."""
        return {key: tensor.chunk(mesh["dp"])[sch.mesh.rank("dp")] for key, tensor in batch.items()}

    losses, seconds = [], []
    for batch in tqdm(batches(options, seed=1, steps=options.steps), desc=f"{name}, 2 processes", disable=not first):
        start = time.perf_counter()
        loss = engine.train_step(own(batch)).loss
        seconds.append(time.perf_counter() - start)
        losses.append(gpt_3d.mean_over_replicas(loss, sch.mesh))
    evaluated = [engine.eval_step(own(batch)).loss for batch in batches(options, seed=2, steps=4, held_out=True)]
    held_out = [gpt_3d.mean_over_replicas(loss, sch.mesh) for loss in evaluated]
    memory: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(memory, memory_of(engine.module, engine.deepspeed.optimizer))
    weights = engine.state_dict(rank0_only=True)
    if first:
        write_result(options, name, losses, seconds, held_out, memory, weights, explain=explain)
    engine.close()


def compare(options: argparse.Namespace) -> int:
    """Print the runs side by side, plot them, and give the exit status."""
    return gpt_3d.compare(options, tuple(RUNS), "The same BERT on one process, and by DeepSpeed on two")


def launch(options: argparse.Namespace) -> int:
    """All runs, one after the other, each in processes of its own, then the comparison."""
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"text, tokenizer and results: {options.output}")
    batches(options, seed=1, steps=1)  # trains the tokenizer once, before the processes start
    this = [str(Path(__file__).resolve()), *sys.argv[1:]]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    for role in ("plain", *RUNS):
        prefix = [] if role == "plain" else torchrun
        done = subprocess.run([sys.executable, *prefix, *this, "--role", role], env=environment, check=False)
        if done.returncode:
            print(f"the run {role} failed with status {done.returncode}", file=sys.stderr)
            return done.returncode
    return compare(options)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="train on this file (default: the Python standard library's source)")
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: %(default)s)")
    parser.add_argument("--length", type=int, default=96, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the tokenizer (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("build/bert_deepspeed"), help="directory (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="4 steps of 16 tokens a sequence, 600 in the tokenizer")
    parser.add_argument("--role", choices=["plain", *RUNS], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.length, options.vocab_size = 4, 16, 600
    return options


def main(options: argparse.Namespace) -> int:
    """What the role says; without one, all runs and the comparison."""
    if options.role == "plain":
        run_plain(options)
    elif options.role is not None:
        dist.init_process_group("gloo")
        run_scheduled(options, options.role)
        dist.barrier()
        dist.destroy_process_group()
    else:
        return launch(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(parsed()))
