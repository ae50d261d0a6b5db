"""Examples take --device: a GPU each, one shared over gloo where that works, or the CPU with a line that says why."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.example_runs import example

COMMON = example("common")


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    COMMON.add_options(parser, "any", ())
    return parser.parse_args(list(words))


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, rank: int = 1) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize(
    ("count", "shared", "words", "expected"),
    [
        (0, True, [], "cpu"),
        (1, True, [], "cuda:0"),
        (1, False, [], "cpu"),
        (2, True, [], "cuda:1"),
        (2, False, ["--device", "cuda"], "cuda:1"),
        (2, True, ["--device", "cpu"], "cpu"),
        (1, True, ["--device", "cuda"], "cuda:0"),
    ],
)
def test_rank_takes_a_gpu_of_its_own_or_shares_one(
    count: int, shared: bool, words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, count)
    assert COMMON.device_of(options(*words), 2, shared=shared) == torch.device(expected)


@pytest.mark.parametrize(("count", "shared"), [(0, True), (1, False)])
def test_gpu_that_is_asked_for_and_missing_ends_the_run(
    count: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, count)
    with pytest.raises(SystemExit, match=f"2 processes need a GPU each, and this machine has {count}"):
        COMMON.device_of(options("--device", "cuda"), 2, shared=shared)


@pytest.mark.parametrize(
    ("count", "shared", "line"),
    [
        (0, True, ""),
        (1, True, "device: cuda; 2 processes take 1 of the GPUs, connected by gloo\n"),
        (1, False, "device: cpu; 2 processes need a GPU each, and this machine has 1\n"),
        (2, False, "device: cuda; 2 processes take a GPU each\n"),
    ],
)
def test_line_says_who_takes_a_gpu(
    count: int, shared: bool, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch, count)
    COMMON.say_device(options(), 2, shared=shared)
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    ("count", "backend", "device"), [(0, "gloo", "cpu"), (1, "gloo", "cuda:0"), (2, "nccl", "cuda:1")]
)
def test_processes_are_connected_by_what_their_device_allows(
    count: int, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, count)
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(dist, "init_process_group", seen.append)
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda: None)
    COMMON.together(seen.append, options())
    chosen = torch.device(device)
    assert seen == ([chosen] if count else []) + [backend, chosen]


@pytest.mark.parametrize("name", ["bert_tp", "bert_deepspeed", "llama_3d", "llama_resume", "tune_bert"])
def test_examples_take_a_device(name: str) -> None:
    module = example(name)
    parse = module.parsed if hasattr(module, "parsed") else module.parser().parse_args
    assert parse(["--device", "cuda"]).device == "cuda"
    if name == "tune_bert":
        assert module.make_study(parse(["--device", "cpu"])).accelerator == "cpu"
