"""Real models start as by their own initializers, whichever piece of a tensor is made."""

from __future__ import annotations

import pytest
import torch

from slapo_runtime.initialization import programs as initialization
from tests.integration.zoo.subjects import subject
from tests.support.initial_values import differences

ZOO = ("torch: transformer", "torch: lstm", "torch: resnet with batch norm", "albert", "bart", "gpt2", "mamba", "t5")


@pytest.mark.parametrize("name", ZOO)
def test_real_models_start_as_by_their_own_initializers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialization, "_BLOCK", 40)
    with torch.device("meta"):
        model = subject(name).build()
    understood, wrong = differences(model)
    assert not wrong
    assert understood >= 0.9 * len(model.state_dict())
