"""Real text for masked-language modeling: the Python standard library, tokenized by a tokenizer trained on it."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(len(SPECIAL))
IGNORED = -100  # label of a position that does not count in the loss


def read_text(file: Path | None, *, limit: int = 4_000_000) -> str:
    """The text of ``file``, or of the standard library's own source files, up to ``limit`` characters."""
    if file is not None:
        return file.read_text(encoding="utf-8")[:limit]
    parts: list[str] = []
    size = 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(source.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[-1])
        if size > limit:
            break
    return "\n".join(parts)[:limit]


def tokenizer_for(text: str, *, vocab_size: int, directory: Path) -> Tokenizer:
    """A byte-pair tokenizer trained on ``text``; kept in ``directory``, so that the next run finds it."""
    digest = hashlib.sha256(f"{vocab_size}\n{text}".encode()).hexdigest()[:16]
    file = directory / f"tokenizer-{digest}.json"
    if file.exists():
        return Tokenizer.from_file(str(file))
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.save(str(file))
    return tokenizer


def sequences(text: str, tokenizer: Tokenizer, *, length: int) -> torch.Tensor:
    """Token ids of shape (number of sequences, ``length``), each ``[CLS] ... [SEP]``."""
    lines = tokenizer.encode_batch(text.splitlines(keepends=True))
    ids = torch.tensor([token for line in lines for token in line.ids])
    body = length - 2
    rows = ids[: len(ids) // body * body].view(-1, body)
    return torch.cat([torch.full((len(rows), 1), CLS), rows, torch.full((len(rows), 1), SEP)], dim=1)


def masked_batches(
    rows: torch.Tensor, *, batch_size: int, steps: int, vocab_size: int, seed: int, predictions: int | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """``steps`` batches of ``input_ids``, ``attention_mask`` and ``labels``; the same for the same seed.

    15 % of the tokens are predicted: of these 80 % are shown as ``[MASK]``, 10 % as a random token, 10 % as they are
    (BERT, section 3.1). With ``predictions``, so many of every sequence: the loss of a batch is then the mean over its
    micro-batches, however it is cut.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = rows[torch.randint(len(rows), (batch_size,), generator=generator)]
        draw = torch.rand(ids.shape, generator=generator)
        if predictions is not None:
            order = draw.masked_fill(ids < len(SPECIAL), 1.0).argsort(dim=1).argsort(dim=1)
            draw = (order + torch.rand(ids.shape, generator=generator)) * (0.15 / predictions)
        predicted = (draw < 0.15) & (ids >= len(SPECIAL))
        shown = ids.masked_fill(predicted & (draw < 0.12), MASK)
        random_ids = torch.randint(len(SPECIAL), vocab_size, ids.shape, generator=generator)
        shown = torch.where(predicted & (draw >= 0.12) & (draw < 0.135), random_ids, shown)
        yield {
            "input_ids": shown,
            "attention_mask": torch.ones_like(ids),
            "labels": ids.masked_fill(~predicted, IGNORED),
        }
