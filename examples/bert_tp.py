"""Train an unmodified BERT tensor-parallel on two processes, and compare it with the same run unscheduled.

    python examples/bert_tp.py                 # both runs, the comparison and the plot
    python examples/bert_tp.py --text my.txt   # on your own text

The script starts ``torchrun`` for the scheduled run by itself. It ends with status 1 if the loss curves part.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from masked_text import masked_batches, read_text, sequences, tokenizer_for
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import BertConfig, BertForMaskedLM

import slapo_core as slapo

TOLERANCE = 1e-3
"""Largest difference allowed between the two loss curves (nats): float32 sums in another order, over all steps."""


def make_model(vocab_size: int, attention: str | None = None) -> BertForMaskedLM:
    """A 6-layer BERT with random weights, the same in every process; dropout off, so that the runs can be compared.

    Args:
        vocab_size: of the tokenizer.
        attention: which of transformers' implementations; None for its default.
    """
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocab_size,
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=8,
            intermediate_size=1024,
            max_position_embeddings=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation=attention,
        )
    )


def schedule_bert(sch: slapo.Schedule) -> None:
    """Tensor parallelism as in Megatron-LM: heads and MLP columns split, one all-reduce behind each half of a layer."""
    for layer in sch["bert.encoder.layer.*"]:
        attention = layer["attention.self"]
        for projection in ("query", "key", "value"):
            attention[projection].shard(["weight", "bias"], axis=0)
        attention.shard_attribute(["num_attention_heads", "all_head_size"])
        attention.sync("bwd_post", "all_reduce")
        layer["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["bert.encoder.layer.[01]"].checkpoint()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-4)


def batches(options: argparse.Namespace, *, seed: int, steps: int, held_out: bool = False) -> list[Any]:
    text = read_text(options.text)
    tokenizer = tokenizer_for(text, vocab_size=options.vocab_size, directory=options.output)
    rows = sequences(text, tokenizer, length=options.length)
    border = len(rows) - len(rows) // 20
    rows = rows[border:] if held_out else rows[:border]
    return list(
        masked_batches(rows, batch_size=options.batch_size, steps=steps, vocab_size=options.vocab_size, seed=seed)
    )


def run_plain(options: argparse.Namespace, attention: str | None) -> None:
    """The model as its author wrote it, in an ordinary PyTorch loop."""
    torch.set_num_threads(1)
    model = make_model(options.vocab_size, attention).train()
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


def run_scheduled(
    options: argparse.Namespace, schedule: Callable[[slapo.Schedule], None], attention: str | None
) -> None:
    """The same model under a schedule; this runs in every process that torchrun starts."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    model = make_model(options.vocab_size, attention).train()
    example = {name: tensor[:2] for name, tensor in batches(options, seed=3, steps=1)[0].items()}
    sch = slapo.create_schedule(model, mesh={"tp": dist.get_world_size()}, example_inputs=example)
    schedule(sch)
    report = slapo.verify(sch, example)
    if first:
        print(sch, report, sep="\n\n", flush=True)
    explain = sch.explain()
    engine = slapo.build(sch, target="torch", optimizer=make_optimizer)
    losses, seconds = [], []
    data = batches(options, seed=1, steps=options.steps)
    for batch in tqdm(data, desc=f"scheduled, {dist.get_world_size()} processes", disable=not first):
        start = time.perf_counter()
        loss = engine.train_step(batch).loss
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    held_out = [engine.eval_step(batch).loss.item() for batch in batches(options, seed=2, steps=4, held_out=True)]
    memory: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(memory, memory_of(engine.module, engine.optimizer))
    weights = engine.state_dict(rank0_only=True)
    if first:
        write_result(options, "scheduled", losses, seconds, held_out, memory, weights, explain=explain)
    engine.close()
    dist.destroy_process_group()


def memory_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """MB held by parameters and optimiser state, and the peak of the whole process."""
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    count = sum(t.numel() * t.element_size() for t in [*model.parameters(), *state])
    return {
        "weights and optimiser": count / 1e6,
        "process peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def write_result(
    options: argparse.Namespace,
    name: str,
    losses: list[float],
    seconds: list[float],
    held_out: list[float],
    memory: list[dict[str, float]],
    weights: dict[str, torch.Tensor],
    *,
    explain: str,
) -> None:
    # Tied weights share memory, which safetensors refuses: every name gets a tensor of its own.
    save_file(
        {key: tensor.clone().contiguous() for key, tensor in weights.items()}, options.output / f"{name}.safetensors"
    )
    result = {"losses": losses, "seconds": seconds, "held_out": held_out, "memory": memory, "explain": explain}
    (options.output / f"{name}.json").write_text(json.dumps(result))


