"""A built run on several ranks: what would part their copies is refused, made right or found, and costs one step."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from slapo_runtime.ranks import world
from tests.messages import Messages


class Net(nn.Module):
    """Two layers to split between a norm, dropout and a head that all tensor-parallel ranks hold."""

    def __init__(self, dropout: float = 0.0, layer_drop: Callable[[], float] | None = None) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(dropout)
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 4)
        self.layer_drop = layer_drop

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.drop(self.norm(x))
        hidden = hidden + self.down(self.up(hidden).relu())
        if self.training and self.layer_drop is not None and self.layer_drop() < 0.5:
            hidden = hidden * 2
        prediction = self.head(hidden)
        return {"loss": nn.functional.mse_loss(prediction, y), "prediction": prediction}


def net(**settings: Any) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(**settings).double()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch_of(number: int, size: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randn(size, width, generator=generator, dtype=torch.float64) for width in (6, 4))
    return {"x": x, "y": y}


def share(batch: dict[str, torch.Tensor], mesh: Any) -> dict[str, torch.Tensor]:
    return {name: value.chunk(mesh.size("dp"))[mesh.rank("dp")] for name, value in batch.items()}


def engine_of(mesh: dict[str, int] | None, model: nn.Module | None = None, **arguments: Any) -> Any:
    schedule = slapo.create_schedule(net() if model is None else model, mesh=mesh)
    if mesh is not None and "tp" in mesh:
        schedule["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        schedule["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return slapo.build(schedule, **{"optimizer": sgd, **arguments})


def said(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error of a call, or what it warned of, as text; ``"fine"`` where there was none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            function(*args, **kwargs)
        except slapo.SlapoError as error:
            return f"{type(error).__name__}: {error}"
    return "\n".join(str(warning.message) for warning in caught) or "fine"


def saved(engine: Any) -> str:
    with tempfile.TemporaryDirectory() as directory:
        return said(engine.save, directory)


def losses_of(engine: Any, count: int = 3) -> list[float]:
    return [engine.train_step(batch_of(number)).loss.item() for number in range(count)]


def looked_at(engine: Any) -> dict[str, str]:
    return {
        "state_dict": said(engine.state_dict),
        "save": saved(engine),
        "check": said(engine.check_replicas),
    }


# -- two tensor-parallel ranks --------------------------------------------------------------------------------


def nothing_wrong() -> Any:
    engine = engine_of({"tp": 2})
    return losses_of(engine), looked_at(engine)


def changed_on_one_rank() -> Any:
    engine = engine_of({"tp": 2})
    losses_of(engine)
    with torch.no_grad():
        engine.module.norm.weight.add_(dist.get_rank())
    found = looked_at(engine)
    repaired = said(engine.check_replicas, repair=True)
    return found, repaired, looked_at(engine)


def other_data_later() -> Any:
    engine = engine_of({"tp": 2})
    losses_of(engine)
    engine.train_step(batch_of(10 + dist.get_rank()))
    return looked_at(engine)


def optimizer_parted() -> Any:
    engine = engine_of({"tp": 2})
    losses_of(engine)
    engine.optimizer.state[engine.module.norm.weight]["momentum_buffer"].add_(dist.get_rank())
    state = looked_at(engine)
    engine.check_replicas(repair=True)
    repaired = said(engine.check_replicas)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.1 + dist.get_rank()
    return state, repaired, said(engine.check_replicas), said(engine.check_replicas, repair=True)


def first_batches() -> dict[str, str]:
    rank, batch = dist.get_rank(), batch_of(0)
    swapped = dict(reversed(batch.items())) if rank else batch
    given = {
        "all of it": batch_of(rank),
        "one key": {**batch, "y": batch["y"] + rank},
        "a size": batch_of(0, 8 + rank),
        "a type": {**batch, "y": batch["y"].float() if rank else batch["y"]},
        "a name": {**batch, **({"z": batch["y"]} if rank else {})},
        "the order of keys": swapped,
    }
    found = {what: said(engine_of({"tp": 2}).train_step, each) for what, each in given.items()}
    found["as a tuple"] = said(engine_of({"tp": 2}).train_step, (batch["x"], batch["y"] + rank))
    found["evaluation"] = said(engine_of({"tp": 2}, optimizer=None).eval_step, given["one key"])
    engine = engine_of({"tp": 2}, accumulate=2)
    second_half = batch["y"].clone()
    second_half[4:] += rank
    found["a later micro-batch"] = said(engine.train_step, {**batch, "y": second_half})
    engine = engine_of({"tp": 2})
    engine.module.drop.train(rank == 0)
    found["the mode of a module"] = said(engine.train_step, batch)
    engine = engine_of({"tp": 2})
    engine.module.head.bias.requires_grad_(rank == 0)
    found["what is trained"] = said(engine.train_step, batch)
    again = engine_of({"tp": 2})
    said(again.train_step, given["one key"])
    found["again, as it should be"] = said(again.train_step, batch)
    return found


def seeded_by_rank() -> Any:
    """Before build: the first rank's seed counts; after it: said, and made right; later: found."""
    torch.manual_seed(1234 + dist.get_rank())
    engine = engine_of({"tp": 2}, net(dropout=0.3))
    before = losses_of(engine), looked_at(engine)

    torch.manual_seed(1234)
    engine = engine_of({"tp": 2}, net(dropout=0.3))
    torch.manual_seed(1234 + dist.get_rank())
    told = said(engine.train_step, batch_of(0))
    torch.manual_seed(1234)
    after = losses_of(engine, 1), looked_at(engine)

    torch.manual_seed(99 + dist.get_rank())
    unseen = said(engine.train_step, batch_of(1))
    later = looked_at(engine)
    said(engine.check_replicas, repair=True)
    return before, told, after, unseen, later, looked_at(engine)


