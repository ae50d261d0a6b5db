"""Whole programs on a machine with a GPU: scripts that start ranks, estimates, searches, the kit, examples."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo_core as slapo
from slapo_tune import Run, Study, StudyError
from slapo_tune.search import search
from tests.gpu.targets import batch_of, engine_schedule

ROOT = Path(__file__).parents[2]


def program(
    *arguments: str, device: torch.device, path: Path | None = None, directory: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, which is ended before the test is; of one that is not over, the test ends."""
    places = [str(path)] if path is not None else []
    seconds = 50 if device.type == "cuda" else 600
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*places, str(ROOT), os.environ.get("PYTHONPATH", "")])},
            cwd=directory,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        last = (error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
        pytest.skip(f"not over within {seconds} s, and ended: {' '.join(last)}")


# -- ranks that are forked from a server ------------------------------------------------------------------------------

SCRIPT = """
from slapo_testing import preload_modules, run_ranks
from tests.gpu.test_programs import all_reduced

preload_modules("preloaded")

if __name__ == "__main__":
    print(run_ranks(all_reduced, {device!r}, world_size=1, backend={backend!r}))
"""
PRELOADED = {
    "asks whether there is a GPU": "import torch\n\ntorch.cuda.is_available()\n",
    "uses a GPU": "import torch\n\ntorch.zeros(1, device='cuda')\n",
}


def all_reduced(device: str) -> float:
    total = torch.ones(2, device=device)
    dist.all_reduce(total)
    return float(total.sum())


def started(tmp_path: Path, device: torch.device, preloaded: str) -> subprocess.CompletedProcess[str]:
    """A script whose ranks are forked from a server that has imported a module of its own."""
    (tmp_path / "preloaded.py").write_text(preloaded)
    backend = "gloo" if device.type == "cpu" else "nccl"
    (tmp_path / "script.py").write_text(SCRIPT.format(device=device.type, backend=backend))
    return program(str(tmp_path / "script.py"), device=device, path=tmp_path)


@pytest.mark.gpu(17)
def test_a_preloaded_module_may_ask_for_gpus(device: torch.device, tmp_path: Path) -> None:
    ended = started(tmp_path, device, PRELOADED["asks whether there is a GPU"])
    assert ended.stdout.strip() == "[2.0]", ended.stderr


@pytest.mark.gpu(17, needs="a GPU that a module can use at its import")
def test_a_preloaded_module_that_uses_a_gpu_is_named(device: torch.device, tmp_path: Path) -> None:
    ended = started(tmp_path, device, PRELOADED["uses a GPU"])
    assert ended.returncode != 0
    assert "module 'preloaded' initializes CUDA" in ended.stderr


# -- estimates --------------------------------------------------------------------------------------------------------


def without_gpu(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of a process that must not see the GPUs of its machine."""
    if torch.cuda.is_available():
        raise RuntimeError("a simulation sees a GPU")
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.gpu(18)
@pytest.mark.parametrize("target", ["torch", "deepspeed", "megatron"])
def test_an_estimate_uses_no_gpu(device: torch.device, measured: Any, target: str) -> None:
    if importlib.util.find_spec(target) is None:
        pytest.skip(f"{target} is not installed")
    sch = engine_schedule(str(device), torch.float32)
    config = {"config": {"zero_optimization": {"stage": 1}}} if target == "deepspeed" else {}
    estimated = slapo.estimate(sch, batch_of("cpu"), optimizer=without_gpu, target=target, **config)
    measured(target=target, memory=str(estimated.memory))
    assert estimated.kinds[0].flops > 0


# -- searches ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Its activations are as many times the batch as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.times = nn.Linear(8, 16), nn.Linear(16, 8), 1

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.repeat(self.times, 1)).relu()).square().mean()


def space(s: Any) -> None:
    s.choose("times", [1, 1 << 40, 2])


def samples(p: Any) -> Tensor:
    return torch.randn(4, 8)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(run: Run) -> float:
    """What a study does without ``evaluate``, on a model that takes the memory of its point."""
    run.schedule.model.times = run.point["times"]
    return run.train()


def study(log: Path, device: torch.device, **more: Any) -> Study:
    settings: dict[str, Any] = {"sampler": "exhaustive", "verify": False, "predict": False, "timeout": 40.0}
    return Study(
        Net,
        space,
        nothing,
        trained,
        batch=samples,
        optimizer=sgd,
        log=log,
        accelerator=device.type,
        **settings,
        **more,
    )


def nothing(sch: Any, p: Any) -> None:
    """Apply no step: the points differ by what the model takes."""


@pytest.mark.gpu(13)
def test_a_point_that_does_not_fit_is_out_of_memory_and_the_next_one_runs(
    device: torch.device, measured: Any, tmp_path: Path
) -> None:
    result = search(study(tmp_path / "run.jsonl", device))
    trials = {trial.point["times"]: trial for trial in result.trials}
    assert {times: trial.status for times, trial in trials.items()} == {1: "ok", 1 << 40: "oom", 2: "ok"}
    assert [trial.point["times"] for trial in result.trials] == [1, 1 << 40, 2]
    measured(**{f"memory_of_{times}": trial.measured.get("memory") for times, trial in trials.items()})
    assert "memory" in trials[1 << 40].reason


@pytest.mark.gpu(13, needs="a GPU, on which a limit of the address space ends every trial")
def test_a_limit_of_the_address_space_is_refused_on_gpus(device: torch.device, tmp_path: Path) -> None:
    with pytest.raises(StudyError) as refused:
        study(tmp_path / "run.jsonl", device, process_memory="4GiB")
    assert "process_memory" in str(refused.value)


# -- the kit and the examples -----------------------------------------------------------------------------------------


@pytest.mark.gpu(40)
def test_the_dialect_of_megatron_passes_the_kit(device: torch.device, measured: Any) -> None:
    command = "from slapo_core.cli.main import main; main()"
    ended = program("-c", command, "plugins", "check", "slapo-megatron", device=device)
    summary = [line for line in ended.stdout.splitlines() if "checks of" in line]
    measured(summary=summary)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
    assert len(summary) == 1


@pytest.mark.gpu(41)
def test_an_example_trains_on_the_device(device: torch.device, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "examples" / "common.py").read_text() * 2)
    sizes = ["--steps", "4", "--batch-size", "2", "--length", "32", "--vocab-size", "600"]
    files = ["--text", str(text), "--output", str(tmp_path)]
    ended = program(str(ROOT / "examples" / "bert_tp.py"), *sizes, *files, "--device", device.type, device=device)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "the loss curves agree" in ended.stdout
