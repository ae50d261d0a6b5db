"""What finding and rewriting costs: bias + GELU over the 24 layers of BERT-large, in CPU time, without compiling.

Run: python benchmarks/rewrite_cost.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from report import save

import slapo_core as slapo

REPEATS = 7
ALLOWED = 50.0
"""Milliseconds of CPU time."""


def dense_gelu(x: Any, weight: Any, bias: Any) -> Any:
    return F.gelu(F.linear(x, weight, bias))


def large_bert() -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    with torch.device("meta"):
        return BertModel(BertConfig(**sizes))


def measure(model: torch.nn.Module, path: str, step: str) -> tuple[float, float]:
    """Milliseconds of CPU time for finding, and for rewriting."""
    tokens = torch.zeros(2, 16, dtype=torch.long, device="meta")
    schedule = slapo.create_schedule(model, example_inputs={"input_ids": tokens})
    layers: Any = schedule[path]
    layers.trace(flatten=True)
    start = time.process_time()
    matches = layers.find(dense_gelu)
    found = time.process_time()
    if step == "replace":
        layers.replace(dense_gelu, matches)
    else:
        layers.checkpoint(matches)
    end = time.process_time()
    assert len(matches) == 24
    schedule.undo(to=0)
    return (found - start) * 1e3, (end - found) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    model = large_bert()
    measure(model, "encoder.layer.*.intermediate", "replace")  # imports, and caches of torch
    print("bias + GELU x 24, CPU milliseconds, median of", REPEATS, f"(allowed {ALLOWED})")
    rows = []
    for path in ("encoder.layer.*.intermediate", "encoder.layer.*"):
        for step in ("replace", "checkpoint"):
            runs = [measure(model, path, step) for _ in range(REPEATS)]
            find, rewrite = (statistics.median(column) for column in zip(*runs, strict=True))
            print(f"{path:30} find {find:5.1f}  {step} {rewrite:5.1f}  together {find + rewrite:5.1f}")
            rows.append(
                {"traced": path, "step": step, "find in ms": find, "rewrite in ms": rewrite, "allowed": ALLOWED}
            )
    save("rewrite_cost", rows)


if __name__ == "__main__":
    main()
