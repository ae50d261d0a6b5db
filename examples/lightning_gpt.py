"""Train an unmodified GPT-2 by Lightning's Trainer, tensor-parallel on two processes, on real text; and let it write.

    python examples/lightning_gpt.py                    # Trainer starts the second process
    python examples/lightning_gpt.py --mesh dp=2        # two replicas
    python examples/lightning_gpt.py --mesh dp=2 tp=2   # four processes
    python examples/lightning_gpt.py --mesh             # Lightning alone, in one process
    python examples/lightning_gpt.py --resume           # goes on for another epoch, from a checkpoint of any mesh
    python examples/lightning_gpt.py --text my.txt      # on your own text

The module, its data and its loop are Lightning's as they would be without a schedule: one argument of Trainer is ours.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from masked_text import read_text, sequences, tokenizer_for
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import slapo_core as slapo
from slapo_lightning import SlapoStrategy
from slapo_models import gpt


class LanguageModel(L.LightningModule):
    """A GPT-2 with random weights, without dropout, so that runs can be compared."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=vocab_size, n_embd=width, n_layer=4, n_head=4, n_positions=128, use_cache=False,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def training_step(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, ids: torch.Tensor, number: int) -> None:
        self.log("held_out", self.model(input_ids=ids, labels=ids).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)


class Losses(L.Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["loss"]))


def split(sch: slapo.Schedule) -> None:
    """Heads, MLP, embeddings and head of each layer over ``tp``, in about ten lines: see slapo_models/decoders.py."""
    gpt(sch, kernels=False)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train, validate and write; this runs in every process."""
    L.seed_everything(0)
    options.output.mkdir(parents=True, exist_ok=True)
    text = read_text(options.text)
    tokenizer = tokenizer_for(text, vocab_size=options.vocab_size, directory=options.output)
    rows = sequences(text, tokenizer, length=options.length)
    border = len(rows) - len(rows) // 20
    replicas, processes = options.mesh.get("dp", 1), math.prod(options.mesh.values())
    training, held_out = (
        DataLoader(part, batch_size=options.batch_size // replicas, shuffle=shuffle, drop_last=True)  # type: ignore[arg-type]
        for part, shuffle in ((rows[:border], True), (rows[border:], False))
    )
    losses, module = Losses(), LanguageModel(options.vocab_size, options.width)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=SlapoStrategy(split, options.mesh) if options.mesh else "auto",
        max_epochs=2 if options.resume else 1,
        limit_train_batches=options.steps,
        limit_val_batches=4,
        gradient_clip_val=1.0,
        callbacks=[losses, ModelCheckpoint(options.output, "{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=options.progress,
        enable_model_summary=False,
    )
    trainer.fit(module, training, held_out, ckpt_path=options.output / "epoch=0.ckpt" if options.resume else None)
    strategy = trainer.strategy
    if isinstance(strategy, SlapoStrategy) and strategy.sch is not None:
        slapo.save_pretrained(strategy.sch, options.output / "gpt2")  # every process calls it
    elif trainer.is_global_zero:
        module.model.save_pretrained(options.output / "gpt2")
    written = ""
    if trainer.is_global_zero:
        model = GPT2LMHeadModel.from_pretrained(options.output / "gpt2")
        prompt = torch.tensor([tokenizer.encode("def ").ids])
        written = tokenizer.decode(model.generate(prompt, max_new_tokens=24, do_sample=False)[0].tolist())
    return {
        "losses": losses.seen,
        "held_out": float(trainer.callback_metrics["held_out"]),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "written": written,
    }


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="*", default=["tp=2"], help="sizes of its dimensions (default: tp=2)")
    parser.add_argument("--text", type=Path, help="train on this file (default: the Python standard library's source)")
    parser.add_argument("--steps", type=int, default=50, help="of an epoch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=96, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the tokenizer (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the hidden states (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build/lightning_gpt"), help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint of the first epoch")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="without a bar")
    options = parser.parse_args(arguments)
    sizes = dict(size.split("=") for size in options.mesh)
    options.mesh = {"dp": 1, "tp": 1} | {name: int(size) for name, size in sizes.items()} if sizes else {}
    return options


if __name__ == "__main__":
    chosen = parsed()
    result = run(chosen)
    if not dist.is_initialized() or dist.get_rank() == 0:
        first, last = result["losses"][0], result["losses"][-1]
        print(f"loss {first:.3f} -> {last:.3f}, held out {result['held_out']:.3f}; a process holds "
              f"{result['parameters']:,} parameters\n{result['written']}")  # fmt: skip
