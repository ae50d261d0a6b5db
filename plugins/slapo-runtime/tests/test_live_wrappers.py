"""A live split model is not trained wrongly in silence: what takes its pieces for replicas is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slapo_core as slapo
from slapo_runtime.correspondence.storage import TorchOptimizer
from slapo_runtime.launcher import run_ranks
from slapo_runtime.state import ModelState
from tests.messages import Messages
from tests.support.building import batches, real, split

Batch = dict[str, torch.Tensor]


def scheduled(mesh: dict[str, int] | None = None, *, scale: bool = False) -> slapo.Schedule:
    model: Any = real("mlp").double()
    if scale:
        model.scale = nn.Linear(1, 1).double()
    return split(slapo.create_schedule(model, mesh=mesh or {"dp": 2, "tp": 2}), "mlp")


def own_batch(sch: slapo.Schedule) -> Batch:
    """This replica's part."""
    assert sch.mesh is not None
    batch = next(batches(1))
    return {n: v.double().chunk(sch.mesh.size("dp"))[sch.mesh.rank("dp")] for n, v in batch.items()}


def refusal(forward: Callable[..., Any], batch: Batch) -> tuple[str, str] | None:
    """The error of a training forward: its class, and what it says; None if there is none."""
    try:
        forward(**batch).backward()
    except slapo.SlapoError as error:
        return type(error).__name__, str(error)
    return None


def ddp(module: nn.Module, group: Any = None) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=group)


class Within(nn.Module):
    """A user's module around the model, whose parameters DistributedDataParallel looks after together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.scale, self.model = nn.Parameter(torch.ones(())), model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.scale * self.model(**batch)


def wrapped(kind: str, sch: slapo.Schedule) -> Callable[..., Any]:
    """The model in a wrapper, as ``"DistributedDataParallel over dp"``."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model, mesh = sch.model, sch.mesh
    assert mesh is not None
    assert mesh.device_mesh is not None
    if kind == "ddp over all":
        return ddp(model)
    if kind == "ddp over dp":
        return ddp(model, mesh.group("dp"))
    if kind == "ddp over tp":
        return ddp(model, mesh.group("tp"))
    if kind == "ddp around the parent":
        return ddp(Within(model).double())
    if kind == "ddp around the parent over dp":
        return ddp(Within(model).double(), mesh.group("dp"))
    if kind == "ddp around a part without pieces":
        model.scale = ddp(model.scale)
        return model
    if kind == "ddp around a part":
        model.fc1 = ddp(model.fc1)
        return model
    if kind == "fsdp over all":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if kind == "fsdp over dp":
        return FullyShardedDataParallel(model, process_group=mesh.group("dp"), device_id=torch.device("cpu"))
    if kind == "fsdp with parameters over all":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "fully_shard over all":
        return fully_shard(model)
    if kind == "fully_shard of the layers over all":
        fully_shard(model.fc1)
        return fully_shard(model)
    if kind == "fully_shard over dp":
        return fully_shard(model, mesh=mesh.device_mesh["dp"])
    assert kind == "none"
    return model


WRONG = (
    "ddp over all",
    "ddp over tp",
    "ddp around the parent",
    "ddp around a part",
    "fsdp over all",
    "fsdp with parameters over all",
    "fully_shard over all",
    "fully_shard of the layers over all",
)
RIGHT = (
    "none",
    "ddp over dp",
    "ddp around the parent over dp",
    "ddp around a part without pieces",
    "fsdp over dp",
    "fully_shard over dp",
)


def answers_to_wrappers() -> dict[str, tuple[str, str] | None]:
    answers = {}
    for kind in (*RIGHT, *WRONG):
        sch = scheduled(scale="without pieces" in kind)
        answers[kind] = refusal(wrapped(kind, sch), own_batch(sch))
    return answers


