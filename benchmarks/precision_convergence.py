"""What the precisions of target `torch` make of a training: a small LLaMA on real text, 300 steps of each, in turn."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from report import save
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_core as slapo
from slapo_testing import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from masked_text import read_text, sequences, tokenizer_for

WORDS, LENGTH, BATCH, HELD_OUT = 1024, 64, 8, 16
LEARNING_RATE = 1e-3
LAST = 20  # steps over which the final loss is a mean
ALLOWED = 0.01  # of fp32's final loss, for bf16-mixed

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-mixed, fsdp": {"precision": "bf16-mixed", "data_parallel": "fsdp"},
    "bf16": {"precision": "bf16"},
}
"""Options of ``build``; one rank has the model."""

Batch = dict[str, torch.Tensor]


def batches(steps: int) -> tuple[list[Batch], list[Batch]]:
    """Those to train on, and some of rows that are held out: the standard library's source, the same everywhere."""
    text = read_text(None, limit=1_500_000)
    with tempfile.TemporaryDirectory() as directory:
        rows = sequences(text, tokenizer_for(text, vocab_size=WORDS, directory=Path(directory)), length=LENGTH)
    draw, border = torch.Generator().manual_seed(1), len(rows) - BATCH * HELD_OUT
    chosen = [rows[torch.randint(border, (BATCH,), generator=draw)] for _ in range(steps)]
    training, held_out = (
        [{"input_ids": ids, "labels": ids} for ids in kind] for kind in (chosen, rows[border:].split(BATCH))
    )
    return training, held_out


def train(options: dict[str, Any], data: tuple[list[Batch], list[Batch]]) -> tuple[list[float], float]:
    """The losses of all steps, and that of the rows that are held out; on one rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    training, held_out = data
    sch = slapo.create_schedule(LlamaForCausalLM(config).train(), mesh={"dp": 1}, example_inputs=training[0])
    engine: Any = slapo.build(
        sch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LEARNING_RATE, len(training), pct_start=0.1
        ),
        max_grad_norm=1.0,
        **options,
    )
    losses = [engine.train_step(batch).loss for batch in tqdm(training, desc=str(options))]
    evaluated = statistics.mean(float(engine.eval_step(batch).loss) for batch in held_out)
    return [float(loss) for loss in losses], evaluated


def main() -> None:
    """Train by each precision, print the table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of each training (default: %(default)s)")
    options = parser.parse_args()
    data = batches(options.steps)
    rows: list[dict[str, Any]] = []
    for name, given in PRECISIONS.items():
        ((losses, held_out),) = run_ranks(train, given, data, world_size=1, timeout=3600)
        final = statistics.mean(losses[-LAST:])
        first = rows[0] if rows else {"final_loss": final, "held_out_loss": held_out}
        rows.append(
            {
                "precision": name,
                "final_loss": final,
                "of_fp32": final / first["final_loss"],
                "held_out_loss": held_out,
                "held_out_of_fp32": held_out / first["held_out_loss"],
                "losses": [round(loss, 4) for loss in losses],
            }
        )
    print(f"{'precision':<18} {'first':>8} {'final':>8} {'of fp32':>8} {'held out':>9} {'of fp32':>8}")
    for row in rows:
        print(
            f"{row['precision']:<18} {row['losses'][0]:8.4f} {row['final_loss']:8.4f} {row['of_fp32']:8.4f} "
            f"{row['held_out_loss']:9.4f} {row['held_out_of_fp32']:8.4f}"
        )
    save("precision_convergence", rows, steps=options.steps, last=LAST, allowed=ALLOWED)
    if any(abs(row["of_fp32"] - 1) > ALLOWED for row in rows if row["precision"].startswith("bf16-mixed")):
        sys.exit(f"bf16-mixed ends more than {ALLOWED:.0%} from fp32")


if __name__ == "__main__":
    main()
