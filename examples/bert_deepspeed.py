"""Train an unmodified BERT with DeepSpeed on two processes, under ZeRO-2 and in a pipeline, and compare both with the
same run unscheduled, without DeepSpeed.

    python examples/bert_deepspeed.py                 # three runs, the comparison and the plot
    python examples/bert_deepspeed.py --text my.txt   # on your own text
    python examples/bert_deepspeed.py --quick         # a few steps of a small vocabulary

Batches, optimizer, learning rates and clipping are those of ``ds_bert.json``, a configuration as DeepSpeed's own
documentation writes them. The script starts ``torchrun`` for the scheduled runs by itself. It ends with status 1 if the
loss curves part. It takes two GPUs, or the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from bert_tp import make_model
from masked_text import masked_batches

import slapo_core as slapo

CONFIG = Path(__file__).with_name("ds_bert.json")

RUNS = {"zero2_dp2": ({"dp": 2, "pp": 1}, 2), "pp2_zero1": ({"dp": 1, "pp": 2}, 1)}
"""The scheduled runs: the mesh, and DeepSpeed's ZeRO stage; with a pipeline DeepSpeed has no more than the first."""

PROCESSES = 2

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
    return list(
        masked_batches(
            common.rows_of(options, held_out=held_out),
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
    config = configuration()
    settings = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
    model = make_model(options.vocab_size).to(common.device_of(options, PROCESSES, shared=False)).train()
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    clip = config["gradient_clipping"]
    common.run_plain(options, model, optimizer, batches, max_grad_norm=clip, learning_rate=learning_rate)


def run_scheduled(options: argparse.Namespace, name: str, device: torch.device) -> None:
    """The same model under a schedule, by DeepSpeed; this runs in every process that torchrun starts."""
    torch.set_num_threads(1)
    mesh, zero = RUNS[name]
    model = make_model(options.vocab_size).to(device).train()
    example = common.on(device, {key: rows[:2] for key, rows in batches(options, seed=3, steps=1)[0].items()})
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=example)
    schedule_bert(sch)
    report = slapo.verify(sch, example)
    engine = slapo.build(sch, target="deepspeed", config=configuration(zero))
    if dist.get_rank() == 0:
        print(report, engine.plan, sep="\n", flush=True)
    common.run_engine(
        options,
        name,
        sch,
        engine,
        batches,
        states=lambda engine: engine.deepspeed.optimizer.state.values(),
        device=device,
    )


def compare(options: argparse.Namespace) -> int:
    """Print the runs side by side, plot them, and give the exit status."""
    return common.compare(options, tuple(RUNS), "The same BERT on one process, and by DeepSpeed on two")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(parser, "bert_deepspeed", RUNS)
    parser.add_argument("--quick", action="store_true", help="4 steps of 16 tokens a sequence, 600 in the tokenizer")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.length, options.vocab_size = 4, 16, 600
    return options


def main(options: argparse.Namespace) -> int:
    """What the role says; without one, all runs and the comparison."""
    if options.role == "plain":
        run_plain(options)
    elif options.role is not None:
        common.together(lambda device: run_scheduled(options, options.role, device), options, shared=False)
    else:
        return common.launch(options, __file__, tuple(RUNS), PROCESSES, batches, shared=False) or compare(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(parsed()))
