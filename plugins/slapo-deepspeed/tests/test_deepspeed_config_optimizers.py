"""The optimizer that a configuration names is one, the only one, and right for the pieces that ranks hold."""

from __future__ import annotations

from typing import Any

import pytest

import slapo_core as slapo
from slapo_core.dialect import BuildArguments
from tests.messages import Messages

from .planned import ADAM, plan, planned, refusal, schedule_of


def of(name: Any, stage: int = 0, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-3, **params}}, "zero_optimization": {"stage": stage}}


def split() -> slapo.Schedule:
    schedule = schedule_of({"tp": 2})
    schedule["0"].shard("weight", axis=0)
    schedule["0"].shard("bias", axis=0)
    schedule["0"].sync(mode="fwd_post", op="all_gather", axis=1)
    return schedule


def test_two_optimizers_are_refused_with_both(message: Messages) -> None:
    both = refusal({"optimizer": ADAM}, arguments=BuildArguments(has_optimizer=True))
    message(both, "two optimizers", "'AdamW'", "build(optimizer=...)")
    planned({"optimizer": ADAM}, arguments=BuildArguments())
    planned({}, arguments=BuildArguments(has_optimizer=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("AdmW", ("'AdmW'", "not an optimizer", "did you mean")),
        ("sgd", ("'sgd'", "not an optimizer", "did you mean")),
        ("OneBitAdam", ("'OneBitAdam'", "not an optimizer")),
        ("Optimizer", ("'Optimizer'", "not an optimizer")),
        ("LBFGS", ("'LBFGS'", "several times")),
        ("MuAdam", ("'muadam'", "mup")),
        ("Muon", ("'Muon'", "groups")),
        (None, ("got None",)),
        (7, ("got 7",)),
    ],
)
def test_an_optimizer_that_there_is_none_is_refused(name: Any, words: tuple[str, ...], message: Messages) -> None:
    message(refusal(of(name)), "'optimizer.type'", *words)


@pytest.mark.parametrize("name", ["Lamb", "LAMB", "Adafactor"])
def test_an_optimizer_that_needs_whole_parameters_is_not_given_pieces(name: str, message: Messages) -> None:
    planned(of(name))
    planned(of(name), {"tp": 2})  # no step splits a parameter
    message(refusal(of(name), schedule=split()), "one by one", "'0.weight'", "mesh_dim 'tp'")
    message(refusal({**of(name), "bf16": {"enabled": True}}, {"pp": 2}), "one by one", "pipeline in bf16")
    planned(of(name), {"pp": 2})
    message(refusal(of(name, stage=2)), "one by one", "ZeRO-2")


@pytest.mark.parametrize("name", ["AdamW", "adam", "SGD", "Lion", "RMSprop", "Adagrad"])
def test_an_optimizer_that_treats_elements_one_by_one_may_be_given_pieces(name: str) -> None:
    plan(of(name, stage=2), schedule=split())


def test_params_that_deepspeed_would_refuse_late_are_refused(message: Messages) -> None:
    message(refusal(of("AdamW", max_grad_norm=0.5)), "'optimizer.params.max_grad_norm'", '"gradient_clipping": 0.5')


def test_values_that_nothing_fills_in_are_named_together(message: Messages) -> None:
    config = {**of("AdamW", weight_decay="auto", lr="auto")}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    text = message(refusal(config), "'optimizer.params.weight_decay'", "'optimizer.params.lr'", "'auto'")
    assert "'scheduler.params.warmup_num_steps'" in text


@pytest.mark.parametrize(("name", "params"), [("AdamW", "learning_rate"), ("SGD", "momentun"), ("Lion", "eps")])
def test_params_that_the_optimizer_does_not_take_are_refused(name: str, params: str) -> None:
    """In words of Python's, which differ from version to version."""
    text = refusal(of(name, **{params: 1}))
    assert text.lower().startswith(f"'optimizer.params' of config: {name.lower()} got an unexpected keyword")
    assert repr(params) in text
