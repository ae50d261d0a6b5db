"""The kits run on the accelerator if there is one: here the meta device takes its part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.internals import Annotate, Replace
from slapo_testing import CHECKS, DIALECT_CHECKS, Case, Check, DialectCase, FakeDistribution, FakeEnvironment
from slapo_testing.bench import build_inputs, prepare
from slapo_testing.check import NotApplicable
from slapo_testing.checks import equivalence
from slapo_testing.conformance import check_plugin
from slapo_testing.device import backend_for, is_shared, resolve_device
from slapo_testing.dialects import launch
from slapo_testing.dialects.bench import open_bench
from slapo_testing.dialects.launch import RankTask, meshes
from slapo_testing.pickled import Pickled
from tests.messages import Messages

META = torch.device("meta")
CHECK = {check.name: check for check in CHECKS}
DIALECT_CHECK = {check.name: check for check in DIALECT_CHECKS}


@pytest.fixture
def one_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """One, with a backend of its own."""
    monkeypatch.setattr(torch, "meta", SimpleNamespace(is_initialized=lambda: False), raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: META)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "meta", "nccl")


def case(**options: Any) -> Case:
    return Case(
        lambda: Replace(nn.Linear(4, 4)),
        path="0",
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        inputs=lambda: {"input": torch.randn(2, 4)},
        after=[("0", Annotate("weight", "seen", True))],
        **options,
    )


def devices(model: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}


@pytest.mark.usefixtures("one_accelerator")
@pytest.mark.parametrize(("device", "found"), [(None, "meta"), ("meta", "meta"), ("cpu", "cpu"), ("cpu:0", "cpu")])
def test_models_batches_and_argument_modules_are_on_the_cases_device(device: str | None, found: str) -> None:
    bench = prepare(case(device=device), mesh_size=1)
    bench.apply()
    bench.apply_after()
    assert devices(bench.model) == {found}
    batches = (bench.schedule.example_inputs, build_inputs(bench.case))
    assert {batch["input"].device.type for batch in batches} == {found}
    with open_bench(DialectCase("torch", device=device)) as dialects:
        assert devices(dialects.model()) == {found}
        (batch,) = dialects.batches(1)
        assert {tensor.device.type for tensor in batch.values()} == {found}
        assert {tensor.dtype for tensor in batch.values()} == {torch.float64}


@pytest.mark.usefixtures("one_accelerator")
def test_checks_that_need_no_values_pass_on_the_accelerator() -> None:
    for name in ("preconditions_mutate_nothing", "faults_roll_back", "undo_is_exact"):
        CHECK[name](case())


def test_without_an_accelerator_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert resolve_device(None) == torch.device("cpu")
    with pytest.raises(slapo.ArgumentError) as caught:
        resolve_device("cuda")
    message(str(caught.value), "'cuda'", "not available", 'device="cpu"')
    with pytest.raises(slapo.ArgumentError) as caught:
        resolve_device("gpu")
    message(str(caught.value), "unknown device 'gpu'", 'device="cuda"')


@pytest.mark.usefixtures("one_accelerator")
def test_accelerators_without_their_own_backend_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "meta", "gloo")  # as torch has it for "mps"
    assert resolve_device(None) == torch.device("cpu")
    monkeypatch.delitem(dist.Backend.default_device_backend_map, "meta")
    assert resolve_device(None) == torch.device("cpu")


@pytest.mark.usefixtures("one_accelerator")
def test_ranks_share_an_accelerator_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [backend_for(META, ranks) for ranks in (1, 2)] == ["nccl", "gloo"]
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [backend_for(META, ranks) for ranks in (1, 2, 4)] == ["nccl", "nccl", "gloo"]
    assert backend_for(torch.device("meta:0"), 2) == "gloo"  # all on that one
    assert backend_for(torch.device("cpu"), 2) == "gloo"
    assert not is_shared(torch.device("cpu:0"), 2)


@pytest.mark.usefixtures("one_accelerator")
def test_meshes_whose_ranks_cannot_share_an_accelerator_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [{"dp": 2}, {"pp": 2, "dp": 1}]
    with open_bench(DialectCase("torch", meshes=sizes)) as bench:
        data, pipeline = meshes(bench).values()
    assert data == {"dp": 2}
    assert "2 ranks" in str(pipeline)
    assert "gloo cannot send its tensors" in str(pipeline)
    alone = DialectCase("torch", device_per_rank=True)
    for name in ("replicas_train_as_one_process", "failure_on_one_rank_ends_the_build_on_all"):
        with pytest.raises(NotApplicable, match="need an accelerator each"):
            DIALECT_CHECK[name](alone)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with open_bench(DialectCase("torch", meshes=sizes, device_per_rank=True)) as bench:
        assert list(meshes(bench).values()) == sizes


def test_ranks_get_the_device_and_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}

    def run_ranks(function: Any, pickled: Any, *args: Any, **options: Any) -> list[Any]:
        started.update(options, contents=pickled.unpack())
        return [[None]] * options["world_size"]

    def backend(device: torch.device, world_size: int) -> str:
        return f"{device} {world_size}"

    for module in ("checks.equivalence", "dialects.launch"):
        monkeypatch.setattr(f"slapo_testing.{module}.run_ranks", run_ranks)
        monkeypatch.setattr(f"slapo_testing.{module}.backend_for", backend)
    CHECK["forward_and_gradients_on_2_ranks"](case(device="cpu:0"))
    assert (started["backend"], started["contents"]["device"]) == ("cpu:0 2", "cpu:0")
    with open_bench(DialectCase("torch", device="cpu:0")) as bench:
        launch._Results().launch(bench, [RankTask("unsupported", (("pp", 2), ("tp", 2)))])
    assert (started["backend"], started["contents"]["device"]) == ("cpu:0 4", "cpu:0")


@pytest.mark.usefixtures("one_accelerator")
def test_ranks_move_models_and_batches_to_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[str]] = {}

    def look(what: str, model: nn.Module, batch: Any) -> None:
        seen[what] = devices(model) | {tensor.device.type for tensor in batch.values()}

    def sent(pickled: Pickled) -> Any:
        return SimpleNamespace(unpack=lambda: {**pickled.unpack(), "device": "meta"})

    monkeypatch.setattr("slapo_verify.verify", lambda sch, batch: look("primitive", sch.model, batch))
    equivalence._verify_on_rank(sent(equivalence._pack(case(device="cpu"))))
    packed: list[Pickled] = []
    monkeypatch.setattr(launch, "run_ranks", lambda function, pickled, *_, **__: [[packed.append(pickled)]])
    task = RankTask("unsupported", (("pp", 1),))
    with open_bench(DialectCase("torch", device="cpu")) as bench:
        launch._Results().launch(bench, [task])
    monkeypatch.setitem(
        launch._TASKS, task.name, lambda bench, _, batches, *__: look("dialect", bench.model(), batches[0])
    )
    launch.run_tasks(sent(packed[0]), [(task, "", "")])
    assert seen == {"primitive": {"meta"}, "dialect": {"meta"}}


@pytest.mark.ranks
def test_case_with_a_device_runs_on_ranks() -> None:
    CHECK["forward_and_gradients_on_2_ranks"](case(device="cpu:0"))


SOURCE = """
from slapo_torch.dialect import TorchDialect


class Mine(TorchDialect):
    name = "mine"


def slapo_cases():
    from slapo_testing import DialectCase

    return [DialectCase(Mine), DialectCase(Mine, device="cpu:0")]
"""


@pytest.mark.ranks
def test_command_sets_the_device_of_cases_without_one(
    fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"slapo.v1.dialects": {"mine": "slapo_mine:Mine"}}
    fake_distributions.install(FakeDistribution("slapo-mine", "1.0", points, {"slapo_mine": SOURCE}, ("slapo-core",)))
    seen: list[Any] = []

    def look(case: DialectCase) -> None:
        seen.append(case.device)

    monkeypatch.setattr("slapo_testing.conformance.DIALECT_CHECKS", [Check(look)])
    registry = fake_distributions.registry(with_installed=True)
    plugin = registry.plugin("slapo-mine")
    assert [item.outcome for item in check_plugin(plugin, registry, device=META)][-2:] == ["passed", "passed"]
    assert seen == [META, "cpu:0"]