def compare(options: argparse.Namespace) -> int:
    """Print both runs side by side, plot them, and give the exit status."""
    plain, scheduled = (json.loads((options.output / f"{name}.json").read_text()) for name in ("plain", "scheduled"))
    print("\nWhat the schedule did\n" + scheduled["explain"])
    print("\n step   unscheduled     scheduled    difference")
    gaps = [abs(a - b) for a, b in zip(plain["losses"], scheduled["losses"], strict=True)]
    for step in range(0, len(gaps), max(1, len(gaps) // 10)):
        print(f"{step + 1:5d}  {plain['losses'][step]:12.6f}  {scheduled['losses'][step]:12.6f}  {gaps[step]:12.2e}")
    print(f"{len(gaps):5d}  {plain['losses'][-1]:12.6f}  {scheduled['losses'][-1]:12.6f}  {gaps[-1]:12.2e}")
    print(f"\nheld-out loss: {statistics.mean(plain['held_out']):.4f} unscheduled, "
          f"{statistics.mean(scheduled['held_out']):.4f} scheduled")  # fmt: skip
    a, b = (load_file(options.output / f"{name}.safetensors") for name in ("plain", "scheduled"))
    if a.keys() != b.keys():
        print(f"the state dicts have different names: {sorted(a.keys() ^ b.keys())}")
        return 1
    worst = max(a, key=lambda name: (a[name] - b[name]).abs().max().item())
    print(f"largest parameter difference: {(a[worst] - b[worst]).abs().max():.2e} in {worst}")
    times = [statistics.median(run["seconds"][2:]) * 1e3 for run in (plain, scheduled)]
    print(f"median step: {times[0]:.0f} ms on 1 process, "
          f"{times[1]:.0f} ms on {len(scheduled['memory'])} processes, one thread each")  # fmt: skip
    for label, run in (("unscheduled", plain), ("scheduled", scheduled)):
        for rank, memory in enumerate(run["memory"]):
            print(f"memory, {label}, rank {rank}: " + ", ".join(f"{what} {mb:.0f} MB" for what, mb in memory.items()))
    print(f"loss curves: {plot(options, plain['losses'], scheduled['losses'])}")
    if max(gaps) > TOLERANCE:
        print(f"FAILED: the loss curves part by {max(gaps):.2e}, more than {TOLERANCE:g}")
        return 1
    print(f"the loss curves agree: largest difference {max(gaps):.2e}, allowed {TOLERANCE:g}")
    return 0


def plot(options: argparse.Namespace, plain: list[float], scheduled: list[float]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    axes.plot(plain, label="unscheduled, 1 process", linewidth=4, alpha=0.4)
    axes.plot(scheduled, label="scheduled, tensor parallel on 2 processes", linewidth=1.5)
    axes.set(
        xlabel="step", ylabel="masked-language-model loss (nats)", title="The same BERT, with and without a schedule"
    )
    axes.legend()
    file = options.output / "loss_curves.png"
    figure.savefig(file, dpi=150)
    return file


def launch(options: argparse.Namespace, script: str) -> int:
    """Both runs, one after the other, each in processes of its own, then the comparison."""
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"text, tokenizer and results: {options.output}")
    batches(options, seed=1, steps=1)  # trains the tokenizer once, before the processes start
    this = [str(Path(script).resolve()), *sys.argv[1:]]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    for prefix, role in (([], "plain"), (torchrun, "scheduled")):
        done = subprocess.run([sys.executable, *prefix, *this, "--role", role], env=environment, check=False)
        if done.returncode:
            print(f"the {role} run failed with status {done.returncode}", file=sys.stderr)
            return done.returncode
    return compare(options)


def parser(name: str = "bert_tp", description: str | None = __doc__) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="train on this file (default: the Python standard library's source)")
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=96, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the tokenizer (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build", name), help="directory (default: %(default)s)")
    parser.add_argument("--role", choices=["plain", "scheduled"], help=argparse.SUPPRESS)
    return parser


def main(
    options: argparse.Namespace,
    *,
    schedule: Callable[[slapo.Schedule], None] = schedule_bert,
    attention: str | None = None,
    script: str = __file__,
) -> int:
    """What the role says; without one, both runs and the comparison.

    Args:
        options: of the command line.
        schedule: applies the steps.
        attention: of the model, as of :func:`make_model`.
        script: what the processes run.
    """
    if options.role == "plain":
        run_plain(options, attention)
    elif options.role == "scheduled":
        run_scheduled(options, schedule, attention)
    else:
        return launch(options, script)
    return 0


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
