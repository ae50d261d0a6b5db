"""Predicted peaks against ``torch.cuda.max_memory_allocated`` over thirty schedules; needs a CUDA device.

    python benchmarks/estimate_gpu.py [--cases 30] [--write]

Where there is none it says so and ends with 2. Each schedule trains two steps on the device, in a process of its own;
``tp`` is played by the fake group, so that one device does for any mesh. What the allocator rounds up (blocks of 512
bytes) is in the counted number and not in the predicted one; so is cuBLAS's work space, which is allocated as a tensor.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import slapo_core as slapo
from slapo_estimate.results import Memory
from slapo_runtime.launcher import run_process
from tests.support.estimate_cases import CASES, OPTIMIZERS, Case
from tests.support.estimate_judge import predicted, train_two_steps

RESULT = Path(__file__).parent / "results" / "estimate_gpu.json"
LIMIT = 0.05
SCALE = 8  # lengths and batches of the cases are those of a CPU


def larger(case: Case) -> Case:
    """The case with activations that matter on a GPU."""
    import dataclasses

    if case.family == "resnet":
        return dataclasses.replace(case, batch=case.batch * SCALE, length=case.length * SCALE // 2)
    return dataclasses.replace(case, batch=case.batch * SCALE, length=min(case.length * SCALE // 2, 512))


def counted(case: Case) -> int:
    """Bytes at the peak of two steps on the device; the process must have no process group."""
    torch.manual_seed(0)
    torch.cuda.init()
    if case.tp > 1:
        dist.init_process_group("fake", rank=0, world_size=case.tp, store=FakeStore())
    with torch.device("cuda"):
        model = case.model()
    schedule = slapo.create_schedule(model, mesh=case.mesh)
    case.schedule(schedule)
    schedule.seal()
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), case.inputs())
    del model
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    optimizer = OPTIMIZERS[case.optimizer]([p for p in schedule.model.parameters() if p.requires_grad])
    train_two_steps(schedule.model, batch, case.accumulate, optimizer)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main() -> int:
    """Run, print, and end with 1 if a peak is further off than 5 %."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--write", action="store_true", help=f"to {RESULT.name}")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured", file=sys.stderr)
        return 2
    rows, worst = [], 0.0
    for case in (larger(each) for each in CASES[:: max(1, len(CASES) // given.cases)][: given.cases]):
        memory: Memory = run_process(predicted, case, timeout=600.0)
        peak = run_process(counted, case, timeout=600.0)
        off = (memory.total - peak) / peak
        worst = max(worst, abs(off))
        rows.append({"case": vars(case), "predicted": memory.total, "counted": peak, "off": round(off, 5)})
        print(f"{off:+.2%}  {memory.total:>14,} {peak:>14,}  {case}", flush=True)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cases": len(rows),
        "worst": round(worst, 5),
        "within_5_percent": sum(abs(row["off"]) <= LIMIT for row in rows),  # type: ignore[arg-type]
        "rows": rows,
    }
    if given.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if worst > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
