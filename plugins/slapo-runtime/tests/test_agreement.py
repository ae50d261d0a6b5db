"""Ranks that disagree are told, all of them, what about; and none of them hangs."""

from __future__ import annotations

import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import slapo_core as slapo
from slapo_core.internals import Replace
from slapo_core.plugins import use_registry
from slapo_runtime.launcher import run_ranks
from slapo_runtime.ranks.checksums import checksum
from slapo_runtime.ranks.consistency import schedule_facts, weights_facts
from slapo_runtime.ranks.facts import RankFact
from slapo_runtime.weights.checkpoint_source import open_source
from slapo_runtime.weights.sources import SafetensorsSource
from slapo_testing import FakeDistribution, FakeEnvironment
from tests.messages import Messages
from tests.support.building import Split, adam, on_meta, real


def outcome(function: Any, *args: Any) -> str:
    """What the call raised, as text; ``"fine"`` if nothing."""
    try:
        function(*args)
    except slapo.SlapoError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def build_with_steps_by_rank(case: str) -> str:
    rank = dist.get_rank()
    mesh = {"dp": 2} if (case == "mesh" and rank == 1) or case == "random state of replicas" else {"tp": 2}
    model = real("mlp", seed=rank) if case == "weights" else real("mlp")
    if case == "device" and rank == 1:
        model = on_meta("mlp")
    schedule = slapo.create_schedule(model, mesh=mesh)
    if case == "argument":
        schedule["fc1"].apply(Split(("weight",), axis=rank))
    if case == "missing step":
        for path in ("fc1", "fc2")[: 1 + rank]:
            schedule[path].apply(Split(("weight",)))
    options: dict[str, Any] = {}
    if case == "own error" and rank == 1:
        options["optimizer"] = adam(list(model.parameters()))
    if case == "factory":
        options["optimizer"] = lambda parameters: None if rank == 0 else adam(parameters)
    if case == "another factory":
        options["optimizer"] = adam if rank == 0 else partial(torch.optim.SGD, lr=0.5)
    if case == "loss" and rank == 0:
        options["loss"] = lambda output, batch: output
    if case == "accumulate":
        options["accumulate"] = 1 + rank
    if case == "groups":
        options["no_decay"] = ("*.bias", "*.weight")[rank]
    if case == "failing with another random state":
        options["optimizer"] = lambda parameters: None if rank == 0 else adam(parameters)
    if case == "option":
        options["find_unused_parameters"] = rank == 1
    if case in ("files", "unreadable file"):
        directory = tempfile.TemporaryDirectory()  # removed with this variable
        file = Path(directory.name) / "model.safetensors"
        save_file({} if case == "files" and rank == 1 else real("mlp").state_dict(), file)
        options["weights"] = file
    if case == "no optimizer" and rank == 0:
        options["optimizer"] = adam
    if case == "no weights" and rank == 0:
        options["weights"] = real("mlp").state_dict()
    if case == "other weights":
        options["weights"] = real("mlp", seed=rank).state_dict()
    if case == "seed":
        options["seed"] = rank
    torch.manual_seed(rank if "random state" in case else 0)
    before = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        if case == "unreadable file" and rank == 1:
            patch.setattr(SafetensorsSource, "read_as", unreadable)
        result = outcome(lambda: slapo.build(schedule, **options))
    if case.startswith("random state"):
        assert result == "fine"
        return f"{checksum(torch.get_rng_state()):016x}"
    if case not in ("fine", "mesh", "own error", "device"):
        assert not schedule.is_sealed
        assert torch.equal(before, torch.get_rng_state())
        schedule.undo(to=0)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), real_like(case, rank), strict=True))
    return result


def unreadable(*args: Any, **options: Any) -> None:
    raise slapo.WeightsError("the disk is gone")


def real_like(case: str, rank: int) -> list[torch.Tensor]:
    return list(real("mlp", seed=rank if case == "weights" else 0).parameters())


CASES = ["fine", "argument", "missing step", "weights", "mesh", "own error", "factory", "files"]
CASES += ["no optimizer", "no weights", "other weights", "seed"]
CASES += ["another factory", "loss", "option", "device", "unreadable file"]
CASES += ["random state", "random state of replicas", "failing with another random state", "accumulate", "groups"]


