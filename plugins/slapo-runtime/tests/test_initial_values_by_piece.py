"""What initializers write is found out, and made again for a piece: the same values, drawn once, nothing whole held."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import slapo_core as slapo
from slapo_core.internals import Internals
from slapo_core.layout import Layout
from slapo_runtime.initialization import programs as initialization
from slapo_runtime.initialization.programs import Initializer, blocks, record
from slapo_runtime.launcher import run_ranks
from tests.support.building import Split, on_meta
from tests.support.initial_values import differences


class Odd(nn.Module):
    """Shapes that no block divides, every kind of write, and initializers around the module."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 10, padding_idx=5, dtype=dtype)
        self.conv = nn.Conv2d(3, 8, (3, 5), dtype=dtype)
        self.linear = nn.Linear(10, 46, dtype=dtype)
        self.scale = nn.Parameter(torch.empty((), dtype=dtype))
        self.table = nn.Parameter(torch.empty(6, 4, dtype=dtype))
        self.register_buffer("steps", torch.empty(4, dtype=torch.int64))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.tied = nn.Linear(10, 37, bias=False, dtype=dtype)
        self.tied.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 1.0, 2.0)
        nn.init.normal_(self.table, 1.0, 0.5)
        self.table.data.mul_(0.25).add_(1.0).clamp_(min=0.9)
        self.table[1:3] = 7.0
        self.table[:, 2].mul_(2.0)
        self.steps.copy_(torch.arange(4))
        self.count.zero_()
        for name, parameter in self.named_parameters():
            if name == "linear.weight":
                parameter.data.normal_(mean=0.0, std=0.02 / math.sqrt(2))


def odd(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return Odd(dtype)


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialization, "_BLOCK", 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block", [40, 1 << 16])
def test_initialization_by_shard_equals_the_initializers(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initialization, "_BLOCK", block)
    model = odd(dtype)
    understood, wrong = differences(model)
    assert not wrong
    assert understood == len({*model.state_dict()})


def initial_odd(size: int | None) -> dict[str, torch.Tensor]:
    schedule = slapo.create_schedule(odd(), mesh={"tp": size} if size else None)
    if size:
        schedule["embedding"].apply(Split(("weight",), axis=1))
        schedule["conv"].apply(Split(("weight",)))
        schedule["linear"].apply(Split(("weight", "bias")))
    return slapo.build(schedule).state_dict()


def initial_odd_split() -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch)
        return initial_odd(dist.get_world_size())


@pytest.mark.ranks
def test_odd_shapes_have_the_same_values_on_one_and_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    alone = initial_odd(None)
    for state in (initial_odd(1), *run_ranks(initial_odd_split, world_size=2)):
        assert list(state) == list(alone)
        for key, tensor in alone.items():
            assert torch.equal(state[key], tensor), key


class _Mesh:
    """One rank of a mesh of one dimension."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self, mesh_dim: str) -> int:
        return self._rank

    def size(self, mesh_dim: str) -> int:
        return self._size


LAYOUTS: dict[str, Callable[[tuple[int, ...]], Layout]] = {
    "rows": lambda shape: Layout("weight", shape, (("tp", Shard(0)),)),
    "columns": lambda shape: Layout("weight", shape, (("tp", Shard(1)),)),
    "both": lambda shape: Layout("weight", shape, (("tp", Shard(0)), ("tp", Shard(1)))),
    "packed rows": lambda shape: Layout("weight", shape, (("tp", Shard(0)),), ((0, (shape[0] // 3,) * 3),)),
    "packed columns": lambda shape: Layout("weight", shape, (("tp", Shard(1)),), ((1, (shape[1] // 2,) * 2),)),
    "padded": lambda shape: Layout("weight", shape, (("tp", Shard(0)),), (), ((0, 4),)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_initialized_shard_is_cut_from_the_full_tensor(
    layout: Callable[[tuple[int, ...]], Layout], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    with torch.device("meta"):
        model = nn.Embedding(48, 16, padding_idx=13)
    initializer = Initializer(model, Internals(slapo.create_schedule(model)).hooks)
    full = initializer.value("weight", (48, 16))
    assert full is not None
    assert not full[13].any()
    for rank in reversed(range(size)):
        mesh: Any = _Mesh(rank, size)
        piece = initializer.shard("weight", layout((48, 16)), mesh)
        assert piece is not None
        assert torch.equal(piece, layout((48, 16)).local(full, mesh))


def test_initial_values_do_not_depend_on_the_order() -> None:
    def values(names: list[str]) -> dict[str, torch.Tensor | None]:
        model = odd()
        initializer = Initializer(model, Internals(slapo.create_schedule(model)).hooks)
        return {name: initializer.value(name, tuple(model.get_parameter(name).shape)) for name in names}

    names = [name for name, _ in odd().named_parameters()]
    first, second = values(names), values(names[::-1])
    for name in names:
        assert first[name] is not None
        assert torch.equal(first[name], second[name]), name


class Half(nn.Linear):
    """Stands in the place of a linear layer, and would itself start differently."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)
        nn.init.constant_(self.bias, 0.5)


def test_replaced_module_starts_with_reference_values() -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))

    untouched = slapo.build(slapo.create_schedule(make())).state_dict()
    schedule = slapo.create_schedule(make())
    with torch.device("meta"):
        schedule["0"].replace(Half(6, 8))
    replaced = slapo.build(schedule)
    assert isinstance(replaced.module[0], Half)
    for key, value in untouched.items():
        assert torch.equal(replaced.state_dict()[key], value), key


