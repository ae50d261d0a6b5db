"""What an estimate of a LLaMA of 405 billion parameters takes: seconds of CPU time, and memory, of one core.

126 layers, tp 8 x dp 16, every layer checkpointed, bfloat16, one sequence of 8192 tokens: the model, the schedule, two
training steps under all trackers.

    OMP_NUM_THREADS=1 python benchmarks/estimate_cost.py [--layers 126] [--pp 9] [--write]

With pp the first of its ranks is played, with as many micro-batches as stages.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from slapo_estimate.simulation import Request, estimate_rank
from slapo_estimate.source import Functions

RESULT = Path(__file__).parent / "results" / "estimate_cost.json"
MESH = {"dp": 16, "tp": 8}


def model(layers: int) -> nn.Module:
    """Of the shape of LLaMA 3.1 405B, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
        torch_dtype="bfloat16",
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def schedule(sch: slapo.Schedule) -> None:
    """Megatron's split, and every layer checkpointed."""
    for layer in sch["model.layers.*"]:
        node: Any = layer
        for name in ("q_proj", "k_proj", "v_proj"):
            node[f"self_attn.{name}"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        node["self_attn.o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        for name in ("gate_proj", "up_proj"):
            node[f"mlp.{name}"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        node["mlp.down_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        node.checkpoint()


def cut(sch: slapo.Schedule, layers: int, pp: int) -> None:
    """The same, in stages of equally many layers."""
    schedule(sch)
    for last in range(layers // pp - 1, layers - 1, layers // pp):
        sch[f"model.layers.{last}"].pipeline_split()


def main() -> None:
    """Run it in this process, and say what it took."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layers", type=int, default=126)
    arguments.add_argument("--pp", type=int, default=1)
    arguments.add_argument("--write", action="store_true", help=f"to {RESULT.name}")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    pp = given.pp
    mesh = {"dp": 2, "pp": pp, "tp": 8} if pp > 1 else MESH
    ids = torch.empty(pp, 8192, dtype=torch.long, device="meta")
    steps = partial(cut, layers=given.layers, pp=pp) if pp > 1 else schedule
    source = Functions(partial(model, given.layers), steps)
    batch = {"input_ids": ids, "labels": ids}
    config = {"microbatches": pp} if pp > 1 else {}
    request = Request(source, mesh, 0, (0,), batch, partial(torch.optim.AdamW, lr=1e-4), config=config)
    begun = time.process_time()
    found = estimate_rank(request)
    seconds = time.process_time() - begun
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {
        "layers": given.layers,
        "mesh": mesh,
        "cpu_seconds": round(seconds, 1),
        "resident_gib": round(resident / 2**30, 2),
        "peak_gib": round(found.memory.total / 2**30, 2),
        "peak": {name: value for name, value in vars(found.memory).items() if value},
        "collectives": len(found.collectives),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }
    print(json.dumps(result, indent=1))
    if given.write and pp == 1:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
