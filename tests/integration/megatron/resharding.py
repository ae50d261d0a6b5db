"""Sharded checkpoints of the small model: written by some sizes of tp, pp and dp, read by others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import slapo_core as slapo
from tests.integration.dialects.small import build, plain, train
from tests.integration.dialects.states import different, said
from tests.integration.megatron.states import BF16, own

__all__ = ["Pair", "refused", "to_the_last_bit", "written_and_read"]

CLOSE = 2e-6  # of weights of size 1: what sums in another order make of float32 over four steps
BEFORE, AFTER = 2, 4

Pair = tuple[str, str]
"""The form that goes on, and the one that saved."""


def differences(engine: Any, steps: int) -> list[str]:
    """What of the state dict is not that of so many steps without interruption."""
    state, wanted = engine.state_dict(), plain(steps)
    assert list(state) == list(wanted)
    return [
        f"{name}: {(state[name] - value).abs().max():.2g}"
        for name, value in wanted.items()
        if state[name].dtype != value.dtype or not torch.allclose(state[name], value, rtol=0, atol=CLOSE)
    ]


def written_and_read(writing: Sequence[str], pairs: Sequence[Pair], directory: Path) -> dict[str, list[str]]:
    """What differs from training without interruption, by what was done."""
    found = {}
    for form in writing:
        engine = build(form)
        train(engine, 0, BEFORE)
        engine.save_sharded(directory / form)
        engine.close()
    for form, other in pairs:
        engine = build(form, seed=7)
        told = said(engine.load_sharded, directory / other)
        differing = differences(engine, BEFORE)
        train(engine, BEFORE, AFTER)
        engine.check_replicas()
        found[f"{form} from {other}"] = differing + differences(engine, AFTER) + ([] if told == "fine" else [told])
        engine.close()
    return {what: differing for what, differing in found.items() if differing}


def to_the_last_bit(directory: Path) -> dict[str, Any]:
    """Main parameters and their moments; a scheduler; and what the files hold."""
    options = own(0.1, lr_warmup_steps=3, lr_decay_steps=9, lr_decay_style="linear")
    options["optimizer_config"] |= BF16["optimizer_config"]
    engine = build("megatron dp2 distributed", dtype=torch.bfloat16, **options)
    train(engine, 0, BEFORE)
    engine.save_sharded(directory / "low")
    train(engine, BEFORE, AFTER)
    wanted = engine.state_dict()
    engine.close()
    found = {}
    for form in ("megatron dp2 distributed", "megatron dp2"):
        other = build(form, seed=7, dtype=torch.bfloat16, **options)
        told = said(other.load_sharded, directory / "low")
        replicas = said(other.check_replicas)
        train(other, BEFORE, AFTER)
        found[form] = (told, replicas, different(other.state_dict(), wanted))
        other.close()
    stored = FileSystemReader(directory / "low").read_metadata().state_dict_metadata
    tensors = {key: one for key, one in stored.items() if isinstance(one, TensorStorageMetadata)}
    weights = {key: (tuple(one.size), str(one.properties.dtype)) for key, one in tensors.items()}
    return {"resumed": found, "tensors": weights, "files": sorted(path.name for path in directory.iterdir())}


def refused(directory: Path) -> dict[str, str]:
    """What is no checkpoint of this kind, or one of something else; the engine is as it was."""
    from megatron.core import dist_checkpointing

    engine = build("megatron dp2")
    engine.save(directory / "ours")
    before = engine.state_dict()
    found = {
        "nothing": said(engine.load_sharded, directory / "nothing"),
        "ours": said(engine.load_sharded, directory / "ours"),
        "in its place": said(engine.save_sharded, directory / "ours"),
    }
    if torch.distributed.get_rank() == 0:
        (directory / "foreign").mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save({"iteration": 3}, str(directory / "foreign"))
    found["foreign"] = said(engine.load_sharded, directory / "foreign")
    engine.save_sharded(directory / "whole")
    engine.close()
    sgd = build("megatron dp2", optimizer=lambda them: torch.optim.SGD(them, lr=0.1))
    found["another optimizer"] = said(sgd.load_sharded, directory / "whole")
    found["unchanged"] = json.dumps(different(sgd.state_dict(), before))
    sgd.close()
    evaluating = build("megatron dp2", seed=7, optimizer=None)
    evaluating.load_sharded(directory / "whole")
    found["weights alone"] = json.dumps(different(evaluating.state_dict(), before))
    evaluating.save_sharded(directory / "weights")
    evaluating.close()
    again = build("megatron dp2")
    found["no state"] = said(again.load_sharded, directory / "weights")
    again.close()
    plain = slapo.create_schedule(torch.nn.Linear(3, 3), mesh={"dp": 2})
    other = slapo.build(plain, target="megatron", optimizer=lambda them: torch.optim.AdamW(them))
    found["another model"] = said(other.load_sharded, directory / "whole")
    other.close()
    return found