def build_all(cases: list[str]) -> dict[str, str]:
    return {case: build_with_steps_by_rank(case) for case in cases}


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    return run_ranks(build_all, CASES, world_size=2)


@pytest.mark.ranks
def test_ranks_that_agree_build(results: list[dict[str, str]]) -> None:
    assert [result["fine"] for result in results] == ["fine", "fine"]


@pytest.mark.ranks
def test_another_argument_is_named_on_every_rank(results: list[dict[str, str]], message: Messages) -> None:
    [text] = {result["argument"] for result in results}
    message(text, "RankMismatchError", "step 1", "axis=0", "axis=1")


@pytest.mark.ranks
def test_a_step_that_one_rank_lacks_is_named(results: list[dict[str, str]], message: Messages) -> None:
    [text] = {result["missing step"] for result in results}
    message(text, "RankMismatchError", "step 2", "rank 0: (nothing)", "'fc2'")


@pytest.mark.ranks
def test_another_mesh_is_named(results: list[dict[str, str]], message: Messages) -> None:
    [text] = {result["mesh"] for result in results}
    message(text, "RankMismatchError", "rank 0: {'tp': 2}", "rank 1: {'dp': 2}")


@pytest.mark.ranks
def test_other_weights_are_named_with_the_seed_to_set(results: list[dict[str, str]], message: Messages) -> None:
    [text] = {result["weights"] for result in results}
    for rank in range(2):
        text = text.replace(f"{checksum(real('mlp', seed=rank).fc1.weight):016x}", f"of rank {rank}")
    message(text, "'fc1.weight'", "checksum of rank 0", "checksum of rank 1", "torch.manual_seed(0)", "weights=")


@pytest.mark.ranks
def test_an_error_of_one_rank_ends_the_build_on_every_rank(results: list[dict[str, str]], message: Messages) -> None:
    first, second = (result["own error"] for result in results)
    assert first.startswith("BuildError: ")
    message(first, "build(target='torch') failed on rank 1: OptimizerError: ", "AdamW")
    assert first.endswith(second)
    first, second = (result["factory"] for result in results)
    assert second.startswith("BuildError: ")
    message(second, "failed on rank 0: OptimizerError: ", "got NoneType")
    assert second.endswith(first)
    first, second = (result["files"] for result in results)
    assert second.startswith("WeightsError: ")
    assert "\n  - missing: fc1.weight (8, 6)" in second
    assert first.startswith("BuildError: ")
    assert first.endswith(" failed on rank 1: " + second)
    first, second = (result["unreadable file"] for result in results)
    assert second == "WeightsError: the disk is gone"
    message(first, "BuildError", "failed on rank 1: WeightsError: the disk is gone")


@pytest.mark.ranks
def test_different_build_arguments_raise_on_every_rank_without_a_hang(
    results: list[dict[str, str]], message: Messages
) -> None:
    cases = {
        "no optimizer": ("the optimizer", "rank 0: <function tests.support.building.adam>", "rank 1: none"),
        "another factory": ("the optimizer", "rank 1: <functools.partial of <class torch.optim.sgd.SGD>, lr=0.5>"),
        "loss": ("the loss", "rank 0: a function", "rank 1: none"),
        "no weights": ("the weights", "rank 0: a mapping", "rank 1: the values of the model"),
        "other weights": ("the weights 'fc1.weight'", "rank 0: (8, 6), torch.float"),
        "accumulate": ("accumulate", "rank 0: 1", "rank 1: 2"),
        "groups": ("no_decay", "*.bias", "*.weight"),
        "seed": ("the seed", "rank 0: 0", "rank 1: 1"),
        "device": ("the device of the model", "rank 0: cpu", "rank 1: meta"),
    }
    for case, words in cases.items():
        [text] = {re.sub(r"checksum \w+", "checksum", result[case]) for result in results}
        message(text, "RankMismatchError", *words)


@pytest.mark.ranks
def test_an_option_of_the_runtime_that_would_make_ranks_wait_for_each_other_is_named(
    results: list[dict[str, str]], message: Messages
) -> None:
    [text] = {result["option"] for result in results}
    message(text, "RankMismatchError", "'find_unused_parameters'", "rank 0: False", "rank 1: True")


