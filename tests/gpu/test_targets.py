"""Targets torch, DeepSpeed and Megatron at one rank of one GPU: losses, checkpoints and names of a scheduled LLaMA."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import slapo_core as slapo
from tests.gpu.subjects import on_ranks
from tests.gpu.targets import CASES, trained
from tests.processor import lacks

MODULES = {"torch": "torch", "deepspeed": "deepspeed", "megatron": "megatron.core"}
RTOL = {"float32": 1e-3, "bfloat16": 3e-2}


_FOUND: dict[str, Any] = {}


def found(target: str, device: torch.device) -> dict[str, Any]:
    """All ways of a target, in one process: a runtime is imported once, and what ends it is not tried again."""
    package = MODULES[target].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if target not in _FOUND:
        try:
            _FOUND[target] = on_ranks(trained, target, device=device)[0]
        except slapo.SlapoError as error:
            _FOUND[target] = error
    if isinstance(_FOUND[target], slapo.SlapoError):
        pytest.fail(str(_FOUND[target]))
    return _FOUND[target]  # type: ignore[no-any-return]


@pytest.mark.gpu(12)
@pytest.mark.parametrize(("target", "name"), [(target, name) for target, cases in CASES.items() for name in cases])
def test_a_target_trains_as_pytorch_alone(device: torch.device, target: str, name: str) -> None:
    if device.type == "cpu" and target == "deepspeed" and "bfloat16" in name and (reason := lacks("bf16")):
        pytest.skip(reason)
    everything = found(target, device)
    case, dtype = everything[name], CASES[target][name][0]
    assert not isinstance(case, str), case
    # Target torch keeps no main weights: those that it trains are rounded in every step.
    count = 2 if target == "torch" and dtype == "bfloat16" else len(case["losses"])
    by_hand = everything[f"by hand, {dtype}"]
    assert case["losses"][:count] == pytest.approx(by_hand[:count], rel=RTOL[dtype])
    assert case["loaded"] == pytest.approx(case["evaluated"], rel=RTOL[dtype])
    assert case["names"]
