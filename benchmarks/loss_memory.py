"""How much memory a head and its loss take at a vocabulary of 128k: plain, by ``linear_cross_entropy``, and over ranks.

The peak of the resident set over forward and backward of one process, above what it held before, hidden states and
weight included. Of two and four ranks one runs here, with its shard and with numbers of others that equal its own. What
is stated: the gradients, and the bound of a chunk (`slapo_loss.head_chunks.CHUNK_BYTES`).

Run: python benchmarks/loss_memory.py
"""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any

import torch
import torch.nn.functional as F
from report import save

from slapo_loss.chunked import linear_cross_entropy
from slapo_loss.head_chunks import CHUNK_BYTES, Vocabulary

TOKENS, CLASSES, FEATURES = 2048, 128_256, 256
SHARE, ROOM = 1.2, 1.1
"""Of the plain peak over the ranks; and over the stated bound."""


def status(field: str) -> int:
    """Bytes, of this process."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


def measured(way: str, ranks: int) -> dict[str, Any]:
    """Run once in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, FEATURES).requires_grad_()
    weight = torch.randn(CLASSES // ranks, FEATURES).mul_(FEATURES**-0.5).requires_grad_()
    labels = torch.randint(0, CLASSES, (TOKENS,))
    small = linear_cross_entropy(hidden[:2, :8], weight[:16, :8], labels[:2] % 16)  # what is started once
    small.backward()  # type: ignore[no-untyped-call]
    hidden.grad = weight.grad = None
    del small
    gc.collect()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
        clear.write("5")  # the highest resident set starts anew
    if way == "plain":
        loss = F.cross_entropy(F.linear(hidden, weight), labels)
    else:
        gather = None if ranks == 1 else (lambda own: torch.stack([own] * ranks))
        loss = linear_cross_entropy(hidden, weight, labels, vocabulary=Vocabulary(CLASSES, 0, gather))
    loss.backward()  # type: ignore[no-untyped-call]
    peak = status("VmHWM") - before
    stated = hidden.nbytes + weight.nbytes + int(ROOM * CHUNK_BYTES["cpu"])
    return {
        "way": way,
        "ranks": ranks,
        "peak_bytes": peak,
        "stated_bytes": stated,
        "logits_bytes": 4 * TOKENS * CLASSES,
    }


def main() -> None:
    rows = []
    context = multiprocessing.get_context("spawn")
    for way, ranks in (
        ("plain", 1),
        ("linear_cross_entropy", 1),
        ("linear_cross_entropy", 2),
        ("linear_cross_entropy", 4),
    ):
        with context.Pool(1) as pool:
            row = pool.apply(measured, (way, ranks))
        plain = rows[0]["peak_bytes"] if rows else row["peak_bytes"]
        row["of_plain_share"] = row["peak_bytes"] * ranks / plain
        row["of_stated"] = row["peak_bytes"] / row["stated_bytes"] if way != "plain" else None
        rows.append(row)
        print(
            f"{way:21} {ranks} ranks: peak {row['peak_bytes'] / 2**20:7.1f} MiB, {row['of_plain_share']:.3f} of the "
            "plain "
            f"one's share (allowed {SHARE})"
            + (f", {row['of_stated']:.3f} of what is stated" if row["of_stated"] is not None else ""),
            flush=True,
        )
        if way != "plain":
            assert row["of_plain_share"] <= SHARE
            assert row["of_stated"] <= 1, row
    save(
        "loss_memory",
        rows,
        tokens=TOKENS,
        classes=CLASSES,
        features=FEATURES,
        dtype="float32",
        bound=CHUNK_BYTES["cpu"],
    )


if __name__ == "__main__":
    main()
