"""Options of Trainers, and kinds of schedules: log lines and predictions over ranks are those of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import EarlyStoppingCallback

import slapo_core as slapo
from slapo_runtime.launcher import run_process, run_ranks

from .training_runs import accuracy, arguments, assert_equal_logs, log, model, padded, samples, schedule

Options = dict[str, Any]
Result = tuple[list[dict[str, float]], Any, dict[str, float]]
"""Log lines, predictions, and their metrics."""


@dataclass(frozen=True)
class Case:
    """A run, of the plain trainer on one process and of the scheduled one.

    Args:
        model: its name; T5 is trained by Seq2SeqTrainer.
        args: of the arguments.
        options: of the trainer.
        steps: of accumulation, of each replica.
        change: made to the reference model first, or another model of it.
        apply: the steps of the schedule; None: those of the name.
        rtol: of the log lines.
        trains: calls of ``train``, of which the last is compared.
    """

    model: str = "llama"
    args: Options = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    steps: int = 1
    change: Callable[[Any], Any] | None = None
    apply: Callable[[Any], None] | None = None
    rtol: float = 1e-9
    trains: int = 1


class Batches:
    """Metrics of batches, which are summed until the last one."""

    def __init__(self) -> None:
        self.right = self.all = 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        kept = prediction.label_ids != -100
        self.right += int(((prediction.predictions.argmax(-1) == prediction.label_ids) & kept).sum())
        self.all += int(kept.sum())
        found = {"accuracy": self.right / self.all, "tokens": self.all}
        if compute_result:
            self.right = self.all = 0
        return found


def inputs_and_losses(prediction: Any) -> dict[str, float]:
    found = {"rows": len(prediction.predictions), "inputs": float(prediction.inputs[prediction.inputs > 0].sum())}
    return {**found, "losses": float(np.sum(prediction.losses)), "samples": len(prediction.losses)}


def best(logits: Any, labels: Any) -> Any:
    return torch.where(labels == -100, labels, logits.argmax(-1))


def of_best(prediction: Any) -> dict[str, float]:
    kept = prediction.label_ids != -100
    return {"accuracy": float((prediction.predictions == prediction.label_ids)[kept].mean()), "tokens": int(kept.sum())}


def generated(prediction: Any) -> dict[str, float]:
    return {"rows": len(prediction.predictions), "sum": int(prediction.predictions.sum())}


def shifted(batch: Any) -> Any:
    """Pad a batch for T5 under label smoothing, which takes the labels out of it."""
    found = padded(batch)
    ids = found["labels"].clamp(min=0)
    return {**found, "decoder_input_ids": torch.cat([ids.new_zeros(len(ids), 1), ids[:, :-1]], 1)}


def even(batch: Any) -> Any:
    """Pad to an even length, which two ranks can divide."""
    found = padded(batch)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    odd = found["labels"].shape[1] % 2
    return {name: nn.functional.pad(value, (0, odd), value=fill[name]) for name, value in found.items()}


def sequence(sch: Any) -> None:
    """Split the sequence between the layers of a LLaMA."""
    layers = sch["model.layers.*"]
    for name in ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj"):
        layers[name].shard("weight", axis=0)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layers[name].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
    layers["self_attn"].sync("fwd_pre", "all_gather", axis=1, inputs=("hidden_states",))
    layers["mlp"].sync("fwd_pre", "all_gather", axis=1)
    layers["*_layernorm"].sync_gradient("weight")
    sch["model.embed_tokens"].shard("weight", axis=0, pad=True)
    layers[0].sync("fwd_pre", "reduce_scatter", axis=1, inputs=("hidden_states",))
    layers[-1].sync("fwd_post", "all_gather", axis=1)
    sch["lm_head"].shard("weight", axis=0, pad=True).sync("bwd_post", "all_reduce").linear_cross_entropy()


def kernels(sch: Any) -> None:
    """Trace, replace, fuse and recompute all layers."""
    import slapo_models

    slapo_models.llama(sch, compiler="aot_eager", checkpoint=1.0)


def eager(made: Any) -> None:
    made.config._attn_implementation = "eager"


def freeze(made: Any) -> None:
    for module in (made.model.embed_tokens, made.model.layers[0], made.model.norm):
        module.requires_grad_(False)


def tie(made: Any) -> None:
    made.config.tie_word_embeddings = True
    made.lm_head.weight = made.model.embed_tokens.weight


def adapt(made: Any) -> Any:
    """Tie the embeddings, and train adapters of few random numbers alone."""
    from peft import LoraConfig, get_peft_model

    tie(made)
    torch.manual_seed(3)
    return get_peft_model(made, LoraConfig(r=2, target_modules=["down_proj"], task_type="CAUSAL_LM")).double()


def adapters(sch: Any) -> None:
    """Split a LLaMA with adapters, its tied embeddings included."""
    base = sch["base_model.model"]
    for mlp in base["model.layers.*.mlp"]:
        for name in ("gate_proj", "up_proj"):
            mlp[name].shard("weight", axis=0)
        for name in ("base_layer", "lora_A.default"):
            mlp[f"down_proj.{name}"].shard("weight", axis=1)
        mlp["down_proj.lora_B.default"].sync_gradient("weight")
        mlp["down_proj"].sync("fwd_post", "all_reduce")
        mlp.sync("bwd_post", "all_reduce")
    base["model.embed_tokens"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
    base["lm_head"].sync("bwd_post", "all_reduce").linear_cross_entropy()


def float32(made: Any) -> Any:
    return made.float()


def unsplit(sch: Any) -> None:
    """Leave all tensors whole: of replicas of replicas."""


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples without a length, which accelerate by itself would send from the first rank."""

    def __init__(self, count: int, seed: int) -> None:
        self.rows = samples(count, seed)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


