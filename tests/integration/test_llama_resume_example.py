"""examples/llama_resume.py: killed, and resumed under another layout, once by DeepSpeed."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from slapo_core import RankFailedError
from slapo_testing import preload_modules, run_ranks
from tests.integration.example_runs import example, text_for

pytestmark = pytest.mark.ranks
preload_modules("transformers.models.llama.modeling_llama", "slapo_tp", "slapo_pipeline", "slapo_loss", "deepspeed")
preload_modules("torch.distributed.fsdp", "slapo_models")


def run_leg(arguments: list[str], name: str, last: int | None) -> None:
    """On every rank: a leg, which ends after a step."""
    module = example("llama_resume")

    def seen(step: int) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    module.run_leg(module.parsed(arguments), name, torch.device("cpu"), seen)


@pytest.mark.parametrize(
    ("legs", "again"),
    [
        (["fsdp2", "ZeRO-2"], 1),
        pytest.param(["fsdp2", "tp2", "ZeRO-2", "pp2 x tp2"], 5, marks=pytest.mark.breadth),
    ],
    ids=["once", "three times"],
)
def test_a_job_that_is_killed_trains_as_one_that_is_not(
    legs: list[str], again: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = str(text_for(tmp_path)), str(tmp_path)
    arguments = ["--quick", "--device", "cpu", "--text", text, "--output", output, "--legs", *legs]
    module = example("llama_resume")
    options = module.parsed(arguments)
    module.run_plain(options)  # trains the tokenizer, too
    for name, last in zip(legs, [*module.kills(options), None], strict=True):
        run = functools.partial(run_leg, arguments, name, last)
        if last is None:
            run_ranks(run, world_size=module.LEGS[name].processes, timeout=300)
            continue
        with pytest.raises(RankFailedError, match="SIGKILL"):
            run_ranks(run, world_size=module.LEGS[name].processes, timeout=300)
    capsys.readouterr()
    assert module.compare(options) == 0
    printed = capsys.readouterr().out
    assert f"{again} steps were trained again after a kill" in printed, printed
    assert (tmp_path / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    plain, resumed = (json.loads((tmp_path / f"{run}.json").read_text()) for run in ("plain", module.RUN))
    assert resumed["losses"] == pytest.approx(plain["losses"], abs=2e-5)
    assert resumed["held_out"] == pytest.approx(plain["held_out"], abs=1e-4)
    resumed["losses"][-1] += 2 * module.common.TOLERANCE  # the comparison can fail
    (tmp_path / f"{module.RUN}.json").write_text(json.dumps(resumed))
    assert module.compare(options) == 1
