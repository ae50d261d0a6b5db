"""The launcher of real rank processes: results in order, and no failure without every rank's traceback."""

from __future__ import annotations

import gc
import os
import select
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_core.errors import ArgumentError, LaunchError, RankFailedError
from slapo_runtime import launcher
from slapo_runtime.launcher import run_ranks
from slapo_runtime.rank_process import take_device
from tests.messages import Messages
from tests.tiers import sampled

pytestmark = pytest.mark.ranks


@dataclass
class Report:
    rank: int
    total: torch.Tensor
    weight: torch.nn.Parameter


def summed(values: list[float], *, scale: float = 1.0) -> Report:
    rank = dist.get_rank()
    total = torch.tensor([values[rank] * scale])
    dist.all_reduce(total)
    return Report(rank, total, torch.nn.Parameter(torch.full((2, 3), float(rank))))


def surroundings() -> tuple[str, str | None, int, str, str]:
    env = os.environ
    return os.getcwd(), env.get("SLAPO_TEST_VARIABLE"), torch.get_num_threads(), env["RANK"], env["WORLD_SIZE"]


def objects_in_no_collection() -> int:
    return gc.get_freeze_count()


def raise_on_every_rank() -> None:
    raise ValueError(f"no luck on rank {dist.get_rank()}")


def raise_on_rank_one_while_rank_zero_waits() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), src=0)
        raise KeyError("only rank 1")
    wait_for_the_other_rank()


def wait_for_the_other_rank() -> None:
    dist.send(torch.ones(1), dst=1)
    dist.all_reduce(torch.ones(1))


def hang_on_rank_one() -> int:
    if dist.get_rank() == 1:
        sleep_forever_in_here()
    dist.recv(torch.ones(1), src=1)
    return dist.get_rank()


def sleep_forever_in_here() -> None:
    dist.send(torch.ones(1), dst=0)
    threading.Event().wait()


def die_on_rank_one() -> int:
    if dist.get_rank() == 1:
        os._exit(7)
    return dist.get_rank()


def crash_on_rank_zero() -> int:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), 11)
    return dist.get_rank()


def return_a_lambda() -> object:
    return lambda: None


class OddError(Exception):
    """Cannot be unpickled: its constructor wants more than its args."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


def raise_odd() -> None:
    raise OddError("odd", "even")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that gives ranks on a busy machine the time to report."""
    monkeypatch.setattr(launcher, "_GRACE", 300.0)
    monkeypatch.setattr(launcher, "_LAST_WORDS", 300.0)


def test_results_come_back_in_rank_order_with_tensors_by_value() -> None:
    reports = run_ranks(summed, [1.0, 2.0, 4.0], world_size=3, scale=10.0)
    assert [report.rank for report in reports] == [0, 1, 2]
    for rank, report in enumerate(reports):
        assert report.total.tolist() == [70.0]
        assert isinstance(report.weight, torch.nn.Parameter)
        assert torch.equal(report.weight, torch.full((2, 3), float(rank)))
        assert not report.weight.is_shared()


def test_ranks_see_the_callers_surroundings_of_this_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLAPO_TEST_VARIABLE", "first")
    assert run_ranks(surroundings, world_size=2) == [(str(tmp_path), "first", 1, str(r), "2") for r in (0, 1)]
    monkeypatch.delenv("SLAPO_TEST_VARIABLE")
    assert run_ranks(surroundings, world_size=1) == [(str(tmp_path), None, 1, "0", "1")]
    more = {"SLAPO_TEST_VARIABLE": "of this run", "RANK": "7"}  # the last is the launcher's own
    assert run_ranks(surroundings, world_size=1, environment=more) == [(str(tmp_path), "of this run", 1, "0", "1")]


def test_ranks_look_for_no_garbage_in_what_their_server_imported() -> None:
    assert run_ranks(objects_in_no_collection, world_size=1)[0] > 100_000