def seeded_by_rank_without_dropout() -> Any:
    """A model that draws nothing is not held to where the ranks' generators stand."""
    engine = engine_of({"tp": 2})
    losses_of(engine)
    torch.manual_seed(dist.get_rank())
    return losses_of(engine), looked_at(engine)


def layers_dropped_by_python() -> str:
    random.seed(dist.get_rank())
    return said(engine_of({"tp": 2}, net(layer_drop=random.random)).train_step, batch_of(0))


def layers_dropped_alike() -> Any:
    random.seed(3)
    engine = engine_of({"tp": 2}, net(layer_drop=random.random))
    return losses_of(engine), looked_at(engine)


def failing_on_one_rank() -> str:
    def layer_drop() -> float:
        if dist.get_rank():
            raise slapo.BuildError("out of paint")
        return 1.0

    return said(engine_of({"tp": 2}, net(layer_drop=layer_drop)).train_step, batch_of(0))


def added_with_other_values() -> str:
    torch.manual_seed(dist.get_rank())
    schedule = slapo.create_schedule(net(), mesh={"tp": 2})
    schedule["drop"].replace(nn.PReLU(6, init=float(torch.rand(()))).double())
    return said(lambda: slapo.build(schedule))


def two_ranks() -> dict[str, Any]:
    parts = (
        nothing_wrong,
        changed_on_one_rank,
        other_data_later,
        optimizer_parted,
        first_batches,
        seeded_by_rank,
        seeded_by_rank_without_dropout,
        layers_dropped_by_python,
        layers_dropped_alike,
        failing_on_one_rank,
        added_with_other_values,
    )
    return {part.__name__: part() for part in parts}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(two_ranks, world_size=2)


FINE = {"state_dict": "fine", "save": "fine", "check": "fine"}


def plain(model: nn.Module, count: int = 3, seed: int | None = None) -> list[float]:
    """The losses of a loop without slapo."""
    if seed is not None:
        torch.manual_seed(seed)
    optimizer, losses = sgd(list(model.parameters())), []
    for number in range(count):
        loss = model(**batch_of(number))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks
