"""benchmarks/gpu.py, small: its parts, what a part that fails leaves to the others, and docs/results/gpu.md."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, sys, threading
sys.path.insert(0, {benchmarks!r})
import gpu

def crash(run):
    run.keep([{{"what": "first"}}])
    os.abort()

def hang(run):
    threading.Event().wait()

def end(run):
    (run.file.parent / "pid").write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGTERM)
    threading.Event().wait()

sys.modules["odd"] = sys.modules[__name__]
host_time = gpu.PARTS["host_time"]
gpu.PARTS = {{name: gpu.Part(f"odd:{{name}}", 1000, "", {{}}) for name in ("hang", "crash", "end")}}
gpu.PARTS["hang"] = gpu.Part("odd:hang", 1, "", {{}})
gpu.PARTS["host_time"] = host_time
sys.exit(gpu.main())
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.fixture
def run(gpu: Any, tmp_path: Path) -> Any:
    setting = {"part": "some", "commit": "abc", "small": True, "device": "CPU"}
    return gpu.Run("some", torch.device("cpu"), True, "eager", time.time() + 600, tmp_path / "gpu_some.json", setting)


def test_the_page_is_that_of_the_results(gpu: Any) -> None:
    assert gpu.page(gpu.RESULTS) == gpu.PAGE.read_text(), "write it: python benchmarks/gpu.py --page"


def test_the_page_shows_figures_and_what_failed(gpu: Any, tmp_path: Path) -> None:
    known = {
        "part": "host_time", "commit": "abc", "small": False, "device": "NVIDIA H100", "driver": "580", "cuda": "13.0",
        "torch": "2.11", "triton": "3.6", "date": "2026-01-02", "facts": {"calls": 20000}, "ended": "failed: some",
        "rows": [
            {"model": "bert", "layer": "traced", "seconds": 2e-5,
             "against_untraced": {"ratio": 1.5, "quartile_1": 1.4, "quartile_3": 1.6, "pairs": 30}},
            {"model": "gpt", "layer": "traced", "failed": "ValueError: some"},
        ],
    }  # fmt: skip
    file = tmp_path / "gpu_host_time.json"
    file.write_text(json.dumps(known))
    page = gpu.page(tmp_path)
    assert "NVIDIA H100, driver 580, torch 2.11, cuda 13.0, triton 3.6, commit abc, 2026-01-02." in page
    assert "Not complete: failed: some." in page
    assert "calls 20,000." in page
    assert "| bert | traced | 20 µs | 1.50 (1.40 to 1.60) |\n| gpt | traced | - | - |" in page
    assert "gpt, traced, ValueError: some." in page
    assert page.count("Not measured yet.") == len(gpu.PARTS) - 1
    for change in ({"small": True}, {"device": "CPU"}):
        file.write_text(json.dumps({**known, **change}))
        with pytest.raises(SystemExit, match="host_time"):
            gpu.page(tmp_path)


def test_a_variant_with_other_losses_has_no_figures(run: Any) -> None:
    training = importlib.import_module("gpu_training")

    def other(model: Any, batch: Any, compiler: str) -> Any:
        with torch.no_grad():
            model.model.norm.weight.mul_(2.0)
        return training.eager(model, batch, compiler)

    makers = {"eager": training.eager, "other": other, "again": training.eager}
    training.compare(run, training.SMALL, {name: ("sdpa", make) for name, make in makers.items()})
    known = json.loads(run.file.read_text())
    assert {"parameters", "flops_per_step", "measured_flops", "batch", "length"} <= set(known["facts"])
    rows = {row["variant"]: row for row in known["rows"]}
    assert "losses" in rows["other"]["failed"]
    assert "seconds" not in rows["other"]
    assert rows["again"]["against_eager"]["pairs"] == 3
    assert rows["again"]["peak_bytes"] > 4 * known["facts"]["parameters"]
    with pytest.raises(AssertionError, match="losses"):
        training.require_losses([1.0, math.nan], [1.0, 1.0])
    expected = known["facts"]["flops_per_step"] / rows["again"]["seconds"] / known["facts"]["measured_flops"]
    assert rows["again"]["mfu_measured"] == pytest.approx(expected)


def test_a_region_that_a_compiler_refuses_is_a_result(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = importlib.import_module("gpu_parts")
    monkeypatch.setattr(parts, "REGIONS", {"fusion.rms_norm": ("fuse", "replace")})
    parts.fused_regions(dataclasses.replace(run, compiler="nonsense"))
    rows = {row["variant"]: row for row in json.loads(run.file.read_text())["rows"]}
    assert rows["eager"]["seconds"] > 0
    assert "nonsense" in rows["torch.compile"]["failed"]
    assert "nonsense" in rows["fuse"]["failed"]
    assert rows["replace"]["against_eager"]["pairs"] == 3


def test_a_part_that_fails_keeps_its_rows(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Any) -> None:
        run.keep([{"what": "first"}])
        raise RuntimeError("of this part")

    monkeypatch.setattr(sys.modules["gpu"], "fail", fail, raising=False)
    monkeypatch.setattr(gpu, "PARTS", {"some": gpu.Part("gpu:fail", 1, "", {})})
    common = ["--small", "--device", "cpu", "--commit", "abc", "--parts", "some", "--out", str(tmp_path)]
    assert gpu.main([*common, "--part", "some", "--deadline", str(time.time() + 600)]) == 1
    known = json.loads((tmp_path / "gpu_some.json").read_text())
    assert known["ended"].startswith("failed: RuntimeError: of this part (gpu.py:")
    assert known["rows"] == [{"what": "first"}]


@pytest.mark.slow
@pytest.mark.breadth
def test_a_part_that_hangs_or_crashes_leaves_the_others(gpu: Any, tmp_path: Path) -> None:
    done = with_odd_parts(tmp_path, "hang,crash,host_time")
    assert done.returncode == 1, done.stdout
    known = {part: json.loads((tmp_path / f"gpu_{part}.json").read_text()) for part in ("hang", "crash")}
    assert known["hang"]["ended"].startswith("ended at its limit")
    assert known["crash"]["ended"] == "failed: exit status -6"
    assert known["crash"]["rows"] == [{"what": "first"}]
    for part, each in known.items():
        assert f"{part}: {each['ended']}" in done.stdout
    document = json.loads((tmp_path / "gpu_host_time.json").read_text())
    fixed = {"part": "host_time", "commit": "abc", "small": True, "device": "CPU", "torch": torch.__version__}
    assert {**document, **fixed, "ended": "complete"} == document
    assert {"date", "machine", "python", "facts"} <= set(document)
    assert [row["layer"] for row in document["rows"]] == ["untraced", "traced", "traced, flatten"] * 3
    for row in document["rows"]:
        assert row["seconds"] > 0
        assert row["against_untraced"]["quartile_1"] <= row["against_untraced"]["quartile_3"]

    def is_complete(part: str, **changed: Any) -> bool:
        given = {"out": tmp_path, "commit": "abc", "small": True, **changed}
        return bool(gpu.is_complete(argparse.Namespace(**given), part))

    assert is_complete("host_time")
    assert not is_complete("host_time", commit="def")
    assert not is_complete("host_time", small=False)
    assert not any(is_complete(part) for part in ("hang", "crash", "absent"))


@pytest.mark.slow
def test_a_part_ends_with_what_started_it(tmp_path: Path) -> None:
    done = with_odd_parts(tmp_path, "end")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert done.returncode == 128 + signal.SIGTERM


def with_odd_parts(directory: Path, parts: str) -> subprocess.CompletedProcess[str]:
    program = directory / "odd_parts.py"
    program.write_text(PROGRAM.format(benchmarks=str(ROOT / "benchmarks")))
    command = [sys.executable, str(program), "--small", "--device", "cpu", "--minutes", "20", "--commit", "abc"]
    command += ["--parts", parts, "--out", str(directory)]
    output = directory / "output"  # a file: a pipe would wait for all who hold it
    with output.open("w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, text=True, cwd=ROOT, check=False)
    done.stdout = output.read_text()
    return done


@pytest.mark.slow
@pytest.mark.breadth
def test_every_part_runs_small(gpu: Any, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--small",
        "--minutes",
        "30",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in gpu.PARTS:
        known = json.loads((tmp_path / f"gpu_{part}.json").read_text())
        failed = [row["failed"] for row in known["rows"] if "failed" in row]
        assert known["rows"]
        assert all(why.startswith("skipped: ") for why in failed), failed


def test_without_a_gpu_full_sizes_are_refused(gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--out", str(tmp_path)])
    assert "--small" in capsys.readouterr().err
