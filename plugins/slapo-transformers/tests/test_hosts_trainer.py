"""Log lines of SlapoTrainer over ranks are those of the plain Trainer on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_runtime.launcher import run_process, run_ranks

from .training_runs import arguments, assert_equal_logs, log, plain, scheduled

Lines = list[dict[str, float]]


def reference(directory: Path, names: list[str], accumulations: list[int], replicas: int) -> list[Lines]:
    """The log lines of plain Trainers, which accumulate the batches of all replicas."""
    found = []
    for name in names:
        for steps in accumulations:
            run = plain(name, arguments(directory, gradient_accumulation_steps=steps * replicas))
            run.train()
            found.append(log(run))
    return found


def on_ranks(
    directory: Path, names: list[str], accumulations: list[int], mesh: dict[str, int], fsdp: bool
) -> list[Lines]:
    found = []
    for name in names:
        for steps in accumulations:
            also = {"activation_checkpointing": steps == 4, "eval_use_gather_object": steps == 4}
            run = scheduled(name, arguments(directory, gradient_accumulation_steps=steps, **also), mesh, fsdp=fsdp)
            run.train()
            assert run.get_total_train_batch_size(run.args) == 2 * steps * mesh.get("dp", 1)
            workers = run.get_train_dataloader().worker_init_fn
            assert workers.keywords["rank"] == run.schedule.mesh.rank("dp")
            found.append(log(run))
    return found


NAMES = ["bert", "gpt2", "llama"]


@pytest.mark.ranks
def test_log_lines_over_tp_are_those_of_one_process(tmp_path: Path) -> None:
    expected = run_process(reference, tmp_path / "one", NAMES, [1, 4], 1)
    for found in run_ranks(on_ranks, tmp_path / "ranks", NAMES, [1, 4], {"tp": 2}, False, world_size=2):
        for lines, others in zip(found, expected, strict=True):
            assert_equal_logs(lines, others)


@pytest.mark.ranks
def test_log_lines_over_replicas_are_those_of_one_process(tmp_path: Path) -> None:
    expected = run_process(reference, tmp_path / "one", NAMES, [2], 2)
    for fsdp in (False, True):
        for found in run_ranks(on_ranks, tmp_path / "ranks", NAMES, [2], {"dp": 2, "tp": 2}, fsdp, world_size=4):
            for lines, others in zip(found, expected, strict=True):
                assert_equal_logs(lines, others)
