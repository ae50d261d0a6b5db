"""What Megatron reads on parameters comes from layouts, and norms without it are wrong."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import slapo_core as slapo
import slapo_megatron.engine
from slapo_core.layout import Layout
from slapo_megatron.marks import Marks, mark
from slapo_runtime.correspondence.storage import LiveTensor
from slapo_testing import run_ranks
from slapo_tp.collectives import RankGroup, all_reduce, copy
from tests.messages import Messages
from tests.support import tied_model
from tests.support.edits import Call

from .against import untouched

pytestmark = pytest.mark.ranks

TP = {"tp": 2}


def live(name: str, shape: tuple[int, ...], *placements: tuple[str, Any], **more: Any) -> LiveTensor:
    return LiveTensor("", name, nn.Parameter(torch.zeros(shape)), Layout(name, shape, placements, **more), True, True)


def request_of(*tensors: LiveTensor, placement: Any = None, pp: int = 0, sizes: dict[str, int] | None = None) -> Any:
    sizes = sizes or {"tp": 2, "pp": 4}
    mesh = SimpleNamespace(size=lambda dim: sizes.get(dim, 1), rank=lambda dim: pp if dim == "pp" else 0)
    schedule, state = SimpleNamespace(mesh=mesh), SimpleNamespace(tensors=lambda: tensors)
    return SimpleNamespace(schedule=schedule, state=state, placement=placement)


def marks_on(one: LiveTensor) -> dict[str, Any]:
    return dict(vars(one.tensor))


def test_marks_follow_the_layout_of_a_parameter() -> None:
    tp = ("tp", Shard(1))
    cases = {
        "whole": (live("w", (4, 6)), (False, -1, 1)),
        "copies": (live("w", (4, 6), ("tp", Replicate())), (False, -1, 1)),
        "number": (live("w", ()), (False, -1, 1)),
        "split": (live("w", (4, 6), tp), (True, 1, 1)),
        "padded": (live("w", (4, 5), tp, padding=((1, 1),)), (True, 1, 1)),
        "three in one": (live("w", (4, 6), tp, packing=((1, (2, 2, 2)),)), (True, 1, 3)),
        "packed elsewhere": (live("w", (4, 6), tp, packing=((0, (2, 2)),)), (True, 1, 1)),
        "grouped heads": (live("w", (4, 8), tp, packing=((1, (4, 2, 2)),)), (True, 1, 1)),
        "summand": (live("w", (4, 6), ("tp", Partial())), (False, -1, 1)),
    }
    mark(request_of(*(one for one, _ in cases.values())))
    names = ("tensor_model_parallel", "partition_dim", "partition_stride")
    for name, (one, wanted) in cases.items():
        assert marks_on(one) == dict(zip(names, wanted, strict=True)), name


def test_replicated_shard_is_marked_on_its_first_rank() -> None:
    found = []
    for tp in range(4):
        one = live("w", (4, 6), ("tp", Shard(0)), shard_counts=(("tp", 2),))
        mesh = SimpleNamespace(size=lambda dim: 4 if dim == "tp" else 1, rank=lambda dim, tp=tp: tp * (dim == "tp"))
        request = request_of(one)
        request.schedule.mesh = mesh
        mark(request)
        found.append(one.tensor.tensor_model_parallel)  # type: ignore[attr-defined]
    assert found == [True, False, True, False]


def test_fused_heads_of_which_ranks_share_only_keys_and_values_are_refused(message: Messages) -> None:
    one = live("w", (8, 6), ("tp", Shard(0)), packing=((0, (4, 2, 2)),), shard_counts=(("tp", (None, 2, 2)),))
    with pytest.raises(slapo.BuildError) as refused:
        mark(request_of(one, sizes={"tp": 4}))
    message(refused, "'w'", "counts a shard in full or not at all")
    mark(request_of(one, sizes={"tp": 2}))
    assert one.tensor.tensor_model_parallel  # type: ignore[attr-defined]


def test_later_copies_of_a_tie_are_shared() -> None:
    found = []
    for pp in (1, 3):
        one, other = live("w", (4, 6)), live("v", (4, 6))
        holders = SimpleNamespace(holders=lambda one: (1, 3) if one.name == "w" else (1,))
        mark(request_of(one, other, placement=holders, pp=pp))
        found.append((one.tensor.shared, one.tensor.shared_embedding, hasattr(other.tensor, "shared")))  # type: ignore[attr-defined]
    assert found == [(False, True, False), (True, True, False)]


def test_marks_of_layers_of_megatron_stay_and_all_are_taken_back() -> None:
    one, other = live("w", (4, 6)), live("v", (4, 6), ("tp", Shard(0)))
    one.tensor.tensor_model_parallel, one.tensor.partition_dim = True, 1  # type: ignore[attr-defined]
    one.tensor.sequence_parallel = True  # type: ignore[attr-defined]
    before = marks_on(one)
    marks = mark(request_of(one, other))
    assert marks_on(one) == {**before, "partition_stride": 1}
    one.tensor.main_grad = other.tensor.main_grad = torch.zeros(1)
    with pytest.raises(KeyError, match="stop"), marks.taken_back_if_it_fails():
        raise KeyError("stop")
    assert marks_on(one) == before
    assert marks_on(other) == {}


def test_parameters_sharded_over_replicas_are_refused_and_nothing_is_marked(message: Messages) -> None:
    first, second = live("v", (4, 6)), live("w", (4, 6), ("dp", Shard(0)))
    with pytest.raises(slapo.BuildError) as caught:
        mark(request_of(first, second, sizes={"dp": 2}))
    message(caught, "'w'", "axis 0 over mesh_dim 'dp'", '"tp"')
    assert marks_on(first) == {}


# -- on ranks -----------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Two matrices in one, as of a gate, and a parameter of which the ranks hold summands."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down, self.shift = nn.Linear(6, 16), nn.Linear(8, 4), nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.both(x).chunk(2, -1)
        return self.shift(self.down(gate.tanh() * value)).square().mean()


def packed() -> nn.Module:
    torch.manual_seed(2)
    return Packed()


def rows(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(5, 6, generator=torch.Generator().manual_seed(step))}


BF16 = {"optimizer_config": {"bf16": True}, "model_parallel_config": {"bf16": True}}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distributed": {
        "ddp_config": {"use_distributed_optimizer": True},
        "optimizer_config": {"use_distributed_optimizer": True},
    },
    "bf16": BF16,
}


def norms_of(options: dict[str, Any], *, marked: bool) -> list[float]:
    keep = slapo_megatron.engine.mark
    if not marked:
        slapo_megatron.engine.mark = lambda context: Marks([])
    try:
        _, engine = tied_model.built(TP, target="megatron", max_grad_norm=tied_model.CLIP, **options)
    finally:
        slapo_megatron.engine.mark = keep
    found = [float(engine.train_step(tied_model.batch(step)).grad_norm) for step in range(2)]
    engine.close()
    return found


def summands(node: Any, edit: Any) -> None:
    """Let the first rank hold the values, and the others zeros; what each of them gives is summed."""
    layout = Layout("shift.weight", (1, 4), (("tp", Partial()),))
    edit.set_parameter(node, "weight", nn.Parameter(layout.local(node.module.weight, node.mesh)), layout=layout)
    edit.wrap_forward(node, functools.partial(summed, group=RankGroup.along(node.mesh, "tp")))


def summed(forward: Any, *, group: RankGroup) -> Any:
    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(forward(module, copy(x, group)), group)

    return run


def of_packed(target: str, *, split: bool) -> list[float]:
    sch = slapo.create_schedule(packed(), mesh=TP)
    if split:
        sch["both"].shard(["weight", "bias"], axis=0, packed=2).sync("bwd_post", "all_reduce")
        sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["shift"].apply(Call(summands))
    engine = slapo.build(sch, target=target, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0), max_grad_norm=0.05)
    found = [float(engine.train_step(rows(step)).grad_norm) for step in range(2)]
    if target == "megatron" and split:
        assert engine.module.both.weight.partition_stride == 2
    engine.close()
    return found


def on_rank() -> dict[str, Any]:
    from tests.support.cpu_megatron import install

    install()
    found: dict[str, Any] = {
        name: (norms_of(way, marked=True), norms_of(way, marked=False)) for name, way in WAYS.items()
    }
    for target in ("torch", "megatron"):
        for split in (False, True):
            found[f"packed {target} {split}"] = of_packed(target, split=split)
    return found


@functools.cache
def found() -> list[dict[str, Any]]:
    return run_ranks(on_rank, world_size=2)


@pytest.mark.parametrize("name", WAYS)
def test_without_marks_the_norm_leaves_out_pieces(name: str) -> None:
    wanted = untouched(steps=2).norms
    for rank in found():
        marked, unmarked = rank[name]
        assert marked == pytest.approx(wanted, rel=1e-2 if name == "bf16" else 2e-6)
        assert unmarked[0] < 0.98 * marked[0]  # and nothing told


def test_packed_parameters_and_summands_count_as_in_the_reference_model() -> None:
    wanted = [norm_of(rows(step)) for step in range(2)]
    for rank in found():
        for target in ("torch", "megatron"):
            for split in (False, True):
                assert rank[f"packed {target} {split}"] == pytest.approx(wanted, rel=2e-6)


def norm_of(batch: dict[str, torch.Tensor]) -> float:
    model = packed()
    model(**batch).backward()
    return float(nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]))
