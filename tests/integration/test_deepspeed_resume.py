"""A checkpoint of any form of a run goes on under every other one: torch, tensor parallelism, ZeRO, a pipeline."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.testing import preload_modules, run_ranks
from tests.integration.dialects.small import FORMS, build, plain, train

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "slapo_tp", "slapo_pipeline")

WHOLE = bool(os.environ.get("SLAPO_TEST_WHOLE"))  # all 20 pairs
PAIRED = ("torch", "torch tp2", "ZeRO-1 dp2", "ZeRO-3 dp2", "ZeRO-1 pp2 tp2")
CLOSE = 2e-6  # of weights of size 1: what sums in another order make of float32 over four steps
BEFORE, AFTER = 2, 4


def differences(engine: Any, steps: int) -> list[str]:
    """What of the state dict is not that of so many steps without interruption."""
    state, wanted = engine.state_dict(), plain(steps)
    assert list(state) == list(wanted)
    return [
        f"{name}: {(state[name] - value).abs().max():.2g}"
        for name, value in wanted.items()
        if state[name].dtype != value.dtype or not torch.allclose(state[name], value, rtol=0, atol=CLOSE)
    ]


def save(form: str, directory: Path) -> list[str]:
    engine = build(form)
    train(engine, 0, BEFORE)
    engine.save(directory / form)
    found = differences(engine, BEFORE)
    engine.close()
    return found


def resume(form: str, other: str, directory: Path) -> list[str]:
    """Load what ``other`` saved, into an engine with other values and no state yet, and go on."""
    engine = build(form, seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left unused, nothing is lacking
        engine.load(directory / other)
    found = differences(engine, BEFORE)
    train(engine, BEFORE, AFTER)
    engine.check_replicas()
    found += differences(engine, AFTER)
    engine.close()
    return found


def saved_and_resumed(saving: list[str], pairs: list[tuple[str, str]], directory: Path) -> dict[str, list[str]]:
    found = {form: save(form, directory) for form in saving}
    found |= {f"{form} from {other}": resume(form, other, directory) for form, other in pairs}
    return {what: differing for what, differing in found.items() if differing}


def apart(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups, the first of which the second stage has no parameters of."""
    own = parameters[-1:] if dist.get_rank() < 2 else []
    rest = [parameter for parameter in parameters if not own or parameter is not own[0]]
    return torch.optim.AdamW([{"params": own}, {"params": rest}])


def in_stages(directory: Path) -> tuple[list[str], str]:
    """Masters of a pipeline in bfloat16, resumed bit for bit; and groups that stages do not share."""
    form, options = "ZeRO-1 pp2 tp2", {"config": {"bf16": {"enabled": True}}, "dtype": torch.bfloat16}
    engine = build(form, **options)
    train(engine, 0, BEFORE)
    engine.save(directory)
    train(engine, BEFORE, AFTER)
    other = build(form, seed=7, **options)
    other.load(directory)
    other.check_replicas()
    train(other, BEFORE, AFTER)
    one, two = engine.state_dict(), other.state_dict()
    differing = [name for name in one if not torch.equal(one[name], two[name])]
    differing += [] if (directory / "trained.safetensors").exists() else ["no masters"]
    try:
        build(form, optimizer=apart)
    except slapo.BuildError as error:
        return differing, str(error)
    return differing, "fine"


def on_four_ranks(form: str, other: str, directory: Path) -> tuple[dict[str, list[str]], list[str], str]:
    return saved_and_resumed([form], [(form, other)], directory), *in_stages(directory / "masters")


def test_every_form_goes_on_where_any_other_one_was(tmp_path: Path) -> None:
    by_size: dict[int, list[str]] = {}
    for form in PAIRED:
        mesh = FORMS[form][1] or {}
        by_size.setdefault(torch.tensor([1, *mesh.values()]).prod().item(), []).append(form)  # type: ignore[arg-type]
    assert list(by_size) == [1, 2, 4]
    (alone,), two, (four,) = by_size[1], by_size[2], by_size[4]
    assert saved_and_resumed([alone], [], tmp_path) == {}
    found = []
    for differing, of_masters, refused in run_ranks(on_four_ranks, four, alone, tmp_path, world_size=4, timeout=1800):
        found.append(differing)
        assert of_masters == []
        assert refused.startswith("group 0 of the optimiser has no parameters on rank 1 of 'pp': DeepSpeed sums")
    here = [(form, other) for form in two for other in PAIRED if other != form]
    there = [(four, other) for other in two]
    if not WHOLE:  # every form is still saved, and still read, with every number of ranks
        here, there = here[::2], there[-1:]
    found += run_ranks(saved_and_resumed, two, here, tmp_path, world_size=2, timeout=1800)
    found += run_ranks(saved_and_resumed, [], there, tmp_path, world_size=4, timeout=1800)
    found.append(saved_and_resumed([], [(alone, other) for other in (*two, four)], tmp_path))
    assert not any(found), found
