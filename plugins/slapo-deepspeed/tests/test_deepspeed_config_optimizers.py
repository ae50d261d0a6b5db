"""The optimiser that a configuration names is one, the only one, and right for the pieces that ranks hold."""

from __future__ import annotations

from typing import Any

import pytest

import slapo_core as slapo
from slapo_core.spec.dialect import BuildArguments

from .planned import ADAM, plan, planned, refusal, schedule_of


def of(name: Any, stage: int = 0, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-3, **params}}, "zero_optimization": {"stage": stage}}


def split() -> slapo.Schedule:
    schedule = schedule_of({"tp": 2})
    schedule["0"].shard("weight", axis=0)
    schedule["0"].shard("bias", axis=0)
    schedule["0"].sync(mode="fwd_post", op="all_gather", axis=1)
    return schedule


def test_two_optimisers_are_refused_with_both() -> None:
    assert refusal({"optimizer": ADAM}, arguments=BuildArguments(has_optimizer=True)) == (
        "two optimisers: 'optimizer' of config is 'AdamW', and build(optimizer=...) is a factory\n"
        '  hint: leave out "optimizer" of the configuration, or optimizer= of build'
    )
    planned({"optimizer": ADAM}, arguments=BuildArguments())
    planned({}, arguments=BuildArguments(has_optimizer=True))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "AdmW",
            "'optimizer.type' of config is 'AdmW', which is no optimiser of DeepSpeed 0.19 and none of torch.optim; ",
        ),
        (
            "sgd",
            "'optimizer.type' of config is 'sgd', which is no optimiser of DeepSpeed 0.19 and none of torch.optim; d",
        ),
        (
            "OneBitAdam",
            "'optimizer.type' of config is 'OneBitAdam', which is no optimiser of DeepSpeed 0.19 and none of ",
        ),
        (
            "Optimizer",
            "'optimizer.type' of config is 'Optimizer', which is no optimiser of DeepSpeed 0.19 and none of t",
        ),
        (
            "LBFGS",
            "'optimizer.type' of config is 'LBFGS', which runs the model several times a step; DeepSpeed runs it",
        ),
        (
            "MuAdam",
            "'optimizer.type' of config is 'muadam', which reads what mup has put on the parameters of the untou",
        ),
        (
            "Muon",
            "'optimizer.type' of config is 'Muon': DeepSpeed sorts the parameters into groups of its own for it, w",
        ),
        (None, "'optimizer.type' of config must name an optimiser (got None)"),
        (7, "'optimizer.type' of config must name an optimiser (got 7)"),
    ],
)
def test_an_optimiser_that_there_is_none_is_refused(name: Any, expected: str) -> None:
    assert refusal(of(name)).startswith(expected)


@pytest.mark.parametrize("name", ["Lamb", "LAMB", "Adafactor"])
def test_an_optimiser_that_needs_whole_parameters_is_not_given_pieces(name: str) -> None:
    planned(of(name))
    planned(of(name), {"tp": 2})  # no step splits a parameter
    message = refusal(of(name), schedule=split())
    assert (
        "which does not treat the elements of a parameter one by one, and '0.weight' is split over mesh_dim 'tp'"
        in (message)
    )
    in_stages = refusal({**of(name), "bf16": {"enabled": True}}, {"pp": 2})
    assert "one by one, and in a pipeline in bf16 DeepSpeed gives each rank pieces" in in_stages
    planned(of(name), {"pp": 2})
    assert "one by one, and ZeRO-2 gives each rank pieces of them" in refusal(of(name, stage=2))


@pytest.mark.parametrize("name", ["AdamW", "adam", "SGD", "Lion", "RMSprop", "Adagrad"])
def test_an_optimiser_that_treats_elements_one_by_one_may_be_given_pieces(name: str) -> None:
    plan(of(name, stage=2), schedule=split())


def test_params_that_deepspeed_would_refuse_late_are_refused() -> None:
    assert refusal(of("AdamW", max_grad_norm=0.5)) == (
        "'optimizer.params.max_grad_norm' of config: DeepSpeed clips by 'gradient_clipping'\n"
        '  hint: "gradient_clipping": 0.5, or max_grad_norm= of build'
    )
    assert refusal(of("AdamW", learning_rate=1)) == (
        "'optimizer.params' of config: adamw got an unexpected keyword argument 'learning_rate'"
    )
    assert refusal(of("SGD", momentun=0.9)).startswith("'optimizer.params' of config: SGD got an unexpected keyword")
    assert refusal(of("Lion", eps=1e-8)).startswith("'optimizer.params' of config: lion got an unexpected keyword")
    assert refusal(of("AdamW", weight_decay="auto")).startswith(
        "'optimizer.params.weight_decay' of config is 'auto', and nothing says what it should be"
    )
