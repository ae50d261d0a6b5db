"""A scheduled model under Lightning's Trainer logs, saves and resumes as under Lightning alone, in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from slapo_lightning import SlapoStrategy
from slapo_runtime.data import sampler
from slapo_testing import preload_modules, run_ranks

from .lightning_model import LAYOUTS, SAMPLES, Module, data, fitted, quiet, saved, split, trainer_of

preload_modules("lightning.pytorch", "torchmetrics", "torch.distributed.fsdp", "slapo_tp", "slapo_lightning")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

RESUMED = {"tp": "fsdp x tp", "dp x tp": "dp x tp", "fsdp x tp": "dp x tp"}
"""Layout -> that of the checkpoint from which its second epoch goes on."""
BY_TWO = ("dp x tp", "fsdp x tp")

Runs = dict[str, Any]


def _alone(root: Path) -> Runs:
    return {"alone": fitted(root / "alone", None, epochs=2), "two": fitted(root / "two", None, accumulate=2)}


def _scheduled(root: Path) -> Runs:
    runs = {name: fitted(root / name, name, epochs=2) for name in LAYOUTS}
    runs |= {f"{name}, two": fitted(root / f"{name}, two", name, accumulate=2) for name in BY_TWO}
    for name, before in RESUMED.items():
        run = f"{name}, resumed"
        runs[run] = fitted(root / run, name, epochs=2, resume=root / before / "epoch=0.ckpt")
    return runs


def _alone_again(root: Path) -> Runs:
    return {"alone, resumed": fitted(root / "alone, resumed", None, epochs=2, resume=root / "dp x tp" / "epoch=0.ckpt")}


@pytest.fixture(scope="module")
def runs() -> Iterator[tuple[Path, Runs]]:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        found = _alone(root)
        ranks = run_ranks(_scheduled, root, world_size=4, timeout=300)
        assert all(theirs == ranks[0] for theirs in ranks), "ranks log other values"
        yield root, found | ranks[0] | _alone_again(root)


def close(values: Any) -> Any:
    return pytest.approx(values, rel=1e-9)


def assert_equal_files(file: Path, other: Path, *, exactly: bool = False) -> None:
    for ours, theirs in zip(saved(file), saved(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0 if exactly else 1e-9, atol=0.0 if exactly else 1e-12)


def test_losses_rates_norms_and_metrics_are_those_of_lightning_alone(runs: tuple[Path, Runs]) -> None:
    _, found = runs
    for name in (*LAYOUTS, *(f"{name}, two" for name in BY_TWO)):
        run, alone = found[name], found["two" if name.endswith("two") else "alone"]
        for ours, theirs in zip(run["losses"], alone["losses"], strict=True):
            assert ours == close(theirs), name
        assert run["norms"] == close(alone["norms"]), name
        for stage in ("logged", "tested"):
            assert run[stage] == close(alone[stage]), name
            assert run[stage]["samples"] == run[stage]["summed"] == SAMPLES, name


def test_a_scheduled_model_takes_the_weights_of_a_checkpoint(runs: tuple[Path, Runs]) -> None:
    _, found = runs
    for name in LAYOUTS:
        assert found[name]["earlier"] == close(found["alone"]["earlier"]), name
        assert found[name]["earlier"]["quality"] != close(found[name]["tested"]["quality"]), name


def _hsdp(root: Path) -> Runs:
    before = root / "hsdp" / "epoch=0.ckpt"
    return {
        "hsdp": fitted(root / "hsdp", "hsdp", epochs=2),
        "resumed": fitted(root / "resumed", "hsdp", epochs=2, resume=before),
        "dp x tp": fitted(root / "dp x tp", "dp x tp", epochs=2, resume=before),
    }


@pytest.mark.breadth
def test_replicas_of_shards_train_save_and_resume(tmp_path: Path) -> None:
    alone, (found, *others) = fitted(tmp_path / "alone", None, epochs=2), run_ranks(_hsdp, tmp_path, world_size=4)
    assert all(theirs == found for theirs in others)
    for name, run in found.items():
        for kind in ("losses", "norms"):
            for ours, theirs in zip(run[kind], alone[kind][-len(run[kind]) :], strict=True):
                assert ours == close(theirs), (name, kind)
        assert run["logged"] == close(alone["logged"]), name
        assert_equal_files(tmp_path / name / "epoch=1.ckpt", tmp_path / "alone" / "epoch=1.ckpt")


class Samples(L.LightningDataModule):
    """The sampler of the schedule's replicas, whose position is saved with the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler: Any = None
        self._left: Any = None

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        self.sampler = sampler(self.trainer.strategy.sch, data())
        if self._left is not None:
            self.sampler.load_state_dict(self._left)
            self._left = None
        return DataLoader(data(), batch_size=4, sampler=self.sampler)

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = state["sampler"]