SMOOTH: Options = {"label_smoothing_factor": 0.1}
ODD: Options = {"eval_dataset": samples(7, seed=8)}
GENERATE: Options = {"predict_with_generate": True, "generation_max_length": 8}
COMMON: dict[str, Case] = {
    "smoothing": Case("bert", SMOOTH, ODD, 2),
    "smoothing of causal labels": Case(
        "llama", {**SMOOTH, "optim": "adafactor", "max_steps": 2}, {"eval_dataset": samples(5, seed=8)}
    ),
    "smoothing of T5": Case("t5", SMOOTH, {"data_collator": shifted}, 4),
    "generation": Case("t5", GENERATE, {"compute_metrics": generated}),
    "beams, Adafactor": Case(
        "t5", {**GENERATE, "generation_num_beams": 2, "optim": "adafactor"}, {"compute_metrics": generated}
    ),
    "batches of metrics": Case("llama", {"batch_eval_metrics": True}, {**ODD, "compute_metrics": Batches()}),
    "chosen logits": Case("gpt2", {}, {**ODD, "preprocess_logits_for_metrics": best, "compute_metrics": of_best}),
    "inputs and losses": Case(
        "llama", {"include_for_metrics": ["inputs", "loss"]}, {**ODD, "compute_metrics": inputs_and_losses}
    ),
    "workers": Case("bert", {"dataloader_num_workers": 1, "prediction_loss_only": True}, ODD),
    "counts": Case(
        "llama",
        {"include_num_input_tokens_seen": "non_padding", "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"eval_dataset": samples(1, seed=8)},
        4,
    ),
    "no counts, no clipping": Case(
        "gpt2",
        {"include_num_input_tokens_seen": "no", "max_grad_norm": 0.0, "optim": "sgd", "eval_on_start": True},
        trains=2,
    ),
    "early end": Case(
        "gpt2",
        {
            **dict.fromkeys(("eval_steps", "save_steps"), 1),
            "save_strategy": "steps",
            "save_total_limit": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
            "learning_rate": 0.3,
        },
        {**ODD, "callbacks": [EarlyStoppingCallback(1)]},
    ),
    "Adafactor": Case("llama", {"optim": "adafactor", "eval_accumulation_steps": 1}, {}, 2),
    "one sample": Case("llama", {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}, ODD),
    "plateau, batch finder": Case(
        "bert",
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "metric_for_best_model": "loss",
            "auto_find_batch_size": True,
        },
    ),
    "sequence": Case("llama", {}, {"data_collator": even}, apply=sequence),
    "sequence, smoothing": Case("llama", SMOOTH, {"data_collator": even}, 2, apply=sequence),
    "kernels": Case("llama", {"max_steps": 2}, change=eager, apply=kernels, rtol=1e-6),  # in float64, the model is not
    "frozen": Case("llama", {"max_grad_norm": 0.1}, {}, 2, change=freeze),
    "adapters": Case("llama", {**SMOOTH, "max_grad_norm": 0.01}, ODD, 2, change=adapt, apply=adapters),
    "streams": Case("llama", {}, {"train_dataset": Stream(48, seed=2), "eval_dataset": Stream(8, seed=3)}, 2),
    "bfloat16": Case("llama", {"bf16": True, "max_steps": 2}, change=float32, rtol=2e-2),
    "tied": Case("llama", {}, {}, 2, change=tie),
}
OF_ONE_REPLICA: dict[str, Case] = {
    "averages of a rank": Case("llama", {"average_tokens_across_devices": False}, {}, 4),
    "epochs": Case("llama", {"max_steps": -1, "num_train_epochs": 2}, {**ODD, "train_dataset": samples(14, seed=7)}, 2),
    "noise": Case("llama", {"neftune_noise_alpha": 5.0}),
    "uneven T5": Case("t5", {}, ODD),
}


