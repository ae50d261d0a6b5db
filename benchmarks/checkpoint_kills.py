"""Kill ranks while they save and load checkpoints, and look at what is left: 200 kills in all.

Every run trains two ranks that save after each step. At a named point - the n-th call of a function - one rank, or all
of them with their worker processes, end as by ``kill -9``. Then one process loads what is left: the values must be
those of the step that the checkpoint names, and no checkpoint that a save reported as complete may be missing.

    python benchmarks/checkpoint_kills.py --kills 200 --output benchmarks/results/checkpoint_kills.json
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

import slapo_core as slapo
from slapo_runtime.checkpoints import manifest, worker, writer
from slapo_runtime.checkpoints.manifest import newest_checkpoint, step_of
from slapo_runtime.weights.checkpoint_source import CheckpointSource

STEPS = 3


@dataclass(frozen=True)
class Kill:
    """One kill.

    Args:
        call: ``"save"``, ``"asynchronous save"`` or ``"load"``.
        who: ``"one rank"`` or ``"all ranks"``.
        point: a function of the checkpoints, see ``POINTS``.
        number: of its call in the rank that is killed, from 1.
        rank: that is killed, or that comes to the point first.
    """

    call: str
    who: str
    point: str
    number: int
    rank: int


POINTS: Mapping[str, tuple[Any, str]] = {
    "begin": (manifest, "begin_step"),
    "rectangle": (writer.RankFile, "add"),
    "write": (writer.RankFile, "_write"),
    "rank file": (writer.RankFile, "finish"),
    "json": (manifest, "write_json"),
    "metadata": (writer, "write_metadata"),
    "manifest": (manifest.Manifest, "write"),
    "settle": (writer, "settle_step"),
    "keep": (manifest, "remove_checkpoint"),
    "read": (CheckpointSource, "fill"),
    "checksums": (CheckpointSource, "check_files"),
}
OF_SAVE = {"begin": 1, "rectangle": 12, "write": 60, "rank file": 1, "json": 2, "metadata": 1, "manifest": 1}
OF_SAVE |= {"settle": 1, "keep": 1}
OF_LOAD = {"read": 9, "checksums": 1}
FIRST_RANK_ONLY = {"begin", "metadata", "manifest", "settle", "keep"}


def kills(count: int, seed: int = 0) -> list[Kill]:
    """Return kills at different points, the same for every run."""
    draw, found = random.Random(seed), list[Kill]()
    for number in range(count):
        call = ("save", "asynchronous save", "load")[number % 3]
        points = OF_LOAD if call == "load" else OF_SAVE
        point = draw.choice(sorted(points))
        rank = 0 if point in FIRST_RANK_ONLY else draw.randrange(2)
        steps = STEPS if call != "load" else 1
        times = draw.randrange(1, points[point] * steps + 1)
        found.append(Kill(call, draw.choice(("one rank", "all ranks")), point, times, rank))
    return found


class Net(nn.Module):
    """Two layers, the first of which is split over both ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.fc2(torch.relu(self.fc1(x))), y)


def engine_on(mesh: dict[str, int] | None) -> Any:
    """Build the net, over both ranks or in one process."""
    sch = slapo.create_schedule(Net().double(), mesh=mesh)
    if mesh is not None:
        sch["fc1"].shard("weight", axis=0)
        sch["fc1"].shard("bias", axis=0)
        sch["fc2"].shard("weight", axis=1)
        sch["fc2"].sync("forward")
        sch["fc1"].sync("backward")
    return slapo.build(sch, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1))


def step(engine: Any) -> None:
    """Run one training step, the same in every process."""
    torch.manual_seed(engine.steps)
    engine.train_step({"x": torch.randn(4, 6, dtype=torch.float64), "y": torch.randn(4, 4, dtype=torch.float64)})


# -- in a rank --------------------------------------------------------------------------------------------------


