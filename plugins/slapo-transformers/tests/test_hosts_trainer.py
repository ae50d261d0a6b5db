"""Log lines of SlapoTrainer over ranks are those of the plain Trainer on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_runtime.launcher import run_process, run_ranks

from .training_runs import arguments, assert_equal_logs, log, plain, scheduled

Lines = list[dict[str, float]]
Cases = list[tuple[str, int, bool]]
"""Model, steps of accumulation, and whether parameters are in shards over replicas."""


def reference(directory: Path, cases: Cases, replicas: int) -> list[Lines]:
    """The log lines of plain Trainers, which accumulate the batches of all replicas."""
    found = []
    for name, steps, _ in cases:
        run = plain(name, arguments(directory, gradient_accumulation_steps=steps * replicas))
        run.train()
        found.append(log(run))
    return found


def on_ranks(directory: Path, cases: Cases, mesh: dict[str, int]) -> list[Lines]:
    """The log lines of scheduled models; where four batches are accumulated, blocks are recomputed by the host."""
    found = []
    for name, steps, fsdp in cases:
        args = arguments(directory, gradient_accumulation_steps=steps, gradient_checkpointing=steps == 4)
        run = scheduled(name, args, mesh, fsdp=fsdp)
        run.train()
        assert run.get_total_train_batch_size(run.args) == 2 * steps * mesh.get("dp", 1)
        workers = run.get_train_dataloader().worker_init_fn
        assert workers.keywords["rank"] == run.schedule.mesh.rank("dp")
        found.append(log(run))
    return found


OVER_TP: Cases = [("bert", 4, False), ("gpt2", 1, False), ("llama", 1, False), ("llama", 4, False)]
OVER_REPLICAS: Cases = [("bert", 2, False), ("llama", 1, True)]
OTHERS: Cases = [("gpt2", 2, False), ("llama", 4, False), ("bert", 2, True), ("gpt2", 1, True), ("llama", 4, True)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        ({"tp": 2}, OVER_TP),
        ({"dp": 2, "tp": 2}, OVER_REPLICAS),
        pytest.param({"tp": 2}, [("bert", 1, False), ("gpt2", 4, False)], marks=pytest.mark.breadth),
        pytest.param({"dp": 2, "tp": 2}, OTHERS, marks=pytest.mark.breadth),
    ],
    ids=["tp", "replicas", "tp, others", "replicas, others"],
)
def test_log_lines_are_those_of_one_process(mesh: dict[str, int], cases: Cases, tmp_path: Path) -> None:
    replicas = mesh.get("dp", 1)
    expected = run_process(reference, tmp_path / "one", cases, replicas)
    for found in run_ranks(on_ranks, tmp_path / "ranks", cases, mesh, world_size=2 * replicas):
        for lines, others in zip(found, expected, strict=True):
            assert_equal_logs(lines, others)
