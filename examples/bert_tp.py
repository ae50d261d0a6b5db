"""Train an unmodified BERT tensor-parallel on two processes, and compare it with the same run unscheduled.

    python examples/bert_tp.py                 # both runs, the comparison and the plot
    python examples/bert_tp.py --text my.txt   # on your own text
    python examples/bert_tp.py --device cpu    # also where there is a GPU

The script starts ``torchrun`` for the scheduled run by itself. It ends with status 1 if the loss curves part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import common
import torch
import torch.distributed as dist
from masked_text import masked_batches
from transformers import BertConfig, BertForMaskedLM

import slapo_core as slapo


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


def split_layers(sch: slapo.Schedule) -> None:
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


def schedule_bert(sch: slapo.Schedule) -> None:
    """Every layer split over the ranks; two of them are recomputed in the backward pass."""
    split_layers(sch)
    sch["bert.encoder.layer.[01]"].checkpoint()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-4)


def batches(options: argparse.Namespace, *, seed: int, steps: int, held_out: bool = False) -> list[Any]:
    rows = common.rows_of(options, held_out=held_out)
    return list(
        masked_batches(rows, batch_size=options.batch_size, steps=steps, vocab_size=options.vocab_size, seed=seed)
    )


def run_plain(options: argparse.Namespace, attention: str | None) -> None:
    """The model as its author wrote it, in an ordinary PyTorch loop."""
    model = make_model(options.vocab_size, attention).to(common.device_of(options)).train()
    common.run_plain(options, model, make_optimizer(model.parameters()), batches)


def run_scheduled(
    options: argparse.Namespace,
    device: torch.device,
    schedule: Callable[[slapo.Schedule], None],
    attention: str | None,
) -> None:
    """The same model under a schedule; this runs in every process that torchrun starts."""
    torch.set_num_threads(1)
    model = make_model(options.vocab_size, attention).to(device).train()
    example = common.on(device, {name: rows[:2] for name, rows in batches(options, seed=3, steps=1)[0].items()})
    sch = slapo.create_schedule(model, mesh={"tp": dist.get_world_size()}, example_inputs=example)
    schedule(sch)
    report = slapo.verify(sch, example)
    if dist.get_rank() == 0:
        print(sch, report, sep="\n\n", flush=True)
    engine = slapo.build(sch, target="torch", optimizer=make_optimizer)
    common.run_engine(options, "scheduled", sch, engine, batches, device=device)


def compare(options: argparse.Namespace) -> int:
    """Print both runs side by side, plot them, and give the exit status."""
    return common.compare(options, ("scheduled",), "The same BERT, with and without a schedule")


def parser(name: str = "bert_tp", description: str | None = __doc__) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(parser, name, ("scheduled",))
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default: %(default)s)")
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
        common.together(lambda device: run_scheduled(options, device, schedule, attention), options)
    else:
        return common.launch(options, script, ("scheduled",), 2, batches) or compare(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