@pytest.mark.parametrize("shape", [(), (1,), (7,), (131,), (3, 100), (5, 7, 2), (2, 3, 90), (1, 1, 41), (4, 0)])
def test_blocks_cover_a_tensor_once_and_each_is_one_stretch_of_memory(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    seen = torch.zeros(shape, dtype=torch.int64)
    for box in blocks(shape):
        part = seen[tuple(slice(start, start + length) for start, length in box)]
        assert part.numel() <= 40
        assert part.is_contiguous()
        part.add_(1)
    assert (seen == 1).all()


class _Costs(TorchDispatchMode):
    """Counts the elements drawn, and keeps the size of the largest tensor that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not args[0].is_meta:
            self.drawn += args[0].numel()
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        self.largest = max([self.largest, *(leaf.untyped_storage().nbytes() // leaf.element_size() for leaf in made)])
        return result


def test_building_draws_every_element_at_most_once() -> None:
    model = on_meta("bert")
    costs = _Costs()
    with costs:
        slapo.build(slapo.create_schedule(model))
    assert 0 < costs.drawn <= sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("axis", [0, 1])
def test_rank_never_allocates_the_full_tensor_of_a_shard(axis: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(1024, 1024)
    initializer = Initializer(model, Internals(slapo.create_schedule(model)).hooks)
    mesh: Any = _Mesh(1, 4)
    costs = _Costs()
    with costs:
        piece = initializer.shard("weight", Layout("weight", (1024, 1024), (("tp", Shard(axis)),)), mesh)
    assert piece is not None
    assert costs.largest == piece.numel() == 1 << 18
    assert costs.drawn == (1 << 18 if axis == 0 else 1 << 20)
    assert piece.std().item() == pytest.approx(1 / 32 / math.sqrt(3), rel=0.02)


# -- what is not understood is run again -------------------------------------------------------------------------


class Reset(nn.Module):
    """Initialized by a function of the module."""

    def __init__(self, reset: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(20, 20))
        self._reset = reset

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self._reset(self)


def _reads(module: Any) -> None:
    if module.weight.std() > 0.5:
        module.weight.mul_(3.0)


def _swallows(module: Any) -> None:
    try:
        module.weight.sum()
    except Exception:  # noqa: BLE001
        return
    finally:
        module.weight.add_(100.0)


def _around(module: Any) -> None:
    module.weight.data.numpy()[:] = 4.0


def _by_device(module: Any) -> None:
    if not module.weight.is_meta and module.weight.device.type == "cpu":
        module.weight.add_(100.0)


def _orthogonal(module: Any) -> None:
    nn.init.orthogonal_(module.weight)


def _truncated(module: Any) -> None:
    nn.init.trunc_normal_(module.weight, std=1.0, a=-0.5, b=0.5)


def _generator(module: Any) -> None:
    module.weight.normal_(generator=torch.Generator().manual_seed(3))


def _half(module: Any) -> None:
    module.weight[:10].uniform_(5.0, 6.0)


def _transposed(module: Any) -> None:
    module.weight.t().normal_(50.0, 0.1)


def _sampled(module: Any) -> None:
    module.weight.copy_(torch.rand(20, 20) + 9.0)


def _tossed(module: Any) -> None:
    if torch.rand(()) < 2.0:
        module.weight.fill_(11.0)


def _is_orthogonal(weight: torch.Tensor) -> bool:
    return torch.allclose(weight @ weight.t(), torch.eye(20), atol=1e-5)


FOREIGN: dict[str, tuple[Callable[[nn.Module], object], Callable[[torch.Tensor], Any]]] = {
    "reads": (_reads, lambda weight: weight.std() > 2.5),
    "swallows": (_swallows, lambda weight: weight.min() > 90),
    "around": (_around, lambda weight: (weight == 4.0).all()),
    "orthogonal": (_orthogonal, _is_orthogonal),
    "truncated": (_truncated, lambda weight: 0.4 < weight.abs().max() <= 0.5),
    "generator": (_generator, lambda weight: weight.equal(torch.randn(20, 20, generator=torch.manual_seed(3)))),
    "half": (_half, lambda weight: weight[:10].min() >= 5 and weight[10:].max() < 5),
    "transposed": (_transposed, lambda weight: (weight - 50).abs().max() < 1),
    "tossed": (_tossed, lambda weight: (weight == 11.0).all()),
    "sampled": (_sampled, lambda weight: weight.min() >= 9 and weight.max() <= 10),
}


@pytest.mark.parametrize(("reset", "holds"), FOREIGN.values(), ids=FOREIGN)
def test_unsupported_initializers_run_on_full_tensors(
    reset: Callable[[nn.Module], object], holds: Callable[[torch.Tensor], Any]
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Reset(reset))
    with torch.random.fork_rng():
        assert record(model).keys() == {"0.weight", "0.bias"}
        slapo.build(slapo.create_schedule(model))
        assert holds(model[1].weight.detach())


def test_an_initializer_that_asks_for_the_device_sees_the_one_of_a_real_model() -> None:
    with torch.device("meta"):
        model = Reset(_by_device)
    assert "weight" in record(model)
    slapo.build(slapo.create_schedule(model))
    assert model.weight.min() > 90


def test_the_memory_of_a_model_is_not_touched_by_looking_at_its_initializers() -> None:
    """One billion elements: 4 GB, if anything wrote into them."""
    with torch.device("meta"):
        model = nn.Linear(1 << 15, 1 << 15)
    costs = _Costs()
    with costs:
        found = record(model)
    assert {"weight", "bias"} == found.keys()
    assert costs.drawn <= 2 * 64
