"""Hosts as they are, given a scheduled model: they train right, or the first forward names the class to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_runtime.launcher import run_process, run_ranks

from .training_runs import arguments, assert_equal_logs, log, model, padded, plain, samples, schedule, trainer

Lines = list[dict[str, float]]


def checkpointed(mesh: dict[str, int] | None) -> Any:
    sch = slapo.create_schedule(model("llama"), mesh=mesh)
    sch["model.layers.*"].checkpoint()
    return sch.model


def reference(directory: Path) -> tuple[Lines, Lines]:
    """The log lines of the reference model, and of a scheduled one on the same rank."""
    from transformers import Trainer

    options = {"gradient_accumulation_steps": 2, "eval_strategy": "no"}
    run = plain("llama", arguments(directory, **options))
    own = trainer(Trainer, arguments(directory, **options), model=checkpointed(None))
    run.train()
    own.train()
    return log(run), log(own)


def on_ranks(directory: Path) -> tuple[list[str], Lines]:
    """What hosts refuse, and the log lines of replicas."""
    from accelerate import Accelerator
    from transformers import Trainer

    refused = []
    run = trainer(Trainer, arguments(directory), model=schedule("llama", model("llama"), {"tp": 2}).model)
    for call in (run.train, run.evaluate):
        with pytest.raises(slapo.SlapoError) as caught:
            call()
        refused.append(str(caught.value))
        run = trainer(Trainer, arguments(directory), model=schedule("llama", model("llama"), {"tp": 2}).model)

    accelerator = Accelerator(cpu=True)
    made = schedule("llama", model("llama"), {"tp": 2}).model
    loader = torch.utils.data.DataLoader(samples(4, seed=2), batch_size=2, collate_fn=padded)  # type: ignore[arg-type]
    prepared, _, loader = accelerator.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1), loader)
    with pytest.raises(slapo.MeshError) as caught:
        prepared(**next(iter(loader)))
    refused.append(str(caught.value))

    args = arguments(directory, eval_strategy="no")
    replicas = trainer(Trainer, args, model=checkpointed({"dp": 2}))
    replicas.train()
    return refused, log(replicas)


@pytest.mark.ranks
def test_hosts_as_they_are_train_right_or_are_refused(tmp_path: Path) -> None:
    expected, own = run_process(reference, tmp_path / "one")
    assert_equal_logs(own, expected)
    for (train, evaluate, loop), replicas in run_ranks(on_ranks, tmp_path / "ranks", world_size=2):
        for text in (train, loop):
            assert "slapo_transformers.SlapoTrainer(schedule=sch" in text
            assert "DistributedDataParallel treats the tensors" in text
        assert "the batch: input_ids" in evaluate
        assert_equal_logs(replicas, expected)
