"""What the examples share: the run as the model's author wrote it, the runs under a schedule, and their comparison."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from masked_text import read_text, sequences, tokenizer_for
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import slapo_core as slapo

TOLERANCE = 1e-3
"""Largest difference allowed between two loss curves (nats): float32 sums in another order, over all steps."""

Batch = dict[str, torch.Tensor]

Batches = Callable[..., Sequence[Batch]]
"""``batches(options, seed=, steps=, held_out=)``: the same for the same seed."""


def add_options(parser: argparse.ArgumentParser, name: str, roles: Iterable[str]) -> None:
    """What every example has on its command line.

    Args:
        parser: of the example.
        name: of the directory of its results.
        roles: its scheduled runs.
    """
    parser.add_argument("--text", type=Path, help="train on this file (default: the Python standard library's source)")
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: %(default)s)")
    parser.add_argument("--length", type=int, default=96, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the tokenizer (default: %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if there is a GPU, else the CPU")
    parser.add_argument("--output", type=Path, default=Path("build", name), help="directory (default: %(default)s)")
    parser.add_argument("--role", choices=["plain", *roles], help=argparse.SUPPRESS)


def device_of(options: argparse.Namespace, processes: int = 1, *, shared: bool = True) -> torch.device:
    """Choose the device of this process: a GPU of its own, one that it shares, or the CPU.

    Args:
        options: of the command line.
        processes: that train together.
        shared: whether several can take one GPU where there are fewer. Gloo connects them then, which reduces and
            gathers CUDA tensors, and sends none from stage to stage.
    """
    count = torch.cuda.device_count()
    if options.device == "cpu" or (options.device is None and not count):
        return torch.device("cpu")
    if not count or (count < processes and not shared):
        if options.device is not None:
            sys.exit(f"--device cuda: {processes} processes need a GPU each, and this machine has {count}")
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)


def say_device(options: argparse.Namespace, processes: int, *, shared: bool) -> None:
    """Print a line where there is a GPU: which processes take it, or why none does."""
    count, device = torch.cuda.device_count(), device_of(options, processes, shared=shared)
    if device.type == "cuda":
        how = "a GPU each" if count >= processes else f"{count} of the GPUs, connected by gloo"
        print(f"device: cuda; {processes} processes take {how}")
    elif count and options.device is None:
        print(f"device: cpu; {processes} processes need a GPU each, and this machine has {count}")


def rows_of(options: argparse.Namespace, *, held_out: bool) -> torch.Tensor:
    """Token ids of shape (number of sequences, ``options.length``); one in twenty is held out of the training."""
    text = read_text(options.text)
    tokenizer = tokenizer_for(text, vocab_size=options.vocab_size, directory=options.output)
    rows = sequences(text, tokenizer, length=options.length)
    border = len(rows) - len(rows) // 20
    return rows[border:] if held_out else rows[:border]


def next_token_batches(
    options: argparse.Namespace, *, seed: int, steps: int, held_out: bool = False
) -> list[dict[str, Any]]:
    """Every token is predicted from those before it, so that all micro-batches have as many of them."""
    rows = rows_of(options, held_out=held_out)
    generator = torch.Generator().manual_seed(seed)
    chosen = [rows[torch.randint(len(rows), (options.batch_size,), generator=generator)] for _ in range(steps)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in chosen]


def run_plain(
    options: argparse.Namespace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    *,
    max_grad_norm: float | None = None,
    learning_rate: Callable[[int], float] | None = None,
) -> None:
    """The model as its author wrote it, in an ordinary PyTorch loop.

    Args:
        options: of the command line.
        model: the reference model.
        optimizer: of its parameters.
        batches: of the example.
        max_grad_norm: to which the gradients are clipped; None for not at all.
        learning_rate: that of a step, by its number; None for the optimizer's own.
    """
    torch.set_num_threads(1)
    device = next(model.parameters()).device
    losses, seconds = [], []
    data = batches(options, seed=1, steps=options.steps)
    for step, batch in enumerate(tqdm(data, desc="unscheduled, 1 process")):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(**on(device, batch)).loss
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        if learning_rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    model.eval()
    with torch.no_grad():
        data = batches(options, seed=2, steps=4, held_out=True)
        held_out = [model(**on(device, batch)).loss.item() for batch in data]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    memory = memory_of(model, optimizer.state.values())
    write_result(options, "plain", losses, seconds, held_out, [memory], weights, explain="")


def run_engine(
    options: argparse.Namespace,
    name: str,
    sch: slapo.Schedule,
    engine: Any,
    batches: Batches,
    *,
    states: Callable[[Any], Iterable[Any]] = lambda engine: engine.optimizer.state.values(),
    device: torch.device,
) -> None:
    """The same model under a schedule; every process calls it, and the first one keeps what came out.

    Args:
        options: of the command line.
        name: of the run.
        sch: what the engine was built of.
        engine: it is closed at the end.
        batches: of the example.
        states: of the optimizer, one for each parameter, to say how much memory they take.
        device: of the model.
    """
    first, processes = dist.get_rank() == 0, dist.get_world_size()

    def own(batch: Batch) -> Batch:
        """The rows of this replica; all ranks of a replica get the same."""
        mine = {key: tensor.chunk(sch.mesh.size("dp"))[sch.mesh.rank("dp")] for key, tensor in batch.items()}
        return on(device, mine)

    explain = sch.explain()
    losses, seconds = [], []
    data = batches(options, seed=1, steps=options.steps)
    for batch in tqdm(data, desc=f"{name}, {processes} processes", disable=not first):
        start = time.perf_counter()
        loss = engine.train_step(own(batch)).loss
        losses.append(mean_over_replicas(loss, sch.mesh))
        seconds.append(time.perf_counter() - start)
    evaluated = [engine.eval_step(own(batch)).loss for batch in batches(options, seed=2, steps=4, held_out=True)]
    held_out = [mean_over_replicas(loss, sch.mesh) for loss in evaluated]
    memory: list[Any] = [None] * processes
    dist.all_gather_object(memory, memory_of(engine.module, states(engine)))
    weights = engine.state_dict(rank0_only=True)
    if first:
        write_result(options, name, losses, seconds, held_out, memory, weights, explain=explain)
    engine.close()


def on(device: torch.device, batch: Batch) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def mean_over_replicas(loss: torch.Tensor, mesh: slapo.Mesh) -> float:
    """Each replica knows the loss of its own rows."""
    total = loss.detach().clone()
    if mesh.size("dp") > 1:
        dist.all_reduce(total, group=mesh.group("dp"))
    return total.item() / mesh.size("dp")


def memory_of(model: torch.nn.Module, states: Iterable[Any]) -> dict[str, float]:
    """MB held by parameters and optimizer state, and the peak of the whole process."""
    state = [t for values in states for t in values.values() if isinstance(t, torch.Tensor)]
    held = [tensor for tensor in (*model.parameters(), *state) if not tensor.is_meta]  # those are of another stage
    return {
        "weights and optimizer": sum(tensor.numel() * tensor.element_size() for tensor in held) / 1e6,
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
        {key: tensor.cpu().clone().contiguous() for key, tensor in weights.items()},
        options.output / f"{name}.safetensors",
    )
    result = {"losses": losses, "seconds": seconds, "held_out": held_out, "memory": memory, "explain": explain}
    (options.output / f"{name}.json").write_text(json.dumps(result))


def compare(
    options: argparse.Namespace, scheduled_runs: Sequence[str], title: str, marks: Mapping[int, str] | None = None
) -> int:
    """Print the runs side by side, plot them where matplotlib is installed, and give the exit status.

    The status is 1 if the loss curves part.

    Args:
        options: of the command line.
        scheduled_runs: their names.
        title: of the plot.
        marks: steps to mark in it, and their labels.
    """
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
    if can_plot():
        print(f"loss curves: {plot(options, runs, title, marks or {})}")
    worst_gap = max(max(gap) for gap in gaps)
    if worst_gap > TOLERANCE:
        print(f"FAILED: the loss curves part by {worst_gap:.2e}, more than {TOLERANCE:g}")
        return 1
    print(f"the loss curves agree: largest difference {worst_gap:.2e}, allowed {TOLERANCE:g}")
    return 0


def can_plot() -> bool:
    """Tell whether matplotlib is installed; where it is not, print a line that says so."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        print("no plot: matplotlib is not installed (hint: pip install matplotlib)")
        return False
    return True


