"""What holds in every run over ranks, each in a test of its own; and each seam of a host that it needs.

Norms are over unique shards, once; items over distinct batches, once; the optimizer of all ranks is saved; a run
resumes under the same mesh; every rank enters a save.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_runtime.launcher import run_process, run_ranks
from slapo_transformers import accelerators, trainer as trainers
from slapo_transformers.checkpoints import write_manifest

from .training_runs import arguments, assert_equal_logs, log, model, padded, samples, schedule

MESH = {"dp": 2, "tp": 2}
CLASSES = {
    "Trainer": trainers.ScheduledTrainerMixin,
    "Accelerator": accelerators.ScheduledAccelerator,
    "Optimizer": accelerators.ScheduledOptimizer,
    "Scheduler": accelerators.ScheduledScheduler,
}
KEPT = {"_attach", "_is_causal", "schedule", "steps"}
KEPT |= {"_wait", "_parameter_counts", "_samples_of_round", "_shared", "_one_of_each_replica", "_first_ranks"}
KEPT |= {"call_model_init", "_run_epoch"}  # test_hosts_refusals.py
KEPT |= {"_run_steps", "_precompute_ref_logps"}  # test_hosts_trl_steps.py
KEPT |= {"_load_optimizer_and_scheduler"}  # for the memory of GPUs: what it loads is the same
WAITING = "Trainer._save_optimizer_and_scheduler"
"""Without it, ranks wait for each other until a timeout."""
SEAMS = [
    f"{kind}.{name}" for kind, own in CLASSES.items() for name in vars(own) if name not in KEPT and name[:2] != "__"
]
"""Overridden members, by their class."""
Facts = dict[str, Any]


def trainer_of(directory: Path, schedules: bool, **options: Any) -> Any:
    """Return a Seq2SeqTrainer of T5, whose evaluations fill no round of two replicas."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
    from transformers.trainer_callback import PrinterCallback

    class Scheduled(trainers.ScheduledTrainerMixin, Seq2SeqTrainer):
        pass

    given: dict[str, Any] = {
        "max_steps": 3,
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "rows",
        "greater_is_better": False,
        "gradient_accumulation_steps": 2 if schedules else 4,
    }
    args = arguments(directory, kind=Seq2SeqTrainingArguments, **{**given, **options})
    own = {"schedule": schedule("t5", model("t5"), MESH)} if schedules else {"model": model("t5")}
    kind: Any = Scheduled if schedules else Seq2SeqTrainer
    run = kind(
        args=args,
        train_dataset=samples(48, seed=2),
        eval_dataset=samples(6, seed=3),
        data_collator=padded,
        compute_metrics=lambda found: {"rows": len(found.label_ids), "labels": int(found.label_ids.sum())},
        **own,
    )
    run.remove_callback(PrinterCallback)
    return run


def trained(directory: Path, schedules: bool) -> Facts:
    """Train three steps; then go on from the second one."""
    run, items = trainer_of(directory, schedules), []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        if module.training:
            items.append(int(kwargs["num_items_in_batch"]))

    handle = run.model.register_forward_pre_hook(note, with_kwargs=True)
    run.train()
    handle.remove()
    lines = log(run)
    facts: Facts = {
        "norms": [line["grad_norm"] for line in lines if "grad_norm" in line],
        "items": items[:: 2 if schedules else 4],
        "lines": lines,
        "batch": run.get_total_train_batch_size(run.args),
        "weights": weights_of(run, schedules),  # the best ones: of the first step
    }
    if schedules:
        dist.barrier()
    if not schedules or dist.get_rank() == 0:
        shutil.copytree(directory / "checkpoint-3", directory / "checkpoint-9")  # a save that was ended midway
        for name in ("trainer_state.json", "slapo.json"):
            (directory / "checkpoint-9" / name).unlink(missing_ok=True)
        shutil.rmtree(directory / "checkpoint-3")
    if schedules:
        dist.barrier()
    again = trainer_of(directory, schedules, load_best_model_at_end=False)
    again.train(resume_from_checkpoint=True if schedules else str(directory / "checkpoint-2"))
    facts["resumed"] = [line for line in log(again) if line["step"] == 3 and "train_loss" not in line]
    facts["resumed weights"] = weights_of(again, schedules)
    return facts


def weights_of(run: Any, schedules: bool) -> dict[str, torch.Tensor]:
    found = slapo.state_dict(run.schedule) if schedules else run.model.state_dict()
    return {name: value.clone() for name, value in found.items()}


class Unknown(torch.optim.SGD):
    """An optimizer that slapo does not know."""


def of_ranks(directory: Path) -> Facts:
    """What one process has no counterpart of: RNG states, workers, and an exchange that waits."""
    run = trainer_of(directory / "rng", True)
    torch.manual_seed(dist.get_rank())
    run._save_rng_state(str(directory / "rng"))
    dist.barrier()
    if dist.get_rank() == 0:
        write_manifest(directory / "rng", run.schedule.mesh)
    dist.barrier()
    expected = float(torch.rand(()))
    run._load_rng_state(str(directory / "rng"))
    drawn = float(torch.rand(()))
    sharded = schedule("gpt2", model("gpt2"), MESH, fsdp=True).model
    flags: list[bool] = []
    sharded.set_requires_gradient_sync = flags.append  # type: ignore[assignment]
    with run.accelerator.no_sync(sharded):
        flags.append(len(flags) == 1)
    workers = run.get_train_dataloader().worker_init_fn
    parameters = run.schedule.model.parameters()
    with pytest.warns(UserWarning, match="Unknown is not known to be element-wise"):
        run.accelerator.prepare(Unknown(parameters, lr=0.1))
    return {"drawn": drawn == expected, "flags": flags, "worker": workers.keywords["rank"]}