@pytest.mark.usefixtures("patient")
def test_an_exception_brings_every_ranks_traceback_and_the_lowest_ranks_as_cause() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_ranks(raise_on_every_rank, world_size=2)
    error = caught.value
    assert sorted(error.failures) == [0, 1]
    assert error.ended == {}
    for rank in (0, 1):
        assert f"---- rank {rank} failed ----\nTraceback (most recent call last):" in str(error)
        assert f"ValueError: no luck on rank {rank}" in error.failures[rank]
        assert "in raise_on_every_rank" in error.failures[rank]
        assert "slapo_core" not in error.failures[rank]
    assert str(error).startswith(
        f"'{__name__}.raise_on_every_rank' failed on rank 0, 1 of 2, first on rank {error.first}\n"
    )
    assert isinstance(error.__cause__, ValueError)
    assert str(error.__cause__) == "no luck on rank 0"


def test_rank_blocked_in_a_collective_ends_with_a_traceback_after_a_failure() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        run_ranks(raise_on_rank_one_while_rank_zero_waits, world_size=2, timeout=1800)
    assert time.monotonic() - start < 900, "only the timeout ended the rank that waited"
    error = caught.value
    assert list(error.failures) == [1]
    assert error.first == 1
    assert "in wait_for_the_other_rank" in error.ended[0]
    assert "---- rank 0 was ended because " in str(error)
    assert isinstance(error.__cause__, KeyError)


@pytest.mark.usefixtures("patient")
def test_a_hang_ends_by_the_timeout_and_names_the_function_that_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = launcher._Run._receive

    def and_time_passes(run: launcher._Run, rank: int) -> None:
        receive(run, rank)
        if 0 in run.returned:  # after rank 1 has begun to sleep
            run.deadline = 0.0

    monkeypatch.setattr(launcher._Run, "_receive", and_time_passes)
    with pytest.raises(RankFailedError) as caught:
        run_ranks(hang_on_rank_one, world_size=2, timeout=900)
    error = caught.value
    assert str(error).startswith(f"'{__name__}.hang_on_rank_one' did not end within 900 s on rank 1 of 2\n")
    assert "---- rank 0 returned ----" in str(error)
    assert "in sleep_forever_in_here" in error.ended[1]
    assert error.failures == {}
    assert error.first is None


@pytest.mark.usefixtures("patient")
def test_a_rank_that_exits_is_reported_with_its_code(message: Messages) -> None:
    with pytest.raises(RankFailedError, match=r"first on rank 1\n") as caught:
        run_ranks(die_on_rank_one, world_size=2)
    assert caught.value.failures.keys() == {1}
    message(caught.value.failures[1], "exit code 7")


@pytest.mark.usefixtures("patient")
def test_a_rank_that_crashes_is_reported_with_its_signal_and_traceback(message: Messages) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_ranks(crash_on_rank_zero, world_size=2)
    text = caught.value.failures[0]
    message(text.splitlines()[0], "signal SIGSEGV")
    assert "in crash_on_rank_zero" in text


def test_exception_that_cannot_be_unpickled_is_reported() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_ranks(raise_odd, world_size=1)
    assert "OddError: odd" in caught.value.failures[0]
    assert caught.value.__cause__ is None


def test_a_result_that_cannot_be_sent_is_an_error_that_names_its_type() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_ranks(return_a_lambda, world_size=1)
    assert "of type function" in caught.value.failures[0]


def test_function_that_cannot_be_sent_is_refused_with_a_hint(message: Messages) -> None:
    def inner() -> None: ...

    with pytest.raises(LaunchError) as caught:
        run_ranks(inner, world_size=2)
    name = f"'{__name__}.test_function_that_cannot_be_sent_is_refused_with_a_hint.<locals>.inner'"
    assert f"{name} to the ranks: " in str(caught.value)
    assert "at the top level" in str(caught.value)
    message(caught.value.hint, "out of its function")


def test_an_argument_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"the arguments of '.*\.summed'"):
        run_ranks(summed, lambda: None, world_size=2)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"world_size": 0}, "world_size"), ({"world_size": 1, "timeout": 0}, "timeout")],
)
def test_numbers_that_make_no_sense_are_refused(arguments: dict[str, int], word: str, message: Messages) -> None:
    with pytest.raises(LaunchError) as caught:
        run_ranks(surroundings, **arguments)
    message(caught, word, "got 0")


