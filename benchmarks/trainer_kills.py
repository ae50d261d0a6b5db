"""Kill ranks of transformers' Trainer at random moments, and compare the resumed runs with uninterrupted ones.

Runs of GPT-2 with dropout save, evaluate and delete older checkpoints. At the n-th call of a function, Python's or C's,
counted over the run, one of its saves, or one of its deletions, one rank or all of them end as by ``kill -9``. The run
is started again with ``resume_from_checkpoint=True``: log lines and final weights must be bitwise those of a run that
nothing interrupted, and no checkpoint that a save left as complete may be missing.

    python benchmarks/trainer_kills.py --kills 50 --output benchmarks/results/trainer_kills.json
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from checkpoint_kills import end, ended, started

import slapo_core as slapo
from slapo_testing.models import gpt2

STEPS, SAVED = 6, 2  # and a checkpoint after every second one
VOCABULARY = 32
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "tp": {"tp": 2},
    "dp x tp": {"dp": 2, "tp": 2},
    "fsdp x tp": {"dp": 2, "tp": 2},
}
PARTS = ("run", "run", "save 1", "save 2", "save 3", "deletion 1", "deletion 2")  # one of which is drawn
_PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "slapo_transformers", "slapo_models"),
    *("slapo_tp", "slapo_loss.implementations", "transformers.models.gpt2.modeling_gpt2", "deepspeed"),
)
_CLOCKED = ("runtime", "per_second", "preparation_time", "train_loss")  # which begins where a run is resumed


@dataclass(frozen=True)
class Kill:
    """One kill.

    Args:
        layout: of the run, see ``LAYOUTS``.
        who: ``"one rank"`` or ``"all ranks"``.
        part: of the run in which calls are counted: ``"run"``, ``"save 1"``, ... or ``"deletion 1"``, ...
        moment: as a share of the calls of that part in an uninterrupted run.
        rank: that counts.
    """

    layout: str
    who: str
    part: str
    moment: float
    rank: int


def kills(count: int, seed: int = 0) -> list[Kill]:
    """Return kills at random moments, the same for every run."""
    draw, found = random.Random(seed), list[Kill]()
    for number in range(count):
        layout, part = list(LAYOUTS)[number % len(LAYOUTS)], draw.choice(PARTS)
        rank = 0 if part.startswith("deletion") else draw.randrange(ranks_of(layout))
        found.append(Kill(layout, draw.choice(("one rank", "all ranks")), part, round(draw.random(), 4), rank))
    return found


def ranks_of(layout: str) -> int:
    """Return the number of ranks of a layout."""
    sizes = LAYOUTS[layout]
    return sizes.get("dp", 1) * sizes["tp"]


# -- in a rank --------------------------------------------------------------------------------------------------


def trainer_of(directory: Path, layout: str) -> Any:
    """Return a trainer that keeps the first checkpoint, which is the best, and the newest one."""
    from transformers import TrainerCallback, TrainingArguments, set_seed
    from transformers.trainer_callback import PrinterCallback
    from transformers.utils import logging

    import slapo_models
    from slapo_transformers import SlapoTrainer

    logging.set_verbosity_error()
    sizes = LAYOUTS[layout]
    args = TrainingArguments(
        str(directory / "runs"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=SAVED,
        save_steps=SAVED,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
        include_num_input_tokens_seen="all",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    set_seed(args.seed)
    sch = slapo.create_schedule(gpt2(vocab_size=VOCABULARY, n_layer=2), mesh=sizes)
    slapo_models.gpt(sch, kernels=False)
    if layout.startswith("fsdp"):
        slapo.fully_shard(sch)

    class Reported(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            (directory / f"complete-{state.global_step}").touch()

    made = SlapoTrainer(
        schedule=sch,
        args=args,
        train_dataset=samples(40, seed=2),
        eval_dataset=samples(8, seed=3),
        data_collator=padded,
        callbacks=[Reported()],
    )
    made.remove_callback(PrinterCallback)
    return made


def samples(count: int, seed: int) -> list[torch.Tensor]:
    """Return sequences of 3 to 12 tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 13, (count,), generator=draw).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=draw) for length in lengths]