class Seen(Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: Any, number: int) -> Any:
        self.seen += [(self.current_epoch, target) for target in batch[1].tolist()]
        return super().training_step(batch, number)


def _sampled(root: Path) -> dict[str, list[tuple[int, float]]]:
    """The samples of two epochs, and of a run that goes on in the middle of the first one, also on other replicas."""
    quiet()
    found, replicas = {}, {"dp": 2, "tp": 1}
    for name, mesh, checkpoint in (("whole", replicas, None), ("same", replicas, 2), ("tp", {"dp": 1, "tp": 2}, 2)):
        saves = ModelCheckpoint(root / name, "{step}", every_n_train_steps=1, save_top_k=-1)
        options: dict[str, Any] = {"enable_checkpointing": True, "reload_dataloaders_every_n_epochs": 1}
        trainer = trainer_of(SlapoStrategy(split, mesh), 2, max_epochs=2, callbacks=[saves], **options)
        module = Seen()
        resumed = root / "whole" / f"step={checkpoint}.ckpt" if checkpoint else None
        trainer.fit(module, datamodule=Samples(), ckpt_path=resumed, weights_only=True)
        found[name] = module.seen
    return found


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    own, other = run_ranks(_sampled, tmp_path, world_size=2)
    for runs in (own, other):
        assert runs["same"] == runs["whole"][2 * 4 :]
        assert len(runs["whole"]) == SAMPLES
        assert runs["tp"] == own["tp"]
    both = [one for ours, theirs in zip(own["whole"], other["whole"], strict=True) for one in (ours, theirs)]
    assert own["tp"] == both[2 * 4 * 2 :]


def test_accumulated_batches_exchange_no_gradients(runs: tuple[Path, Runs]) -> None:
    _, found = runs
    for name in BY_TWO:
        assert found[name]["exchanged"] == [True] * 6, name
        assert found[f"{name}, two"]["exchanged"] == [False, True, True], name


def test_checkpoints_are_those_of_lightning_alone(runs: tuple[Path, Runs]) -> None:
    root, _ = runs
    for name in LAYOUTS:
        for file in ("epoch=0.ckpt", "epoch=1.ckpt"):
            assert_equal_files(root / name / file, root / "alone" / file)


def test_a_checkpoint_resumes_under_the_same_and_other_layouts(runs: tuple[Path, Runs]) -> None:
    root, found = runs
    for name in (*RESUMED, "alone"):
        is_same = RESUMED.get(name) == name
        for ours, theirs in zip(found[f"{name}, resumed"]["losses"], found[name]["losses"][3:], strict=True):
            assert ours == (theirs if is_same else close(theirs)), name
        assert_equal_files(root / f"{name}, resumed" / "epoch=1.ckpt", root / name / "epoch=1.ckpt", exactly=is_same)


def test_ranks_that_find_other_checkpoints_best_save_together(runs: tuple[Path, Runs]) -> None:
    root, _ = runs  # the second epoch is better on some ranks, which would save and wait for the others
    for name in LAYOUTS:
        assert torch.load(root / name / "best" / "best.ckpt", weights_only=True)["epoch"] == 0
    assert torch.load(root / "alone" / "best" / "best.ckpt", weights_only=True)["epoch"] == 1
