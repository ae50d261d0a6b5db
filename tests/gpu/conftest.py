"""Tests of what only a GPU can show: their order, their time, their results, and their rehearsal on the CPU.

Each is marked ``gpu(rank, ...)``, and those of the lowest ranks run first. Without a CUDA device all are skipped;
``--rehearse`` runs them on the CPU, but for those that name what CUDA alone has (``needs=``). After ``--gpu-seconds``
the others are skipped, too. ``--gpu-results FILE`` takes outcomes and measured values at once, a line of JSON each, so
that a run that is cut off loses nothing.
"""

from __future__ import annotations

import functools
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 150.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "tests of what only a GPU can show")
    group.addoption("--rehearse", action="store_true", help="run them on the CPU, where they can run there")
    group.addoption("--gpu-seconds", type=float, help="after that many, the others are skipped (default: 150 on a GPU)")
    group.addoption("--gpu-results", type=Path, help="file of JSON lines for outcomes and measured values")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Run(config), "gpu_run")


@functools.cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


class Run:
    """One run of these tests.

    Args:
        config: of pytest; its options may be absent where the run began at a directory above.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.rehearses = bool(config.getoption("rehearse", False))
        seconds = config.getoption("gpu_seconds", None)
        self._seconds: float = seconds if seconds is not None else float("inf") if self.rehearses else SECONDS
        self._file: Path | None = config.getoption("gpu_results", None)
        self._deadline: float | None = None
        self._lost = ""
        self.measured: list[dict[str, Any]] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put those of the lowest ranks first; all may start processes and take their time."""
        for item in items:
            if _marker(item) is not None:
                item.add_marker(pytest.mark.slow)
        items.sort(key=_rank)
        if self._file is not None:
            self._write(self._machine(), mode="w")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip what cannot run here, or not in time."""
        marker = _marker(item)
        if marker is None:
            return
        needs = marker.kwargs.get("needs")
        if self.rehearses and needs:
            pytest.skip(f"not rehearsed: needs {needs}")
        if not self.rehearses and not _has_cuda():
            pytest.skip("no CUDA device was found")
        if self._lost:
            pytest.skip(f"not run: {self._lost} ended the CUDA context of this process")
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._seconds
        if now >= self._deadline:
            pytest.skip(f"not run: {self._seconds:g} s are over")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Find errors of kernels in the test that launched them."""
        try:
            return (yield)
        finally:
            if _marker(item) is not None and not self.rehearses:
                self._synchronize(item)

    def _synchronize(self, item: pytest.Item) -> None:
        import torch

        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:  # it stays in this state until the process ends
            self._lost = item.nodeid
            raise

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write each outcome as soon as it is known."""
        if self._file is None or not report.keywords.get("gpu"):
            return
        if report.when != "call" and report.passed:
            return
        reason = "" if report.passed else str(report.longrepr[2] if report.skipped else report.longreprtext)[-4000:]
        self._write({"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "reason": reason})

    def record(self, test: str, values: dict[str, Any]) -> None:
        """Keep measured values, and write them."""
        self.measured.append({"test": test, **values})
        if self._file is not None:
            self._write({"test": test, "measured": values})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print what was measured."""
        if self.measured:
            terminalreporter.section("measured")
        for row in self.measured:
            terminalreporter.write_line(json.dumps(row, default=str))

    def _write(self, row: dict[str, Any], mode: str = "a") -> None:
        assert self._file is not None
        with self._file.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(row, default=str) + "\n")

    def _machine(self) -> dict[str, Any]:
        found = {"device": "CPU (a rehearsal)", "cuda": None}
        if not self.rehearses and _has_cuda():
            import torch

            found = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        return {
            **found,
            "driver": _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "torch": version("torch"),
            "python": platform.python_version(),
            "commit": _printed("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        }


def _marker(item: pytest.Item) -> pytest.Mark | None:
    return item.get_closest_marker("gpu")


def _rank(item: pytest.Item) -> float:
    marker = _marker(item)
    return float("inf") if marker is None else float(marker.args[0])


def _printed(*command: str) -> str | None:
    """Return what a program prints; None where it is not installed or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """The run that the test is a part of."""
    found: Run = request.config.pluginmanager.get_plugin("gpu_run")
    return found


@pytest.fixture
def device(run: Run) -> Any:
    """The device to test on."""
    import torch

    return torch.device("cpu") if run.rehearses else torch.device("cuda", 0)


@pytest.fixture
def measured(request: pytest.FixtureRequest, run: Run) -> Callable[..., None]:
    """Keep values by their names: ``measured(us_per_call=12.5)``."""
    return lambda **values: run.record(request.node.nodeid, values)