SCRIPT = """
import os
from slapo_runtime.launcher import run_ranks

class Box:
    def __init__(self, value): self.value = value

def double(box):
    import torch.distributed as dist
    return Box(box.value * 2 + dist.get_rank())

def variable():
    return os.environ.get("SLAPO_TEST_VARIABLE")

{guard}
    os.environ["SLAPO_TEST_VARIABLE"] = "set when the processes' server starts"
    run_ranks(variable, world_size=1)
    del os.environ["SLAPO_TEST_VARIABLE"]
    print(run_ranks(variable, world_size=1))
    print([box.value for box in run_ranks(double, Box(4), world_size=2)])
"""


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.breadth)])
def test_plain_script_launches_ranks_under_a_main_guard(tmp_path: Path, guarded: bool, message: Messages) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard='if __name__ == "__main__":' if guarded else "if True:"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    if guarded:
        assert done.stdout == "[None]\n[8, 9]\n", done.stderr
    else:
        assert done.returncode == 1
        message(_last_error(done), "script.py", "`if __name__ == '__main__':`")


def _last_error(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.rpartition("slapo_core.errors.LaunchError: ")[2]


GREEDY = """
import os, torch

assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"  # torch.cuda.is_available() leaves the driver alone
torch.cuda.is_initialized = lambda: True  # as after torch.cuda.init()
"""

PRELOADS = """
import os, sys
from slapo_core.errors import LaunchError
from slapo_runtime import launcher
from slapo_runtime.launcher import never_preload, preload_modules, run_process

def surroundings():
    import torch
    kept = {"SLAPO_RANK_SERVER_MODULES", "PYTORCH_NVML_BASED_CUDA_CHECK"} & set(os.environ)
    return kept, "colorsys" in sys.modules, "greedy" in sys.modules, torch.cuda.is_initialized()

if __name__ == "__main__":
    launcher._PRELOAD[:] = ["torch"]  # quicker
    preload_modules("colorsys", "greedy", "not_installed_at_all")
    if sys.argv[1:]:
        never_preload("greedy")
    print(run_process(surroundings))
"""


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_preloaded_module_that_initializes_cuda_is_named(
    tmp_path: Path, is_left_out: bool, message: Messages
) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    (tmp_path / "script.py").write_text(PRELOADS)
    command = [sys.executable, "script.py", *(["left out"] if is_left_out else [])]
    own = {name: value for name, value in os.environ.items() if "NVML" not in name}  # which an import of DeepSpeed sets
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, env=own)
    if is_left_out:
        assert done.stdout == "(set(), True, False, False)\n", done.stderr
    else:
        assert done.returncode == 1
        message(done.stderr.rpartition("ServerWithCudaError: ")[2], "'greedy'", "never_preload('greedy')")


