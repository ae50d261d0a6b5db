"""SFTTrainer and DPOTrainer with the mixin: log lines of TRL's defaults are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_runtime.launcher import run_process, run_ranks

from .training_runs import VOCABULARY, arguments, assert_equal_logs, log, model, samples

Lines = list[dict[str, float]]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), pad_token="w0", eos_token="w1"
    )


def config(kind: Any, directory: Path, **options: Any) -> Any:
    """Return TRL's arguments: its own defaults, but for sizes and float64."""
    given = arguments(directory)
    own = ("max_steps", "learning_rate", "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "use_cpu")
    also = ("per_device_train_batch_size", "per_device_eval_batch_size", "ddp_backend", "disable_tqdm", "report_to")
    return kind(
        output_dir=str(directory), bf16=False, **{name: getattr(given, name) for name in (*own, *also)}, **options
    )


def sft(directory: Path, steps: int, mesh: dict[str, int] | None, *, split_head: bool = False) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from slapo_models import schedules
    from slapo_transformers import ScheduledTrainerMixin

    class MyTrainer(ScheduledTrainerMixin, SFTTrainer):  # type: ignore[misc, unused-ignore]
        pass

    args = config(SFTConfig, directory, gradient_accumulation_steps=steps)
    data = {
        "train_dataset": Dataset.from_list(samples(48, seed=2)),
        "eval_dataset": Dataset.from_list(samples(8, seed=3)),
    }
    made = model("llama")
    if mesh is None:
        return SFTTrainer(model=made, args=args, processing_class=tokenizer(), **data)
    sch = slapo.create_schedule(made, mesh=mesh)
    schedules.llama(sch, kernels=False, embeddings=split_head)
    return MyTrainer(model=made, schedule=sch, args=args, processing_class=tokenizer(), **data)


def reference(directory: Path, steps: int) -> Lines:
    run = sft(directory, steps, None)
    run.train()
    return log(run)


def on_ranks(directory: Path, steps: int, mesh: dict[str, int]) -> Lines:
    run = sft(directory, steps, mesh)
    run.train()
    if mesh == {"tp": 2}:
        with pytest.raises(slapo.SlapoError, match="'lm_head' did not run"):
            sft(directory, steps, mesh, split_head=True).train()
    return log(run)


@pytest.mark.ranks
def test_sft_over_tp(tmp_path: Path) -> None:
    expected = run_process(reference, tmp_path / "one", 2)
    assert {"entropy", "num_tokens", "mean_token_accuracy", "loss", "grad_norm"} <= set(expected[0])
    for found in run_ranks(on_ranks, tmp_path / "ranks", 2, {"tp": 2}, world_size=2):
        assert_equal_logs(found, expected)
