"""What the loss of a large vocabulary costs: ``linear_cross_entropy`` against the plain one, and that of torch.

Forward and backward of the head and its loss on one thread, in CPU time, in turn; ratios are those of each round.

Run: python benchmarks/loss_cost.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from report import in_turn, ratio_of, save
from torch import Tensor

from slapo_loss import Objective, Vocabulary
from slapo_loss.head_chunks import chunk_size
from slapo_loss.implementations import Chunked, Torch

SHAPES = [
    (1024, 32_000, 256, "float32"),
    (2048, 32_000, 256, "float32"),
    (256, 32_000, 1024, "float32"),
    (1024, 32_000, 64, "float32"),
    (128, 32_000, 256, "float32"),
    (512, 128_256, 128, "float32"),
    (128, 32_000, 256, "bfloat16"),
]
"""Tokens, classes, features, type of the head; the loss is in float32."""

ALLOWED = 1.0
"""Of the plain one over ours, and of torch's over ours, in the median."""


def measure(tokens: int, classes: int, features: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Ratios of CPU time of a shape."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, features).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features) / features**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, classes, (tokens,))
    given = {"bias": None, "class_weight": None, "objective": Objective(), "vocabulary": Vocabulary(classes)}

    def plain() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    def ours() -> Tensor:
        return Chunked()(hidden, weight, labels, between=Tensor.float, chunk=None, **given)

    def theirs() -> Tensor:
        return Torch()(hidden, weight, labels, between=Tensor.float, chunk=None, **given)

    def seconds(loss: Callable[[], Tensor]) -> float:
        hidden.grad = weight.grad = None
        start = time.process_time()
        loss().backward()  # type: ignore[no-untyped-call]
        return time.process_time() - start

    losses = {"plain": plain, "ours": ours, "torch": theirs}
    if not hasattr(F, "linear_cross_entropy"):
        del losses["torch"]
    values = [loss().item() for loss in losses.values()]
    assert max(values) - min(values) < 1e-2 * values[0], values
    found = [
        in_turn({name: lambda loss=loss: seconds(loss) for name, loss in losses.items()}, n) for n in range(rounds)
    ]
    of = {name: [one[name] for one in found] for name in losses}
    return {
        "tokens": tokens,
        "classes": classes,
        "features": features,
        "dtype": str(dtype).removeprefix("torch."),
        "chunk": min(
            tokens, chunk_size(classes, dtype, hidden.device, "in place" if dtype == torch.float32 else "cast")
        ),
        "seconds": {name: sorted(times)[rounds // 2] for name, times in of.items()},
        "plain / ours": ratio_of(of["plain"], of["ours"]),
        **({"torch / ours": ratio_of(of["torch"], of["ours"])} if "torch" in of else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for tokens, classes, features, dtype in SHAPES:
        row = measure(tokens, classes, features, getattr(torch, dtype), options.rounds)
        rows.append(row)
        ratios = "  ".join(
            "{} {ratio:.2f} ({quartile_1:.2f} to {quartile_3:.2f})".format(name, **row[name])
            for name in ("plain / ours", "torch / ours")
            if name in row
        )
        print(f"{tokens:5} x {classes:7,} x {features:4} {dtype:8}  {ratios}", flush=True)
        save("loss_cost", rows, allowed=ALLOWED, rounds=options.rounds, clock="CPU time, one thread")


if __name__ == "__main__":
    main()
