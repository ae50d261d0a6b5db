"""Train scheduled models by Megatron-core on real ranks, and compare each with the reference model in one process.

python tools/megatron_matrix.py --family bert --only "dp 2, tp 2"   # these
python tools/megatron_matrix.py --json m.json --write docs/results/megatron_matrix.md

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
from tests.integration.dialects.closeness import GRADIENT, LOSS, WEIGHT
from tests.integration.dialects.same_file import file_cells
from tests.integration.dialects.subjects import MAX_GRAD_NORM, STEPS, SUBJECTS
from tests.integration.megatron.cases import cells, sequence_cells

preload_modules("deepspeed", "tests.support.cpu_megatron")

INTRODUCTION = f"""Written by `tools/megatron_matrix.py`. Each run trains a model of four blocks for {STEPS} steps in
float32 on real processes (gloo) by `slapo.build(sch, target="megatron")`, and evaluates it once; the reference model
does the same in one process, by torch alone. All models have tied embeddings, and attention masks are given; Adam with
an epsilon of 1e-4, and weight decay for matrices; Megatron clips the gradients to {MAX_GRAD_NORM}, less than a half of
their norm in every step. Compared are, relative to the largest element: losses (to {LOSS:.0e}), the norm of all
gradients before clipping and each main gradient as the optimizer gets it ({GRADIENT:.0e}), and every tensor of the
state dict after the last step ({WEIGHT:.0e}): about five times what a sum in another order makes of float32."""

ONE_FILE = """One schedule file - tensor parallelism, parts of graphs replaced and fused, blocks recomputed, and a cut
where the mesh has stages - is replayed under `target="torch"`, `target="deepspeed"` and `target="megatron"`. The losses
of every step and the state dicts are compared with each other, and with those of the reference model."""

COLUMNS = {"mesh": "mesh", "stages a rank": "virtual", "micro-batches": "micro_batches", "optimizer": "distributed"}
SAY = {"distributed": lambda distributed: "distributed" if distributed else "plain"}

PAGE = Page(
    "Megatron-core held against the reference model",
    INTRODUCTION,
    [
        Table(
            [cell for family in SUBJECTS for cell in cells(family)],
            COLUMNS,
            say=SAY,
        ),
        Table(
            sequence_cells(),
            COLUMNS,
            "Sequence parallelism",
            "Between the pairs of matrices each rank along `tp` has a shard of the sequence; words are split, too.",
            say=SAY,
        ),
        Table(
            file_cells(),
            {"mesh": "mesh", "ZeRO": "zero", "micro-batches": "micro_batches"},
            "The same file under all targets",
            ONE_FILE,
        ),
    ],
    ("megatron-core", "deepspeed", "torch", "transformers"),
)

if __name__ == "__main__":
    sys.exit(main(PAGE, __doc__ or ""))
