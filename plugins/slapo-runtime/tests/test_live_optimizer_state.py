"""The state of an optimizer in a live loop: full tensors by reference names, for any mesh."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from tests.messages import Messages
from tests.support.building import batches, real, split

State = dict[str, Any]
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


class Run:
    """Steps of a tied, partly frozen model: alone, over tp in equal replicas, or in fully_shard beside tp."""

    def __init__(self, kind: str, name: str) -> None:
        model: Any = real("mlp").double()
        model.again, model.frozen = model.fc2, nn.Linear(2, 2).double().requires_grad_(False)
        mesh = None if kind == "alone" else {"dp": 2, "tp": 2}
        self.sch = slapo.create_schedule(model, mesh=mesh)
        self.dp = 1
        if mesh is not None:
            split(self.sch, "mlp")
        if kind == "fully_shard":
            from torch.distributed.fsdp import fully_shard

            assert self.sch.mesh is not None
            assert self.sch.mesh.device_mesh is not None
            fully_shard(model, mesh=self.sch.mesh.device_mesh["dp"])
            self.dp = 2
        named = dict(model.named_parameters())
        biases = [value for key, value in named.items() if key.endswith("bias")]
        weights = [value for key, value in named.items() if not key.endswith("bias")]
        self.optimizer = OPTIMIZERS[name]([{"params": weights, "weight_decay": 0.1}, {"params": biases}])

    def steps(self, first: int, last: int) -> None:
        rank = self.sch.mesh.rank("dp") if self.dp > 1 and self.sch.mesh is not None else 0
        for batch in list(batches(last))[first:]:
            self.optimizer.zero_grad()
            self.sch.model(**{key: value.double().chunk(self.dp)[rank] for key, value in batch.items()}).backward()
            self.optimizer.step()

    def evaluate(self) -> None:
        """Run a forward alone, after which fully_shard leaves parameters gathered."""
        with torch.no_grad():
            self.sch.model(**{key: value.double() for key, value in next(batches(1)).items()})


Checkpoint = tuple[str, State, State, State]


def saved(kind: str) -> list[Checkpoint]:
    """The optimizer, weights and its state after two steps, and weights after four."""
    found = []
    for name in OPTIMIZERS:
        run = Run(kind, name)
        run.steps(0, 2)
        run.evaluate()
        weights, state = slapo.state_dict(run.sch), slapo.optimizer_state_dict(run.sch, run.optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.optimizer.state_dict()
        warned = ["this rank's shards" in str(one.message) for one in caught]
        assert warned == ([True] if kind == "tp" else [])  # DTensors tell nothing of tp
        first = slapo.optimizer_state_dict(run.sch, run.optimizer, rank0_only=True)
        is_first = run.sch.mesh is None or run.sch.mesh.is_first_rank
        assert list(first) == (["type", "state", "param_groups"] if is_first else [])
        run.steps(2, 4)
        stream = io.BytesIO()
        torch.save((weights, state), stream)
        stream.seek(0)
        found.append((name, *torch.load(stream, weights_only=True), slapo.state_dict(run.sch)))
    return found


def resume(kind: str, checkpoints: list[Checkpoint]) -> None:
    for name, weights, state, end in checkpoints:
        run = Run(kind, name)
        run.evaluate()
        slapo.load_state_dict(run.sch, weights)
        slapo.load_optimizer_state_dict(run.sch, run.optimizer, state)
        run.steps(2, 4)
        for key, value in slapo.state_dict(run.sch).items():
            torch.testing.assert_close(value, end[key], rtol=1e-11, atol=1e-13)


def on_ranks(alone: list[Checkpoint]) -> list[Checkpoint]:
    checkpoints = saved("tp") + saved("fully_shard")
    for kind in ("tp", "fully_shard"):
        resume(kind, alone + checkpoints)
    return checkpoints


@pytest.mark.ranks
def test_a_run_resumes_under_any_mesh_and_fully_shard() -> None:
    alone = saved("alone")
    checkpoints = alone + run_ranks(on_ranks, alone, world_size=4)[3]
    assert len(checkpoints) == 6
    for _, _, state, _ in checkpoints:
        assert set(state["state"]) == {"fc1.weight", "fc1.bias", "fc2.weight"}  # tied: the first name; none frozen
        assert all(type(one) is torch.Tensor for values in state["state"].values() for one in values.values())
        assert [group["params"] for group in state["param_groups"]] == [
            ["fc1.weight", "fc2.weight", "frozen.weight"],
            ["fc1.bias", "frozen.bias"],
        ]
    resume("alone", checkpoints)


def test_torch_loads_the_state_into_the_reference_model() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    run = Run("alone", "AdamW")
    run.steps(0, 2)
    state = slapo.optimizer_state_dict(run.sch, run.optimizer)
    plain = Run("alone", "AdamW")
    set_optimizer_state_dict(plain.sch.model, plain.optimizer, state, options=StateDictOptions(full_state_dict=True))
    for group, other in zip(plain.optimizer.param_groups, run.optimizer.param_groups, strict=True):
        for one, two in zip(group["params"], other["params"], strict=True):
            assert plain.optimizer.state[one].keys() == run.optimizer.state[two].keys()
            for key, value in run.optimizer.state[two].items():
                assert torch.equal(plain.optimizer.state[one][key], value)


def test_incompatible_state_is_refused_and_changes_nothing(message: Messages) -> None:
    run, other = Run("alone", "AdamW"), Run("alone", "SGD")
    run.steps(0, 1)
    other.steps(0, 1)
    state = slapo.optimizer_state_dict(run.sch, run.optimizer)
    before = torch.optim.Optimizer.state_dict(run.optimizer)
    wrong = {**state, "state": {**state["state"], "fc1.bias": {"exp_avg": torch.ones(3)}}}
    for bad, kind, word in (
        (slapo.optimizer_state_dict(other.sch, other.optimizer), slapo.BuildError, "SGD"),
        (run.optimizer.state_dict(), slapo.ArgumentError, "by number"),
        ({"model": {}}, slapo.ArgumentError, "param_groups"),
        (wrong, slapo.BuildError, "'fc1.bias'"),
    ):
        with pytest.raises(kind) as refused:
            slapo.load_optimizer_state_dict(run.sch, run.optimizer, bad)
        message(refused, word)
    assert run.optimizer.state_dict().keys() == before.keys()
    assert slapo.optimizer_state_dict(run.sch, run.optimizer)["state"].keys() == state["state"].keys()
    with pytest.raises(slapo.OptimizerError) as refused:
        slapo.optimizer_state_dict(run.sch, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    message(refused, "sch.model.parameters()")
    with pytest.raises(slapo.ArgumentError) as refused:
        slapo.optimizer_state_dict(run.sch, object())  # type: ignore[arg-type]
    message(refused, "optimizer of torch")


def test_a_state_dict_is_not_loaded_into_a_model_on_the_meta_device(message: Messages) -> None:
    with torch.device("meta"):
        model = real("mlp")
    sch = slapo.create_schedule(model)
    with pytest.raises(slapo.WeightsError) as refused:
        slapo.load_state_dict(sch, real("mlp").state_dict())
    message(refused, "meta device", "build(sch, weights=state")