def loop(directory: Path, schedules: bool) -> Facts:
    """A loop of accelerate; one process accumulates the batches of both replicas."""
    from accelerate import Accelerator

    from slapo_transformers import prepare

    accelerator = Accelerator(cpu=True)
    made = model("gpt2")
    sch = schedule("gpt2", made, MESH) if schedules else None
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(samples(8, seed=2), batch_size=2, collate_fn=padded)  # type: ignore[arg-type]
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    if sch is not None:
        forward, optimizer, loader, scheduler = prepare(accelerator, sch, optimizer, loader, scheduler)
    else:
        forward = made
    batches, losses, tokens, rates, objects = list(loader), [], [], [], []
    for first in range(0, len(batches), 1 if schedules else 2):
        step = batches[first : first + (1 if schedules else 2)]
        counts = []
        for batch in step:
            loss = forward(**batch).loss
            accelerator.backward(loss / len(step))
            losses += accelerator.gather(loss.detach().view(1)).tolist()
            counts.append(float(accelerator.reduce(batch["attention_mask"].sum())))
            objects += accelerator.gather_for_metrics([float(batch["input_ids"].sum())], use_gather_object=True)
        tokens.append(sum(counts))
        rates.append(float(accelerator.clip_grad_norm_(made.parameters(), 0.1)))
        optimizer.step()
        for _ in range(1 if schedules else 2):  # accelerate steps once for each process
            scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        if sch is not None and first == 0:
            accelerator.save_state(str(directory / "state"))
    if sch is None:
        return {"numbers": [*losses, *tokens, *rates, *objects], "loop": made.state_dict(), "reloaded": {}}
    found = slapo.state_dict(sch)
    accelerator.load_state(str(directory / "state"))
    forward(**batches[-1]).loss.backward()
    accelerator.clip_grad_norm_(made.parameters(), 0.1)
    optimizer.step()
    reloaded = slapo.state_dict(sch)
    return {"numbers": [*losses, *tokens, *rates, *objects], "loop": found, "reloaded": _differing(found, reloaded)}


def _differing(found: Any, reloaded: Any) -> dict[str, float]:
    return {key: 0.0 for key, value in found.items() if not torch.equal(value, reloaded[key])}


def reference(directory: Path) -> Facts:
    return {**trained(directory, False), **loop(directory, False)}


def on_ranks(directory: Path, deleted: str) -> Facts:
    """The facts of a run; without an overridden member, those that it could change."""
    arguments(directory)  # the type of numbers, too
    kind, _, name = deleted.partition(".")
    if name:
        delattr(CLASSES[kind], name)
    facts = trained(directory, True) if kind in ("", "Trainer") else {}
    return {**facts, **(loop(directory, True) if kind != "Trainer" else {}), **of_ranks(directory)}


def check(facts: Facts, expected: Facts, rank: int) -> None:
    expected = {**expected, "drawn": True, "flags": [False, True, True], "worker": rank // 2}
    for name, value in facts.items():
        if name in ("lines", "resumed"):
            assert_equal_logs(value, expected[name])
        else:
            torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-10, msg=name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("invariants")


@pytest.fixture(scope="module")
def expected(place: Path) -> Facts:
    return run_process(reference, place / "one")


@pytest.fixture(scope="module")
def ranks(place: Path) -> list[Facts]:
    return run_ranks(on_ranks, place / "ranks", "", world_size=4)


@pytest.mark.ranks
def test_a_norm_is_over_unique_shards_once(ranks: list[Facts], expected: Facts) -> None:
    for facts in ranks:
        assert facts["norms"] == pytest.approx(expected["norms"], rel=1e-9)


@pytest.mark.ranks
def test_items_are_those_of_distinct_batches_once(ranks: list[Facts], expected: Facts) -> None:
    assert len(set(expected["items"])) > 1
    for facts in ranks:
        assert facts["items"] == expected["items"]


@pytest.mark.ranks
def test_the_optimizer_of_all_ranks_is_saved(ranks: list[Facts], expected: Facts, place: Path) -> None:
    found, other = (
        torch.load(place / kind / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
        for kind in ("ranks", "one")
    )
    torch.testing.assert_close(found, other, rtol=1e-8, atol=1e-10)


@pytest.mark.ranks
def test_a_run_resumes_where_it_was(ranks: list[Facts], expected: Facts) -> None:
    for facts in ranks:
        assert facts["resumed"] == [
            line for line in facts["lines"] if line.get("step") == 3 and "train_loss" not in line
        ]


@pytest.mark.ranks
def test_every_rank_enters_a_save_and_all_is_as_of_one_process(
    ranks: list[Facts], expected: Facts, place: Path
) -> None:
    assert (place / "ranks" / "checkpoint-2" / "slapo.json").is_file()
    for rank, facts in enumerate(ranks):
        check(facts, expected, rank)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["Trainer", "Accelerator"])
def test_with_all_seams_a_run_is_the_same(kind: str, expected: Facts, tmp_path: Path) -> None:
    _run_without(kind, expected, tmp_path)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("seam", SEAMS)
def test_without_a_seam_a_run_is_another_one(seam: str, expected: Facts, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, slapo.SlapoError)) as caught:  # of ranks that raise, or wait for others
        _run_without(seam, expected, tmp_path)
    text = str(caught.value)
    errors = re.findall(r"^(?:\w+\.)*\w+Error: .*", text, re.MULTILINE)
    print(seam, "->", *(errors[:1] or text.splitlines()[:1]))


def _run_without(seam: str, expected: Facts, directory: Path) -> None:
    timeout = 59 if seam == WAITING else 600
    for rank, facts in enumerate(run_ranks(on_ranks, directory, seam, world_size=4, timeout=timeout)):
        check(facts, expected, rank)
