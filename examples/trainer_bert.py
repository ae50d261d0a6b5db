"""Train a BERT by transformers' Trainer, tensor-parallel: two lines of a script for one process are different.

    torchrun --nproc-per-node 2 examples/trainer_bert.py        # tp 2
    torchrun --nproc-per-node 4 examples/trainer_bert.py --tp 2 # two replicas of tp 2
    python examples/trainer_bert.py                             # one process

``checkpoint-*/`` in the output directory is read by ``from_pretrained``; with ``--resume`` training goes on from the
newest one, under another number of processes if you like.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from masked_text import PAD, read_text, sequences, tokenizer_for
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)

import slapo_core as slapo
from slapo_transformers import SlapoTrainer


def split(sch: slapo.Schedule) -> None:
    """Split heads, MLPs and the embedding over tp, as Megatron-LM does."""
    for layer in sch["bert.encoder.layer.*"]:
        attention = layer["attention.self"]
        for projection in ("query", "key", "value"):
            attention[projection].shard(["weight", "bias"], axis=0)
        attention.sync("bwd_post", "all_reduce")
        layer["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["bert.embeddings.word_embeddings"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
    sch["cls.predictions"].shard("bias", axis=0, pad=True)
    sch["cls.predictions.decoder"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")


def main(options: argparse.Namespace) -> None:
    text = read_text(options.text, limit=400_000)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_for(text, vocab_size=options.vocab_size, directory=options.output.parent),
        pad_token="[PAD]",
        mask_token="[MASK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    rows = [{"input_ids": row.tolist()} for row in sequences(text, tokenizer.backend_tokenizer, length=64)]
    args = TrainingArguments(  # first: it makes the process group
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=5e-4,
        logging_steps=options.steps // 4,
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        save_steps=options.steps // 2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=options.cpu,
    )
    set_seed(args.seed)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=PAD,
        )
    )
    tp = options.tp or args.world_size
    sch = slapo.create_schedule(model, mesh={"dp": args.world_size // tp, "tp": tp})
    split(sch)
    trainer = SlapoTrainer(
        schedule=sch,
        args=args,
        train_dataset=rows[:-64],
        eval_dataset=rows[-64:],
        data_collator=DataCollatorForLanguageModeling(tokenizer),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    last = options.output / f"checkpoint-{options.steps}"
    if trainer.is_world_process_zero():
        read = BertForMaskedLM.from_pretrained(last)
        print(f"{last.name} holds a {type(read).__name__} of {read.num_parameters()} parameters")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tp", type=int, default=0, help="ranks of a replica; all of them if it is left out")
    made.add_argument("--steps", type=int, default=60)
    made.add_argument("--vocab-size", type=int, default=4001)
    made.add_argument("--text", type=Path, help="a file; else the Python standard library")
    made.add_argument("--output", type=Path, default=Path("trainer_bert"))
    made.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    made.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    return made


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(parser().parse_args())