@pytest.mark.ranks
def test_wrapper_over_shards_is_refused_and_over_replicas_accepted(message: Messages) -> None:
    results = run_ranks(answers_to_wrappers, world_size=4)
    for answers in results:
        assert {kind: answers[kind] for kind in RIGHT} == dict.fromkeys(RIGHT)
        assert {kind: (answers[kind] or ("nothing",))[0] for kind in WRONG} == dict.fromkeys(WRONG, "MeshError")
    message(results[3]["ddp over all"][1], "ranks 0, 1, 2, 3", "along 'tp'", 'process_group=sch.mesh.group("dp")')


def the_way_out() -> tuple[list[float], dict[str, torch.Tensor]]:
    """What the hint says, for three steps."""
    sch = scheduled()
    assert sch.mesh is not None
    forward = ddp(sch.model, sch.mesh.group("dp"))
    optimizer = torch.optim.SGD(sch.model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches(3):
        loss = forward(**{n: v.double().chunk(2)[sch.mesh.rank("dp")] for n, v in batch.items()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, slapo.state_dict(sch)


@pytest.mark.ranks
def test_hint_trains_as_the_reference_model() -> None:
    plain = real("mlp").double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(3):
        optimizer.zero_grad()
        plain(**{name: value.double() for name, value in batch.items()}).backward()
        optimizer.step()
    for _, state in run_ranks(the_way_out, world_size=4):
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-14)


def trained_in_fully_shard(directory: str) -> dict[str, Any]:
    sch = scheduled()
    forward = wrapped("fully_shard over dp", sch)
    optimizer = torch.optim.SGD(sch.model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for batch in batches(3):
        optimizer.zero_grad()
        forward(**{n: v.double().chunk(2)[sch.mesh.rank("dp")] for n, v in batch.items()}).backward()  # type: ignore[union-attr]
        norms.append(slapo.clip_grad_norm_(sch, 0.05).item())
        optimizer.step()
    state = slapo.state_dict(sch)
    slapo.save_pretrained(sch, directory)
    slapo.load_state_dict(sch, {name: tensor + 1 for name, tensor in state.items()})
    return {"norms": norms, "state": state, "loaded": slapo.state_dict(sch)}


@pytest.mark.ranks
def test_a_model_in_fully_shard_over_dp_is_clipped_saved_and_loaded(tmp_path: Path) -> None:
    plain, norms = real("mlp").double(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(3):
        optimizer.zero_grad()
        plain(**{name: value.double() for name, value in batch.items()}).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        optimizer.step()
    exported = None
    for found in run_ranks(trained_in_fully_shard, str(tmp_path), world_size=4):
        exported = exported or load_file(tmp_path / "model.safetensors")
        assert found["norms"] == pytest.approx(norms, rel=1e-9)
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(found["state"][name], tensor, rtol=1e-9, atol=1e-11)
            assert torch.equal(found["loaded"][name], found["state"][name] + 1)
            assert torch.equal(exported[name], found["state"][name])


def steps_under_fully_shard(sch: slapo.Schedule, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for batch in list(batches(last))[first:]:
        optimizer.zero_grad()
        sch.model(**{n: v.double().chunk(2)[sch.mesh.rank("dp")] for n, v in batch.items()}).backward()  # type: ignore[union-attr]
        optimizer.step()


def resumed_under_fully_shard(written: str, read: str) -> dict[str, Any]:
    """Two steps, saved; a third, and the same third of the checkpoint of one process."""
    sch = scheduled()
    wrapped("fully_shard over dp", sch)
    optimizer = torch.optim.AdamW(sch.model.parameters(), lr=0.01)
    steps_under_fully_shard(sch, optimizer, 0, 2)
    state = ModelState.of(sch)
    state.save(written, optimizer=optimizer)
    storage, weight = TorchOptimizer(optimizer), sch.model.get_parameter("fc1.weight")
    moment = storage.read(weight, "exp_avg")
    storage.write(weight, "exp_avg", moment + 1)
    found = {
        "partitioned": storage.partitioned(weight),
        "state": {key: value.is_meta for key, value in storage.state(weight).items()},
        "shapes": (tuple(weight.shape), tuple(moment.shape), type(moment) is torch.Tensor),
        "written": torch.equal(storage.read(weight, "exp_avg"), moment + 1),
    }
    sch = scheduled()
    wrapped("fully_shard over dp", sch)
    optimizer = torch.optim.AdamW(sch.model.parameters(), lr=0.01)
    ModelState.of(sch).load(read, optimizer=optimizer)
    kept = optimizer.state[sch.model.get_parameter("fc1.weight")]["exp_avg"]
    found["memory of a moment's shard"] = kept.to_local().untyped_storage().nbytes() // kept.to_local().nbytes
    steps_under_fully_shard(sch, optimizer, 2, 3)
    state = ModelState.of(sch)
    state.check_replicas(optimizer=optimizer)
    found["third step"] = state.state_dict()
    return found


@pytest.mark.ranks
def test_the_state_of_an_optimizer_in_fully_shard_is_saved_and_loaded_in_full(tmp_path: Path) -> None:
    def engine() -> Any:
        sch = slapo.create_schedule(real("mlp").double())
        return slapo.build(sch, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01))

    plain = engine()
    for batch in batches(2):
        plain.train_step({name: value.double() for name, value in batch.items()})
    plain.save(tmp_path / "plain")
    third = {name: value.double() for name, value in list(batches(3))[2].items()}
    plain.train_step(third)
    results = run_ranks(resumed_under_fully_shard, str(tmp_path / "sharded"), str(tmp_path / "plain"), world_size=4)
    resumed = engine()
    resumed.load(tmp_path / "sharded")
    resumed.train_step(third)
    for found in results:
        assert found["partitioned"] == ("dp",)
        assert found["state"] == {"step": False, "exp_avg": True, "exp_avg_sq": True}
        assert found["shapes"][0] == found["shapes"][1]
        assert found["shapes"][2]
        assert found["written"]
        assert found["memory of a moment's shard"] == 1
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(found["third step"][name], tensor, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(resumed.state_dict()[name], tensor, rtol=1e-9, atol=1e-11)


class Teaching(nn.Module):
    """A split model, called within a wrapper of another one."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.student = real("mlp", seed=3).double()
        self.teacher = [teacher]

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.student(**batch) + self.teacher[0](**batch).detach()


def found_at_the_first_forward() -> dict[str, tuple[str, str] | None]:
    """What else trains a split model wrongly, and what only looks like it."""
    answers: dict[str, tuple[str, str] | None] = {}
    world = dist.group.WORLD

    sch = scheduled()
    for tensor in sch.model.parameters():
        dist.broadcast(tensor.data, src=0, group=world)
    answers["rank 0 copied over all"] = refusal(sch.model, own_batch(sch))
    answers["again"] = refusal(sch.model, own_batch(sch))

    sch = scheduled()
    for tensor in sch.model.parameters():
        nn.init.constant_(tensor, 0.5)
    answers["constant pieces"] = refusal(sch.model, own_batch(sch))

    sch = scheduled()
    dist.broadcast(sch.model.fc1.bias.data, src=0, group=world)
    answers["one piece alike"] = refusal(sch.model, own_batch(sch))

    sch = scheduled()
    noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank())).double()
    answers["a batch for each rank"] = refusal(sch.model, {**own_batch(sch), "x": noise})

    sch = scheduled()
    answers["copied before"] = refusal(copy.deepcopy(sch.model), own_batch(sch))

    sch = scheduled({"tp": 4})
    forward = ddp(Teaching(sch.model))
    answers["a split teacher of a wrapped student"] = refusal(forward, own_batch(sch))

    sch = scheduled({"tp": 4})
    answers["nothing replicated"] = refusal(ddp(sch.model), own_batch(sch))
    sch = scheduled({"tp": 4})
    sch.model._ddp_params_and_buffers_to_ignore = [name for name, _ in sch.model.named_parameters()][:2]
    answers["all but one ignored"] = refusal(ddp(sch.model), own_batch(sch))
    sch = scheduled({"tp": 4})
    sch.model.scale = nn.Parameter(torch.ones((), dtype=torch.float64))  # type: ignore[assignment]
    sch.model._ddp_params_and_buffers_to_ignore = ["fc1.weight", "fc1.bias", "fc2.weight"]  # type: ignore[assignment]
    forward = DistributedDataParallel(sch.model, find_unused_parameters=True)
    answers["pieces ignored"] = refusal(forward, own_batch(sch))
    return answers


@pytest.mark.ranks
def test_copied_shards_and_different_batches_are_found_in_the_first_forward(message: Messages) -> None:
    results = run_ranks(found_at_the_first_forward, world_size=4)
    right = (
        "constant pieces",
        "one piece alike",
        "copied before",
        "a split teacher of a wrapped student",
        "pieces ignored",
    )
    for answers in results:
        assert {what: answers[what] for what in right} == dict.fromkeys(right)
        assert (answers["all but one ignored"] or ("nothing",))[0] == "MeshError"
        assert answers["again"] == answers["rank 0 copied over all"]  # it is not forgotten by being caught
        kind, text = answers["a batch for each rank"] or ("nothing", "")
        assert kind == "RankMismatchError"
        assert text.startswith("ranks disagree about the batch: x:\n  rank ")
        assert 'DistributedSampler(dataset, num_replicas=sch.mesh.size("dp")' in text
    for what, kind, word in (
        ("rank 0 copied over all", "WeightsError", "along 'tp'"),
        ("nothing replicated", "MeshError", "no tensor is replicated"),
    ):
        [told] = {answers[what] for answers in results}
        assert told is not None
        assert told[0] == kind
        message(told[1], word)


def hooks_and_collectives() -> tuple[list[tuple[int, int]], list[list[str]]]:
    """Of each training step: the hooks on the root, and the calls of torch.distributed in a training step."""
    sch = scheduled({"tp": 2})
    model, batch = sch.model, own_batch(sch)
    calls: list[str] = []
    group_class = dist.ProcessGroup
    originals = {name: getattr(group_class, name) for name in ("allreduce", "allgather", "broadcast", "barrier")}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(group_class, name, counted(name))
    hooks, steps = [], []
    for _ in range(4):
        with torch.no_grad():
            model(**batch)  # an evaluation is not looked at
        calls.clear()
        hooks.append((len(model._forward_pre_hooks), len(model._forward_pre_hooks_with_kwargs)))
        model(**batch).backward()
        steps.append(list(calls))
    for name, original in originals.items():
        setattr(group_class, name, original)
    return hooks, steps


@pytest.mark.ranks
def test_steps_after_the_first_three_have_the_schedule_s_own_hooks_and_all_its_collectives_only() -> None:
    for hooks, steps in run_ranks(hooks_and_collectives, world_size=2):
        assert hooks == [(1, 1)] * 3 + [(0, 0)]
        assert steps == [["allreduce"]] * 4


def after_going_back() -> list[int]:
    """The hooks on the root as steps go and come."""
    sch = scheduled({"tp": 2})
    model, batch = sch.model, own_batch(sch)

    def count() -> int:
        return len(model._forward_pre_hooks) + len(model._state_dict_pre_hooks) + len(model._load_state_dict_pre_hooks)

    counts = [count()]
    with sch.reference():
        counts.append(count())
    counts.append(count())
    for _ in range(3):
        model(**batch).backward()
    counts.append(count())
    with sch.reference():
        counts.append(count())
    counts.append(count())
    records = sch.undo(to=0)
    counts.append(count())
    for record in reversed(records):
        sch[record.path].apply(record.primitive)
    counts.append(count())
    return counts


@pytest.mark.ranks
def test_the_hooks_go_with_the_last_split_and_come_with_the_next() -> None:
    assert run_ranks(after_going_back, world_size=2) == [[3, 0, 3, 2, 0, 2, 0, 3]] * 2


def parts_of_a_batch() -> list[str]:
    """A schedule whose steps gather may be given parts: it is said, and goes on."""
    import warnings

    from tests.support.edits import Call

    sch = scheduled({"tp": 2})
    sch.root.apply(Call(lambda node, edit: edit.add_hook(node, "forward_pre", lambda module, args, kwargs: None)))
    noise = torch.randn(8, 6, generator=torch.Generator().manual_seed(dist.get_rank())).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sch.model(**{**own_batch(sch), "x": noise}).backward()
    return [str(one.message) for one in caught if "batch" in str(one.message)]


@pytest.mark.ranks
def test_steps_that_put_parts_together_may_be_given_parts(message: Messages) -> None:
    [first], [second] = run_ranks(parts_of_a_batch, world_size=2)
    assert first == second
    message(re.sub(r"checksum \w+", "checksum", first), "the batch: x:\n  rank 0: ", "its own shard")


def in_own_meshes(directory: str) -> dict[str, Any]:
    """The norm, the error of clipped gradients, and the state, under meshes that the schedule does not have."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    batch = {name: value.double() for name, value in next(batches(1)).items()}

    def replicated(model: nn.Module) -> nn.Module:
        """By hand: whole parameters, whose gradients are partial sums over the ranks' samples."""
        mesh = init_device_mesh("cpu", (4,))
        for layer in model.children():
            for name, value in list(layer.named_parameters(recurse=False)):
                layer.register_parameter(name, nn.Parameter(distribute_tensor(value.detach(), mesh, [Replicate()])))
        model.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {n: distribute_tensor(v, mesh, [Shard(0)]) for n, v in kwargs.items()}),
            with_kwargs=True,
        )
        return model

    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    kinds: dict[str, tuple[Any, Callable[[nn.Module], nn.Module]]] = {
        "other names": ({"dp": 4}, lambda model: fully_shard(model, mesh=hybrid._flatten("all"))),
        "no names": ({"dp": 4}, lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (4,)))),
        "torch's default": ({"dp": 4}, fully_shard),
        "no mesh of the schedule": (None, fully_shard),
        "hybrid": ({"dp": 4}, lambda model: fully_shard(model, mesh=hybrid)),
        "partial gradients": (None, replicated),
    }
    found = {}
    for kind, (mesh, wrap) in kinds.items():
        sch = slapo.create_schedule(real("mlp").double(), mesh=mesh)
        model = wrap(sch.model)
        model(**batch).backward()
        gradients: Any = [parameter.grad for parameter in model.parameters()]
        full = [gradient.full_tensor().clone() for gradient in gradients]
        norm = nn.utils.get_total_norm(full)
        own = slapo.clip_grad_norm_(sch, 0.05)
        clipped = zip(gradients, full, strict=True)
        error = max(float((one.full_tensor() - other * (0.05 / norm)).abs().max()) for one, other in clipped)
        state = slapo.state_dict(sch)
        slapo.save_pretrained(sch, f"{directory}/{kind}")
        written = load_file(f"{directory}/{kind}/model.safetensors")  # by the first rank, for which the others wait
        slapo.load_state_dict(sch, {name: value + 1 for name, value in state.items()})
        loaded = slapo.state_dict(sch)
        right = [
            torch.equal(state[n], v) and torch.equal(loaded[n], v + 1)
            for n, v in real("mlp").double().state_dict().items()
        ]
        right += [type(value) is torch.Tensor and torch.equal(written[name], value) for name, value in state.items()]
        found[kind] = (float(own / norm), error, all(right))
    return found


@pytest.mark.ranks
def test_parameters_in_a_mesh_of_their_own_are_clipped_and_saved_over_that_mesh(tmp_path: Path) -> None:
    for found in run_ranks(in_own_meshes, str(tmp_path), world_size=4):
        assert len(found) == 6
        for kind, (ratio, error, is_right) in found.items():
            assert ratio == pytest.approx(1, rel=1e-12), kind
            assert error < 1e-6, kind  # torch adds 1e-6 to the norm
            assert is_right, kind
