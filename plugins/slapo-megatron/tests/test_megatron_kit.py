"""The dialect keeps what every dialect promises: Megatron-core on CPUs, through the tests' stand-in for CUDA."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slapo_megatron.cases import adamw, sgd, slapo_cases
from slapo_testing import DialectCase, parametrize_dialect_checks
from slapo_testing.dialects.case import regression_steps

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def on_cpus_here() -> Iterator[None]:
    """What a check runs in this process has the stand-in, too; other tests find torch's own methods again."""
    from tests.support import cpu_megatron

    cpu_megatron.install()
    yield
    cpu_megatron.take_back()


ON_RANKS = {
    "split_model_trains_as_one_process",
    "diverged_replicas_are_found",
    "another_batch_on_a_rank_is_refused",
    "failure_on_one_rank_ends_the_build_on_all",
    "other_options_on_a_rank_are_refused",
}


def on_cpus(name: str) -> list[DialectCase]:
    """The case of that name, for ranks, which have the stand-in."""
    cases = [dataclasses.replace(case, unavailable=None, device="cpu") for case in slapo_cases()]
    return [case for case in cases if case.name == name]


def test_cases_run_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert {(case.device, case.device_per_rank, case.unavailable) for case in slapo_cases()} == {("cuda", True, None)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {case.device for case in slapo_cases()} == {"cpu"}
    assert all("CUDA" in str(case.unavailable) for case in slapo_cases())


@parametrize_dialect_checks(on_cpus("plain"))
def test_with_a_plain_optimizer(check: Any) -> None:
    check()


@pytest.mark.breadth
@parametrize_dialect_checks(
    on_cpus("distributed-optimizer"), checks={*ON_RANKS, "replicas_train_as_one_process", "loaded_state_is_trained_on"}
)
def test_with_a_distributed_optimizer(check: Any) -> None:
    check()


def cut(sch: Any) -> None:
    regression_steps(sch)
    if sch.mesh is not None and sch.mesh.size("pp") > 1:
        sch["down"].pipeline_split()


PIPELINE = DialectCase(
    "megatron",
    config={"microbatches": 4},
    schedule=cut,
    optimizers=(sgd, adamw),
    meshes=[{"pp": 2, "tp": 2}],
    dtype=torch.float32,
    device="cpu",
    needs_process_group=True,
    name="pipeline",
)


@pytest.mark.breadth
@parametrize_dialect_checks([PIPELINE], checks=ON_RANKS)
def test_with_a_pipeline_of_split_stages(check: Any) -> None:
    check()


@pytest.mark.breadth
def test_the_command_checks_what_it_can_and_says_that_megatron_needs_cuda() -> None:
    """Without the tests' stand-in, as a user runs it."""
    command = [sys.executable, "-m", "slapo_core.cli.main", "plugins", "check", "slapo-megatron", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    found = {(check["subject"], check["check"]): check for check in answer["plugins"][0]["checks"]}
    failed = [check for check in found.values() if check["outcome"] == "failed"]
    assert (done.returncode, failed) == (0, []), done.stderr
    for case in ("plain", "distributed-optimizer"):
        assert found[f"megatron [{case}]", "bad_options_are_refused"]["outcome"] == "passed"
        if not torch.cuda.is_available():
            told = found[f"megatron [{case}]", "training_is_that_of_the_plain_model"]
            assert told["message"].startswith("Megatron-core runs on CUDA")
