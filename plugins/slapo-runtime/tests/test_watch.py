"""A watch attributes what runs, counts it, and leaves nothing behind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import slapo_core as slapo
from slapo_core.effects import Calls, Casts, Effect, NeverAllocates, Recomputes
from slapo_core.errors import ApplyError
from slapo_core.observers import happened
from slapo_runtime.launcher import run_process
from slapo_runtime.receipts.receipt import Finding, expectations, receipt
from slapo_runtime.receipts.watch import Observed, Watch


class _Scaled(torch.autograd.Function):
    """Work without gradients in its forward, as a collective of a hook does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.special.erf(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.special.erfc(gradient)


class Scaling(nn.Module):
    """A layer whose forward is a function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = _Scaled.apply(self.fc(x))
        return scaled * scaled  # which keeps it


class _Looks:
    """A hook of a step that reports its call."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        happened("call", "looks")
        return output + 0


@dataclass(frozen=True)
class Look(slapo.Primitive):
    """Add a hook that reports its calls, and promise them."""

    name = "tests.look"
    equivalence = slapo.Equivalence.EXACT

    times: int = 1

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.add_hook(node, "forward", _Looks())

    def effects(self, node: slapo.Node) -> Iterator[Effect]:
        yield Calls("looks", self.times)


@dataclass(frozen=True)
class Promise(slapo.Primitive):
    """Change nothing, and promise an effect."""

    name = "tests.promise"
    equivalence = slapo.Equivalence.EXACT

    effect: Any = None

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("nothing to do")

    def effects(self, node: slapo.Node) -> Iterator[Any]:
        if isinstance(self.effect, Exception):
            raise self.effect
        yield self.effect


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()


X = torch.randn(3, 4, dtype=torch.float64)


def watched(sch: slapo.Schedule, x: torch.Tensor = X) -> Observed:
    with Watch(sch).watching() as record:
        record.steps = 1
        sch.model(x).sum().backward()
    return record


def findings(sch: slapo.Schedule, record: Observed) -> list[Finding]:
    return receipt(expectations(sch), record)


def tables(model: nn.Module) -> list[Any]:
    """Everything of a model that a watch may exchange."""
    return [
        (
            {name: dict(table) for name, table in vars(module).items() if name.endswith("_hooks")},
            vars(module).get("forward"),
            getattr(vars(module).get("forward"), "__func__", None),
        )
        for module in model.modules()
    ]


def test_operations_are_counted_by_module_and_phase() -> None:
    sch = slapo.create_schedule(net())
    record = watched(sch)
    seen = {(place.module, place.phase): counts for place, counts in record.operators.items()}
    assert seen["0", "forward"]["aten.addmm"] == seen["2", "forward"]["aten.addmm"] == 1
    assert seen["1", "forward"] == {"aten.relu": 1, "aten.detach": 1} or seen["1", "forward"]["aten.relu"] == 1
    assert seen["2", "backward"]["aten.mm"] == 2
    assert seen["0", "backward"]["aten.mm"] == 1
    assert record.products[next(place for place in record.products if place.module == "0")] == {"float64": 1}
    assert (record.calls["0"].forward, record.calls["0"].with_gradient, record.calls["0"].differentiable) == (1, 0, 1)
    assert (record.calls["2"].with_gradient, record.calls["2"].rows, record.calls["2"].inputs) == (1, 3, {"float64"})


def test_counts_do_not_grow_with_the_number_of_steps() -> None:
    sch = slapo.create_schedule(net())
    sizes = []
    for steps in (1, 5):
        watch = Watch(sch)
        with watch.watching() as record:
            for _ in range(steps):
                record.steps += 1
                sch.model(X).sum().backward()
        sizes.append((len(record.operators), len(record.largest), len(record.calls)))
        assert record.calls[""].forward == steps
    assert sizes[0] == sizes[1]


def test_recomputed_code_without_gradients_is_not_backward() -> None:
    sch = slapo.create_schedule(nn.Sequential(Scaling(), Scaling()).double())
    sch["0"].checkpoint()
    sch["1"].checkpoint()
    record = watched(sch)
    phases = {
        (place.module, place.phase): dict(counts)
        for place, counts in record.operators.items()
        for counts in [{name: count for name, count in counts.items() if "erf" in name}]
        if counts
    }
    for path in ("0", "1"):
        assert phases[path, "forward"] == phases[path, "recomputation"] == {"aten.erf": 1}, phases
        assert phases[path, "backward"] == {"aten.erfc": 1}
    assert all(one.is_seen for one in findings(sch, record))


def test_a_later_forward_after_a_backward_is_a_forward() -> None:
    sch = slapo.create_schedule(net())
    with Watch(sch).watching() as record:
        record.steps = 1
        for _ in range(2):
            sch.model(X).sum().backward()
        torch.autograd.grad(sch.model(X).sum(), list(sch.model.parameters()))
    seen = {place.phase: counts["aten.addmm"] for place, counts in record.operators.items() if place.module == "0"}
    assert seen["forward"] == 3
    assert all(place.module != "optimizer" for place, counts in record.operators.items() if counts["aten.mm"])


def test_a_model_is_as_before_whatever_happens_in_the_block() -> None:
    sch = slapo.create_schedule(net())
    sch["0"].apply(Look())
    sch["2"].checkpoint()
    before, call = tables(sch.model), nn.Module.__call__

    def fail() -> None:
        with Watch(sch).watching():
            assert tables(sch.model) != before  # else this would show nothing
            sch.model(X).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert tables(sch.model) == before
    assert nn.Module.__call__ is call
    assert torch.autograd.backward.__module__ == "torch.autograd"
    happened("call", "nobody listens")


def test_hooks_that_come_and_go_in_the_block_stay_so() -> None:
    sch = slapo.create_schedule(net())
    sch["0"].apply(Look())
    hooks = sch.model[0]._forward_hooks
    (number,) = hooks
    with Watch(sch).watching():
        handle = sch.model[1].register_forward_hook(lambda *_: None)
        kept = hooks.pop(number)
    assert number not in hooks
    assert len(sch.model[1]._forward_hooks) == 1
    handle.remove()
    assert kept is not None


def test_a_copy_of_a_watched_model_reports_to_nobody() -> None:
    sch = slapo.create_schedule(net())
    sch["0"].apply(Look())
    with Watch(sch).watching() as record:
        copied = copy.deepcopy(sch.model)
        copied(X)
    assert type(next(iter(copied[0]._forward_hooks.values()))) is _Looks
    assert not record.calls


def test_both_of_two_watches_see_a_step() -> None:
    sch = slapo.create_schedule(net())
    sch["0"].apply(Look())
    with Watch(sch).watching() as outer:
        outer.steps = 1
        with Watch(sch).watching() as inner:
            inner.steps = 1
            sch.model(X).sum().backward()
        sch.model(X).sum().backward()
    assert inner.calls["0"].forward == 1
    assert outer.calls["0"].forward == 2
    assert [one.is_seen for one in (*findings(sch, inner), *findings(sch, outer))] == [True, True]
    assert sum(inner.happenings.values()) == 1
    assert sum(outer.happenings.values()) == 2


def test_calls_of_other_threads_are_not_seen() -> None:
    sch = slapo.create_schedule(net())
    with Watch(sch).watching() as record:
        thread = threading.Thread(target=lambda: sch.model(X))
        thread.start()
        thread.join()
    assert not record.calls
    assert not record.operators


def test_a_shared_module_is_judged_under_each_of_its_names() -> None:
    layer = nn.Linear(4, 4).double()
    sch = slapo.create_schedule(nn.Sequential(layer, nn.ReLU(), layer))
    sch["2"].apply(Look())
    record = watched(sch)
    (one,) = findings(sch, record)
    assert one.is_seen
    assert one.seen.startswith("2 of 2")
    sch.undo()
    sch["2"].apply(Look(times=2))
    (one,) = findings(sch, watched(sch))
    assert not one.is_seen


def test_a_large_result_of_another_shape_hides_nothing() -> None:
    """The weight's gradient is larger than the logits; the transposed weight is no allocation."""
    for rows in (10, 1000):
        sch = slapo.create_schedule(nn.Sequential(nn.Linear(64, 50)).double())
        sch.apply(Promise(NeverAllocates(50)))
        (one,) = findings(sch, watched(sch, torch.randn(rows, 64, dtype=torch.float64)))
        assert not one.is_seen
        assert f"({rows}, 50)" in one.seen
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64)).double())
    sch.apply(Promise(NeverAllocates(50)))
    (one,) = findings(sch, watched(sch, torch.randn(10, 64, dtype=torch.float64)))
    assert one.is_seen


