"""DeepSpeed's own checkpoints of a scheduled model, and their conversion to universal ones, which other meshes read."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import slapo_core as slapo
from slapo_core.layout import Layout
from slapo_runtime.state import ModelState
from slapo_testing import preload_modules, run_ranks
from tests.integration.deepspeed.states import different
from tests.integration.dialects.small import build, train

preload_modules("deepspeed", "slapo_tp", "slapo_pipeline")

CLOSE = 2e-6  # where sums come in another order


def one_group(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1)


def convert(directory: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        argparse.Namespace(
            input_folder=str(directory / "two"),
            output_folder=str(directory / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )


def own_and_universal(form: str, others: list[str], directory: Path) -> dict[str, Any]:
    """Two steps and saved; loaded as it is, and converted, under other forms; what differs there and two steps on."""
    engine = build(form, padded=False, optimizer=one_group)
    train(engine, 0, 2)
    engine.deepspeed.save_checkpoint(str(directory), tag="two")
    two = engine.state_dict()
    train(engine, 2, 4)
    four = engine.state_dict()
    again = build(form, padded=False, optimizer=one_group, seed=7)
    again.deepspeed.load_checkpoint(str(directory), tag="two")
    found: dict[str, Any] = {"own": different(again.state_dict(), two)}
    train(again, 2, 4)
    found["own"] += different(again.state_dict(), four)
    if dist.get_rank() == 0:
        convert(directory)
    dist.barrier()
    for other in others:
        universal = {"checkpoint": {"load_universal": True}}
        loaded = build(other, padded=False, optimizer=one_group, seed=7, config=universal)
        loaded.deepspeed.load_checkpoint(str(directory), tag="universal")
        differing = different(loaded.state_dict(), two)
        loaded.check_replicas()
        train(loaded, 2, 4)
        state = loaded.state_dict()
        found[other] = differing + [name for name in four if (state[name] - four[name]).abs().max() > CLOSE]
        loaded.close()
        hung = {name for name in vars(loaded.deepspeed.module) if "universal" in name}
        found[other] += [*hung, *(name for one in loaded.module.parameters() for name in vars(one) if "autotp" in name)]
    return found


def all_of(forms: dict[str, list[str]], directory: Path) -> list[dict[str, Any]]:
    return [own_and_universal(form, others, directory / form) for form, others in forms.items()]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("forms", "world_size"),
    [
        ({"ZeRO-1 tp2": ["ZeRO-1 tp2", "ZeRO-1 dp2"], "ZeRO-1 dp2": ["ZeRO-1 tp2"]}, 2),
        pytest.param({"ZeRO-1 pp2 tp2": ["ZeRO-1 pp2 tp2"]}, 4, marks=pytest.mark.breadth),
    ],
    ids=["two ranks", "a pipeline"],
)
def test_a_universal_checkpoint_is_read_under_another_mesh(
    tmp_path: Path, forms: dict[str, list[str]], world_size: int
) -> None:
    wanted = [{"own": [], **{other: [] for other in others}} for others in forms.values()]
    assert run_ranks(all_of, forms, tmp_path, world_size=world_size, timeout=1800) == [wanted] * world_size


class Tp:
    """As much of a mesh as a layout asks for."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.place, self.extent = rank, size

    def size(self, mesh_dim: str) -> int:
        return self.extent if mesh_dim == "tp" else 1

    def rank(self, mesh_dim: str) -> int:
        return self.place if mesh_dim == "tp" else 0


@pytest.mark.parametrize(
    "layout",
    [
        Layout("w", (6, 5)),
        Layout("w", (6, 5), (("tp", Shard(0)),)),
        Layout("w", (5, 6), (("tp", Shard(1)),)),
        Layout("w", (12, 5), (("tp", Shard(0)),), ((0, (4, 4, 4)),)),
        Layout("w", (5, 12), (("tp", Shard(1)),), ((1, (8, 4)),)),
    ],
    ids=str,
)
def test_the_map_for_deepspeed_is_the_layout(layout: Layout) -> None:
    from deepspeed.checkpoint.affine import ParamAffineMap

    from slapo_deepspeed.state.universal import _map_of

    full = torch.arange(1.0, layout.shape[0] * layout.shape[1] + 1).view(layout.shape)
    meshes: list[Any] = [Tp(0), Tp(1)]
    pieces = {place: layout.local(full, mesh) for place, mesh in enumerate(meshes)}
    described = ParamAffineMap.from_dict(_map_of(layout, meshes[0]))
    described.validate_coverage()
    assert torch.equal(described.rebuild(pieces), full)
    assert all(torch.equal(described.extract(full, place), piece) for place, piece in pieces.items())


def test_a_padded_vocabulary_is_refused_by_universal_checkpoints() -> None:
    from deepspeed.checkpoint.ds_to_universal import _validate_autotp_conversion_support
    from deepspeed.checkpoint.universal_checkpoint import _resolve_autotp_partition

    from slapo_deepspeed.state.universal import describe

    sch = slapo.create_schedule(nn.Sequential(nn.Embedding(17, 4)), mesh={"tp": 2})
    sch["0"].shard("weight", axis=0, pad=True).sync("forward")
    weight = sch.model[0].weight
    engine = SimpleNamespace(param_names={weight: "0.weight"}, module=sch.model)
    describe(engine, SimpleNamespace(schedule=sch, state=ModelState.of(sch)))
    with pytest.raises(ValueError, match=r"0.+weight.: its vocabulary is padded"):
        _validate_autotp_conversion_support(sch.model.universal_checkpoint_info)
    with pytest.raises(RuntimeError, match="its vocabulary is padded"):
        _resolve_autotp_partition(weight, {}, torch.zeros(17, 4), 0, 2)
