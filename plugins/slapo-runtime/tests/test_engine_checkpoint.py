"""A checkpoint written under one schedule and world size goes on under another, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from tests.messages import Messages
from tests.support.building import adam, batches, on_meta, real, sgd, split
from tests.support.checkpoints import described, newest, stored


def grouped_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1, "betas": (0.8, 0.9)}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
    )


def engine_on(mesh: dict[str, int] | None, optimizer: Any = grouped_adam) -> Any:
    schedule = slapo.create_schedule(real("mlp").double(), mesh=mesh)
    if mesh is not None:
        split(schedule, "mlp")
    return slapo.build(schedule, optimizer=optimizer)


def train(engine: Any, first: int, last: int) -> dict[str, torch.Tensor]:
    mesh = engine._state.mesh
    replicas, place = (mesh.size("dp"), mesh.rank("dp")) if mesh is not None else (1, 0)
    for number, batch in enumerate(batches(last)):
        if number >= first:
            engine.train_step({name: value.double().chunk(replicas)[place] for name, value in batch.items()})
    return engine.state_dict()


def save_after_three(mesh: dict[str, int] | None, directory: str) -> None:
    engine = engine_on(mesh)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.02  # as a schedule of the learning rate would
    train(engine, 0, 3)
    engine.save(directory)


def go_on_to_six(mesh: dict[str, int] | None, directory: str) -> dict[str, torch.Tensor]:
    engine = engine_on(mesh)
    train(engine, 0, 1)  # other values and state, to be replaced
    engine.load(directory)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.02, 0.02]
    assert engine.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    return train(engine, 3, 6)


def without_interruption() -> dict[str, torch.Tensor]:
    engine = engine_on(None)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.02
    return train(engine, 0, 6)


def check(state: dict[str, torch.Tensor]) -> None:
    for key, tensor in without_interruption().items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-10, atol=1e-12)


def test_one_process_resumes_bitwise(tmp_path: Path) -> None:
    save_after_three(None, str(tmp_path))
    check(go_on_to_six(None, str(tmp_path)))


@pytest.mark.ranks
def test_two_tensor_parallel_ranks_save_and_one_process_goes_on(tmp_path: Path) -> None:
    run_ranks(save_after_three, {"tp": 2}, str(tmp_path), world_size=2)
    check(go_on_to_six(None, str(tmp_path)))
    plain = real("mlp").double()
    plain.load_state_dict(stored(tmp_path))


@pytest.mark.ranks
def test_checkpoint_of_one_process_resumes_on_tensor_parallel_ranks(tmp_path: Path) -> None:
    save_after_three(None, str(tmp_path))
    for state in run_ranks(go_on_to_six, {"tp": 2}, str(tmp_path), world_size=2):
        check(state)


def test_checkpoint_files_hold_reference_names_only(tmp_path: Path) -> None:
    save_after_three({"tp": 1}, str(tmp_path))
    save_after_three({"tp": 1}, str(tmp_path))  # over the first
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000003"]
    assert sorted(file.name for file in newest(tmp_path).iterdir()) == [".metadata", "__0_0.distcp", "checkpoint.json"]
    assert sorted(stored(tmp_path)) == ["fc1.bias", "fc1.weight", "fc2.weight"]
    assert sorted(stored(tmp_path, "optimizer")) == [
        f"{name}::{key}"
        for name in ("fc1.bias", "fc1.weight", "fc2.weight")
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert [group["params"] for group in described(tmp_path)["optimizer"]["groups"]] == [
        ["fc1.weight", "fc2.weight"],
        ["fc1.bias"],
    ]


def test_a_tied_model_is_saved_with_all_its_names(tmp_path: Path) -> None:
    engine = slapo.build(slapo.create_schedule(on_meta("gpt2")))
    engine.save(tmp_path)
    plain = real("gpt2", seed=4)
    assert plain.load_state_dict(stored(tmp_path), strict=False).missing_keys == ["lm_head.weight"]  # written once
    other = slapo.build(slapo.create_schedule(on_meta("gpt2")), weights=tmp_path)
    state = other.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in plain.state_dict().items())


def test_tensors_added_by_a_replacement_are_saved_apart(tmp_path: Path, message: Messages) -> None:
    from .test_weights_reference import gated

    engine = slapo.build(gated(real("mlp")), optimizer=adam)
    with torch.no_grad():
        engine.module.fc1.gate.fill_(3.0)
    engine.train_step(next(batches(1)))
    gate = engine.module.fc1.gate.detach().clone()
    engine.save(tmp_path)
    assert list(stored(tmp_path, "added")) == ["fc1.gate"]

    again = slapo.build(gated(real("mlp", seed=5)), optimizer=adam)
    again.load(tmp_path)
    assert torch.equal(again.module.fc1.gate, gate)

    plain = slapo.build(slapo.create_schedule(real("mlp")))
    with pytest.warns(UserWarning, match=r"fc1\.gate$") as caught:
        plain.load(tmp_path)
    message(caught[0].message, "added by replacements", "fc1.gate")


def test_another_optimizer_or_other_groups_are_refused_before_anything_changes(
    tmp_path: Path, message: Messages
) -> None:
    engine = engine_on(None)
    train(engine, 0, 1)
    engine.save(tmp_path)
    other = engine_on(None, sgd)
    before = other.state_dict()
    with pytest.raises(slapo.BuildError) as error:
        other.load(tmp_path)
    message(error, "AdamW", "SGD")
    assert all(torch.equal(tensor, before[key]) for key, tensor in other.state_dict().items())
    with pytest.raises(slapo.BuildError) as error:
        engine_on(None, adam).load(tmp_path)
    message(error, "group 0", "'betas'")


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path, message: Messages) -> None:
    with pytest.raises(slapo.WeightsError, match="is not a checkpoint"):
        engine_on(None).load(tmp_path)
    evaluating = slapo.build(slapo.create_schedule(real("mlp")))
    evaluating.save(tmp_path)
    with pytest.raises(slapo.BuildError) as caught:
        slapo.build(slapo.create_schedule(real("mlp")), optimizer=sgd).load(tmp_path)
    message(caught, "no optimizer state")


def save_with_rows(mesh: dict[str, int] | None, directory: str) -> str:
    """With one number for each row of a matrix in the optimizer's state."""
    engine = engine_on(mesh)
    train(engine, 0, 1)
    weight = engine.module.fc1.weight
    engine.optimizer.state[weight]["row"] = torch.ones(weight.shape[0], 1)
    try:
        engine.save(directory)
    except slapo.BuildError as error:
        return error.message
    engine.load(directory)
    return f"{tuple(engine.optimizer.state[weight]['row'].shape)}"


