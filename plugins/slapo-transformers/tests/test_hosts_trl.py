"""TRL's trainers with the mixin: log lines under their defaults are those of one process, with split heads, too."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import slapo_core as slapo
from slapo_runtime.launcher import run_process, run_ranks

from .training_runs import VOCABULARY, accuracy, arguments, assert_equal_logs, log, model, samples

Lines = list[dict[str, float]]
Cases = list[tuple[str, dict[str, Any]]]
"""Trainer, and options of :func:`trainer`."""


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[attr-defined, unused-ignore]
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w1")
    found.chat_template = (
        "{% for one in messages %}{% if one.role == 'assistant' %}{% generation %}{{ one.content | trim + ' w1' }}"
        "{% endgeneration %}{% else %}{{ one.content + ' w2 ' }}{% endif %}{% endfor %}"
    )
    return found


def config(kind: Any, directory: Path, **options: Any) -> Any:
    """Return TRL's arguments: its own defaults, but for sizes and float64."""
    given = arguments(directory)
    own = ("max_steps", "learning_rate", "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "use_cpu")
    also = ("per_device_train_batch_size", "per_device_eval_batch_size", "ddp_backend", "disable_tqdm", "report_to")
    own_values = {name: getattr(given, name) for name in (*own, *also)}
    return kind(output_dir=str(directory), bf16=False, **{**own_values, **options})


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
            for name in ("base_layer", "lora_B.*"):
                projection[name].shard("weight", axis=0)
            projection["lora_A.default"].sync_gradient("weight")
        for projection in (attention["k_proj"], mlp["gate_proj"], mlp["up_proj"]):
            projection.shard("weight", axis=0)
        for projection in (attention["o_proj"], mlp["down_proj"]):
            for name in ("base_layer", "lora_A.*"):
                projection[name].shard("weight", axis=1)
            projection["lora_B.default"].sync_gradient("weight")
            projection.sync("fwd_post", "all_reduce")
        attention.sync("bwd_post", "all_reduce")
        mlp.sync("bwd_post", "all_reduce")


def is_first() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def on_disk(rows: list[Any], directory: Path) -> Any:
    """Return a dataset whose caches all ranks share."""
    from datasets import Dataset, load_from_disk

    if is_first():
        Dataset.from_list(rows).save_to_disk(directory)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return load_from_disk(directory)


class InDouble(TorchFunctionMode):
    """Compute in float64 what code computes in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        given = kwargs or {}
        if given.get("dtype") is torch.float32:
            given = {**given, "dtype": torch.float64}
        return func(*args, **given)


def kernels_in_double() -> None:
    """Have the kernels of TRL, which fold logits in float32, fold them in float64."""
    from trl.kernels import ChunkedLogProbFunction

    def in_double(function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            with InDouble():
                return function(*args)

        return run

    for name in ("forward", "backward"):
        function = getattr(ChunkedLogProbFunction, name)
        if not hasattr(function, "__wrapped__"):
            setattr(ChunkedLogProbFunction, name, staticmethod(in_double(function)))


def split(made: Any, mesh: dict[str, int], head: str, *, adapter: bool = False) -> slapo.Schedule:
    """Split a LLaMA, with adapters or not; its head is ``whole``, ``gathered`` or ``deferred``."""
    import slapo_models

    sch = slapo.create_schedule(made, mesh=mesh)
    if adapter:
        split_lora(sch)
        model, at = sch["base_model.model.model"], sch["base_model.model.lm_head"]
    else:
        slapo_models.llama(sch, kernels=False, embeddings=False)
        model, at = sch["model"], sch["lm_head"]
    if head != "whole":
        model["embed_tokens"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
        if len(at.ties("weight")) == 1:
            at.shard("weight", axis=0, pad=True)
        at.sync("bwd_post", "all_reduce")
        if head == "gathered":
            at.sync("fwd_post", "all_gather")
        else:
            at.linear_cross_entropy()
    return sch


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Return prompts, chosen and rejected completions of unequal lengths."""
    draw = torch.Generator().manual_seed(seed)

    def text(least: int, most: int) -> str:
        length = int(torch.randint(least, most, (1,), generator=draw))
        return " ".join(f"w{int(one)}" for one in torch.randint(2, VOCABULARY, (length,), generator=draw))

    return [{"prompt": text(1, 5), "chosen": " " + text(1, 6), "rejected": " " + text(1, 6)} for _ in range(count)]


def completions(count: int, seed: int) -> list[dict[str, str]]:
    """Return prompts and completions."""
    return [{"prompt": one["prompt"], "completion": one["chosen"]} for one in pairs(count, seed)]


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """Return conversations."""
    return [
        {
            "messages": [
                {"role": "user", "content": one["prompt"]},
                {"role": "assistant", "content": one["chosen"]},
            ]
        }
        for one in pairs(count, seed)
    ]


def trainer(
    kind: str,
    directory: Path,
    mesh: dict[str, int] | None,
    *,
    adapter: bool = False,
    head: str = "whole",
    fsdp: bool = False,
    reference: str = "none",
    data: str = "",
    tied: bool = False,
    metrics: bool = False,
    layers: dict[str, int] | None = None,
    mixin: bool = True,
    **arguments_: Any,
) -> Any:
    """Return a trainer of TRL, plain without a mesh."""
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from slapo_transformers import ScheduledTrainerMixin

    kernels_in_double()
    host, of = (SFTTrainer, SFTConfig) if kind == "sft" else (DPOTrainer, DPOConfig)
    make = {"": samples if kind == "sft" else pairs, "completions": completions, "chats": chats}[data]
    steps = 2 // (mesh or {}).get("dp", 1)
    args = config(of, directory, gradient_accumulation_steps=steps, **arguments_)
    options: dict[str, Any] = {
        "args": args,
        "processing_class": tokenizer(),
        "train_dataset": on_disk(make(48, seed=2), directory / "data"),
        "eval_dataset": on_disk(make(8, seed=3), directory / "held_out"),
    }
    made = model("llama")
    if tied:
        made.lm_head.weight, made.config.tie_word_embeddings = made.model.embed_tokens.weight, True
    if metrics:
        options["compute_metrics"] = accuracy
    if reference == "default":  # which TRL loads by the name of the model
        made.config._name_or_path = str(directory / "reference")
        made.save_pretrained(made.config._name_or_path, is_main_process=is_first())
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    made = lora(made) if adapter else made
    if adapter and kind == "dpo" and mesh is not None:
        made.add_adapter("ref", made.peft_config["default"])
        made.double()
    if reference == "model":
        options["ref_model"] = model("llama")
        if mesh is not None:
            options["ref_model"] = split(options["ref_model"], mesh, head).model
    if layers is not None:
        sch = slapo.create_schedule(made, mesh=layers)
        sch["model.layers.*"].checkpoint()
    if mesh is None or not mixin:
        return host(model=made if mesh is None else split(made, mesh, head).model, **options)
    sch = split(made, mesh, head, adapter=adapter)
    if fsdp:
        slapo.fully_shard(sch)
    return type("MyTrainer", (ScheduledTrainerMixin, host), {})(model=made, schedule=sch, **options)


def reference(directory: Path, cases: Cases, replicas: int) -> list[Lines]:
    """Plain runs with the batches of all replicas in one, over which TRL pools entropy and accuracy."""
    found = []
    for number, (kind, options) in enumerate(cases):
        own: Any = {name: value for name, value in options.items() if name not in ("head", "fsdp")}
        run = trainer(kind, directory / str(number), None, **own)
        run.args.gradient_accumulation_steps = 2 // replicas
        run.args.per_device_train_batch_size *= replicas
        run._train_batch_size = run.args.train_batch_size
        run.train()
        found.append(log(run))
    return found


def on_ranks(directory: Path, mesh: dict[str, int], cases: Cases) -> list[Lines]:
    """Runs of scheduled models; and, of an adapter, the run that goes on with a checkpoint."""
    found = []
    for number, (kind, options) in enumerate(cases):
        run = trainer(kind, directory / str(number), mesh, **options)
        run.train()
        found.append(log(run))
        if "save_strategy" in options:
            again = trainer(kind, directory / "again", mesh, **options)
            again.train(resume_from_checkpoint=str(directory / str(number) / "checkpoint-2"))
            found.append(log(again))
    return found


def assert_equal_runs(directory: Path, mesh: dict[str, int], cases: Cases) -> None:
    """Compare log lines of cases over ranks with those of one process."""
    replicas = mesh.get("dp", 1)
    expected = run_process(reference, directory / "one", cases, replicas)
    for runs in run_ranks(on_ranks, directory / "ranks", mesh, cases, world_size=2 * replicas):
        left = iter(runs)
        for (kind, options), lines in zip(cases, expected, strict=True):
            found, resumed = next(left), next(left) if "save_strategy" in options else None
            assert _METRICS[kind] <= set(lines[0])
            if resumed is not None:
                assert without_counters(resumed) == without_counters(found)
            if options.get("reference") == "default":  # not split: its log-probabilities differ by a last bit
                found, lines = map(without_ties, (found, lines))
            if "dp" in mesh:  # without lines of evaluations, by batch, and of operations, on padding, too
                found, lines = ([line for line in these if "loss" in line] for these in (found, lines))
            assert_equal_logs(found, lines, atol=1e-12)  # rewards are differences of log-probabilities, and begin at 0


_METRICS = {
    "sft": {"entropy", "num_tokens", "mean_token_accuracy", "loss", "grad_norm"},
    "dpo": {
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "logits/rejected",
        "entropy",
        "num_tokens",
        "loss",
    },
}


def without_counters(lines: Lines) -> Lines:
    """Leave out what TRL and the host count again from zero after a resume: tokens, and the mean loss."""
    return [
        {key: value for key, value in line.items() if not key.endswith(("num_tokens", "train_loss"))} for line in lines
    ]


def without_ties(lines: Lines) -> Lines:
    """Leave out which rewards are larger as long as they are equal to rounding."""
    return [
        {
            key: 0.0 if key == "rewards/accuracies" and abs(line["rewards/margins"]) < 1e-12 else value
            for key, value in line.items()
        }
        for line in lines
    ]


SPLIT: Cases = [("sft", {"head": "deferred"}), ("dpo", {"head": "gathered", "reference": "model"})]
ADAPTED: Cases = [
    ("sft", {"adapter": True, "save_strategy": "steps", "save_steps": 2}),
    ("dpo", {"adapter": True, "head": "deferred"}),
    ("dpo", {"adapter": True, "head": "gathered", "precompute_ref_log_probs": True}),
]
WHOLE: Cases = [
    ("sft", {}),
    ("sft", {"head": "gathered"}),
    ("sft", {"head": "gathered", "loss_type": "dft"}),
    ("dpo", {"head": "deferred", "precompute_ref_log_probs": True}),
    ("dpo", {"head": "deferred", "reference": "model", "use_weighting": True}),
    ("dpo", {"reference": "default", "gradient_checkpointing": False}),
    ("sft", {"head": "deferred", "tied": True}),
    ("sft", {"head": "deferred", "metrics": True}),
]
OF_ONE_REPLICA: Cases = [
    ("dpo", {"head": "deferred", "reference": "default", "loss_type": ["sigmoid", "sft"]}),
    ("sft", {"head": "gathered", "tied": True, "label_smoothing_factor": 0.1}),
]
"""The host takes a mean of each micro-batch, or sums in float32, so that replicas are not one batch."""
DATA: Cases = [
    ("sft", {"head": "deferred", "packing": True, "max_length": 16}),
    ("sft", {"head": "gathered", "padding_free": True, "max_length": None}),
    ("sft", {"head": "deferred", "data": "completions"}),
    ("sft", {"head": "gathered", "data": "chats", "assistant_only_loss": True}),
]
MESHES: list[dict[str, int]] = [{"tp": 2}, {"dp": 2, "tp": 2}]


@pytest.mark.ranks
def test_heads_that_are_split(tmp_path: Path) -> None:
    assert_equal_runs(tmp_path, {"tp": 2}, SPLIT)


@pytest.mark.breadth
@pytest.mark.ranks
def test_heads_that_are_split_over_replicas(tmp_path: Path) -> None:
    fsdp: Cases = [(kind, {**options, "fsdp": True}) for kind, options in SPLIT]
    assert_equal_runs(tmp_path, {"dp": 2, "tp": 2}, [*SPLIT, *fsdp])


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_other_heads_references_and_losses(mesh: dict[str, int], tmp_path: Path) -> None:
    assert_equal_runs(tmp_path, mesh, WHOLE if "dp" in mesh else [*WHOLE, *OF_ONE_REPLICA])


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_packed_and_masked_tokens(mesh: dict[str, int], tmp_path: Path) -> None:
    assert_equal_runs(tmp_path, mesh, DATA)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_adapters(mesh: dict[str, int], tmp_path: Path) -> None:
    assert_equal_runs(tmp_path, mesh, ADAPTED)
    checkpoint = tmp_path / "ranks" / "0" / "checkpoint-4"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (checkpoint / "model.safetensors").is_file()
    from peft import PeftModel

    base = model("llama")
    weight = base.model.layers[0].self_attn.q_proj.weight.clone()
    merged: Any = PeftModel.from_pretrained(base, checkpoint).merge_and_unload()
    assert not torch.equal(merged.model.layers[0].self_attn.q_proj.weight, weight)


AS_THEY_ARE: Cases = [
    ("sft", {"activation_checkpointing": False}),
    ("dpo", {"activation_checkpointing": False, "reference": "model"}),
]


def as_they_are(directory: Path, mesh: dict[str, int]) -> tuple[list[Lines], list[str]]:
    """Log lines of plain trainers, given a model with steps at its layers; and what they say of split models."""
    found = []
    for number, (kind, options) in enumerate(AS_THEY_ARE):
        run = trainer(kind, directory / str(number), None, layers=mesh, **options)
        run.args.gradient_accumulation_steps = 2 // mesh.get("dp", 1)
        run.train()
        found.append(log(run))
    refused = []
    for kind, head, call in (
        ("sft", "whole", "train"),
        ("sft", "deferred", "train"),
        ("dpo", "gathered", "train"),
        ("dpo", "gathered", "evaluate"),
    ):
        run = (
            trainer(
                kind,
                directory / f"{kind}{head}",
                {"tp": 2},
                head=head,
                mixin=False,
                reference="model" if kind == "dpo" else "none",
            )
            if mesh
            else None
        )
        if run is not None:
            with pytest.raises(slapo.SlapoError) as caught:
                getattr(run, call)()
            refused.append(str(caught.value))
    return found, refused


@pytest.mark.breadth
@pytest.mark.ranks
def test_trainers_as_they_are_train_right_or_are_refused(tmp_path: Path) -> None:
    expected = run_process(reference, tmp_path / "one", AS_THEY_ARE, 1)
    pooled = run_process(reference, tmp_path / "pooled", AS_THEY_ARE, 2)
    own, _ = run_process(as_they_are, tmp_path / "own", {})
    for found, lines in zip(own, expected, strict=True):
        assert_equal_logs(found, lines, atol=1e-12)
    for replicas, refused in run_ranks(as_they_are, tmp_path / "ranks", {"dp": 2}, world_size=2):
        for found, lines in zip(replicas, pooled, strict=True):
            assert_equal_logs(*([line for line in these if "loss" in line] for these in (found, lines)), atol=1e-12)
        for text in refused[:3]:
            assert "MyTrainer(slapo_transformers.ScheduledTrainerMixin, SFTTrainer)" in text
        assert "the batch: input_ids" in refused[3]
