"""How much memory a rank takes to build a model from the meta device under ZeRO-3, where DeepSpeed partitions it.

Above the import baseline, which is what the process held when all was imported, DeepSpeed started and the model on the
meta device scheduled. Its partition is what DeepSpeed keeps for good on a rank, of the parameters' elements divided by
the replicas: a partition of each in the precision of the model; with an optimizer also a master of it in float32, and a
gradient, in the precision of the model. What is allowed on top of the partition: the largest parameter, and 400 MiB.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from typing import Any

import torch
from report import save
from transformers import BertConfig, BertForMaskedLM

import slapo_core as slapo
from slapo_deepspeed.runtime import start
from slapo_testing import preload_modules, run_ranks

ALLOWED_MIB = 400
CONFIG = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def status(field: str) -> float:
    """MiB, of this process."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measured(replicas: int, layers: int, dtype: str, *, trains: bool) -> dict[str, Any]:
    """Build once in this process, a rank of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(**{**CONFIG, "num_hidden_layers": layers}))
    sch = slapo.create_schedule(model, mesh={"dp": replicas})
    start(sch.mesh)
    sizes = [parameter.numel() for parameter in model.parameters()]
    largest = max(sizes) * 4 / 2**20
    width = 2 if dtype == "bf16" else 4
    partition = sum(sizes) / replicas * (width + (4 + width if trains else 0)) / 2**20
    gc.collect()
    baseline = status("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
        clear.write("5")  # the highest resident set starts anew
    config: dict[str, Any] = {"zero_optimization": ZERO}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine = slapo.build(sch, target="deepspeed", config=config, optimizer=adamw if trains else None)
    peak, after = status("VmHWM") - baseline, status("VmRSS") - baseline
    whole = sum(sizes) * 4 / 2**20
    engine.close()
    return {"peak": peak, "after": after, "partition": partition, "largest": largest, "whole": whole, "base": baseline}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24, help="of BERT-large (default: %(default)s)")
    options = parser.parse_args()
    preload_modules("deepspeed", "transformers.models.bert.modeling_bert")
    rows: list[dict[str, Any]] = []
    for dtype in ("fp32", "bf16"):
        for trains in (False, True):
            found = run_ranks(
                measured,
                options.replicas,
                options.layers,
                dtype,
                trains=trains,
                world_size=options.replicas,
                timeout=1800,
            )
            for rank, one in enumerate(found):
                allowed = one["partition"] + one["largest"] + ALLOWED_MIB
                rows.append({"dtype": dtype, "trains": trains, "rank": rank, **one, "allowed": allowed})
                what = f"{dtype}, {'with' if trains else 'without'} an optimizer, rank {rank}"
                print(
                    f"{what}: peak {one['peak']:.0f} MiB over {one['base']:.0f}, allowed {allowed:.0f} (partition "
                    f"{one['partition']:.0f}, largest parameter {one['largest']:.0f}, {ALLOWED_MIB}); at the end "
                    f"{one['after']:.0f}; the whole model {one['whole']:.0f}",
                    flush=True,
                )
    save("zero3_memory", rows)


if __name__ == "__main__":
    main()
