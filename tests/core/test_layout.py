"""Promise: ``full(local(x)) == x`` for every layout, on every rank; elements are never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import Partial, Replicate, Shard

from slapo_core.errors import MeshError
from slapo_core.layout import Layout, Mesh, declare_mesh
from slapo_runtime.launcher import run_ranks
from slapo_runtime.weights.sources import SafetensorsSource
from tests.messages import Messages

TP0, TP1 = (("tp", Shard(0)),), (("tp", Shard(1)),)
LAYOUTS: dict[str, Layout] = {
    "replica": Layout("w", (4, 6)),
    "said replica": Layout("w", (4, 6), (("tp", Replicate()),)),
    "rows": Layout("w", (4, 6), TP0),
    "columns": Layout("w", (4, 6), TP1),
    "last axis": Layout("w", (4, 6), (("tp", Shard(-1)),)),
    "vector": Layout("w", (8,), TP0),
    "three axes": Layout("w", (2, 4, 6), TP1),
    "packed columns": Layout("w", (3, 12), TP1, packing=((1, (4, 4, 4)),)),
    "packed rows, not equal": Layout("w", (12, 3), TP0, packing=((0, (8, 2, 2)),)),
    "packed, not split": Layout("w", (12, 3), TP1[:0], packing=((0, (8, 2, 2)),)),
    "packed on the other axis": Layout("w", (12, 4), TP1, packing=((0, (8, 2, 2)),)),
    "padded": Layout("w", (7, 3), TP0, padding=((0, 1),)),
    "padded on both": Layout("w", (7, 5), TP0, padding=((0, 1), (1, 3))),
    "partial": Layout("w", (4, 6), (("tp", Partial()),)),
    "partial, without axes": Layout("w", (), (("tp", Partial()),)),
    "partial and padded": Layout("w", (7, 3), (("tp", Partial()),), padding=((0, 1),)),
    "padded, not split": Layout("w", (7, 3), (), padding=((0, 1),)),
    "packed and padded": Layout("w", (11, 3), TP0, packing=((0, (8, 4)),), padding=((0, 1),)),
}
TWO_DIMS: dict[str, Layout] = {
    "both axes": Layout("w", (4, 6), (("dp", Shard(0)), ("tp", Shard(1)))),
    "one axis twice": Layout("w", (8, 3), (("dp", Shard(0)), ("tp", Shard(0)))),
    "one axis twice, the other way": Layout("w", (8, 3), (("tp", Shard(0)), ("dp", Shard(0)))),
    "split, then partial": Layout("w", (4, 6), (("dp", Shard(0)), ("tp", Partial()))),
    "partial, then split": Layout("w", (4, 6), (("dp", Partial()), ("tp", Shard(1)))),
    "partial over both": Layout("w", (4, 6), (("dp", Partial()), ("tp", Partial()))),
    "packed, twice": Layout("w", (16, 3), (("tp", Shard(0)), ("dp", Shard(0))), packing=((0, (8, 4, 4)),)),
}


def _tensor(layout: Layout) -> torch.Tensor:
    return torch.arange(torch.Size(layout.shape).numel(), dtype=torch.float64).reshape(layout.shape) + 1


def _round_trip(mesh_sizes: dict[str, int], names: list[str]) -> dict[str, Any]:
    mesh = declare_mesh(mesh_sizes)
    assert mesh is not None
    found = {}
    for name in names:
        layout = (LAYOUTS | TWO_DIMS)[name]
        whole = _tensor(layout)
        for full in (whole, whole.t().contiguous().t() if whole.dim() == 2 else whole):
            local = layout.local(full, mesh)
            assert local.is_contiguous()
            assert local.data_ptr() != full.data_ptr(), name
            assert tuple(local.shape) == layout.local_shape(mesh), name
            dry = Mesh(mesh_sizes, rank=dist.get_rank())
            assert torch.equal(local, layout.local(full, dry)), f"{name}: a dry rank has the same piece"
            strided = local.t().contiguous().t() if local.dim() == 2 else local
            assert torch.equal(layout.full(strided, mesh), full), name
        found[name] = local
    return found


@pytest.mark.ranks
def test_round_trip_on_two_ranks() -> None:
    pieces = run_ranks(_round_trip, {"tp": 2}, list(LAYOUTS), world_size=2)
    assert [rank["rows"].tolist() for rank in pieces] == [
        [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]],
        [[13, 14, 15, 16, 17, 18], [19, 20, 21, 22, 23, 24]],
    ]
    assert pieces[0]["packed columns"][0].tolist() == [1, 2, 5, 6, 9, 10]
    assert pieces[1]["packed columns"][0].tolist() == [3, 4, 7, 8, 11, 12]
    assert pieces[0]["packed rows, not equal"][:, 0].tolist() == [1, 4, 7, 10, 25, 31]
    assert pieces[1]["padded"][-1].tolist() == [0, 0, 0]
    assert torch.equal(pieces[0]["replica"], pieces[1]["replica"])
    assert pieces[0]["partial"].tolist() == pieces[0]["replica"].tolist()
    assert pieces[1]["partial"].tolist() == torch.zeros(4, 6).tolist()


@pytest.mark.ranks
def test_round_trip_on_a_two_by_two_mesh() -> None:
    pieces = run_ranks(_round_trip, {"dp": 2, "tp": 2}, [*TWO_DIMS, "rows", "packed columns"], world_size=4)
    # {"dp": 2, "tp": 2}: ranks (0, 0), (0, 1), (1, 0), (1, 1)
    assert [rank["one axis twice"][:, 0].tolist() for rank in pieces] == [[1, 4], [7, 10], [13, 16], [19, 22]]
    assert [rank["one axis twice, the other way"][:, 0].tolist() for rank in pieces] == [
        [1, 4],
        [13, 16],
        [7, 10],
        [19, 22],
    ]
    assert torch.equal(pieces[0]["rows"], pieces[2]["rows"])


@pytest.mark.parametrize("name", [*LAYOUTS, *TWO_DIMS])
def test_pieces_of_a_dry_mesh_hold_every_element_once(name: str) -> None:
    layout = (LAYOUTS | TWO_DIMS)[name]
    full = _tensor(layout)
    count = {"dp": 2, "tp": 2}
    pieces = [layout.local(full, Mesh(count, rank=rank)) for rank in range(4)]
    replicas = 4 // 2 ** len(layout.placements)  # of a partial sum one rank has the values
    if name == "said replica":
        replicas = 4
    elements = torch.cat([piece.flatten() for piece in pieces])
    elements = elements[elements != 0].sort().values
    assert torch.equal(elements, full.flatten().repeat_interleave(replicas))


def test_trivial_and_missing_meshes_hold_the_whole_tensor() -> None:
    for mesh in (None, Mesh({"tp": 1}), Mesh({"dp": 1})):
        for name, layout in LAYOUTS.items():
            full = _tensor(layout)
            local = layout.local(full, mesh)
            assert tuple(local.shape) == layout.local_shape(mesh)
            assert torch.equal(layout.full(local, mesh), full), name


def test_indivisible_axis_never_loses_elements(message: Messages) -> None:
    layout = Layout("fc.weight", (7, 3), TP0)
    told = set()
    for call in (
        lambda: layout.local(torch.zeros(7, 3), Mesh({"tp": 2})),
        lambda: layout.local_shape(Mesh({"tp": 2})),
        lambda: layout.full(torch.zeros(3, 3), Mesh({"tp": 2})),
    ):
        with pytest.raises(MeshError) as caught:
            call()
        told.add(str(caught.value))
    message(*told, "axis 0 of 'fc.weight'", "[7]", "'tp' of size 2")
    packed = Layout("qkv", (6, 3), TP0, packing=((0, (3, 3)),))
    with pytest.raises(MeshError, match=r"\[3, 3\]"):
        packed.local_shape(Mesh({"tp": 2}))


def test_full_of_a_dry_mesh_names_the_launch_command(message: Messages) -> None:
    with pytest.raises(MeshError) as caught:
        LAYOUTS["rows"].full(torch.zeros(2, 6), Mesh({"tp": 2}))
    message(caught, "torchrun --nproc-per-node 2 your_script.py")


def test_local_piece_is_new_memory_without_history() -> None:
    full = torch.ones(4, 6, requires_grad=True)
    for layout in (LAYOUTS["replica"], LAYOUTS["rows"]):
        local = layout.local(full, Mesh({"tp": 2}))
        assert not local.requires_grad
        with torch.no_grad():
            local.zero_()
    assert full.detach().all()
    assert LAYOUTS["rows"].local(torch.empty(4, 6, device="meta"), Mesh({"tp": 2})).is_meta


def test_text_of_a_layout() -> None:
    assert str(LAYOUTS["replica"]) == "replicated"
    assert str(LAYOUTS["rows"]) == "tp: S(0)"
    assert str(TWO_DIMS["packed, twice"]) == "tp: S(0), dp: S(0), packed (8, 4, 4) on axis 0"
    assert LAYOUTS["rows"].is_sharded
    assert not LAYOUTS["said replica"].is_sharded
    assert TWO_DIMS["both axes"].shards() == (("dp", 0), ("tp", 1))


def _sum_of_summands() -> list[Any]:
    mesh = declare_mesh({"tp": 2})
    layout, summand = Layout("w", (2,), (("tp", Partial()),)), torch.tensor([1.0, 10.0]) * (dist.get_rank() + 1)
    return [layout.full(summand, mesh).tolist(), summand.tolist()]


@pytest.mark.ranks
def test_full_of_a_partial_sum_adds_up_what_the_ranks_have() -> None:
    assert run_ranks(_sum_of_summands, world_size=2) == [[[3, 30], [1, 10]], [[3, 30], [2, 20]]]


def test_a_placement_that_no_function_here_knows_is_refused(message: Messages) -> None:
    with pytest.raises(MeshError) as caught:
        Layout("fc.weight", (4,), (("tp", Partial("max")),))
    message(caught, "'fc.weight'", "Partial(max)")
    with pytest.raises(MeshError) as caught:
        Layout("fc.weight", (4,), (("tp", Partial()), ("tp", Shard(0))))
    message(caught, "'fc.weight'", "tp: P(sum), tp: S(0)")


def test_a_partial_sum_read_from_a_file_is_read_once(tmp_path: Path) -> None:
    full = torch.arange(6.0).reshape(2, 3)
    save_file({"w": full, "scale": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for name, whole in (("w", full), ("scale", torch.tensor(3.0))):
        layout = Layout(name, tuple(whole.shape), (("tp", Partial()),))
        pieces = [source.read(name, layout, Mesh({"tp": 2}, rank=rank)) for rank in range(2)]
        assert torch.equal(pieces[0], whole)
        assert torch.equal(pieces[1], torch.zeros_like(whole))
