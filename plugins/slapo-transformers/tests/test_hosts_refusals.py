"""What a host does not carry out is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import slapo_core as slapo
from slapo_transformers import SlapoTrainer, accelerators, checkpoints, prepare
from tests.messages import Messages

from .training_runs import arguments, log, model, trainer

ARGUMENTS: dict[str, Any] = {
    "torch_compile": True,
    "use_liger_kernel": True,
    "deepspeed": "zero.json",
    "fsdp": "full_shard",
    "parallelism_config": "ParallelismConfig(tp_size=2)",
    "save_on_each_node": True,
    "train_sampling_strategy": "batch_rebalance",
    "_n_gpu": 2,
}


def changed(directory: Path, name: str, value: Any) -> Any:
    """Return arguments with one value, which the machine might refuse by itself."""
    args = arguments(directory)
    setattr(args, name, value)
    return args


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_beside_the_schedule_are_refused(name: str, tmp_path: Path, message: Messages) -> None:
    sch = slapo.create_schedule(model("llama"))
    with pytest.raises(slapo.ArgumentError) as caught:
        trainer(SlapoTrainer, changed(tmp_path, name, ARGUMENTS[name]), schedule=sch)
    message(caught, "GPUs" if name == "_n_gpu" else name)


def test_samples_that_one_process_sends_are_refused(tmp_path: Path, message: Messages) -> None:
    args = arguments(tmp_path, accelerator_config={"dispatch_batches": True})
    with pytest.raises(slapo.ArgumentError) as caught:
        trainer(SlapoTrainer, args, schedule=slapo.create_schedule(model("llama")))
    message(caught, "dispatch_batches")


def test_recomputing_twice_is_refused(tmp_path: Path, message: Messages) -> None:
    sch = slapo.create_schedule(model("llama"))
    sch["model.layers.*"].checkpoint()
    with pytest.raises(slapo.ArgumentError) as caught:
        trainer(SlapoTrainer, changed(tmp_path, "activation_checkpointing", True), schedule=sch)
    message(caught, "recompute")
    sch.undo()
    sch.undo()
    assert trainer(SlapoTrainer, changed(tmp_path, "activation_checkpointing", True), schedule=sch).schedule is sch


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"cp": 2, "tp": 2}, {"tp": 2}], ids=["stages", "context", "abstract"])
def test_meshes_that_no_host_runs_are_refused(mesh: dict[str, int], tmp_path: Path, message: Messages) -> None:
    sch = slapo.create_schedule(model("llama"), mesh=mesh)
    with pytest.raises(slapo.MeshError) as caught:
        trainer(SlapoTrainer, arguments(tmp_path), schedule=sch)
    message(caught, str(mesh))
    with pytest.raises(slapo.MeshError):
        prepare(accelerate.Accelerator(cpu=True), sch, torch.optim.SGD(sch.model.parameters()))


def test_a_mesh_of_another_launch_is_refused(message: Messages) -> None:
    sch = slapo.create_schedule(model("llama"), mesh={"tp": 1})
    with pytest.raises(slapo.MeshError) as caught:
        accelerators.check_schedule(sch, 2)
    message(caught, "world size 2")


def test_what_is_not_the_schedule_of_the_model_is_refused(tmp_path: Path, message: Messages) -> None:
    sch, args = slapo.create_schedule(model("llama")), arguments(tmp_path)
    for given in ({"schedule": sch.model}, {"schedule": sch, "model": model("llama")}, {"schedule": "tp"}):
        with pytest.raises(slapo.ArgumentError) as caught:
            trainer(SlapoTrainer, args, **given)
        message(caught, "schedule")
    with pytest.raises(slapo.ArgumentError) as caught:
        trainer(SlapoTrainer, args, schedule=sch, model_init=lambda: model("llama"))
    message(caught, "model_init")


def test_a_function_makes_the_schedule_after_model_init(tmp_path: Path) -> None:
    made = []

    def make(fresh: Any) -> slapo.Schedule:
        made.append(slapo.create_schedule(fresh))
        return made[-1]

    args = arguments(tmp_path, max_steps=1, eval_strategy="no")
    run = trainer(SlapoTrainer, args, model_init=lambda: model("llama"), schedule=make)
    run.train()
    assert len(made) == 2
    assert run.schedule is made[-1]
    assert run.model is run.schedule.model is run.accelerator.schedule.model
    fresh = model("llama")
    assert trainer(SlapoTrainer, args, model=fresh, schedule=make).schedule.model is fresh


def test_older_checkpoints_stay_until_a_save_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "eval_strategy": "no"}
    run = trainer(SlapoTrainer, arguments(tmp_path, **options), schedule=slapo.create_schedule(model("llama")))
    written = checkpoints.write_manifest

    def full(directory: Path, mesh: Any) -> None:
        if directory.name == "checkpoint-2":
            raise OSError("no space left on device")
        written(directory, mesh)

    monkeypatch.setattr("slapo_transformers.trainer.write_manifest", full)
    with pytest.raises(OSError, match="no space"):
        run.train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    assert checkpoints.newest(tmp_path) == tmp_path / "checkpoint-1"
    assert run.args.save_total_limit == 1
    monkeypatch.undo()
    run.train(resume_from_checkpoint=True)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3"}
    run.train(resume_from_checkpoint=True)
    assert [line["step"] for line in log(run)] == [1, 2, 3, 3]  # no step after the last one
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()  # as a deletion that was killed midway
    assert checkpoints.newest(tmp_path) is None
    with pytest.raises(slapo.ArgumentError, match="no complete checkpoint"):
        trainer(SlapoTrainer, arguments(tmp_path / "empty"), schedule=run.schedule).train(resume_from_checkpoint=True)