def test_a_run_in_which_nothing_is_wrong_is_not_disturbed(results: list[dict[str, Any]]) -> None:
    for result in results:
        losses, looked = result["nothing_wrong"]
        assert losses == pytest.approx(plain(net()), rel=1e-12)
        assert looked == FINE


@pytest.mark.ranks
def test_a_copy_that_is_changed_on_one_rank_is_found_and_can_be_repaired(results: list[dict[str, Any]]) -> None:
    for result in results:
        found, repaired, after = result["changed_on_one_rank"]
        for text in found.values():
            assert text.startswith("ReplicaError: replicas of 'norm.weight' differ")
            assert "\n  rank 0: (6,), torch.float64, norm " in text
            assert "engine.check_replicas(repair=True)" in text
        assert repaired.startswith("replicas of 'norm.weight' differ")
        assert repaired.endswith("the first rank's values now")
        assert after == FINE


@pytest.mark.ranks
def test_other_data_on_a_later_step_parts_the_copies_and_is_found(results: list[dict[str, Any]]) -> None:
    for result in results:
        for text in result["other_data_later"].values():
            assert text.startswith("ReplicaError: replicas of 'norm.weight' differ")
            assert "'norm.bias', 'down.bias', 'head.weight', 'head.bias'" in text


@pytest.mark.ranks
def test_an_optimizer_whose_state_or_settings_part_is_found(results: list[dict[str, Any]], message: Messages) -> None:
    (settings,) = {result["optimizer_parted"][2] for result in results}
    message(settings, "ReplicaError: replicas of 'lr of SGD'", ":\n  rank 0: 0.1\n  rank 1: 1.1\n")
    (beyond_repair,) = {result["optimizer_parted"][3] for result in results}
    message(beyond_repair, "ReplicaError: replicas of 'lr of SGD'", "\n  rank 0: 0.1\n  rank 1: 1.1\n  hint: ")
    for result in results:
        state, repaired, *_ = result["optimizer_parted"]
        assert state["state_dict"] == "fine"
        for text in (state["save"], state["check"]):
            assert text.startswith("ReplicaError: replicas of 'norm.weight::momentum_buffer' differ")
        assert repaired == "fine"


@pytest.mark.ranks
def test_another_batch_on_a_rank_of_the_same_replica_is_refused_in_the_first_step(
    results: list[dict[str, Any]], message: Messages
) -> None:
    (hint,) = {result["first_batches"]["all of it"].partition("\n  hint: ")[2] for result in results}
    message(hint, "the same batch", 'num_replicas=mesh.size("dp")', 'rank=mesh.rank("dp")')
    start = "RankMismatchError: ranks disagree about the "
    for result in results:
        found = result["first_batches"]
        assert found["all of it"].startswith(f"{start}batch['x']:\n  rank 0: (8, 6), torch.float64, checksum ")
        for case, place in (
            ("one key", "batch['y']"),
            ("a size", "batch['x']"),
            ("a type", "batch['y']"),
            ("a name", "names in the batch:\n  rank 0: 'x', 'y'\n  rank 1: 'x', 'y', 'z'"),
            ("as a tuple", "batch[1]"),
            ("evaluation", "batch['y']"),
            ("a later micro-batch", "batch['y']"),
            ("the mode of a module", "modules in training mode:\n  rank 0: 6, "),
            ("what is trained", "parameters to train:\n  rank 0: 8, "),
        ):
            assert found[case].startswith(start + place), case
        assert found["the order of keys"] == "fine"  # given by keyword, it is the same call
        assert found["again, as it should be"] == "fine"


@pytest.mark.ranks
def test_ranks_of_a_replica_drop_the_same_elements_whatever_they_were_seeded_with(
    results: list[dict[str, Any]],
) -> None:
    expected = plain(net(dropout=0.3), seed=1234)
    assert expected != pytest.approx(plain(net(dropout=0.3), seed=1235))
    for result in results:
        (losses, looked), told, after, unseen, later, repaired = result["seeded_by_rank"]
        assert losses == pytest.approx(expected, rel=1e-12)
        assert looked == FINE
        assert "RNG state on the CPU was changed after build()" in told
        assert after[1] == FINE
        assert unseen == "fine"
        for text in later.values():
            assert text.startswith("ReplicaError: replicas of 'norm.weight' differ")
        assert repaired == FINE


