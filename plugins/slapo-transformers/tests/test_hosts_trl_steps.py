"""Steps at the root and at the head, past which TRL's forward goes, run with the mixin, or are noticed without it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import slapo_core as slapo
from slapo_transformers import ScheduledTrainerMixin
from tests.messages import Messages

from .test_hosts_trl import config, kernels_in_double, lora, on_disk, pairs, tokenizer
from .training_runs import VOCABULARY, assert_equal_logs, log, model, samples


class Sft(ScheduledTrainerMixin, SFTTrainer):  # type: ignore[misc, unused-ignore]
    pass


class Dpo(ScheduledTrainerMixin, DPOTrainer):  # type: ignore[misc, unused-ignore]
    pass


class DoubledLogits(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class SomeLogits(nn.Linear):
    """Gives those of one rank, as a split head whose step to gather them was left out."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)[..., :20]


def double_logits(sch: slapo.Schedule) -> None:
    head = DoubledLogits(16, VOCABULARY, bias=False, dtype=torch.float64)
    head.load_state_dict(sch["lm_head"].module.state_dict())
    sch["lm_head"].replace(head)


def defer(sch: slapo.Schedule) -> None:
    sch["lm_head"].linear_cross_entropy()


def checkpoint_root(sch: slapo.Schedule) -> None:
    sch.root.checkpoint()


def lines(directory: Path, kind: Any, made: Any, **options: Any) -> list[dict[str, float]]:
    """Return the log lines of a run."""
    kernels_in_double()
    args = config(SFTConfig, directory, max_steps=2, eval_steps=1, activation_checkpointing=False)
    data = {
        "train_dataset": on_disk(samples(8, 2), directory / "data"),
        "eval_dataset": on_disk(samples(3, 3), directory / "held"),
    }
    run = kind(model=made, args=args, processing_class=tokenizer(), **data, **options)
    run.train()
    return log(run)


@pytest.mark.parametrize("steps", [double_logits, defer, checkpoint_root], ids=lambda one: one.__name__)
def test_steps_that_trl_goes_past_run(steps: Callable[[slapo.Schedule], None], tmp_path: Path) -> None:
    plain, made, calls = model("llama"), model("llama"), []
    if steps is double_logits:
        plain.config.logit_scale = 2.0  # which TRL reads
    sch = slapo.create_schedule(made)
    steps(sch)
    made.model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    assert_equal_logs(lines(tmp_path / "own", Sft, made, schedule=sch), lines(tmp_path / "plain", SFTTrainer, plain))
    ids, factor = torch.arange(6)[None], 2 if steps is double_logits else 1
    torch.testing.assert_close(made(input_ids=ids).logits, plain(input_ids=ids).logits * factor)
    forwards = 2 if steps is checkpoint_root else 1  # the steps' backwards recompute
    assert calls.count(True) == 2 * forwards + 1


@pytest.mark.parametrize("steps", [double_logits, defer, checkpoint_root], ids=lambda one: one.__name__)
def test_without_the_mixin_they_are_noticed(
    steps: Callable[[slapo.Schedule], None], tmp_path: Path, message: Messages
) -> None:
    sch = slapo.create_schedule(model("llama"))
    steps(sch)
    if steps is checkpoint_root:
        with pytest.warns(UserWarning, match="(?s)these steps, which do not run.*ScheduledTrainerMixin"):
            lines(tmp_path, SFTTrainer, sch.model)
        return
    with pytest.raises(slapo.MeshError) as caught:
        lines(tmp_path, SFTTrainer, sch.model)
    message(caught, "'lm_head' did not run", "ScheduledTrainerMixin, SFTTrainer")


