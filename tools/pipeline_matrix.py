"""Train cut models on real ranks under every schedule, and compare each with the reference model in one process.

python tools/pipeline_matrix.py --family bert --family t5   # these
python tools/pipeline_matrix.py --json m.json --write docs/results/pipeline_matrix.md

What m.json holds already is not run again: a run that was stopped goes on. Delete the file to start anew.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matrix_table import Page, Table, main

from tests.integration.pipelines.matrix import cells
from tests.integration.pipelines.models import FAMILIES

INTRODUCTION = """Written by `tools/pipeline_matrix.py`. Each run trains a model of eight blocks for three steps in
float64 on real processes (gloo), and evaluates it once; the reference model does the same in one process, over the same
micro-batches. Compared, to 1e-9, are losses, norms of gradients, the output of the evaluation, and every tensor of the
state dict after the last step. AdamW and SGD with momentum, with and without clipping, attention masks given and left
out. T5 is cut in encoder and decoder; the ResNet has batch norms."""

PAGE = Page(
    "Pipelines held against the reference model",
    INTRODUCTION,
    [
        Table(
            [cell for family in FAMILIES for cell in cells(family)],
            {"mesh": "mesh", "schedule": "schedule", "stages": "stages", "micro-batches": "count"},
        )
    ],
    ("torch", "transformers"),
)

if __name__ == "__main__":
    sys.exit(main(PAGE, __doc__ or "", timeout=1800))