@pytest.mark.ranks
def test_the_random_state_of_a_model_that_draws_nothing_does_not_matter(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["seeded_by_rank_without_dropout"][1] == FINE


@pytest.mark.ranks
def test_layers_dropped_by_pythons_random_module_are_seen_in_the_first_step(
    results: list[dict[str, Any]], message: Messages
) -> None:
    (text,) = {result["layers_dropped_by_python"] for result in results}
    message(text, "RankMismatchError: ", "Python's random module", "ranks 0, 1", "hint: random.seed(0)")
    for result in results:
        losses, looked = result["layers_dropped_alike"]
        random.seed(3)
        assert losses == pytest.approx(plain(net(layer_drop=random.random)), rel=1e-12)
        assert looked == FINE


@pytest.mark.ranks
def test_a_first_step_that_fails_on_one_rank_leaves_no_rank_waiting(results: list[dict[str, Any]]) -> None:
    told, own = (result["failing_on_one_rank"] for result in results)
    assert own == "BuildError: out of paint"
    assert told.startswith("RankFailedError: the connection to another rank is lost; rank 1: BuildError: out of paint")


@pytest.mark.ranks
def test_tensors_added_by_a_step_must_agree_on_every_rank(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["added_with_other_values"].startswith("RankMismatchError: replicas of 'drop.weight' differ")


# -- two replicas of two ranks --------------------------------------------------------------------------------


def accumulated(count: int, size: int, *, norm: float | None) -> Any:
    engine = engine_of({"dp": 2, "tp": 2}, accumulate=count, max_grad_norm=norm)
    steps = []
    for number in range(3):
        result = engine.train_step(share(batch_of(number, size), engine._state.mesh))
        steps.append((result.loss.item(), None if result.grad_norm is None else result.grad_norm.item()))
        assert (result.output is None) == (count > 1)
    engine.check_replicas()
    return steps, engine.state_dict()


def by_hand(*, right: bool) -> Any:
    """A loop of the user's own, over two micro-batches."""
    engine = engine_of({"dp": 2, "tp": 2})
    runtime, told = engine.torch, ""

    def step(number: int) -> None:
        pieces = share(batch_of(number), engine._state.mesh)
        for place in range(2):
            piece = {name: value.chunk(2)[place] for name, value in pieces.items()}
            with runtime.no_sync() if place == 0 and right else nullcontext():
                called = runtime.module if right else engine.module
                (called(**piece)["loss"] / 2).backward()
        runtime.clip_gradients()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    for number in range(3):
        told = said(step, number)
    return told, said(engine.check_replicas), engine.module.norm.weight.detach().clone()


def cost_of_steps() -> list[dict[str, int]]:
    """The collectives of the first, second and third step, and how often ranks met for a comparison."""
    engine, steps = engine_of({"dp": 2, "tp": 2}, max_grad_norm=1.0), []
    for number in range(3):
        enter = patch.object(world.World, "__enter__", autospec=True, side_effect=world.World.__enter__)
        with enter as meeting:
            with profile() as profiler:
                engine.train_step(share(batch_of(number), engine._state.mesh))
                engine.eval_step(share(batch_of(number), engine._state.mesh))
        calls = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("c10d::")}
        steps.append({**calls, "comparisons": meeting.call_count})
    return steps


def unfrozen_after_build() -> Any:
    model = net()
    model.head.weight.requires_grad_(False)
    engine = engine_of({"dp": 2, "tp": 2}, model)
    model.head.weight.requires_grad_(True)
    return said(lambda: engine.train_step(share(batch_of(0), engine._state.mesh)))


def only_the_first_rank_asks() -> Any:
    """Where every rank has the whole model, its state dict is this rank's own, and waits for nobody."""
    engine = slapo.build(slapo.create_schedule(net(), mesh={"dp": 4}), optimizer=sgd)
    return len(engine.state_dict()) if dist.get_rank() == 0 else 0


def four_ranks() -> dict[str, Any]:
    return {
        "whole": accumulated(1, 16, norm=0.5),
        "accumulated": accumulated(4, 16, norm=0.5),
        "not clipped": accumulated(2, 16, norm=None),
        "by hand": by_hand(right=True),
        "by hand, past the wrapper": by_hand(right=False),
        "cost": cost_of_steps(),
        "unfrozen": unfrozen_after_build(),
        "alone": only_the_first_rank_asks(),
    }


@pytest.fixture(scope="module")
def replicas() -> list[dict[str, Any]]:
    return run_ranks(four_ranks, world_size=4)


def plain_steps(size: int, norm: float | None) -> Any:
    model, steps = net(), []
    optimizer = sgd(list(model.parameters()))
    for number in range(3):
        loss = model(**batch_of(number, size))["loss"]
        optimizer.zero_grad()
        loss.backward()
        found = nn.utils.clip_grad_norm_(model.parameters(), norm) if norm is not None else None
        optimizer.step()
        steps.append((loss.item(), None if found is None else found.item()))
    return steps, model.state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["whole", "accumulated", "not clipped"])