@pytest.mark.parametrize(
    ("effect", "is_seen"),
    [
        (Casts(storage="float64"), True),
        (Casts(storage="float32"), False),
        (Casts(compute="float64"), True),
        (Casts(compute="bfloat16"), False),
        (Casts(storage="float64", compute="bfloat16"), False),
    ],
)
def test_types_of_parameters_and_products(effect: Effect, is_seen: bool) -> None:
    sch = slapo.create_schedule(net())
    sch["0"].apply(Promise(effect))
    (one,) = findings(sch, watched(sch))
    assert one.is_seen is is_seen, one


class Unused(nn.Module):
    """A branch whose output nobody uses, and one that runs without gradients."""

    def __init__(self, *, without_gradients: bool = False) -> None:
        super().__init__()
        self.used, self.unused, self.without_gradients = nn.Linear(4, 4), nn.Linear(4, 4), without_gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(not self.without_gradients):
            self.unused(x)
        y: torch.Tensor = self.used(x)
        return y


@pytest.mark.parametrize(
    ("without_gradients", "is_frozen", "seen"),
    [(False, False, []), (True, True, []), (True, False, [False])],
)
def test_a_checkpoint_without_a_backward_is_missing_only_where_it_should_train(
    without_gradients: bool, is_frozen: bool, seen: list[bool]
) -> None:
    sch = slapo.create_schedule(Unused(without_gradients=without_gradients).double())
    sch["unused"].apply(Promise(Recomputes()))
    sch.model.unused.requires_grad_(not is_frozen)
    assert [one.is_seen for one in findings(sch, watched(sch))] == seen


