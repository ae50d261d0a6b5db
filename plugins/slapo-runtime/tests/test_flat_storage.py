"""The state of a flat tensor, made of the states of the parameters in it."""

from __future__ import annotations

import pytest
import torch

from slapo_core import BuildError
from slapo_runtime.correspondence.flat_storage import FlatOptimizer, FlatStorage, StoredGroup, StoredParameter
from slapo_runtime.flat_shards import FlatShard


def stored() -> tuple[torch.optim.Optimizer, torch.Tensor, torch.Tensor, FlatOptimizer]:
    """A number and a vector in one flat tensor, which AdamW steps."""
    flat, vector, number = torch.zeros(5), torch.zeros(4), torch.zeros(())
    optimizer = torch.optim.AdamW([flat])
    held = {
        id(number): StoredParameter(FlatShard(flat, 0, 0, 1, ()), optimizer=optimizer),
        id(vector): StoredParameter(FlatShard(flat, 1, 0, 4, (4,)), optimizer=optimizer),
    }
    storage = FlatStorage(held, None, torch.device("cpu"))
    names = {id(number): "number", id(vector): "vector"}
    group = StoredGroup([number, vector], {"lr": 1.0})
    return optimizer, number, vector, FlatOptimizer(storage, [group], names, "A runtime", [optimizer])


def test_a_parameter_without_axes_has_its_place_too() -> None:
    """Its moments have no axes either, as the number of steps has none, which all parameters share."""
    optimizer, number, vector, mine = stored()
    states = {
        number: {"step": torch.tensor(2.0), "exp_avg": torch.tensor(0.5)},
        vector: {"step": torch.tensor(2.0), "exp_avg": torch.arange(4.0)},
    }
    mine.loading([{"lr": 0.5}], states)()
    (state,) = optimizer.state.values()
    assert float(state["step"]) == 2.0
    assert state["exp_avg"].tolist() == [0.5, 0.0, 1.0, 2.0, 3.0]
    assert mine.read(vector, "exp_avg").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert mine.read(number, "exp_avg").shape == ()
    assert {key: tuple(value.shape) for key, value in mine.state(vector).items()} == {"step": (), "exp_avg": (4,)}
    assert mine.param_groups[0]["lr"] == 0.5
    mine.loading([{"lr": 0.5}], {})()
    assert mine.state(vector) == {}


def test_step_counts_must_agree() -> None:
    _, number, vector, mine = stored()
    states = {number: {"step": torch.tensor(1.0)}, vector: {"step": torch.tensor(2.0)}}
    with pytest.raises(BuildError, match=r"'number' and 2\.0 for 'vector', but A runtime keeps one number"):
        mine.loading([{}], states)
    with pytest.warns(UserWarning, match="no optimizer state for vector"):
        mine.loading([{}], {number: {"step": torch.tensor(1.0)}})