def armed(kill: Kill, rank: int, directory: str, in_worker: bool) -> None:
    """End this process, or all of them, at the kill's point."""
    owner, name = POINTS[kill.point]
    original, calls = getattr(owner, name), collections.Counter[str]()

    def at(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if calls[name] == kill.number:
            end(kill.who, directory, in_worker)
        return original(*args, **kwargs)

    if rank == kill.rank:
        for module in (owner, writer, manifest, *(sys.modules[one] for one in _USERS if one in sys.modules)):
            if getattr(module, name, None) is original:
                setattr(module, name, at)


_USERS = ("slapo_runtime.weights.saving", "slapo_runtime.weights.loading")


def end(who: str, directory: str, in_worker: bool) -> None:
    """Kill this rank, or "all ranks" with their workers; the own process is the last one."""
    Path(directory, "killed").touch()
    own = os.getpid()
    processes = {own, os.getppid()} if in_worker else {own}
    if who == "all ranks":
        processes |= {int(file.read_text()) for file in Path(directory).glob("pid-*")}
    for process in sorted(processes, key=lambda process: process == own):
        os.kill(process, signal.SIGKILL)


def trained(rank: int, directory: str, kill: Kill, port: int) -> None:
    """Train and save, or load, until the kill."""
    os.environ |= {"OMP_NUM_THREADS": "1", "SLAPO_KILL": json.dumps([asdict(kill), rank, directory])}
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    Path(directory, f"pid-{rank}").write_text(str(os.getpid()))
    engine, runs = engine_on({"tp": 2}), Path(directory, "runs")
    if kill.call == "load":
        train_and_save(engine, runs, rank, asynchronous=False)
    torch.distributed.barrier()
    if kill.call == "asynchronous save" and kill.point != "begin":
        worker._MAIN = _MAIN.format(folder=str(Path(__file__).parent)) + worker._MAIN
    else:
        armed(kill, rank, directory, in_worker=False)
    if kill.call == "load":
        engine.load(runs)
        return
    train_and_save(engine, runs, rank, asynchronous=kill.call != "save")


_MAIN = """
import sys
sys.path.insert(0, {folder!r})
import checkpoint_kills
checkpoint_kills.armed_worker()
"""


def armed_worker() -> None:
    """End the worker process with its rank, or all of them, at the kill's point."""
    kill, rank, directory = json.loads(os.environ["SLAPO_KILL"])
    worker._SECONDS = 1.0
    armed(Kill(**kill), rank, directory, in_worker=True)


def train_and_save(engine: Any, runs: Path, rank: int, *, asynchronous: bool) -> None:
    """Save after each step, and note which checkpoints were reported as complete."""
    for _ in range(STEPS):
        step(engine)
        pending = engine.save(runs, keep=2, asynchronous=asynchronous)
        if pending is not None:
            pending.wait()
        if rank == 0:
            (runs.parent / f"complete-{engine.steps}").touch()


# -- what is left -----------------------------------------------------------------------------------------------


@dataclass
class Left:
    """What a kill left.

    Args:
        kill: the kill.
        came: whether the point was reached.
        step: of the newest complete checkpoint; 0 without one.
        reported: the newest step that a save reported as complete.
        problem: what is wrong; ``""`` for nothing.
    """

    kill: Kill
    came: bool
    step: int
    reported: int
    problem: str


def left_by(kill: Kill, expected: Mapping[int, Mapping[str, torch.Tensor]]) -> Left:
    """Run two ranks until the kill, and look at what is left."""
    with tempfile.TemporaryDirectory() as directory:
        preload = ("torch", "torch._dynamo", "slapo_runtime.build", "slapo_tp", *_USERS)
        with started(trained, 2, directory, kill, preload=preload) as ranks:
            is_hung = not ended(ranks)
        came = Path(directory, "killed").exists()
        reported = max((int(file.name.partition("-")[2]) for file in Path(directory).glob("complete-*")), default=0)
        newest = newest_checkpoint(Path(directory, "runs"))
        found = (step_of(newest) or 0) if newest is not None else 0
        problem = "processes hung" if is_hung else ""
        if not came and any(process.exitcode for process in ranks):
            problem = "a rank failed without a kill"
        if found < reported:
            problem = f"lost: {reported} was reported as complete, {found} is the newest"
        elif newest is not None:
            problem = problem or wrong(newest.parent, found, expected)
        return Left(kill, came, found, reported, problem)


@contextlib.contextmanager
def started(target: Callable[..., None], count: int, *args: Any, preload: Sequence[str]) -> Iterator[list[Any]]:
    """Start ranks, with their number before the arguments and the port of a store behind them."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    ranks = [context.Process(target=target, args=(rank, *args, store.port)) for rank in range(count)]
    for process in ranks:
        process.start()
    yield ranks


def ended(ranks: Sequence[Any], grace: float = 20) -> bool:
    """Wait for the ranks; end them as a launcher does, ``grace`` seconds after one of them failed."""
    deadline = time.monotonic() + 120
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.05)
    in_time = all(process.exitcode is not None for process in ranks) or any(process.exitcode for process in ranks)
    for process in ranks:
        process.kill()
        process.join()
    return in_time


def wrong(runs: Path, found: int, expected: Mapping[int, Mapping[str, torch.Tensor]]) -> str:
    """Load a checkpoint into one process, and compare its values with those of its step."""
    engine = engine_on(None)
    try:
        engine.load(runs)
    except slapo.SlapoError as error:
        return f"torn: {error}"
    own = values(engine)
    far = [name for name, value in expected[found].items() if not torch.allclose(own[name], value, 1e-10, 1e-12)]
    if engine.steps != found or far:
        return f"torn: step {engine.steps}, with other values of {far}"
    step(engine)  # and saves again
    engine.save(runs)
    return "" if step_of(newest_checkpoint(runs) or runs) == found + 1 else "the next save is not there"


def values(engine: Any) -> dict[str, torch.Tensor]:
    """Return weights and optimizer state."""
    states = {name: engine.optimizer.state[one] for name, one in engine.module.named_parameters()}
    moments = {f"{name} {key}": value for name, state in states.items() for key, value in state.items()}
    return {name: torch.as_tensor(one).clone() for name, one in {**engine.state_dict(), **moments}.items()}


def by_step() -> dict[int, dict[str, torch.Tensor]]:
    """Return the values after each step of one process."""
    engine, found = engine_on(None), {}
    for number in range(1, STEPS + 1):
        step(engine)
        found[number] = values(engine)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2, help="pairs of ranks at a time")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    expected, found = by_step(), list[Left]()
    with ThreadPoolExecutor(options.processes) as pool:
        for left in pool.map(left_by, kills(2 * options.kills), repeat(expected)):
            found.append(left)
            print(len(found), line(left), flush=True)
            if options.output is not None:
                options.output.write_text(json.dumps(table(found), indent=1) + "\n")
            if sum(one.came for one in found) == options.kills:
                pool.shutdown(cancel_futures=True)
                break


def line(left: Left) -> str:
    """Describe a kill, the step that is loaded after it, and what is wrong."""
    return " ".join(map(str, (*asdict(left.kill).values(), "->", left.step, left.problem or "fine")))


def table(found: Sequence[Left]) -> dict[str, Any]:
    """Return the counts and all kills."""
    killed = [left for left in found if left.came]
    return {
        "kills": len(killed),
        "runs that ended before their point": len(found) - len(killed),
        "torn taken": sum(left.problem.startswith("torn") for left in found),
        "lost": sum(left.problem.startswith("lost") for left in found),
        "with a problem": sum(bool(left.problem) for left in found),
        "runs by call": dict(collections.Counter(f"{left.kill.call}, {left.kill.who}" for left in found)),
        "all": [line(left) for left in found],
    }


if __name__ == "__main__":
    main()
