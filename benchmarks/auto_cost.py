"""What the choice of a mesh costs for LLaMA of 70 billion parameters on 64 devices: CPU seconds, and memory.

    for layers in 80 160 320; do
        OMP_NUM_THREADS=1 python benchmarks/auto_cost.py --layers $layers --write
    done

The model is on the meta device, a step has 64 sequences of 4096 tokens, and a device 70 GiB. Simulations run in other
processes, one at a time; their time counts, and the largest process.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from multiprocessing import forkserver
from typing import Any

import torch
from report import RESULTS, save
from torch import nn

import slapo_core as slapo


def model(layers: int) -> nn.Module:
    """Of the shape of LLaMA 2 70B, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=32000,
        use_cache=False,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument(
        "--write", action="store_true", help="replace the row of these layers in results/auto_cost.json"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.empty(64, 4096, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    start = time.process_time()
    choice = slapo.auto_schedule(model(given.layers), batch, devices=64, memory="70GiB", device="a100", tell=print)
    own = time.process_time() - start
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()  # so that the time of the processes that it started is counted
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    largest = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, children.ru_maxrss) * 1024
    row = {
        "layers": given.layers,
        "cpu_seconds": round(own + children.ru_utime + children.ru_stime, 1),
        "of_simulations": round(children.ru_utime + children.ru_stime, 1),
        "resident_gib": round(largest / 2**30, 2),
        "mesh": choice.best.layout.mesh,
        "options": choice.options,
        "meshes": len(choice.candidates),
        "steps": len(choice.schedule.records),
    }
    print(choice, row, sep="\n")
    if given.write:
        before = json.loads((RESULTS / "auto_cost.json").read_text())["rows"]
        save("auto_cost", [*(other for other in before if other["layers"] != given.layers), row])


if __name__ == "__main__":
    main()
