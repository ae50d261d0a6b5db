"""What static graphs cost, in CPU time: tracing the 24 layers of BERT-large, and a call of a traced block.

Each question is a function that gives its rows; more of them (find, rewrite) join ``QUESTIONS``.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from report import interleaved, ratio_of, save
from torch import nn
from transformers import BertConfig, BertModel

import slapo_core as slapo

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
ALLOWED_TRACE, ALLOWED_CALL = 0.5, 1.1
IDS = {"input_ids": torch.zeros(2, 16, dtype=torch.long)}


def bert(sizes: dict[str, int], device: str = "cpu") -> nn.Module:
    """A BERT with a small vocabulary."""
    with torch.device(device):
        return BertModel(BertConfig(vocab_size=1000, **sizes)).eval()


def trace_layers() -> Iterator[dict[str, Any]]:
    """``create_schedule(model, example_inputs=...)`` and ``sch["encoder.layer.*"].trace()``."""
    for device in ("meta", "cpu"):
        model = bert(LARGE, device)
        ids = {name: value.to(device) for name, value in IDS.items()}
        for flatten in (False, True):
            seconds = []
            for _ in range(7):
                start = time.process_time()
                sch = slapo.create_schedule(model, example_inputs=ids)
                sch["encoder.layer.*"].trace(flatten=flatten)
                seconds.append(time.process_time() - start)
                sch.undo(to=0)
            yield {
                "question": f"trace 24 layers, {device}{', flatten' if flatten else ''}",
                "seconds": statistics.median(seconds[1:]),
                "first": seconds[0],
                "allowed": ALLOWED_TRACE,
            }


def call_a_block() -> Iterator[dict[str, Any]]:
    """A forward of one block of a tiny BERT, traced against untraced, in turn; without gradients, the harder case."""
    torch.set_num_threads(1)
    plain = bert(TINY)
    x = torch.randn(2, 16, TINY["hidden_size"])
    for flatten in (False, True):
        model = copy.deepcopy(plain)
        slapo.create_schedule(model, example_inputs=IDS)["encoder.layer.*"].trace(flatten=flatten)
        blocks = [one.encoder.layer[0] for one in (model, plain)]

        def run(block: Any) -> Callable[[], None]:
            def calls() -> None:
                for _ in range(20):
                    block(x, None, encoder_hidden_states=None, past_key_values=None, position_ids=None)

            return calls

        with torch.no_grad():
            run(blocks[0])(), run(blocks[1])()
            traced, untraced = interleaved(run(blocks[0]), run(blocks[1]), pairs=60, clock=time.process_time)
        name = f"call of a block{', flatten' if flatten else ''}"
        each = statistics.median(untraced) / 20
        yield {"question": name, "untraced": each, **ratio_of(traced, untraced), "allowed": ALLOWED_CALL}


QUESTIONS: tuple[Callable[[], Iterator[dict[str, Any]]], ...] = (trace_layers, call_a_block)


def main() -> None:
    """Ask everything, print it and keep it."""
    rows = []
    for question in QUESTIONS:
        for row in question():
            rows.append(row)
            value = row.get("ratio", row.get("seconds"))
            shown = f"{value:.3f}" if "ratio" in row else f"{1000 * value:.0f} ms"
            bound = row["allowed"] if "ratio" in row else f"{1000 * row['allowed']:.0f} ms"
            print(f"{row['question']:<36} {shown:>9}   allowed {bound}", flush=True)
    save("graph_cost", rows)


if __name__ == "__main__":
    main()
