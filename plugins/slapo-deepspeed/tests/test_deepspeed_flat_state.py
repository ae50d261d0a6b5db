"""The state of a flat tensor, made of the states of the parameters in it."""

from __future__ import annotations

import torch

from slapo_deepspeed.state.flat_layout import flat_states
from slapo_runtime.flat_shards import Place


def test_a_parameter_without_axes_has_its_place_too() -> None:
    """Its moments have no axes either, as the number of steps has none, which all parameters share."""
    flat, vector, number = torch.zeros(5), torch.zeros(4), torch.zeros(())
    places = {id(number): Place(flat, 0, 0, 1, ()), id(vector): Place(flat, 1, 0, 4, (4,))}
    states = {
        number: {"step": torch.tensor(2.0), "exp_avg": torch.tensor(0.5)},
        vector: {"step": torch.tensor(2.0), "exp_avg": torch.arange(4.0)},
    }
    optimizer = torch.optim.AdamW([flat])
    names = {id(number): "number", id(vector): "vector"}
    ((stepped, state),) = flat_states(optimizer, places, [number, vector], states, names)
    assert stepped is flat
    assert float(state["step"]) == 2.0
    assert state["exp_avg"].tolist() == [0.5, 0.0, 1.0, 2.0, 3.0]