@pytest.mark.ranks
def test_state_whose_place_in_the_full_tensor_is_unknown_is_refused(tmp_path: Path, message: Messages) -> None:
    first, second = run_ranks(save_with_rows, {"tp": 2}, str(tmp_path), world_size=2)
    assert first == second
    message(first, "'row' of shape (4, 1)", "'fc1.weight'", "(4, 6)")
    assert list(tmp_path.iterdir()) == []
    for mesh in (None, {"tp": 1}):  # a whole tensor
        assert save_with_rows(mesh, str(tmp_path)) == "(8, 1)"


def test_state_of_tensors_made_of_others_is_refused(tmp_path: Path, message: Messages) -> None:
    """As optimizers in 8 bits keep it."""
    from torch.testing._internal.two_tensor import TwoTensor

    engine = engine_on(None)
    train(engine, 0, 1)
    weight = engine.module.fc1.weight
    engine.optimizer.state[weight]["exp_avg"] = TwoTensor(torch.ones_like(weight), torch.ones_like(weight))
    with pytest.raises(slapo.BuildError) as caught:
        engine.save(tmp_path)
    message(caught, "'exp_avg' of 'fc1.weight'", "TwoTensor", "state_dict()")
    assert list(tmp_path.iterdir()) == []


def save_into_a_file(directory: str) -> str:
    engine = engine_on({"tp": 2})
    try:
        engine.save(directory)
    except (slapo.BuildError, OSError) as error:
        return type(error).__name__
    return "saved"


@pytest.mark.ranks
def test_a_write_that_fails_on_the_first_rank_fails_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert run_ranks(save_into_a_file, str(tmp_path / "file"), world_size=2) == ["BuildError", "BuildError"]


class WideState(torch.optim.SGD):
    """Keeps its momentum in float32, whatever its parameters are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("sum", torch.zeros_like(p, dtype=torch.float32)).add_(p.grad.float() / 3)
                p.add_(state["sum"].to(p.dtype), alpha=-0.1)


def test_optimizer_state_of_another_type_than_its_parameters_keeps_it(tmp_path: Path) -> None:
    def made() -> Any:
        schedule = slapo.create_schedule(real("mlp").bfloat16())
        return slapo.build(schedule, optimizer=lambda params: WideState(params, lr=0.1))

    engine = made()
    for batch in batches(2):
        engine.train_step({name: value.bfloat16() for name, value in batch.items()})
    engine.save(tmp_path)
    other = made()
    other.load(tmp_path)
    for own, theirs in zip(engine.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert theirs["sum"].dtype == torch.float32
        assert torch.equal(own["sum"], theirs["sum"])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.drop, self.fc2 = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.fc2(self.drop(self.fc1(x))), y)


def resumed_with_dropout(directory: str) -> list[bool]:
    def made() -> Any:
        return slapo.build(slapo.create_schedule(Dropping().double(), mesh={"dp": 2}), optimizer=sgd)

    engine = made()
    torch.manual_seed(7 + engine._state.mesh.rank("dp"))  # replicas drop other elements
    train(engine, 0, 2)
    engine.save(directory)
    expected = train(engine, 2, 4)
    other = made()
    torch.manual_seed(99)
    other.load(directory)
    return [torch.equal(value, expected[name]) for name, value in train(other, 2, 4).items()]


@pytest.mark.ranks
def test_each_replica_goes_on_with_its_own_random_state(tmp_path: Path) -> None:
    for same in run_ranks(resumed_with_dropout, str(tmp_path), world_size=2):
        assert all(same)


def test_a_byte_that_changed_in_a_file_is_found(tmp_path: Path) -> None:
    engine = engine_on(None, sgd)
    engine.save(tmp_path)
    file = newest(tmp_path) / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(slapo.WeightsError, match="damaged"):
        engine.load(tmp_path)


def test_an_empty_directory_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    schedule = slapo.create_schedule(real("mlp"))
    for save in (lambda: slapo.save_pretrained(schedule, ""), lambda: engine_on(None, sgd).save("")):
        with pytest.raises(slapo.ArgumentError, match="empty"):
            save()
    assert not list(tmp_path.iterdir())
