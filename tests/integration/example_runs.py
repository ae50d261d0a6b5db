"""Run an example small: unscheduled here, its scheduled runs on ranks that have imported everything, and compare."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slapo_testing import run_ranks

__all__ = ["EXAMPLES", "assert_trains_as_one_process", "example", "text_for"]

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)


def text_for(directory: Path) -> Path:
    """A file to train on."""
    text = directory / "text.txt"
    text.write_text((EXAMPLES / "common.py").read_text() * 2)
    return text


def all_runs(name: str, arguments: list[str]) -> None:
    """On every rank."""
    module = example(name)
    options = module.parsed(arguments)
    for run in runs_of(module, options):
        module.run_scheduled(options, run, torch.device("cpu"))


def runs_of(module: Any, options: Any) -> list[str]:
    """The scheduled runs of an example, or those of them that its command line asks for."""
    return list(getattr(options, "targets", module.RUNS))


def assert_trains_as_one_process(
    name: str, arguments: list[str], directory: Path, capsys: pytest.CaptureFixture[str], *, world_size: int
) -> tuple[str, dict[str, list[float]]]:
    """All runs of an example, its comparison, and proof that this can fail.

    Args:
        name: of the example.
        arguments: of its command line.
        directory: for its results.
        capsys: of the test.
        world_size: number of ranks of the scheduled runs.

    Returns:
        what the comparison printed; and by the name of each run, how much memory each rank has for weights and
        optimizer, as a share of what one process has.
    """
    arguments = [*arguments, "--device", "cpu", "--text", str(text_for(directory)), "--output", str(directory)]
    module = example(name)
    options = module.parsed(arguments)
    runs = runs_of(module, options)
    module.run_plain(options)  # trains the tokenizer, too
    run_ranks(functools.partial(all_runs, name, arguments), world_size=world_size, timeout=600)
    capsys.readouterr()
    assert module.compare(options) == 0
    printed = capsys.readouterr().out
    assert "the loss curves agree" in printed
    assert (directory / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    plain, *others = (json.loads((directory / f"{run}.json").read_text()) for run in ("plain", *runs))
    (whole,) = [memory["weights and optimizer"] for memory in plain["memory"]]
    shares = {}
    for run, other in zip(runs, others, strict=True):
        assert other["losses"] == pytest.approx(plain["losses"], abs=2e-5), run
        assert other["held_out"] == pytest.approx(plain["held_out"], abs=1e-4), run
        shares[run] = [memory["weights and optimizer"] / whole for memory in other["memory"]]
    others[-1]["losses"][-1] += 2 * module.common.TOLERANCE  # the comparison can fail
    (directory / f"{runs[-1]}.json").write_text(json.dumps(others[-1]))
    assert module.compare(options) == 1
    return printed, shares
