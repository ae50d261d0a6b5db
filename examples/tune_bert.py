"""Tune the demo's BERT on two processes: its batch, how much is recomputed, and whether replicas or split layers.

    python examples/tune_bert.py               # search, table, pictures, and the winner's schedule, verified
    slapo tune run examples/tune_bert.py       # the same study from the command line, to look at while it runs
    slapo tune best examples/tune_bert.py

Every point is trained for real on both processes, as long as its step is predicted to fit into the memory that a rank
may take; nothing else is started.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from typing import Any

import bert_tp
import common
import torch
from masked_text import masked_batches
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM

import slapo_core as slapo
import slapo_tune

RANKS = 2
LAYERS = 6
BATCHES = (2, 4, 6, 8, 10, 12, 16, 20, 24)
RATIOS = tuple(layers / LAYERS for layers in range(LAYERS + 1))
LARGEST = 24  # sequences of a step, over all replicas


def space(s: Any) -> None:
    """Two replicas, or layers split over both processes; a batch; how many of the layers are recomputed."""
    tp = s.choose("tp", (1, 2))
    batch = s.choose("batch", BATCHES)
    s.require(batch * RANKS // tp <= LARGEST, f"a step has at most {LARGEST} sequences")
    s.choose("checkpoint", RATIOS)


def schedule(sch: slapo.Schedule, p: Any) -> None:
    """The steps of a point."""
    if p["tp"] > 1:
        bert_tp.split_layers(sch)
    for layer in range(round(p["checkpoint"] * LAYERS)):
        sch[f"bert.encoder.layer.{layer}"].checkpoint()


def mesh(p: Any) -> dict[str, int]:
    return {"dp": RANKS // p["tp"], "tp": p["tp"]}


def make_model(vocab_size: int) -> BertForMaskedLM:
    return bert_tp.make_model(vocab_size)


def batch(options: argparse.Namespace, p: Any) -> dict[str, torch.Tensor]:
    """One replica's batch of real text, the same on all ranks."""
    (made,) = masked_batches(rows(options), batch_size=p["batch"], steps=1, vocab_size=options.vocab_size, seed=1)
    return made


def rows(options: argparse.Namespace) -> torch.Tensor:
    """Token ids of shape (sequences, length); kept in a file, because every trial reads them."""
    file = options.output / f"rows-{options.vocab_size}-{options.length}.safetensors"
    if not file.exists():
        options.output.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        save_file({"rows": common.rows_of(options, held_out=False)[:4096].contiguous()}, part)
        part.replace(file)
    return load_file(file)["rows"]


def make_study(options: argparse.Namespace) -> slapo_tune.Study:
    return slapo_tune.Study(
        functools.partial(make_model, options.vocab_size),
        space,
        schedule,
        world_size=RANKS,
        mesh=mesh,
        batch=functools.partial(batch, options),
        optimizer=bert_tp.make_optimizer,
        memory=options.memory,
        sampler=options.sampler,
        accelerator=options.device,
        log=options.output / "tune_bert.jsonl",
        steps=options.steps,
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(parser, "tune_bert", ())
    parser.set_defaults(steps=3, length=64)
    parser.add_argument("--memory", default="150MiB", help="that a rank may take (default: %(default)s)")
    parser.add_argument("--sampler", default="frontier", help="e.g. exhaustive (default: %(default)s)")
    return parser


def main(options: argparse.Namespace) -> int:
    """Search, or go on where the last search ended; print, draw, verify, and give the exit status."""
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"text, tokenizer, log and results: {options.output}")
    rows(options)  # trains the tokenizer once, before the processes start
    chosen = make_study(options)
    result = chosen.run(progress=True)
    chosen.report(result.trials).print()
    if common.can_plot():
        file = options.output / "search.png"
        print(f"wrote {chosen.plot(file, axes=('batch', 'checkpoint'), title='BERT')}")
    if result.winner is None or not result.winner.right:
        print(f"FAILED: no verified schedule: {result.winner.reason if result.winner else 'no trial was ok'}")
        return 1
    print(f"\n{result.winner.text}")
    print(f"\nthe best schedule, with its point: {slapo_tune.best_file(chosen.log)}")
    return 0


study = make_study(parser().parse_args([]))
"""What `slapo tune run examples/tune_bert.py` searches."""

if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
