"""Compare what two installations of slapo cost, in CPU time, on this machine.

python benchmarks/two_versions.py OLD/.venv/bin/python NEW/.venv/bin/python [PART ...]

A process of each installation stays alive, and they run each part in turn, so that both meet the same clock of the
processor. An import and a command start a process each time.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys

from report import ratio_of_medians, save

PAIRS = 41
WORKER = """
import sys, time, torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM
import slapo_core as slapo
from schedule_cost import shard_bert

torch.set_num_threads(1)

def large():
    with torch.device("meta"):
        return nn.Transformer(256, 8, 24, 24, 1024, batch_first=True)

def small():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)))

def bert():
    with torch.device("meta"):
        return BertForMaskedLM(BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096))

reused = slapo.create_schedule(bert(), mesh={"tp": 2})

def fresh():
    global reused
    reused.undo(to=0)
    reused = slapo.create_schedule(reused.model, mesh={"tp": 2})
    return reused

def sharded_bert():
    sch = fresh()
    shard_bert(sch)
    return sch

model = large()
paths = [path for path, _ in model.named_modules()]
sch = slapo.create_schedule(model, mesh={"tp": 2})

def shard():
    sch = slapo.create_schedule(small(), mesh={"tp": 2}, example_inputs=torch.randn(4, 16))
    for block in range(4):
        sch[f"{block}.0"].shard("weight", axis=0)
        sch[f"{block}.0"].shard("bias", axis=0)
        sch[f"{block}.2"].shard("weight", axis=1)
        sch[f"{block}.0"].sync("backward")
        sch[f"{block}.2"].sync("forward")
    return sch

def trace():
    sch = slapo.create_schedule(small(), example_inputs=torch.randn(4, 16))
    sch["*"].trace()
    sch["*.0"].checkpoint()
    return sch

def build():
    return slapo.build(slapo.create_schedule(small()), target="torch",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda output, batch: output.mean())

def bert_small():
    with torch.device("meta"):
        return BertForMaskedLM(BertConfig(
            hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024))

def inputs():
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    return {"input_ids": ids, "attention_mask": ids.clone()}

def traced_bert():
    sch = slapo.create_schedule(bert_small(), example_inputs=inputs())
    sch["bert.encoder.layer.*"].trace()
    return sch

def bias_gelu(x, weight, bias):
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))

found_in = traced_bert()

def cut_bert():
    global cut
    cut.undo(to=0)
    cut = slapo.create_schedule(cut.model, example_inputs=inputs())
    cut["bert.encoder.layer.1"].pipeline_split()
    return cut

cut = slapo.create_schedule(bert_small())

def traced_engine():
    sch = trace()
    return slapo.build(sch, target="torch", optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda output, batch: output.square().mean())

engine = traced_engine()
batch = torch.randn(4, 16)

parts = {  # what is prepared, and what is timed
    "create": (large, slapo.create_schedule),
    "visit": (lambda: sch, lambda sch: [(sch[path].path, sch[path].module) for path in paths]),
    "create BERT-large": (lambda: reused.undo(to=0), lambda _: slapo.create_schedule(reused.model, mesh={"tp": 2})),
    "shard BERT-large": (fresh, shard_bert),  # the workload of schedule_cost.py
    "undo BERT-large": (sharded_bert, lambda sch: sch.undo(to=0)),
    "shard": (lambda: None, lambda _: shard()),
    "undo": (shard, lambda sch: sch.undo(to=0)),
    "trace": (lambda: None, lambda _: trace()),
    "verify": (trace, lambda sch: slapo.verify(sch, torch.randn(4, 16))),
    "build": (lambda: None, lambda _: build()),
    "step": (lambda: None, lambda _: [engine.train_step(batch) for _ in range(20)]),
    "find": (lambda: None, lambda _: [found_in.find(bias_gelu) for _ in range(20)]),
    "partition": (cut_bert, slapo.stages),
}
print(*parts, sep=",", flush=True)
for line in sys.stdin:
    prepare, run = parts[line.strip()]
    prepared = prepare()
    start = time.process_time()
    run(prepared)
    print(time.process_time() - start, flush=True)
"""
COMMANDS = {
    "import slapo_core": ("-c", "import slapo_core"),
    "slapo plugins list": ("-m", "slapo_core.cli.main", "plugins", "list"),
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
FOLDER = os.path.dirname(os.path.abspath(__file__))


class Installation:
    """A Python with slapo, and a process of it that runs the parts."""

    def __init__(self, python: str) -> None:
        self.python = os.path.abspath(python)  # processes start in another folder
        command = [self.python, "-W", "ignore", "-c", WORKER]
        self.worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**ENVIRONMENT, "PYTHONPATH": FOLDER},
        )
        self.parts = self._answer().strip().split(",")

    def milliseconds(self, part: str) -> float:
        """The CPU time of a part; of a command, with the interpreter's start."""
        if part in COMMANDS:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [self.python, *COMMANDS[part]]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", env=ENVIRONMENT)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return 1000 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert self.worker.stdin is not None
        print(part, file=self.worker.stdin, flush=True)
        return 1000 * float(self._answer())

    def _answer(self) -> str:
        assert self.worker.stdout is not None
        line = self.worker.stdout.readline()
        if not line:
            sys.exit(f"{self.python} ended")
        return line


def main(old_python: str, new_python: str, *parts: str) -> None:
    old, new = Installation(old_python), Installation(new_python)
    rows = []
    for part in parts or (*old.parts, *COMMANDS):
        times: dict[Installation, list[float]] = {old: [], new: []}
        for pair in range(PAIRS + 3):
            for one in (old, new) if pair % 2 == 0 else (new, old):
                times[one].append(one.milliseconds(part))
        before, after = times[old][3:], times[new][3:]  # the first ones import and fill caches
        medians = {"old_ms": statistics.median(before), "new_ms": statistics.median(after)}
        rows.append({"part": part, **medians, **ratio_of_medians(after, before)})
        low, high = rows[-1]["interval_95"]
        times_ms = f"{medians['old_ms']:9.2f} {medians['new_ms']:9.2f} ms"
        print(f"{part:20} {times_ms}  {rows[-1]['ratio']:.3f} ({low:.3f}..{high:.3f})")
    if not parts:
        save("two_versions", rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