def test_ranks_share_gpus_over_gloo_and_never_over_nccl(monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    for rank in range(4):
        take_device(rank, "cpu:gloo,cuda:gloo")
        take_device(rank, "gloo")  # it may be for the CPU alone: no context on a GPU
    assert taken == [0, 1, 0, 1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(LaunchError) as caught:
            run_ranks(surroundings, world_size=2, backend=backend)
        message(caught, "a GPU for each rank", "cpu:gloo,cuda:gloo")


def test_gloo_for_gpus_is_gloo_for_the_cpu_too() -> None:
    reports = run_ranks(summed, [1.0, 2.0], world_size=2, backend="cpu:gloo,cuda:gloo")
    assert [report.total.tolist() for report in reports] == [[3.0], [3.0]]


VERIFY = """
import torch
from torch import nn
import slapo_core as slapo

sch = slapo.create_schedule(nn.Sequential(nn.Linear({size}, {size})), mesh={{"tp": 2}})
sch["0"].checkpoint()
{guard}
    print(slapo.verify(sch, torch.randn(2, {size})))
"""


@pytest.mark.parametrize("size", [pytest.param(4, marks=pytest.mark.breadth), 512])  # below and above what a pipe holds
def test_a_script_that_verifies_a_dry_schedule_without_a_main_guard_is_shown_the_guard(
    tmp_path: Path, size: int, message: Messages
) -> None:
    script = tmp_path / "script.py"
    script.write_text(VERIFY.format(size=size, guard="if True:"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert (done.returncode, done.stdout) == (1, "")
    message(_last_error(done), "2 processes", "script.py", "`if __name__ == '__main__':`", "--nproc-per-node 2")


@pytest.mark.parametrize("guard", sampled(["if True:", 'if __name__ == "__main__":']))
def test_script_on_standard_input_is_refused_with_a_hint(tmp_path: Path, guard: str, message: Messages) -> None:
    text = VERIFY.format(size=4, guard=guard)
    done = subprocess.run([sys.executable], input=text, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert (done.returncode, done.stdout) == (1, "")
    message(_last_error(done), "2 processes", "no file '<stdin>'", "`python train.py`", "--nproc-per-node 2")


@pytest.mark.parametrize("is_known", sampled([True, False]))
def test_notebook_verifies_imported_classes_and_refuses_its_own(
    tmp_path: Path, is_known: bool, message: Messages
) -> None:
    text = VERIFY.format(size=4, guard="if True:")
    if not is_known:
        text = text.replace("nn.Sequential(", "Own(").replace("sch =", "class Own(nn.Sequential): pass\nsch =")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    if is_known:
        assert done.returncode == 0, done.stderr
        assert "verified" in done.stdout
    else:
        message(_last_error(done), "'Own'", "interactive session", "into a module file")


def test_batch_with_wrong_arguments_has_one_error(capfd: pytest.CaptureFixture[str], message: Messages) -> None:
    sch = slapo.create_schedule(torch.nn.Sequential(torch.nn.Linear(4, 4)), mesh={"tp": 2})
    sch["0"].checkpoint()
    with pytest.raises(ArgumentError) as caught:
        slapo.verify(sch, torch.randn(2, 5))
    shown = [*traceback.format_exception(caught.value), capfd.readouterr().err]
    assert "".join(shown).count("Traceback") == 1
    said = str(caught.value)
    message(said.replace("addmm: ", ""), "2x5 and 4x4", "verify(sch, example_inputs)")  # which newer torch names


TEST_MODULE = """
from slapo_runtime.launcher import run_ranks

class Answer:
    value = 42

def answer(question):
    return question, Answer()

def test_answer():
    assert [found.value for _, found in run_ranks(answer, Answer(), world_size=2)] == [42, 42]
"""


def test_a_test_module_that_no_path_leads_to_is_imported_from_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "plugins" / "my-plugin" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_answer.py").write_text(TEST_MODULE)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    options = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


ORPHANS = """
import os, sys, threading
from slapo_runtime.launcher import run_ranks

def hold_the_fifo_open(fifo, in_the_callers_group):
    if in_the_callers_group:
        os.setpgid(0, os.getpgid(os.getppid()))
    stream = open(fifo, "w")
    print("here", file=stream, flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    run_ranks(hold_the_fifo_open, sys.argv[1], sys.argv[2] == "True", world_size=2)
"""


@pytest.mark.parametrize("in_the_callers_group", sampled([False, True]))
def test_no_rank_outlives_a_caller_that_was_killed_and_others_of_its_group_do(
    tmp_path: Path, in_the_callers_group: bool
) -> None:
    script, fifo = tmp_path / "script.py", tmp_path / "fifo"
    script.write_text(ORPHANS)
    os.mkfifo(fifo)
    caller = subprocess.Popen([sys.executable, str(script), str(fifo), str(in_the_callers_group)], process_group=0)
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=caller.pid)
    with fifo.open() as stream:
        assert [stream.readline() for _ in range(2)] == ["here\n", "here\n"]
        caller.kill()
        caller.wait()
        # The end of the file comes when the last rank has let go of the fifo.
        assert select.select([stream], [], [], 600)[0], "a rank outlived its caller"
        assert stream.read() == ""
    assert other.communicate(b"alive") == (b"alive", None)