def padded(batch: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad a batch to its longest sequence."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(list(batch), batch_first=True)
    return {"input_ids": ids, "labels": pad(list(batch), True, -100), "attention_mask": (ids > 0).long()}


class Calls:
    """Calls of functions on this rank, counted by part; the one that is given ends it.

    Args:
        at: the part and the number of the call; None: all are counted.
        end: ends this rank.
    """

    def __init__(self, at: tuple[str, int] | None, end: Callable[[], None]) -> None:
        self.at, self.end, self.counts = at, end, collections.Counter[str]()
        self._inside: set[str] = set()

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        for part in self._inside:
            self.counts[part] += 1
            if self.at == (part, self.counts[part]):
                self.end()

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Count calls as those of a part."""
        self._inside.add(part)
        try:
            yield
        finally:
            self._inside.remove(part)

    def count_in(self, owner: Any, name: str, part: str) -> None:
        """Count the calls within the first call of a function as those of ``"part 1"``, and so on."""
        original, numbers = getattr(owner, name), itertools.count(1)

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.of(f"{part} {next(numbers)}"):
                return original(*args, **kwargs)

        setattr(owner, name, counted)


def trained(rank: int, directory: Path, layout: str, kill: Kill | None, number: int, port: int) -> None:
    """Train until the kill, from the newest complete checkpoint if there is one; leave what came out."""
    os.environ |= {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks_of(layout)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # which the parent process holds, as torchrun does
    torch.set_num_threads(1)
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    trainer = trainer_of(directory, layout)
    from slapo_transformers.checkpoints import newest

    is_killed = kill is not None and kill.rank == rank
    at = (kill.part, number) if kill is not None and is_killed else None
    calls = Calls(at, lambda: end(kill.who if kill is not None else "", str(directory), in_worker=False))
    calls.count_in(trainer, "_save_checkpoint", "save")
    calls.count_in(shutil, "rmtree", "deletion")
    torch.distributed.barrier()
    with calls.of("run"):
        sys.setprofile(calls if kill is None or is_killed else None)
        try:
            trainer.train(resume_from_checkpoint=newest(directory / "runs") is not None)
        finally:
            sys.setprofile(None)
    lines = [
        {key: value for key, value in line.items() if not any(map(key.count, _CLOCKED))}
        for line in trainer.state.log_history
    ]
    weights = slapo.state_dict(trainer.schedule)
    torch.save({"lines": lines, "weights": weights, "calls": dict(calls.counts)}, directory / f"result-{rank}")
    torch.distributed.destroy_process_group()


# -- what is left -----------------------------------------------------------------------------------------------


@dataclass
class Left:
    """What a kill left.

    Args:
        kill: the kill.
        came: whether the moment was reached.
        step: of the checkpoint from which the run went on; 0 without one.
        problem: what is wrong; ``""`` for nothing.
    """

    kill: Kill
    came: bool
    step: int
    problem: str


Results = list[dict[str, Any]]
"""Of each rank: the lines of its log, the weights, and the calls of each part."""


def run(directory: Path, layout: str, kill: Kill | None = None, number: int = 0) -> Results | None:
    """Run the ranks of a layout to the end, or until a kill; give what they left, or None."""
    with started(trained, ranks_of(layout), directory, layout, kill, number, preload=_PRELOADED) as ranks:
        ended(ranks, grace=2)
        if any(process.exitcode for process in ranks):
            return None
    return [torch.load(directory / f"result-{rank}", weights_only=True) for rank in range(ranks_of(layout))]


def uninterrupted(layouts: Sequence[str]) -> dict[str, Results]:
    """Return the results of runs that nothing interrupts."""
    found = {}
    for layout in layouts:
        with tempfile.TemporaryDirectory() as directory:
            results = run(Path(directory), layout)
        assert results is not None, f"the run of {layout} failed"
        found[layout] = results
    return found


def left_by(kill: Kill, expected: Mapping[str, Results]) -> Left:
    """Run until the kill, go on from what is left, and compare."""
    from slapo_transformers.checkpoints import newest

    with tempfile.TemporaryDirectory() as name:
        directory, whole = Path(name), expected[kill.layout]
        number = 1 + int(kill.moment * whole[kill.rank]["calls"][kill.part])
        results = run(directory, kill.layout, kill, number)
        came = (directory / "killed").exists()
        reported = max((int(file.name.partition("-")[2]) for file in directory.glob("complete-*")), default=0)
        checkpoint = newest(directory / "runs")
        step = int(checkpoint.name.partition("-")[2]) if checkpoint is not None else 0
        if not came:
            return Left(kill, False, step, "a rank failed without a kill" if results is None else "")
        if step < reported < STEPS:  # at the end, the host deletes the newest one, which is not the best
            return Left(kill, True, step, f"lost: {reported} was complete")
        results = run(directory, kill.layout)
        return Left(kill, True, step, "the resumed run failed" if results is None else difference(results, whole))


def difference(results: Results, expected: Results) -> str:
    """Describe the first difference of a resumed run; ``""`` if there is none."""
    for rank, (found, whole) in enumerate(zip(results, expected, strict=True)):
        for line, other in zip(found["lines"], whole["lines"], strict=False):
            if line != other:
                return f"rank {rank} logged {line}, not {other}"
        if len(found["lines"]) != len(whole["lines"]):
            return f"rank {rank} logged {len(found['lines'])} lines, not {len(whole['lines'])}"
        far = [key for key, value in whole["weights"].items() if not torch.equal(found["weights"][key], value)]
        if far or found["weights"].keys() != whole["weights"].keys():
            return f"rank {rank} has other weights: {far[:3]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    expected, found = uninterrupted(list(LAYOUTS)), list[Left]()
    with ThreadPoolExecutor(options.processes) as pool:
        for left in pool.map(left_by, kills(2 * options.kills, options.seed), repeat(expected)):
            found.append(left)
            print(len(found), line(left), flush=True)
            if options.output is not None:
                options.output.write_text(json.dumps(table(found), indent=1) + "\n")
            if sum(one.came for one in found) == options.kills:
                pool.shutdown(cancel_futures=True)
                break


def line(left: Left) -> str:
    """Describe a kill, the step from which the run goes on, and what is wrong."""
    return " ".join(map(str, (*asdict(left.kill).values(), "->", left.step, left.problem or "fine")))


def table(found: Sequence[Left]) -> dict[str, Any]:
    """Return the counts and all kills."""
    killed = [left for left in found if left.came]
    return {
        "kills": len(killed),
        "runs that ended before their moment": len(found) - len(killed),
        "not resumed, or not equal": sum(bool(left.problem) for left in found),
        "kills by layout": dict(collections.Counter(f"{left.kill.layout}, {left.kill.who}" for left in killed)),
        "kills by part": dict(collections.Counter(left.kill.part.split()[0] for left in killed)),
        "resumed from step": dict(sorted(collections.Counter(left.step for left in killed).items())),
        "all": [line(left) for left in found],
    }


if __name__ == "__main__":
    main()