def make(case: Case, args: Options, directory: Path, mesh: dict[str, int] | None, fsdp: bool) -> Any:
    """Return a trainer; ``mesh`` None: the plain one."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from slapo_transformers import ScheduledTrainerMixin

    base, arguments_of = (
        (Seq2SeqTrainer, Seq2SeqTrainingArguments) if case.model == "t5" else (Trainer, TrainingArguments)
    )
    made = model(case.model)
    if case.change is not None:
        made = case.change(made) or made
    own: Options = {"model": made}
    kind: Any = base
    if mesh is not None:
        if case.apply is None:
            sch = schedule(case.model, made, mesh)
        else:
            sch = slapo.create_schedule(made, mesh=mesh, example_inputs=padded(samples(2, seed=3)))
            case.apply(sch)
        if fsdp:
            slapo.fully_shard(sch)
        kind, own = type("Scheduled", (ScheduledTrainerMixin, base), {}), {"schedule": sch}
    defaults: Options = {
        "train_dataset": samples(48, seed=2),
        "eval_dataset": samples(8, seed=3),
        "data_collator": padded,
        "compute_metrics": accuracy,
    }
    run = kind(
        args=arguments(directory, kind=arguments_of, **{**case.args, **args}), **{**defaults, **own, **case.options}
    )
    run.remove_callback(PrinterCallback)
    return run


def results(
    cases: dict[str, Case], directory: Path, mesh: dict[str, int] | None, replicas: int, fsdp: bool = False
) -> dict[str, Result]:
    """Train, and predict seven samples, which fill no round of two replicas."""
    found = {}
    for name, case in cases.items():
        steps = case.steps * (replicas if mesh is None else 1)
        run = make(case, {"gradient_accumulation_steps": steps}, directory / name, mesh, fsdp)
        for _ in range(case.trains):
            run.train()
        predicted = run.predict(samples(6 if case.model == "t5" else 7, seed=5))
        run.state.log_history.append(predicted.metrics)
        *lines, metrics = log(run)
        found[name] = (lines, predicted.predictions, metrics)
    return found


def compare(cases: dict[str, Case], directory: Path, mesh: dict[str, int], *, fsdp: bool = False) -> None:
    replicas = mesh.get("dp_replicate", 1) * mesh.get("dp", 1)
    expected = run_process(results, cases, directory / "one", None, replicas, timeout=600)
    world_size = replicas * mesh.get("tp", 1)
    for of_rank in run_ranks(
        results, cases, directory / "ranks", mesh, replicas, fsdp, world_size=world_size, timeout=600
    ):
        for name, (lines, predictions, metrics) in of_rank.items():
            print(name)  # of a failure
            rtol = cases[name].rtol
            assert_equal_logs([*lines, metrics], [*expected[name][0], expected[name][2]], rtol)
            torch.testing.assert_close(
                _tensors(predictions), _tensors(expected[name][1]), rtol=10 * rtol, atol=10 * rtol
            )


def _tensors(predictions: Any) -> list[torch.Tensor]:
    """Return predictions; of a model with its encoder's states, the logits alone, whose padding is not masked."""
    if predictions is None:
        return []
    first = predictions[0] if isinstance(predictions, tuple) else predictions
    return [torch.as_tensor(first)]


