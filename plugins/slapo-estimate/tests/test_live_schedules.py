"""`sch.estimate` and `estimate_functions`: what they accept, what they leave alone, and what they refuse."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_estimate.simulation import Request, estimate_rank
from slapo_estimate.source import Functions
from slapo_runtime.launcher import run_process
from tests.messages import Messages

from .models import DecidesBy, Net, adam, make_net, split, split_without_gpu, split_wrongly

X = torch.ones(16, 64)
PARAMETERS = 4 * (8320 + 8256 + 4096)


def scheduled(tp: int = 2) -> slapo.Schedule:
    sch = slapo.create_schedule(Net(), mesh={"tp": tp})
    split(sch)
    return sch


@pytest.mark.ranks
def test_the_schedule_and_its_model_are_only_read() -> None:
    sch = scheduled()
    model = sch.model

    def state() -> list[Any]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        facts = [(name, id(t), t.data_ptr(), t.grad, t.requires_grad, t._backward_hooks) for name, t in tensors]
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
        return [facts, hooks, str(sch), [str(record) for record in sch.records], nn.Module.__call__]

    before = state()
    found = sch.estimate(X, optimizer=adam)
    assert state() == before
    assert found.memory.parameters == found.memory.gradients == PARAMETERS  # tied weights count once
    assert [kind.ranks for kind in found.kinds] == [(0, 1)]


@pytest.mark.ranks
def test_simulations_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = slapo.estimate_functions(make_net, split_without_gpu, X, mesh={"tp": 2}, optimizer=adam)
    assert found.memory.total > 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.ranks
def test_batches_of_each_type_and_meshes_of_any_size() -> None:
    sch = scheduled()
    whole = sch.estimate(X, optimizer=adam)
    for batch in ((X,), {"x": X}, X.to("meta")):
        assert sch.estimate(batch, optimizer=adam).memory == whole.memory
    nested = sch.estimate({"x": X, "extra": {"deep": [torch.ones(64)]}}, optimizer=adam)
    assert nested.memory.inputs == whole.memory.inputs + 256
    other = sch.estimate(X, optimizer=adam, mesh={"dp": 2, "tp": 4}, rank=5)
    assert other.memory.parameters == 4 * (4160 + 4160 + 4096)
    assert [(kind.rank, kind.ranks) for kind in other.kinds] == [(5, tuple(range(8)))]
    without = sch.estimate(X)
    assert without.memory.optimizer == 0
    assert without.memory.phase in ("forward", "backward")
    large = torch.empty(4096, 64, device="meta")
    at_once, pieces = (sch.estimate(large, accumulate=count).memory for count in (1, 8))
    assert pieces.total - pieces.inputs < 0.3 * (at_once.total - at_once.inputs)


@pytest.mark.ranks
def test_frozen_parameters_have_no_gradient_and_modes_stay() -> None:
    model = Net().eval()
    model.first.requires_grad_(False)
    found = slapo.create_schedule(model).estimate(X, optimizer=adam)
    assert found.memory.parameters - found.memory.gradients == 4 * (64 * 256 + 256)
    assert any("evaluation mode" in text for text in found.assumptions)
    assert not model.training


@pytest.mark.ranks
def test_assumptions_about_the_optimizer_are_reported() -> None:
    sch = scheduled()
    said = {
        name: " ".join(sch.estimate(X, optimizer=partial(factory, lr=1e-3, **settings)).assumptions)
        for name, factory, settings in (
            ("default", torch.optim.AdamW, {}),
            ("foreach", torch.optim.AdamW, {"foreach": True}),
            ("reads", torch.optim.Adafactor, {"foreach": False}),
        )
    }
    assert {name for name, text in said.items() if "foreach=True" in text} == {"default"}
    assert {name for name, text in said.items() if "assumed to be 1" in text} == {"reads"}


def test_large_models_are_sent_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from slapo_estimate import source

    sch = slapo.create_schedule(Net())
    sent = source.of_schedule(sch)
    assert all(parameter.is_meta for parameter in sent.model.parameters())
    assert sent.model.head.weight is sent.model.into.weight  # type: ignore[union-attr]
    assert sent.model.places.tolist() == list(range(5))  # type: ignore[union-attr,operator]
    batch = source.sendable_batch({"x": X, "labels": torch.arange(3)})
    assert batch["x"].is_meta
    assert batch["labels"].tolist() == [0, 1, 2]


@pytest.mark.ranks
def test_integer_inputs_choose_the_same_branches() -> None:
    sch = slapo.create_schedule(DecidesBy("mask"))
    x = torch.ones(4, 8)
    some = sch.estimate((x, torch.tensor([True, False, True, False])), optimizer=adam)
    none = sch.estimate((x, torch.tensor([True, True, True, True])), optimizer=adam)
    assert some.memory.total >= none.memory.total
    assert any(
        "assumed to be 1" in text
        for text in sch.estimate((x, torch.empty(4, dtype=torch.bool, device="meta"))).assumptions
    )


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(slapo.SlapoError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.ranks
def test_models_that_branch_on_computed_values_are_named(message: Messages) -> None:
    x = torch.ones(2, 8)
    for read, line in (
        ("item", 'if self.read == "item" and y.sum() > 0:'),
        ("index", "return y[y > 0]"),
        ("pointer", "ctypes.memset(y.data_ptr(), 0, 0)"),
    ):
        text = raised(lambda read=read: slapo.create_schedule(DecidesBy(read)).estimate(x, optimizer=adam))
        message(text, "EstimateError: ", "'inner.0'", f"(`{line}`)")
        assert re.search(r"\n  at .*models\.py:\d+\n  hint: ", text)
    text = raised(lambda: slapo.create_schedule(DecidesBy("shape")).estimate(x, optimizer=adam))
    assert text.startswith("EstimateError: ")  # in words of torch's
    assert "RuntimeError in module 'inner.0'" in text


@pytest.mark.ranks
def test_refusals_have_a_hint(message: Messages) -> None:
    sch = scheduled()
    sealed = slapo.create_schedule(Net())
    sealed.seal()
    frozen = slapo.create_schedule(Net().requires_grad_(False))

    class Local(Net):
        pass

    lazy = slapo.create_schedule(nn.Sequential(nn.LazyLinear(4)))
    local = slapo.create_schedule(Local())
    calls: list[tuple[tuple[str, ...], Callable[[], Any]]] = [
        (("ArgumentError: ", "one batch"), lambda: sch.estimate(optimizer=adam)),
        (("ArgumentError: rank ", "0 to 1", "got 2"), lambda: sch.estimate(X, rank=2)),
        (("ArgumentError: accumulate ", "got 0"), lambda: sch.estimate(X, accumulate=0)),
        (("BuildError: the batch has 16 samples", "accumulate=3"), lambda: sch.estimate(X, accumulate=3)),
        (
            ("ArgumentError: optimizer ", "got SGD"),
            lambda: sch.estimate(X, optimizer=torch.optim.SGD(sch.model.parameters(), lr=1.0)),
        ),
        (
            ("SerializationError: ", "optimizer cannot"),
            lambda: sch.estimate(X, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
        ),
        (("ArgumentError: device ", "got str"), lambda: sch.estimate(X, device="H100")),  # type: ignore[arg-type]
        (("MeshError: ", "'tq'"), lambda: sch.estimate(X, mesh={"tq": 2})),
        (("ArgumentError: mesh ", "got list"), lambda: sch.estimate(X, mesh=[2])),  # type: ignore[arg-type]
        (
            ("ReplayError: #1 shard(('weight', 'bias'), axis=0) at 'first'", "rank 0"),
            lambda: sch.estimate(X, mesh={"tp": 7}),
        ),
        (("SealedError: ", "reference model"), lambda: sealed.estimate(X)),
        (("EstimateError: lazy parameter '0.weight'", "no shape"), lambda: lazy.estimate(X)),
        (("EstimateError: nothing to train",), lambda: frozen.estimate(X)),
        (("LaunchError: ", "cannot send"), lambda: local.estimate(X)),
        (("ArgumentError: ", "a schedule", "got Net"), lambda: slapo.estimate(Net(), X)),  # type: ignore[arg-type]
        (
            ("EstimateError: making the schedule", "ValueError"),
            lambda: slapo.estimate_functions(make_net, split_wrongly, X, mesh={"tp": 2}),
        ),
        (("SerializationError: ", "make_model"), lambda: slapo.estimate_functions(lambda: Net(), split, X)),
    ]
    for words, call in calls:
        text = raised(call)
        assert "\n  hint: " in text or words[0].startswith(("ReplayError", "EstimateError: making")), text
        if words[0] in ("SerializationError: ", "LaunchError: "):  # the reason is in words of pickle's
            assert [word for word in words if word not in text] == []
        else:
            message(text, *words)


@pytest.mark.ranks
def test_estimate_functions_equals_estimate_of_the_live_schedule() -> None:
    live = scheduled().estimate(X, optimizer=adam)
    functions = slapo.estimate_functions(make_net, split, X, mesh={"tp": 2}, optimizer=adam)
    assert functions == live


@pytest.mark.ranks
def test_peak_of_a_step_is_exact() -> None:
    """Pinned: 8320 + 8256 + 4096 parameters of a rank, their gradients, AdamW's two moments and five counts."""
    memory = run_process(_net_on_two_ranks, timeout=60.0)
    assert memory == {
        "parameters": 82688,
        "buffers": 40,
        "gradients": 82688,
        "optimizer": 165396,
        "activations": 4,
        "temporaries": 66048,
        "inputs": 4096,
        "module": "optimizer",
        "phase": "optimizer",
    }


def _net_on_two_ranks() -> dict[str, object]:
    request = Request(Functions(make_net, split), {"tp": 2}, 1, (0, 1), torch.empty(16, 64), adam)
    return dict(vars(estimate_rank(request).memory))