@pytest.mark.ranks
def test_ranks_that_share_a_replica_draw_as_the_first_of_them_and_replicas_as_they_were_seeded(
    results: list[dict[str, str]],
) -> None:
    states = [f"{checksum(torch.Generator().manual_seed(rank).get_state()):016x}" for rank in range(2)]
    assert [result["random state"] for result in results] == [states[0], states[0]]
    assert [result["random state of replicas"] for result in results] == states
    first, second = (result["failing with another random state"] for result in results)  # its own state is back
    assert first.startswith("OptimizerError: ")
    assert second.startswith("BuildError: ")
    assert "failed on rank 0" in second


def test_weights_are_compared_by_bits_and_files_by_content(tmp_path: Path) -> None:
    state = {"b": torch.ones(2, 3), "a": torch.tensor(1.0)}
    save_file(state, tmp_path / "model.safetensors")
    assert list(weights_facts(state, open_source(state))) == [
        RankFact("the weights 'b'", f"(2, 3), torch.float32, checksum {checksum(torch.ones(6)):016x}"),
        RankFact("the weights 'a'", f"(), torch.float32, checksum {checksum(torch.ones(1)):016x}"),
    ]
    in_files = [RankFact("the weights 'a'", "()"), RankFact("the weights 'b'", "(2, 3)")]
    assert list(weights_facts(None, open_source(tmp_path))) == in_files
    assert list(weights_facts(None, open_source(tmp_path / "model.safetensors"))) == in_files


def test_arguments_that_differ_from_process_to_process_are_compared_by_type() -> None:
    def facts() -> dict[str, str | None]:
        schedule = slapo.create_schedule(real("mlp"))
        schedule["fc2"].apply(Replace(torch.nn.Linear(8, 4, bias=False)))
        return {fact.what: fact.value for fact in schedule_facts(schedule)}

    assert facts() == facts()
    assert facts()["step 1"].startswith(
        "core.replace(new_module=<torch.nn.modules.linear.Linear>, match=None, params=()"
    )
    assert facts()["the active plugins"].startswith("slapo-core ")


def build_alone() -> str:
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match="has no mesh") as caught:
            slapo.build(slapo.create_schedule(on_meta("mlp")))
        return str(caught[0].message)
    return ""


@pytest.mark.ranks
def test_a_schedule_without_a_mesh_waits_for_nobody_and_says_so(message: Messages) -> None:
    message(run_ranks(build_alone, world_size=2, timeout=60)[0], "2 processes", "no mesh", 'mesh={"dp": 2}')


NOTES = """
from dataclasses import dataclass
import slapo_core as slapo

@dataclass(frozen=True)
class Remark(slapo.Primitive):
    name = "acme.remark"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node, edit):
        edit.note("nothing to change")
"""


def build_with_installations_by_rank(case: str) -> str:
    """Each rank has an installation of its own, with another version or other plugins named."""
    rank = dist.get_rank()
    version = f"1.{rank}" if case == "version" else "1.0"
    with tempfile.TemporaryDirectory() as directory:
        environment = FakeEnvironment(Path(directory))
        points = {"slapo.v1.primitives": {"acme.remark": "acme_remarks:Remark"}}
        environment.install(FakeDistribution("acme-slapo", version, points, {"acme_remarks": NOTES}))
        sys.path.insert(0, directory)
        try:
            with use_registry(environment.registry(with_installed=True)):
                named = ["acme-slapo"] if case == "plugins" and rank == 1 else []
                schedule = slapo.create_schedule(real("mlp"), mesh={"tp": 2}, plugins=named)
                if case == "version":
                    schedule["fc1"].remark()
                return outcome(lambda: slapo.build(schedule))
        finally:
            sys.path.remove(directory)
            environment.forget_modules()


def build_all_installations() -> dict[str, str]:
    return {case: build_with_installations_by_rank(case) for case in ("same", "version", "plugins")}


@pytest.mark.ranks
def test_another_version_of_a_plugin_and_other_active_plugins_are_named(message: Messages) -> None:
    first, second = run_ranks(build_all_installations, world_size=2)
    assert first == second
    assert first["same"] == "fine"
    message(first["version"], "RankMismatchError", "step 1", "from acme-slapo 1.0\n", "from acme-slapo 1.1\n")
    message(
        first["plugins"], "RankMismatchError", "the active plugins", "rank 0: slapo-torch", "rank 1: acme-slapo 1.0"
    )
