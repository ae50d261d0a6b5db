"""Train models in shards over replicas on real ranks, and compare each with the reference model in one process.

python tools/sharded_matrix.py --family bert --only "dp 2, tp 2"   # these
python tools/sharded_matrix.py --json m.json --write docs/results/sharded_matrix.md

What m.json holds already is not run again: a run that was stopped goes on. Delete the file to start again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matrix_table import Page, Table, main

from slapo_testing import preload_modules
from tests.integration.sharded.cases import cells
from tests.integration.sharded.models import SUBJECTS

preload_modules("torch.distributed.fsdp", "slapo_tp", "slapo_loss", "slapo_fusion", "slapo_torch.sharded_data")

INTRODUCTION = """Written by `tools/sharded_matrix.py`. Each run trains a model of four blocks (T5: two and two) for
three steps in float64 on real processes (gloo) by `slapo.build(sch, data_parallel="fsdp")`, and evaluates it after
each step; the reference model does the same in one process, on all samples at once. WideResNet's batch norms see the
micro-batches of each replica there, too. Compared, to 1e-9 (to 2e-6 where the model itself computes its loss or
softmax in float32, and the scheduled one does not), are losses, norms of gradients before clipping, and every tensor
of the state dict after the last step. Tensor parallelism, kernels, checkpoints, fused heads and stages are those of
the schedules of slapo-models; ViT's blocks are traced instead of kernels. *marks*: steps say which modules are units;
*tied*: head and word embeddings share their weight; *frozen*: one block and a parameter of another; *unequal*:
samples have different numbers of tokens, by which losses are weighted (not those of pictures)."""

PAGE = Page(
    "Shards over replicas held against the reference model",
    INTRODUCTION,
    [
        Table(
            [cell for family in SUBJECTS for cell in cells(family)],
            {
                "mesh": "mesh",
                "steps": "steps",
                "parameters": "parameters",
                "micro-batches": "count",
                "clipped": "clips",
                "tokens": "pads",
            },
            say={
                "clips": lambda is_so: "yes" if is_so else "no",
                "pads": lambda is_so: "unequal" if is_so else "equal",
            },
        )
    ],
    ("torch", "transformers"),
)

if __name__ == "__main__":
    sys.exit(main(PAGE, __doc__ or "", timeout=900))
