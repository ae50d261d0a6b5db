"""Train an unmodified GPT-2 in a pipeline on four processes, tensor-parallel stages and replicated ones, and compare
both with the same run unscheduled.

    python examples/gpt_3d.py                 # three runs, the comparison and the plot
    python examples/gpt_3d.py --text my.txt   # on your own text

The script starts ``torchrun`` for the scheduled runs by itself. It ends with status 1 if the loss curves part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bert_tp import memory_of, write_result
from masked_text import read_text, sequences, tokenizer_for
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import slapo_core as slapo
import slapo_pipeline

TOLERANCE = 1e-3
"""Largest difference allowed between two loss curves (nats): float32 sums in another order, over all steps."""

MESHES = {"pp2_tp2": {"dp": 1, "pp": 2, "tp": 2}, "dp2_pp2": {"dp": 2, "pp": 2, "tp": 1}}
"""The scheduled runs."""

MICROBATCHES = 4


def make_model(vocab_size: int, layers: int) -> GPT2LMHeadModel:
    """A GPT-2 with random weights, the same in every process; dropout off, so that the runs can be compared."""
    torch.manual_seed(0)
    sizes = {"n_embd": 256, "n_layer": layers, "n_head": 8, "n_positions": 128}
    off = {"use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **sizes, **off))


def schedule_gpt(sch: slapo.Schedule) -> None:
    """Two stages of one size, each of them tensor-parallel; where ``tp`` has one rank the splits do nothing."""
    sch["transformer"].pipeline_split(stages=2, balance="flops")
    for block in sch["transformer.h.*"]:
        block["attn.c_attn"].shard(["weight", "bias"], axis=1, packed=3).sync("bwd_post", "all_reduce")
        block["attn"].shard_attribute(["num_heads", "split_size"])
        block["attn.c_proj"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
        block["mlp.c_fc"].shard(["weight", "bias"], axis=1).sync("bwd_post", "all_reduce")
        block["mlp.c_proj"].shard("weight", axis=0).sync("fwd_post", "all_reduce")


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-4)


def batches(options: argparse.Namespace, *, seed: int, steps: int, held_out: bool = False) -> list[dict[str, Any]]:
    """Every token is predicted from those before it, so that all micro-batches have as many of them."""
    text = read_text(options.text)
    tokenizer = tokenizer_for(text, vocab_size=options.vocab_size, directory=options.output)
    rows = sequences(text, tokenizer, length=options.length)
    border = len(rows) - len(rows) // 20
    rows = rows[border:] if held_out else rows[:border]
    generator = torch.Generator().manual_seed(seed)
    chosen = [rows[torch.randint(len(rows), (options.batch_size,), generator=generator)] for _ in range(steps)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in chosen]


def run_plain(options: argparse.Namespace) -> None:
    """The model as its author wrote it, in an ordinary PyTorch loop."""
    torch.set_num_threads(1)
    model = make_model(options.vocab_size, options.layers).train()
    optimizer = make_optimizer(model.parameters())
    losses, seconds = [], []
    for batch in tqdm(batches(options, seed=1, steps=options.steps), desc="unscheduled, 1 process"):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        held_out = [model(**batch).loss.item() for batch in batches(options, seed=2, steps=4, held_out=True)]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_result(options, "plain", losses, seconds, held_out, [memory_of(model, optimizer)], weights, explain="")


def run_scheduled(options: argparse.Namespace, name: str) -> None:
    """The same model under a schedule; this runs in every process that torchrun starts."""
    torch.set_num_threads(1)
    first = dist.get_rank() == 0
    model = make_model(options.vocab_size, options.layers).train()
    example = {key: tensor[:2] for key, tensor in batches(options, seed=3, steps=1)[0].items()}
    sch = slapo.create_schedule(model, mesh=MESHES[name], example_inputs=example)
    schedule_gpt(sch)
    report = slapo.verify(sch, example)
    if first:
        print(sch, slapo_pipeline.stages(sch), report, sep="\n\n", flush=True)
    explain = sch.explain()
    engine = slapo.build(
        sch, target="torch", optimizer=make_optimizer, pipeline_schedule="1f1b", microbatches=MICROBATCHES
    )

    def own(batch: dict[str, Any]) -> dict[str, Any]:
        """The rows of this replica; the ranks of a pipeline all get the whole of them."""
        replicas = sch.mesh.size("dp")
        return {key: tensor.chunk(replicas)[sch.mesh.rank("dp")] for key, tensor in batch.items()}

    losses, seconds = [], []
    for batch in tqdm(batches(options, seed=1, steps=options.steps), desc=f"{name}, 4 processes", disable=not first):
        start = time.perf_counter()
        loss = engine.train_step(own(batch)).loss
        seconds.append(time.perf_counter() - start)
        losses.append(mean_over_replicas(loss, sch.mesh))
    evaluated = [engine.eval_step(own(batch)).loss for batch in batches(options, seed=2, steps=4, held_out=True)]
    held_out = [mean_over_replicas(loss, sch.mesh) for loss in evaluated]
    memory: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(memory, memory_of(engine.module, engine.optimizer))
    weights = engine.state_dict(rank0_only=True)
    if first:
        write_result(options, name, losses, seconds, held_out, memory, weights, explain=explain)
    engine.close()


def mean_over_replicas(loss: torch.Tensor, mesh: slapo.Mesh) -> float:
    """Each replica knows the loss of its own rows."""
    total = loss.detach().clone()
    if mesh.size("dp") > 1:
        dist.all_reduce(total, group=mesh.group("dp"))
    return total.item() / mesh.size("dp")


def compare(
    options: argparse.Namespace,
    scheduled_runs: Sequence[str] = tuple(MESHES),
    title: str = "The same GPT-2 on one process and on four",
) -> int:
    """Print the runs side by side, plot them, and give the exit status."""
    names = ("plain", *scheduled_runs)
    plain, *scheduled = (json.loads((options.output / f"{name}.json").read_text()) for name in names)
    print("\nWhat the schedule did\n" + scheduled[0]["explain"])
    print("\n step   unscheduled" + "".join(f"{name:>14}    difference" for name in scheduled_runs))
    gaps = [[abs(a - b) for a, b in zip(plain["losses"], run["losses"], strict=True)] for run in scheduled]
    count = len(plain["losses"])
    for step in sorted({*range(0, count, max(1, count // 10)), count - 1}):
        shown = "".join(
            f"{run['losses'][step]:14.6f}  {gap[step]:12.2e}" for run, gap in zip(scheduled, gaps, strict=True)
        )
        print(f"{step + 1:5d}  {plain['losses'][step]:12.6f}{shown}")
    runs = list(zip(names, (plain, *scheduled), strict=True))
    print("\nheld-out loss: " + ", ".join(f"{statistics.mean(run['held_out']):.4f} {name}" for name, run in runs))
    before = load_file(options.output / "plain.safetensors")
    for name in scheduled_runs:
        after = load_file(options.output / f"{name}.safetensors")
        if before.keys() != after.keys():
            print(f"the state dicts have different names: {sorted(before.keys() ^ after.keys())}")
            return 1
        worst = max(before, key=lambda key: (before[key] - after[key]).abs().max().item())
        print(f"{name}: largest parameter difference {(before[worst] - after[worst]).abs().max():.2e} in {worst}")
    for name, run in runs:
        step = statistics.median(run["seconds"][2:]) * 1e3
        print(f"{name}: median step {step:.0f} ms on {len(run['memory'])} processes, one thread each")
        for rank, memory in enumerate(run["memory"]):
            print(f"    memory of rank {rank}: " + ", ".join(f"{what} {mb:.0f} MB" for what, mb in memory.items()))
    print(f"loss curves: {plot(options, runs, title)}")
    worst_gap = max(max(gap) for gap in gaps)
    if worst_gap > TOLERANCE:
        print(f"FAILED: the loss curves part by {worst_gap:.2e}, more than {TOLERANCE:g}")
        return 1
    print(f"the loss curves agree: largest difference {worst_gap:.2e}, allowed {TOLERANCE:g}")
    return 0


def plot(options: argparse.Namespace, runs: list[tuple[str, dict[str, Any]]], title: str) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, run) in enumerate(runs):
        axes.plot(run["losses"], label=name, linewidth=4 - 1.2 * number, alpha=0.5)
    axes.set(xlabel="step", ylabel="language-model loss (nats)", title=title)
    axes.legend()
    file = options.output / "loss_curves.png"
    figure.savefig(file, dpi=150)
    return file


def launch(options: argparse.Namespace) -> int:
    """All runs, one after the other, each in processes of its own, then the comparison."""
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"text, tokenizer and results: {options.output}")
    batches(options, seed=1, steps=1)  # trains the tokenizer once, before the processes start
    this = [str(Path(__file__).resolve()), *sys.argv[1:]]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    for role in ("plain", *MESHES):
        prefix = [] if role == "plain" else torchrun
        done = subprocess.run([sys.executable, *prefix, *this, "--role", role], env=environment, check=False)
        if done.returncode:
            print(f"the run {role} failed with status {done.returncode}", file=sys.stderr)
            return done.returncode
    return compare(options)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="train on this file (default: the Python standard library's source)")
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=8, help="sequences a step, a multiple of 8 (default: %(default)s)"
    )
    parser.add_argument("--length", type=int, default=96, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the tokenizer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the model (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build/gpt_3d"), help="directory (default: %(default)s)")
    parser.add_argument("--role", choices=["plain", *MESHES], help=argparse.SUPPRESS)
    return parser


def main(options: argparse.Namespace) -> int:
    """What the role says; without one, all runs and the comparison."""
    if options.role == "plain":
        run_plain(options)
    elif options.role is not None:
        dist.init_process_group("gloo")
        run_scheduled(options, options.role)
        dist.destroy_process_group()
    else:
        return launch(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
