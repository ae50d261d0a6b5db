"""Fine-tune a LLaMA by TRL's SFTTrainer with LoRA, tensor-parallel, and generate with it.

    torchrun --nproc-per-node 2 examples/sft_llama.py   # tp 2
    python examples/sft_llama.py                        # one process

The model is small and random, so that the script runs anywhere; ``--model`` takes the directory of another LLaMA. The
adapter in ``checkpoint-*/`` is peft's: ``PeftModel.from_pretrained(model, directory)`` reads it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from datasets import Dataset
from masked_text import read_text, tokenizer_for
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import slapo_core as slapo
from slapo_transformers import ScheduledTrainerMixin


class Trainer(ScheduledTrainerMixin, SFTTrainer):
    """TRL's trainer for a scheduled model."""


def split(sch: slapo.Schedule) -> None:
    """Split the layers and their adapters over tp."""
    for layer in sch["base_model.model.model.layers.*"]:
        attention, mlp = layer["self_attn"], layer["mlp"]
        first = [attention[name] for name in ("q_proj", "k_proj", "v_proj")] + [mlp["gate_proj"], mlp["up_proj"]]
        for projection in first:
            projection["base_layer"].shard("weight", axis=0)
            projection["lora_B.default"].shard("weight", axis=0)
            projection["lora_A.default"].sync_gradient("weight")
        for projection in (attention["o_proj"], mlp["down_proj"]):
            projection["base_layer"].shard("weight", axis=1)
            projection["lora_A.default"].shard("weight", axis=1)
            projection["lora_B.default"].sync_gradient("weight")
            projection.sync("fwd_post", "all_reduce")
        attention.sync("bwd_post", "all_reduce")
        mlp.sync("bwd_post", "all_reduce")


def small(vocab_size: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            use_cache=False,
        )
    )


def main(options: argparse.Namespace) -> None:
    text = read_text(options.text, limit=400_000)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_for(text, vocab_size=options.vocab_size, directory=options.output.parent),
        pad_token="[PAD]",
        eos_token="[SEP]",
    )
    paragraphs = [part for part in text.split("\n\n") if 40 < len(part) < 400]
    args = SFTConfig(  # first: it makes the process group
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_length=64,
        logging_steps=options.steps // 4,
        save_steps=options.steps // 2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=options.cpu,
        bf16=not options.cpu and torch.cuda.is_available(),
    )
    set_seed(args.seed)
    base = LlamaForCausalLM.from_pretrained(options.model) if options.model else small(len(tokenizer))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))
    sch = slapo.create_schedule(model, mesh={"tp": args.world_size})
    split(sch)
    dataset = Dataset.from_dict({"text": paragraphs})
    trainer = Trainer(model=model, schedule=sch, args=args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    prompt = tokenizer("import ", return_tensors="pt").to(args.device)
    model.eval()
    tokens = model.generate(input_ids=prompt["input_ids"], max_new_tokens=12, do_sample=False, pad_token_id=0)
    if trainer.is_world_process_zero():
        print("generated:", repr(tokenizer.decode(tokens[0])))
        print(
            "saved:", *sorted(file.name for file in (options.output / f"checkpoint-{options.steps}").glob("adapter*"))
        )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", type=Path, help="the directory of a LLaMA; else a small random one")
    made.add_argument("--steps", type=int, default=60)
    made.add_argument("--vocab-size", type=int, default=4001)
    made.add_argument("--text", type=Path, help="a file; else the Python standard library")
    made.add_argument("--output", type=Path, default=Path("sft_llama"))
    made.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    return made


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(parser().parse_args())
