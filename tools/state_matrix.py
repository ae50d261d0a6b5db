"""Save a training under each layout, go on under each other one, and compare it with the uninterrupted training.

python tools/state_matrix.py --family fsdp2 --only tp2   # saved under tp2, resumed under fsdp2
python tools/state_matrix.py --json m.json --write docs/results/state_matrix.md

What m.json holds already is not run again: a run that was stopped goes on. Delete the file to start again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matrix_table import Page, Table, main

from slapo_testing import preload_modules
from tests.integration.dialects.layouts import LAYOUTS, MAX_GRAD_NORM
from tests.integration.dialects.state_cells import AFTER, BEFORE, CLOSE, DIRECTORY, StateCell, save_on_ranks

preload_modules("deepspeed", "tests.support.cpu_megatron", "torch.distributed.fsdp", "slapo_tp", "slapo_pipeline")

DOUBLE, SINGLE = CLOSE.values()

INTRODUCTION = f"""Written by `tools/state_matrix.py`. Each layout trains a model for {BEFORE} steps on real processes
(gloo) and saves it by `engine.save(directory)`. In fresh processes, each layout then loads what each one saved into
an engine with other first values, and trains for {AFTER - BEFORE} more steps. The model has tied words, a frozen
parameter, a buffer, and a weight of two matrices; its sizes are not divisible by the ranks. AdamW has two groups and
a scheduler, and gradients are clipped to {MAX_GRAD_NORM}. Compared with the uninterrupted training in one process,
without slapo, are, after loading and at the end: weights, buffers, moments, numbers of steps and learning rates; of
every step the loss and the norm of the gradients; the RNG state of each replica that there was before, and the place
in the data: to {DOUBLE:.0e} in float64, and to {SINGLE:.0e} in float32, in which DeepSpeed and Megatron-core (with
its distributed optimizer) save and load. A warning counts as a difference. In `tp2, sequences` each rank has a shard
of the sequence between the pairs of matrices; `dp2` of target `torch` are replicas."""

PAGE = Page(
    "Checkpoints resumed under other layouts",
    INTRODUCTION,
    [Table([StateCell(layout, saved) for layout in LAYOUTS for saved in LAYOUTS], {"saved under": "mesh"})],
    ("torch", "deepspeed", "megatron-core"),
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.environ[DIRECTORY] = directory
        sys.exit(main(PAGE, __doc__ or "", prepare=save_on_ranks))
