"""What pipelines cost: cutting BERT-large into stages, in CPU time, and a step of two stages on two real ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from report import save
from torch import nn
from transformers import BertConfig, BertForMaskedLM

import slapo_core as slapo

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
ALLOWED_CUT = 0.139  # seconds of CPU time: half of what the reference of 2024 takes for 8 stages, 209 + 69 ms
ROUNDS = 9


def bert_large() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Without values, and a batch for it."""
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(**LARGE))
        ids = torch.zeros(4, 128, dtype=torch.long)
        return model.train(), {"input_ids": ids, "attention_mask": ids.clone(), "labels": ids.clone()}


def cut() -> Iterator[dict[str, Any]]:
    """From the steps to the stages and what passes between them: ``slapo.stages(sch)``, 2 and 8 stages in turn."""
    model, batch = bert_large()
    seconds: dict[int, list[float]] = {2: [], 8: []}
    for _ in range(ROUNDS + 1):
        for stages, times in seconds.items():
            sch = slapo.create_schedule(model, example_inputs=batch)
            size = LARGE["num_hidden_layers"] // stages
            for last in range(size - 1, LARGE["num_hidden_layers"] - 1, size):
                sch[f"bert.encoder.layer.{last}"].pipeline_split()
            start = time.process_time()
            found = slapo.stages(sch)
            times.append(time.process_time() - start)
            assert len(found.partition.stages) == stages
            sch.undo(to=0)
    for stages, (first, *times) in seconds.items():
        lower, _, upper = statistics.quantiles(times, n=4)
        yield {
            "question": f"cut BERT-large on meta into {stages} stages",
            "seconds": statistics.median(times),
            "quartile_1": lower,
            "quartile_3": upper,
            "first": first,
            "allowed": ALLOWED_CUT,
        }


def main() -> None:
    """Ask everything, print it and keep it."""
    rows = []
    for row in cut():
        rows.append(row)
        low, middle, high, first, allowed = (
            f"{1000 * row[name]:.0f}" for name in ("quartile_1", "seconds", "quartile_3", "first", "allowed")
        )
        print(f"{row['question']:<44} {middle:>5} ms ({low} to {high}, first {first})   allowed {allowed} ms")
    save("pipeline_cost", rows)


if __name__ == "__main__":
    main()
