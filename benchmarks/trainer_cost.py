"""What a step of Trainer with the mixin costs: against Trainer without it, and against loops of our own.

Steps of GPT-2, with clipping, AdamW and a log line each, alternate in the same processes: two Trainers, or a Trainer
and a loop, whose losses must be equal. Times are processor time of the first rank, without its waits for the other one.

    python benchmarks/trainer_cost.py --pairs 100
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from report import interleaved, ratio_of_medians, save
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from slapo_testing.models import gpt2
from slapo_transformers import SlapoTrainer

BATCH, LENGTH, VOCABULARY = 4, 128, 1024
RATE, NORM, WARM_UP = 1e-3, 1.0, 5

Step = Callable[[], float]
"""Gives the loss."""


def model() -> nn.Module:
    """Return a GPT-2 of 4 layers without dropout, of the same values each time."""
    sizes: dict[str, Any] = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    made: nn.Module = gpt2(vocab_size=VOCABULARY, **sizes, **dropout)
    return made


def scheduled(mesh: Mapping[str, int] | None) -> slapo.Schedule:
    """Return a schedule: tensor parallelism over a mesh, and no step without one."""
    import slapo_models

    sch = slapo.create_schedule(model(), mesh=mesh)
    if mesh is not None:
        slapo_models.gpt(sch, kernels=False)
    return sch


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same sequence again and again, so that all orders give equal losses."""

    def __init__(self) -> None:
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
        labels = torch.cat([torch.tensor([-100]), ids[1:]])  # the host's count of items includes the first label
        self.sample = {"input_ids": ids, "labels": labels}

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.sample


class Steps(TrainerCallback):
    """The steps of a Trainer, whose loop waits in a thread of its own between them."""

    def __init__(self, kind: Callable[..., Any], **options: Any) -> None:
        self._go, self._logged, self.loss = threading.Semaphore(0), threading.Semaphore(0), 0.0
        args = TrainingArguments(
            tempfile.gettempdir(),
            max_steps=10**6,
            per_device_train_batch_size=BATCH,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=NORM,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
            disable_tqdm=True,
        )
        trainer = kind(args=args, train_dataset=Samples(), callbacks=[self], **options)
        trainer.remove_callback(PrinterCallback)

        def run() -> None:
            self._go.acquire()
            trainer.train()

        threading.Thread(target=run, daemon=True).start()  # ends with the process

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.loss = float(logs["loss"])
        self._logged.release()
        self._go.acquire()

    def __call__(self) -> float:
        self._go.release()
        if not self._logged.acquire(timeout=300):
            raise RuntimeError("the Trainer did not finish a step")
        return self.loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, fused=True)


def batch() -> dict[str, torch.Tensor]:
    return {name: value.repeat(BATCH, 1) for name, value in Samples().sample.items()}


def engine_steps(mesh: Mapping[str, int] | None) -> Step:
    engine = slapo.build(scheduled(mesh), optimizer=adamw, max_grad_norm=NORM)
    return lambda: float(engine.train_step(batch()).loss)


def loop_steps() -> Step:
    net: Any = model()
    optimizer = adamw(net.parameters())

    def step() -> float:
        loss = net(**batch()).loss
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


TP = {"tp": 2}
QUESTIONS: Mapping[str, tuple[int, Callable[[], Step], Callable[[], Step], float | None]] = {
    "Trainer with the mixin / Trainer, one process": (
        *(1, lambda: Steps(SlapoTrainer, schedule=scheduled(None)), lambda: Steps(Trainer, model=model())),
        1.02,
    ),
    "Trainer / a loop, one process": (1, lambda: Steps(Trainer, model=model()), loop_steps, None),
    "Trainer with the mixin / an engine, tp 2": (
        *(2, lambda: Steps(SlapoTrainer, schedule=scheduled(TP)), lambda: engine_steps(TP)),
        None,
    ),
}
"""Ranks, two kinds of steps, and where the 95 % interval of the ratio of their medians must end."""


def compare(question: str, pairs: int) -> tuple[list[float], list[float]]:
    """Time both kinds of steps in turn, after they have given equal losses."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    if os.environ["WORLD_SIZE"] == "1":  # a process as without a launcher, which the host wraps for no replicas
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name)
    _, *kinds, _ = QUESTIONS[question]
    first, second = (make() for make in kinds)
    losses = [(first(), second()) for _ in range(WARM_UP)]
    assert all(abs(one - other) < 1e-4 * abs(other) for one, other in losses), losses
    assert losses[-1][0] < losses[0][0], losses  # it trains
    return interleaved(first, second, pairs=pairs, clock=time.process_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="interleaved pairs of steps (default: %(default)s)")
    parser.add_argument("--only", choices=list(QUESTIONS), action="append", help="only this question; nothing is kept")
    options = parser.parse_args()
    preload_modules("slapo_transformers", "slapo_models", "transformers.models.gpt2.modeling_gpt2")
    rows = []
    for question in options.only or QUESTIONS:
        ranks, *_, allowed = QUESTIONS[question]
        times = run_ranks(compare, question, options.pairs, world_size=ranks, timeout=3600)[0]
        ours, theirs = (1e3 * statistics.median(one) for one in times)
        row = {"question": question, **ratio_of_medians(*times), "ms": ours, "other_ms": theirs, "allowed": allowed}
        rows.append(row)
        low, high = row["interval_95"]
        print(
            f"{question:<50} {row['ratio']:.3f} (95 %: {low:.3f} to {high:.3f}, {ours:.1f} / {theirs:.1f} ms)",
            flush=True,
        )
    if not options.only:
        save("trainer_cost", rows, clock="process_time")


if __name__ == "__main__":
    main()
