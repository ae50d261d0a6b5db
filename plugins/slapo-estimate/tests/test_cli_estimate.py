"""``slapo estimate`` and ``slapo device``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from slapo_core.cli.main import make_app
from slapo_core.errors import ArgumentError
from slapo_estimate import device_benchmark
from slapo_estimate.device import DEVICES, DeviceSpec, Link
from slapo_estimate.device_benchmark import measure_device, products_of
from tests.messages import Messages

MODULE = """
import torch
from torch import nn
import slapo_core as slapo

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x)
        return x[mask.bool()].sum()

def make_model():
    return Model()

def schedule(sch):
    sch["layers.0"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["layers.1"].shard("weight", axis=1).sync("forward")

def make_pair():
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

def cut(sch):
    sch["0"].pipeline_split()
    sch["1"].shard(["weight", "bias"], axis=0).sync("fwd_post", "all_gather").sync("bwd_post", "all_reduce")

def mean(output, batch):
    return output.mean()

def loss(output, batch):
    return output

class Limited(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        self.register_buffer("limit", torch.arange(4))

    def forward(self, x):
        return super().forward(x if self.limit[1] == 1 else x[:1])

def limited():
    return slapo.create_schedule(Limited(), mesh={"dp": 2})

def batch():
    return {"x": torch.ones(4, 16), "mask": torch.ones(4, dtype=torch.long)}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "tiny_estimated.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("tiny_estimated", None)


def run(*words: str) -> Result:
    return CliRunner().invoke(make_app(), list(words))


PLAIN = ("estimate", "tiny_estimated:make_model", "--loss", "tiny_estimated:loss")
ESTIMATE = ("estimate", "tiny_estimated:schedule", "--model", *PLAIN[1:])
BATCH = ("--batch", "x=4x16:float32", "--batch", "mask=4:int64")


@pytest.mark.slow
def test_estimate_prints_tables_and_json(here: Path) -> None:
    words = (*ESTIMATE, "--mesh", "dp=2,tp=2", *BATCH, "--device", "h100")
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["mesh"] == {"dp": 2, "tp": 2}
    (kind,) = found["kinds"]
    assert kind["ranks"] == [0, 1, 2, 3]
    half = 16 * 8 * 4
    assert kind["memory"]["parameters"] == half + 8 * 4 + half + 16 * 4
    assert kind["memory"]["optimizer"] == 2 * kind["memory"]["parameters"] + 4 * 4  # and AdamW's count of steps
    assert [(each["kind"], each["mesh_dim"], each["bytes"], each["module"]) for each in kind["collectives"]] == [
        ("all_reduce", "tp", 4 * 16 * 4, "layers.1"),
        ("all_reduce", "dp", kind["memory"]["parameters"], "layers.0"),
    ]
    assert kind["flops"] == 2 * (4 * 16 * 8) * (2 + 3)  # the first layer's input has no gradient
    assert 0 < found["time"] < 0.01
    shown = run(*words)
    assert "total" in shown.stdout
    assert "all_reduce  tp        2      forward   1      256B     layers.*  sync('forward')" in shown.stdout
    assert "estimating: a training step of tiny_estimated:schedule" in shown.stderr
    assert run(*words, "--each").stdout.count("#4 sync('forward') at 'layers.1'") == 1


@pytest.mark.slow
def test_a_function_that_returns_the_schedule_keeps_its_mesh_and_integer_buffers(here: Path) -> None:
    words = ("estimate", "tiny_estimated:limited", "--loss", "tiny_estimated:mean", "--batch", "4x16:float32")
    done = run(*words, "--optimizer", "none", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(done.stdout)
    assert found["mesh"] == {"dp": 2}
    assert found["kinds"][0]["flops"] == 2 * (4 * 16 * 16) * 2


@pytest.mark.slow
def test_micro_batches_of_a_pipeline_are_passed_and_reported(here: Path) -> None:
    words = ("estimate", "tiny_estimated:cut", "--model", "tiny_estimated:make_pair")
    words = (*words, "--loss", "tiny_estimated:mean", "--mesh", "pp=2,tp=2", "--batch", "input=8x16:float32")
    said = "assumption: a step of the pipeline has {0} micro-batches (microbatches={0})"
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert said.format(2) in done.stdout
    command = [sys.executable, "-m", "slapo_core.cli.main", *words, "--microbatches", "4"]
    alone = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert said.format(4) in alone.stdout
    assert "never verified" not in alone.stderr


@pytest.mark.slow
def test_step_over_the_memory_limit_exits_with_1(here: Path) -> None:
    done = run(*PLAIN, "--batch", "tiny_estimated:batch", "--optimizer", "SGD", "--memory", "1KiB")
    assert done.exit_code == 1
    assert "error: the step needs" in done.stderr
    assert "more than --memory 1KiB" in done.stderr


def test_device_round_trips_through_json_and_faults_are_named(tmp_path: Path, message: Messages) -> None:
    file = tmp_path / "device.json"
    whole = DEVICES["h100"].to_json()
    file.write_text(json.dumps(whole))
    assert DeviceSpec.from_json(file) == DEVICES["h100"]
    assert json.loads(run("device", "show", str(file), "--json").stdout) == whole
    assert "links of tp" in run("device", "show", "h100").stdout
    for change, *words in (
        ({"bandwidth": 0}, "'bandwidth'", "got 0"),
        ({"bandwidth": True}, "'bandwidth'", "got True"),
        ({"launch": float("nan")}, "'launch'", "got nan"),
        ({"flops": {"float32": "fast"}}, "'flops.float32'", "got 'fast'"),
        ({"links": {"tp": {"bandwidth": 1}}}, "no 'links.tp.latency'"),
        ({"memory": "80GiB"}, "'memory'", "got '80GiB'"),
        ({"speed": 1}, "unknown key 'speed'"),
    ):
        with pytest.raises(ArgumentError) as caught:
            DeviceSpec.from_json({**whole, **change})
        message(caught, *words)
    file.write_text("{")
    with pytest.raises(ArgumentError, match="is not a device"):
        DeviceSpec.from_json(file)
    del whole["flops"]
    with pytest.raises(ArgumentError) as caught:
        DeviceSpec.from_json(whole)
    message(caught, "no 'flops'")


def test_tf32_is_measured_with_float32_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products_of(("float32", "bfloat16")) == ("float32", "bfloat16")
    monkeypatch.setattr(device_benchmark, "_device", lambda: torch.device("cuda", 0))
    assert products_of(("float32", "bfloat16")) == ("float32", "bfloat16", "tf32")
    assert products_of(("tf32", "float32")) == ("tf32", "float32")
    assert products_of(("bfloat16",)) == ("bfloat16",)


@pytest.mark.slow
def test_measure_device_on_this_machine(message: Messages) -> None:
    told: list[str] = []
    device = measure_device(ranks=2, dtypes=("float32", "tf32"), size=64, tell=told.append)
    if device.type == "cpu":
        assert told == ["products in float32", "products in tf32", "memory", "launches", "links of 2 ranks"]
    assert device.flops["float32"] > 1e6
    assert device.flops["tf32"] > 1e6
    assert device.bandwidth > 1e6
    assert 0 < device.launch < 1
    assert isinstance(device.links["*"], Link)
    assert DeviceSpec.from_json(json.loads(json.dumps(device.to_json()))) == device
    with pytest.raises(ArgumentError) as caught:
        measure_device(dtypes=("float31",))
    message(caught, "dtypes", "got float31")
