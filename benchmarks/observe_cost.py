"""What an observed training step costs beside a plain one: BERT layers of several sizes, one process, one thread.

A watch alone, as ``verify`` and ``build(receipts=True)`` use it, and one that measures memory, as ``observe`` does.
Pairs in turn: the ratio of the medians, and where 95 % of such ratios lie.
"""

from __future__ import annotations

import argparse
import time

import torch
from report import interleaved, ratio_of_medians, save
from transformers import BertConfig, BertForMaskedLM

import slapo_core as slapo
from slapo_runtime.receipts.watch import Watch

ALLOWED = 3.0
SIZES = {"tiny": (128, 2, 8, 64), "mini": (256, 4, 8, 64), "small": (512, 4, 4, 64), "base": (768, 2, 4, 64)}
"""Name of a model of Google's series -> hidden size, layers (of "base", 2 of 12), samples, tokens."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    rows = []
    for name, (hidden, layers, samples, tokens) in SIZES.items():
        config = BertConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            intermediate_size=4 * hidden,
            vocab_size=1000,
        )
        schedule = slapo.create_schedule(BertForMaskedLM(config).train())
        for layer in schedule["bert.encoder.layer.*"]:
            layer.checkpoint()
        ids = torch.randint(0, 1000, (samples, tokens))

        def step(schedule: slapo.Schedule = schedule, ids: torch.Tensor = ids) -> None:
            schedule.model.zero_grad()
            schedule.model(input_ids=ids, labels=ids).loss.backward()

        for what, with_memory in (("a watch", False), ("with memory", True)):

            def observed(schedule: slapo.Schedule = schedule, with_memory: bool = with_memory) -> None:
                with Watch(schedule, with_memory=with_memory).watching():
                    step()

            step()
            observed()
            times = interleaved(observed, step, pairs=pairs, clock=time.process_time)
            found = ratio_of_medians(*times)
            rows.append({"model": name, "layers": layers, "hidden": hidden, "what": what, **found})
            rows[-1]["held"] = found["interval_95"][1] < ALLOWED
            low, high = found["interval_95"]
            print(f"BERT {name:6} {layers} layers  {what:12} x {found['ratio']:.2f} ({low:.2f} to {high:.2f})")
    save("observe_cost", rows)
    return 0 if all(row["held"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
