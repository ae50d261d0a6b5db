"""Train scheduled models by DeepSpeed on real ranks, and compare each with the reference model in one process.

python tools/deepspeed_matrix.py --family bert --only "dp 2, tp 2"   # these
python tools/deepspeed_matrix.py --json m.json --write docs/results/deepspeed_matrix.md

What m.json holds already is not run again: a run that was stopped goes on. Delete the file to start anew.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matrix_table import Page, Table, main

from slapo_testing import preload_modules
from tests.integration.deepspeed.cases import cells
from tests.integration.dialects.closeness import GRADIENT, LOSS, WEIGHT
from tests.integration.dialects.subjects import MAX_GRAD_NORM, STEPS, SUBJECTS

preload_modules("deepspeed")

INTRODUCTION = f"""Written by `tools/deepspeed_matrix.py`. Each run trains a model of four blocks for {STEPS} steps in
float32 on real processes (gloo) by `slapo.build(sch, target="deepspeed")`, and evaluates it once; the reference model
does the same in one process, by torch alone. All models have tied embeddings, and attention masks are given; AdamW with
an epsilon of 1e-4; DeepSpeed clips the gradients to {MAX_GRAD_NORM}, less than a half of their norm in every step.
Compared are, relative to the largest element: losses (to {LOSS:.0e}), the norm of all gradients before clipping and
each gradient as `deepspeed.utils.safe_get_full_grad` gives it out ({GRADIENT:.0e}), and every tensor of the state dict
after the last step ({WEIGHT:.0e}): about five times what a sum in another order makes of float32."""

PAGE = Page(
    "DeepSpeed held against the reference model",
    INTRODUCTION,
    [
        Table(
            [cell for family in SUBJECTS for cell in cells(family)],
            {"mesh": "mesh", "ZeRO": "zero", "micro-batches": "micro_batches"},
        )
    ],
    ("deepspeed", "torch", "transformers"),
)

if __name__ == "__main__":
    sys.exit(main(PAGE, __doc__ or ""))
