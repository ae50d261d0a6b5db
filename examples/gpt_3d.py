"""Train an unmodified GPT-2 in a pipeline on four processes, tensor-parallel stages and replicated ones, and compare
both with the same run unscheduled.

    python examples/gpt_3d.py                 # three runs, the comparison and the plot
    python examples/gpt_3d.py --text my.txt   # on your own text

The script starts ``torchrun`` for the scheduled runs by itself. It ends with status 1 if the loss curves part.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import common
import torch
import torch.distributed as dist
from common import next_token_batches as batches
from transformers import GPT2Config, GPT2LMHeadModel

import slapo_core as slapo
import slapo_pipeline

RUNS = {"pp2_tp2": {"dp": 1, "pp": 2, "tp": 2}, "dp2_pp2": {"dp": 2, "pp": 2, "tp": 1}}
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


def run_plain(options: argparse.Namespace) -> None:
    """The model as its author wrote it, in an ordinary PyTorch loop."""
    model = make_model(options.vocab_size, options.layers).train()
    common.run_plain(options, model, make_optimizer(model.parameters()), batches)


def run_scheduled(options: argparse.Namespace, name: str) -> None:
    """The same model under a schedule; this runs in every process that torchrun starts."""
    torch.set_num_threads(1)
    model = make_model(options.vocab_size, options.layers).train()
    example = {key: tensor[:2] for key, tensor in batches(options, seed=3, steps=1)[0].items()}
    sch = slapo.create_schedule(model, mesh=RUNS[name], example_inputs=example)
    schedule_gpt(sch)
    report = slapo.verify(sch, example)
    if dist.get_rank() == 0:
        print(sch, slapo_pipeline.stages(sch), report, sep="\n\n", flush=True)
    engine = slapo.build(
        sch, target="torch", optimizer=make_optimizer, pipeline_schedule="1f1b", microbatches=MICROBATCHES
    )
    common.run_engine(options, name, sch, engine, batches)


def compare(options: argparse.Namespace) -> int:
    """Print the runs side by side, plot them, and give the exit status."""
    return common.compare(options, tuple(RUNS), "The same GPT-2 on one process and on four")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(parser, "gpt_3d", RUNS)
    parser.add_argument(
        "--batch-size", type=int, default=8, help="sequences a step, a multiple of 8 (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=6, help="blocks of the model (default: %(default)s)")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """What the role says; without one, all runs and the comparison."""
    if options.role == "plain":
        run_plain(options)
    elif options.role is not None:
        common.together(lambda: run_scheduled(options, options.role))
    else:
        return common.launch(options, __file__, tuple(RUNS), 4, batches) or compare(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(parsed()))