def plot(
    options: argparse.Namespace, runs: list[tuple[str, dict[str, Any]]], title: str, marks: Mapping[int, str]
) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, run) in enumerate(runs):
        axes.plot(run["losses"], label=name, linewidth=4 - 1.2 * number, alpha=0.5)
    for step, label in marks.items():
        axes.axvline(step, color="gray", linestyle=":")
        axes.annotate(label, (step, 1), xycoords=("data", "axes fraction"), xytext=(3, -12), textcoords="offset points")
    axes.set(xlabel="step", ylabel="language-model loss (nats)", title=title)
    axes.legend()
    file = options.output / "loss_curves.png"
    figure.savefig(file, dpi=150)
    return file


def launch(
    options: argparse.Namespace,
    script: str,
    roles: Sequence[str],
    processes: int,
    batches: Batches,
    *,
    shared: bool = True,
) -> int:
    """All runs, one after the other, each in processes of its own.

    Args:
        options: of the command line.
        script: what the processes run.
        roles: the scheduled runs.
        processes: of each of them.
        batches: of the example.
        shared: whether processes can share a GPU.

    Returns:
        the status of the first one that failed, or 0.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"text, tokenizer and results: {options.output}")
    say_device(options, processes, shared=shared)
    batches(options, seed=1, steps=1)  # trains the tokenizer once, before the processes start
    this = [str(Path(script).resolve()), *sys.argv[1:]]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    for role in ("plain", *roles):
        prefix = [] if role == "plain" else torchrun
        done = subprocess.run([sys.executable, *prefix, *this, "--role", role], env=environment, check=False)
        if done.returncode:
            print(f"the run {role} failed with status {done.returncode}", file=sys.stderr)
            return done.returncode
    return 0


def together(
    run: Callable[[torch.device], None],
    options: argparse.Namespace,
    *,
    shared: bool = True,
    **rendezvous: Any,
) -> None:
    """Run it on its device in one of several processes, connected with the others.

    Args:
        run: called with the device.
        options: of the command line.
        shared: whether processes can share a GPU.
        rendezvous: further arguments of ``init_process_group``, without torchrun.
    """
    processes = int(os.environ["WORLD_SIZE"])
    device = device_of(options, processes, shared=shared)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        has_own = device.type == "cuda" and torch.cuda.device_count() >= processes  # NCCL refuses two ranks on one GPU
        dist.init_process_group("nccl" if has_own else "gloo", **rendezvous)
    run(device)
    dist.barrier()
    dist.destroy_process_group()