def test_accumulated_steps_are_those_of_the_untouched_model_with_the_whole_batch(
    case: str, replicas: list[dict[str, Any]]
) -> None:
    expected, state = plain_steps(16, None if case == "not clipped" else 0.5)
    for result in replicas:
        for key, tensor in state.items():
            torch.testing.assert_close(result[case][1][key], tensor, rtol=1e-12, atol=1e-14)
        norms = [norm for _, norm in result[case][0]]
        assert norms == [norm and pytest.approx(norm, rel=1e-12) for _, norm in expected]
    first, second = replicas[0][case][0], replicas[2][case][0]  # each replica's loss is that of its own samples
    assert [(a[0] + b[0]) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx([a[0] for a in expected])


@pytest.mark.ranks
def test_a_loop_by_hand_through_the_wrapper_trains_and_one_past_it_is_told(replicas: list[dict[str, Any]]) -> None:
    state = plain_steps(8, None)[1]
    for result in replicas:
        told, checked, weight = result["by hand"]
        assert (told, checked) == ("fine", "fine")
        torch.testing.assert_close(weight, state["norm.weight"], rtol=1e-12, atol=1e-14)
        told, checked, _ = result["by hand, past the wrapper"]
        assert told.startswith("the optimizer steps ")
        assert "through engine.torch" in told
        assert checked.startswith("ReplicaError: replicas of 'norm.weight' differ")


@pytest.mark.ranks
def test_only_the_first_step_pays_for_being_watched(replicas: list[dict[str, Any]]) -> None:
    for result in replicas:
        first, second, third = result["cost"]
        # Forward and backward of training, forward of evaluation, the norm over tp, and one bucket of gradients.
        assert first == {"c10d::allreduce_": 5, "comparisons": 2}  # for training, and for evaluation
        assert second == {
            "c10d::allreduce_": 5,
            "c10d::broadcast_": 2,
            "comparisons": 0,
        }  # where torch sorts its buckets
        assert third == {"c10d::allreduce_": 5, "comparisons": 0}


@pytest.mark.ranks
def test_a_parameter_that_is_unfrozen_after_build_is_found(replicas: list[dict[str, Any]]) -> None:
    for result in replicas:
        assert result["unfrozen"].startswith("BuildError: 'head.weight' was unfrozen")


@pytest.mark.ranks
def test_the_state_dict_of_whole_models_waits_for_nobody(replicas: list[dict[str, Any]]) -> None:
    assert [result["alone"] for result in replicas] == [8, 0, 0, 0]