def test_a_copy_of_the_model_calls_its_own_head(tmp_path: Path) -> None:
    sch = slapo.create_schedule(model("llama"))
    double_logits(sch)
    lines(tmp_path, Sft, sch.model, schedule=sch)
    other: Any = copy.deepcopy(sch.model)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        before = sch.model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        assert torch.equal(other(input_ids=ids, labels=ids, fused_lm_head=True).log_probs, before)
        other.lm_head.weight.zero_()
        found = other(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        assert torch.equal(sch.model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs, before)
    torch.testing.assert_close(found, torch.full_like(found, -torch.tensor(float(VOCABULARY)).log().item()))


def test_what_the_mixin_does_not_run_is_refused(tmp_path: Path, message: Messages) -> None:
    traced = slapo.create_schedule(model("llama"), example_inputs={"input_ids": torch.arange(6)[None]})
    traced.root.trace()
    smaller = slapo.create_schedule(model("llama"))
    smaller["lm_head"].replace(SomeLogits(16, VOCABULARY, bias=False, dtype=torch.float64))
    for sch, words in ((traced, "replaced the forward"), (smaller, "20 of 51 logits")):
        with pytest.raises(slapo.ArgumentError) as caught:
            lines(tmp_path, Sft, sch.model, schedule=sch)
        message(caught, words)
    sch = slapo.create_schedule(model("llama"))
    with pytest.raises(slapo.ArgumentError) as caught:
        lines(tmp_path, Sft, sch.model, schedule=sch, peft_config=object())
    message(caught, "get_peft_model")


def test_the_adapter_of_the_reference_is_one_of_the_schedule(tmp_path: Path, message: Messages) -> None:
    made = lora(model("llama"))
    sch = slapo.create_schedule(made)
    options = {"processing_class": tokenizer(), "train_dataset": on_disk(pairs(4, 2), tmp_path / "data")}
    args = config(DPOConfig, tmp_path, eval_strategy="no")
    with pytest.raises(slapo.ArgumentError) as caught:
        Dpo(model=made, schedule=sch, args=args, **options)
    message(caught, "'ref'", "before create_schedule")
    made.add_adapter("ref", made.peft_config["default"])
    run = Dpo(model=made, schedule=slapo.create_schedule(made), args=args, **options)
    assert "add_adapter" not in vars(made)
    one, other = (
        made.get_parameter(f"base_model.model.model.layers.0.self_attn.q_proj.lora_A.{name}.weight")
        for name in ("default", "ref")
    )
    assert torch.equal(one, other)
    run.train()
    assert not torch.equal(one, other)


def test_losses_that_read_the_head_are_refused(tmp_path: Path, message: Messages) -> None:
    from slapo_transformers.trl_forwards import run_steps

    sch = slapo.create_schedule(model("llama"))
    args = config(SFTConfig, tmp_path)
    for name, value, words in (
        ("loss_type", "chunked_nll", 'loss_type="nll"'),
        ("entropy_coef", 0.1, "entropy_coef=0.0"),
    ):
        given = copy.copy(args)
        setattr(given, name, value)
        run_steps(given, sch.model)
        defer(sch)
        with pytest.raises(slapo.ArgumentError) as caught:
            run_steps(given, sch.model)
        message(caught, words)
        sch.undo()


def test_each_seam_of_trl_is_where_it_was() -> None:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    from slapo_transformers.trl_forwards import _HeadCalls

    made = model("llama")
    utils.add_fused_lm_head(made)
    function = made.forward.__func__
    code = function.__code__
    moved = [
        f"{name} of _fused_forward"
        for name in ("_ChunkedLogProbFunction", "get_output_embeddings")
        if name not in code.co_names
    ]
    moved += [] if code.co_name == "_fused_forward" else [f"_fused_forward is {code.co_name}"]
    moved += [] if "original_forward" in code.co_freevars else ["original_forward of _fused_forward"]
    taken = list(inspect.signature(ChunkedLogProbFunction.forward).parameters)[1:]
    own = list(inspect.signature(_HeadCalls.apply).parameters)[1:]
    moved += (
        [] if len(taken) == len(own) and taken[-1] == own[-1] else [f"arguments of ChunkedLogProbFunction: {taken}"]
    )
    source = inspect.getsource(DPOTrainer)
    for name in ("_precompute_ref_logps", 'model.add_adapter("ref"', "add_fused_lm_head", "self.ref_model"):
        moved += [] if name in source else [f"DPOTrainer -> {name}"]
    moved += [] if "add_fused_lm_head" in inspect.getsource(SFTTrainer) else ["SFTTrainer -> add_fused_lm_head"]
    assert moved == [], f"a release of TRL has moved: {', '.join(moved)}"