@pytest.mark.ranks
def test_options_over_shards_of_replicas(tmp_path: Path) -> None:
    name = "smoothing of causal labels"
    compare({name: COMMON[name]}, tmp_path, {"dp": 2, "tp": 2}, fsdp=True)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mesh", "fsdp"),
    [({"tp": 2}, False), ({"dp": 2, "tp": 2}, False), ({"dp": 2, "tp": 2}, True)],
    ids=["tp", "replicas", "shards of replicas"],
)
@pytest.mark.parametrize("part", range(3))
def test_options_are_carried_out_over_ranks(part: int, mesh: dict[str, int], fsdp: bool, tmp_path: Path) -> None:
    cases = COMMON if "dp" in mesh else {**COMMON, **OF_ONE_REPLICA}
    compare(dict(list(cases.items())[part::3]), tmp_path, mesh, fsdp=fsdp)


@pytest.mark.breadth
@pytest.mark.ranks
def test_replicas_of_shards(tmp_path: Path) -> None:
    cases = {
        name: dataclasses.replace(COMMON[name], apply=unsplit) for name in ("smoothing of causal labels", "counts")
    }
    compare(cases, tmp_path, {"dp_replicate": 2, "dp": 2}, fsdp=True)


def searched(directory: Path, mesh: dict[str, int] | None) -> tuple[list[float], Any]:
    """Search a learning rate by two trials: the losses of their ends, and the best one, which rank 0 knows."""
    import optuna
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback

    from slapo_transformers import SlapoTrainer

    losses: list[float] = []

    def objective(metrics: dict[str, float]) -> float:
        losses.append(metrics["eval_loss"])
        return losses[-1]

    steps = 2 // (mesh or {}).get("dp", 1)
    args = arguments(directory, max_steps=2, gradient_accumulation_steps=steps, save_strategy="steps", save_steps=2)
    own: Options = {} if mesh is None else {"schedule": lambda made: schedule("gpt2", made, mesh)}
    run: Any = (Trainer if mesh is None else SlapoTrainer)(
        args=args,
        model_init=lambda: model("gpt2"),
        train_dataset=samples(48, seed=2),
        eval_dataset=samples(7, seed=3),
        data_collator=padded,
        **own,
    )
    run.remove_callback(PrinterCallback)
    found = run.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1)},
        compute_objective=objective,
        n_trials=2,
        backend="optuna",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    return losses, found and (found.run_id, found.hyperparameters)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_search_finds_what_one_process_finds(mesh: dict[str, int], tmp_path: Path) -> None:
    losses, best_run = run_process(searched, tmp_path / "one", None, timeout=300)
    assert len(set(losses)) == 2
    ranks = run_ranks(searched, tmp_path / "ranks", mesh, world_size=2 * mesh.get("dp", 1), timeout=300)
    assert [found for _, found in ranks] == [best_run] + [None] * (len(ranks) - 1)
    for found, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-9)
    assert (tmp_path / "ranks" / "run-1" / "checkpoint-2" / "slapo.json").is_file()


def of_full_matrices(
    directory: Path, mesh: dict[str, int] | None, resume: Path | None = None
) -> list[dict[str, float]]:
    """The last log lines of a run by Adafactor."""
    case = Case("llama", {"optim": "adafactor", "save_strategy": "steps", "save_steps": 2})
    run = make(case, {}, directory, mesh, False)
    run.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [line for line in log(run) if line["step"] > 2 and "train_loss" not in line]


@pytest.mark.breadth
@pytest.mark.ranks
def test_a_state_of_full_matrices_is_resumed_with_a_mesh_and_without(tmp_path: Path) -> None:
    mesh = {"tp": 2}
    expected = run_process(of_full_matrices, tmp_path / "one", None)
    (whole, _) = run_ranks(of_full_matrices, tmp_path / "tp", mesh, world_size=2)
    saved = {kind: tmp_path / kind / "checkpoint-2" for kind in ("one", "tp")}
    (again, _) = run_ranks(of_full_matrices, tmp_path / "again", mesh, saved["tp"], world_size=2)
    assert again == whole
    (other, _) = run_ranks(of_full_matrices, tmp_path / "other", mesh, saved["one"], world_size=2)
    plain = run_process(of_full_matrices, tmp_path / "plain", None, saved["tp"])
    for found in (whole, other, plain):
        assert_equal_logs(found, expected)
