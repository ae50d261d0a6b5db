"""A compiled live model is looked at while it is traced: no graph break, and the wrong wrapper is still found."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from tests.support.building import Split, batches, real

from .test_live_wrappers import own_batch, scheduled


def compiled() -> tuple[float, float, int, str]:
    """The losses of a compiled and of a plain live model, the hooks left, and what a wrapped one says."""
    sch = scheduled({"tp": 2})
    batch = own_batch(sch)
    expected = sch.model(**batch).item()
    sch = scheduled({"tp": 2})
    loss = torch.compile(sch.model, backend="eager")(**batch)
    loss.backward()
    left = len(sch.model._forward_pre_hooks)
    sch = scheduled({"tp": 2})
    forward = torch.compile(DistributedDataParallel(sch.model), backend="eager")
    try:
        forward(**batch)
    except Exception as error:  # noqa: BLE001 - torch.compile gives it another class
        return loss.item(), expected, left, str(error)
    return loss.item(), expected, left, ""


@pytest.mark.ranks
def test_compiled_model_is_checked_during_tracing() -> None:
    for loss, expected, left, text in run_ranks(compiled, world_size=2):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert left == 1  # it stays, and what was compiled does not call it
        assert "DistributedDataParallel treats the tensors of this Mlp " in text
        assert " on the ranks 0, 1" in text


def whole_graph() -> int:
    """The hooks left on a split model that is compiled as one graph, its steps not communicating in the forward."""
    sch = slapo.create_schedule(real("mlp").double(), mesh={"tp": 2})
    sch["fc1"].apply(Split(("weight", "bias")))
    sch["fc2"].apply(Split(("weight",), axis=1))
    batch = {name: value.double() for name, value in next(batches(1)).items()}
    torch.compile(sch.model, backend="eager", fullgraph=True)(**batch).backward()
    return len(sch.model._forward_pre_hooks)


@pytest.mark.ranks
def test_looking_breaks_no_graph() -> None:
    assert run_ranks(whole_graph, world_size=2) == [1, 1]
