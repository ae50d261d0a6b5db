"""SFTTrainer with the mixin: log lines under TRL's defaults are those of one process, with an adapter, too."""

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


def lora(made: Any) -> Any:
    """Return the model with an adapter of few random numbers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    found = get_peft_model(made, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    return found.double()


def split_lora(sch: slapo.Schedule) -> None:
    """Split the layers of a LLaMA with adapters over tp."""
    for layer in sch["base_model.model.model.layers.*"]:
        attention, mlp = layer["self_attn"], layer["mlp"]
        for projection in (attention["q_proj"], attention["v_proj"]):
            for name in ("base_layer", "lora_B.default"):
                projection[name].shard("weight", axis=0)
            projection["lora_A.default"].sync_gradient("weight")
        for projection in (attention["k_proj"], mlp["gate_proj"], mlp["up_proj"]):
            projection.shard("weight", axis=0)
        for projection in (attention["o_proj"], mlp["down_proj"]):
            for name in ("base_layer", "lora_A.default"):
                projection[name].shard("weight", axis=1)
            projection["lora_B.default"].sync_gradient("weight")
            projection.sync("fwd_post", "all_reduce")
        attention.sync("bwd_post", "all_reduce")
        mlp.sync("bwd_post", "all_reduce")


def sft(directory: Path, mesh: dict[str, int] | None, *, adapter: bool = False, split_head: bool = False) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    import slapo_models
    from slapo_transformers import ScheduledTrainerMixin

    class MyTrainer(ScheduledTrainerMixin, SFTTrainer):  # type: ignore[misc, unused-ignore]
        pass

    steps = 2 // (mesh or {}).get("dp", 1)
    args = config(SFTConfig, directory, gradient_accumulation_steps=steps)
    args.save_strategy, args.save_steps = "steps", 2
    options: dict[str, Any] = {
        "args": args,
        "processing_class": tokenizer(),
        "train_dataset": Dataset.from_list(samples(48, seed=2)),
        "eval_dataset": Dataset.from_list(samples(8, seed=3)),
    }
    made = lora(model("llama")) if adapter else model("llama")
    if mesh is None:
        return SFTTrainer(model=made, **options)
    sch = slapo.create_schedule(made, mesh=mesh)
    if adapter:
        split_lora(sch)
    else:
        slapo_models.llama(sch, kernels=False, embeddings=split_head)
    return MyTrainer(model=made, schedule=sch, **options)


def reference(directory: Path, replicas: int) -> list[Lines]:
    """Runs with the batches of all replicas in one, over which TRL pools entropy and accuracy."""
    found = []
    for adapter in (False, True):
        run = sft(directory / str(adapter), None, adapter=adapter)
        run.args.gradient_accumulation_steps = 2 // replicas
        run.args.per_device_train_batch_size *= replicas
        run._train_batch_size = run.args.train_batch_size
        run.train()
        found.append(log(run))
    return found


def on_ranks(directory: Path, mesh: dict[str, int]) -> list[Lines]:
    """Runs of a model and of an adapter; and the run that goes on with the adapter."""
    found = []
    for adapter in (False, True):
        run = sft(directory / str(adapter), mesh, adapter=adapter)
        run.train()
        found.append(log(run))
    again = sft(directory / "again", mesh, adapter=True)
    again.train(resume_from_checkpoint=str(directory / "True" / "checkpoint-2"))
    found.append(log(again))
    with pytest.raises(slapo.SlapoError, match="'lm_head' did not run"):
        sft(directory / "split", mesh, split_head=True).train()
    return found


def without_counters(lines: Lines) -> Lines:
    """Leave out what TRL and the host count again from zero after a resume: tokens, and the mean loss."""
    return [
        {key: value for key, value in line.items() if not key.endswith(("num_tokens", "train_loss"))} for line in lines
    ]


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_sft_with_and_without_an_adapter(mesh: dict[str, int], tmp_path: Path) -> None:
    full, adapted = run_process(reference, tmp_path / "one", mesh.get("dp", 1))
    assert {"entropy", "num_tokens", "mean_token_accuracy", "loss", "grad_norm"} <= set(full[0])
    for runs in run_ranks(on_ranks, tmp_path / "ranks", mesh, world_size=2 * mesh.get("dp", 1)):
        for found, expected in ((runs[0], full), (runs[1], adapted)):
            if "dp" in mesh:  # without lines of evaluations, by batch, and of operations, on padding, too
                found, expected = ([line for line in lines if "loss" in line] for lines in (found, expected))
            assert_equal_logs(found, expected, 1e-6 if "dp" in mesh else 1e-9)  # TRL sums in float32
        assert without_counters(runs[2]) == without_counters(runs[1])
    checkpoint = tmp_path / "ranks" / "True" / "checkpoint-4"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (checkpoint / "model.safetensors").is_file()
    from peft import PeftModel

    base = model("llama")
    weight = base.model.layers[0].self_attn.q_proj.weight.clone()
    merged: Any = PeftModel.from_pretrained(base, checkpoint).merge_and_unload()
    assert not torch.equal(merged.model.layers[0].self_attn.q_proj.weight, weight)
