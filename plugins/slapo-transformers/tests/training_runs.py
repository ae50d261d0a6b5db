"""Runs of Trainers that are compared: models, samples of unequal lengths, and what a run leaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules
from slapo_testing.models import bert, gpt2

preload_modules(
    "slapo_transformers",
    "slapo_models",
    "slapo_loss.implementations",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.trainer_seq2seq",
)

VOCABULARY = 51  # padded over tp
_CLOCKED = ("runtime", "per_second", "preparation_time")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            use_cache=False,
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def causal_loss(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> torch.Tensor:
    """Compute the loss of causal models as transformers does, but in float64."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(logits.view(-1, vocab_size), shifted.reshape(-1), reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def model(name: str) -> Any:
    """Return a small model in float64, without dropout."""
    made: Any
    if name == "bert":
        options: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        made = bert(vocab_size=VOCABULARY, num_hidden_layers=2, **options)
    elif name == "gpt2":
        made = gpt2(vocab_size=VOCABULARY, n_layer=2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    else:
        made = t5() if name == "t5" else llama()
    if name in ("gpt2", "llama"):
        made.loss_function = causal_loss
    return made.double()


def schedule(name: str, made: nn.Module, mesh: dict[str, int], *, fsdp: bool = False) -> slapo.Schedule:
    """Schedule a model: tensor parallelism with a split vocabulary, in llama without logits while it trains."""
    import slapo_models

    sch = slapo.create_schedule(made, mesh=mesh)
    if name == "llama":
        slapo_models.llama(sch, kernels=False)
    elif name == "t5":
        slapo_models.t5(sch, kernels=False)
    elif name == "bert":
        slapo_models.bert(sch, kernels=False, embeddings=False)
        sch["bert.embeddings.word_embeddings"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
        sch["cls.predictions"].shard("bias", axis=0, pad=True)
        sch["cls.predictions.decoder"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")
    else:
        slapo_models.gpt(sch, kernels=False, embeddings=False)
        sch["transformer.wte"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
        sch["lm_head"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")
    if fsdp:
        slapo.fully_shard(sch)
    return sch


def samples(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Return sequences of 3 to 12 tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 13, (count,), generator=draw).tolist()
    return [{"input_ids": torch.randint(1, VOCABULARY, (n,), generator=draw).tolist()} for n in lengths]


def padded(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad a batch to its longest sequence; labels are the tokens, and ignored at the padding."""
    longest = max(len(one["input_ids"]) for one in batch)
    rows = {"input_ids": (0, 0), "labels": (-100, 0), "attention_mask": (0, 1)}
    found: dict[str, list[list[int]]] = {name: [] for name in rows}
    for one in batch:
        ids = one["input_ids"]
        fill = longest - len(ids)
        found["input_ids"].append(ids + [0] * fill)
        found["labels"].append(ids + [-100] * fill)
        found["attention_mask"].append([1] * len(ids) + [0] * fill)
    return {name: torch.tensor(values) for name, values in found.items()}


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    kept = prediction.label_ids != -100
    right = (logits.argmax(-1) == prediction.label_ids) & kept
    return {"accuracy": float(right.sum() / kept.sum()), "tokens": float(kept.sum())}


def arguments(directory: Path | str, *, kind: Any = None, **options: Any) -> Any:
    from transformers import TrainingArguments

    if "RANK" in os.environ:
        torch.set_default_dtype(torch.float64)  # in which the host sums losses
        if not torch.distributed.is_initialized():  # the host would make a process group
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name)
    given: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "include_num_input_tokens_seen": "all",
        "report_to": [],
        "use_cpu": True,
        "ddp_backend": "gloo" if torch.distributed.is_initialized() else None,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": 1,
        **options,
    }
    return (kind or TrainingArguments)(output_dir=str(directory), **given)


def trainer(kind: Callable[..., Any], args: Any, **options: Any) -> Any:
    """Return a trainer over the samples, without a printer."""
    from transformers.trainer_callback import PrinterCallback

    made = kind(
        args=args,
        train_dataset=samples(48, seed=2),
        eval_dataset=samples(8, seed=3),
        data_collator=padded,
        compute_metrics=accuracy,
        **options,
    )
    made.remove_callback(PrinterCallback)
    return made


def plain(name: str, args: Any, **options: Any) -> Any:
    """Return a plain Trainer of the reference model."""
    from transformers import Trainer

    return trainer(Trainer, args, model=model(name), **options)


def scheduled(name: str, args: Any, mesh: dict[str, int], *, fsdp: bool = False, **options: Any) -> Any:
    """Return a SlapoTrainer of the scheduled model."""
    from slapo_transformers import SlapoTrainer

    return trainer(SlapoTrainer, args, schedule=schedule(name, model(name), mesh, fsdp=fsdp), **options)


def log(run: Any) -> list[dict[str, float]]:
    """Return the log lines of a run, without what a clock says."""
    lines = run.state.log_history
    return [{key: value for key, value in line.items() if not any(map(key.count, _CLOCKED))} for line in lines]


def assert_equal_logs(
    found: list[dict[str, float]], expected: list[dict[str, float]], rtol: float = 1e-9, *, atol: float = 0.0
) -> None:
    """Compare log lines: numbers of steps, samples and tokens exactly, others within ``rtol`` or ``atol``."""
    assert [sorted(line) for line in found] == [sorted(line) for line in expected]
    for line, other in zip(found, expected, strict=True):
        for key, value in other.items():
            if isinstance(value, int) or key in ("epoch", "learning_rate", "total_flos", "eval_tokens"):
                assert line[key] == value, (key, line, other)
            else:
                assert abs(line[key] - value) <= max(rtol * abs(value), atol), (key, line, other)