def test_checkpoints_within_checkpoints_are_seen() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return y

    sch = slapo.create_schedule(nn.Sequential(Outer(), Outer()).double())
    for path in ("0", "1", "0.inner"):  # that of '0' has nothing left to keep
        sch[path].checkpoint()
    found = findings(sch, watched(sch))
    assert [one.source.rpartition(" ")[2] for one in found] == ["'1'", "'0.inner'"]
    assert all(one.is_seen for one in found), [str(one) for one in found]


def test_effects_that_raise_or_are_none_name_the_plugin() -> None:
    class Own(Effect):
        """A kind that nothing looks for."""

    for effect, word in ((KeyError("oh"), "KeyError"), ("all_reduce", "got str"), (Own(), "got Own")):
        sch = slapo.create_schedule(net())
        sch["0"].apply(Promise(effect))
        with pytest.raises(ApplyError, match=word) as refused:
            expectations(sch)
        assert refused.value.path == "0"
        assert refused.value.plugin


def test_sparse_results_and_traces_are_left_out() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch._subclasses.FakeTensorMode():
                torch.empty(10**6, 10**6) + 1
            y: torch.Tensor = self.table(x)
            return y

    sch = slapo.create_schedule(Odd())
    record = watched(sch, torch.tensor([1, 2]))
    assert max(one.bytes for one in record.largest.values()) < 10**6
    assert record.calls["table"].forward == 1


@pytest.mark.ranks
def test_operations_on_shards_of_distributed_tensors_are_seen_once() -> None:
    products, shapes = run_process(_distributed, timeout=60.0)
    assert products == 1
    assert (4, 3) in shapes  # of the local shard, not (8, 3)
    assert (8, 3) not in shapes


def _distributed() -> tuple[int, set[tuple[int, ...]]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))

    class Distributed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)], src_data_rank=None))

        def forward(self, x: torch.Tensor) -> Any:
            return self.weight.float() @ distribute_tensor(x, mesh, src_data_rank=None)

    sch = slapo.create_schedule(Distributed())
    with Watch(sch).watching() as record, torch.no_grad():
        sch.model(torch.ones(3, 3))
    products = sum(counts["aten.mm"] for counts in record.operators.values())
    return products, {one.shape for one in record.largest.values()}
