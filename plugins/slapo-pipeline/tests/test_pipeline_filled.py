"""Layers that fill a container which the model hands around, or which a context variable holds: it crosses the cuts."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import slapo_core as slapo
from slapo_core import GuardError, TraceError
from slapo_runtime.launcher import run_ranks
from tests.messages import Messages

from .staging import bound, compare, cut


@dataclass
class Terms:
    loss: Any = 0.0
    all: list[torch.Tensor] = field(default_factory=list)


class Own(list[Any]):
    """A list of its own class."""


def append(kept: Any, term: torch.Tensor) -> None:
    kept.append(term)


def add(kept: Any, term: torch.Tensor) -> None:
    kept["loss"] = kept.get("loss", 0.0) + term
    kept["count"] = kept.get("count", 0) + 1


def nest(kept: Any, term: torch.Tensor) -> None:
    kept["terms"].append(term)
    kept["by number"][len(kept["by number"])] = term * 2


def count(kept: Any, term: torch.Tensor) -> None:
    kept.loss = kept.loss + term
    kept.all.append(term * 3)


def replace(kept: Any, term: torch.Tensor) -> None:
    kept.append((kept.pop() if kept else 0.0) + term)


KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, torch.Tensor], None], Callable[[Any], Any]]] = {
    "list": (lambda x: [], append, sum),
    "list with a tensor": (lambda x: [x.mean()], append, sum),
    "list of its own class": (lambda x: Own(), append, sum),
    "list whose item is replaced": (lambda x: [], replace, sum),
    "dictionary": (lambda x: {}, add, lambda kept: kept["loss"] / kept["count"]),
    "OrderedDict": (lambda x: OrderedDict(), add, lambda kept: kept["loss"] / kept["count"]),
    "UserDict": (lambda x: UserDict(), add, lambda kept: kept["loss"] / kept["count"]),
    "nested": (
        lambda x: {"terms": [x.mean()], "by number": {}},
        nest,
        lambda kept: sum(kept["terms"]) + kept["by number"][2],
    ),
    "defaultdict": (lambda x: defaultdict(list), lambda kept, term: kept[0].append(term), lambda kept: sum(kept[0])),
    "dataclass": (lambda x: Terms(), count, lambda kept: kept.loss + sum(kept.all)),
    "deque": (lambda x: deque(), append, sum),
    "namespace": (lambda x: SimpleNamespace(loss=0.0, all=[]), count, lambda kept: kept.loss + sum(kept.all)),
}
REFUSED = {"deque": "gives a call a deque", "namespace": "neither returned nor put into a list"}


class Layer(nn.Module):
    def __init__(self, fill: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.fc, self.fill = nn.Linear(6, 6), fill

    def forward(self, x: torch.Tensor, *, kept: Any) -> torch.Tensor:
        h = torch.tanh(self.fc(x))
        self.fill(kept, h.square().mean())
        return x + h


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, fill, self.sum = KINDS[kind]
        self.layers = nn.ModuleList(Layer(fill) for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        kept = self.make(x)
        for layer in self.layers:
            x = layer(x, kept=kept)
        return {"loss": x.mean() + self.sum(kept), "kept": list(kept) if isinstance(kept, list) else None}


X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED])
def test_values_that_layers_put_into_a_container_cross_cuts(kind: str) -> None:
    compare(Net(kind), ["layers.0", "layers.1"], X)
    flat = Net(kind)
    sch = slapo.create_schedule(flat, example_inputs=(X,))
    sch.root.trace()  # its layers are calls as well
    assert torch.equal(sch.model(X)["loss"], Net(kind)(X)["loss"])
    assert torch.equal(sch.model(X)["loss"], Net(kind)(X)["loss"])


@pytest.mark.parametrize("kind", REFUSED)
def test_another_container_is_refused_with_the_reason(kind: str, message: Messages) -> None:
    with pytest.raises(TraceError) as caught:
        cut(Net(kind), ["layers.0"], X)
    message(re.split(r" (?:at |\()/", caught.value.message)[0], REFUSED[kind])
    message(caught.value.hint, "that")


class Sometimes(Layer):
    def forward(self, x: torch.Tensor, *, kept: Any) -> torch.Tensor:
        out = super().forward(x, kept=kept)
        if self.is_short:
            kept.pop()
        return out

    is_short = False


def test_a_layer_that_puts_in_another_number_is_noticed() -> None:
    model = Net("list")
    model.layers[1] = Sometimes(append).double()
    made = cut(model, ["layers.1"], X)
    Sometimes.is_short = True
    try:
        with pytest.raises(GuardError, match="tuple"):
            made.run(bound(model, (X,), {}))
    finally:
        Sometimes.is_short = False


SEEN: ContextVar[dict[str, list[torch.Tensor]] | None] = ContextVar("seen", default=None)


def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    seen = SEEN.get()
    if seen is not None:
        seen["halves"].append(output / 2)


class Noted(nn.Module):
    """Collects what hooks inside of its layers make, as transformers collects router logits: from its first call on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        if not getattr(self, "_is_hooked", False):
            for layer in self.layers:
                layer[0].register_forward_hook(note)
            self._is_hooked = True
        token = SEEN.set({"halves": []})
        try:
            for layer in self.layers:
                x = x + layer(x)
            seen = SEEN.get()
        finally:
            SEEN.reset(token)
        return {"last": x, **(seen or {})}


@pytest.mark.parametrize("is_called", [False, True])
def test_values_that_hooks_put_into_a_context_variable_cross_cuts(is_called: bool) -> None:
    model = Noted()
    if is_called:
        model(X)
    compare(model, ["layers.0", "layers.1"], X)
    assert SEEN.get() is None
    assert [len(layer[0]._forward_hooks) for layer in model.layers] == [1, 1, 1]  # as after a call


class Failing(Noted):
    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        self.calls = 3
        return found


def test_a_model_that_cannot_be_cut_keeps_no_hook_of_its_first_call() -> None:
    model = Failing()
    with pytest.raises(TraceError, match=r"sets self\.calls"):
        cut(model, ["layers.0"], X)
    assert not hasattr(model, "_is_hooked")
    assert not any(layer[0]._forward_hooks for layer in model.layers)


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True, use_cache=False))


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.arange(24).view(4, 6) % 7
    return {"input_ids": ids, "labels": ids}


def losses_on_rank() -> list[float]:
    found = []
    for model, batch, path in ((Net("list"), X, "layers.1"), (mixtral(), tokens(), "model.layers.0")):
        sch = slapo.create_schedule(model, mesh={"pp": 2}, example_inputs=batch)
        sch[path].pipeline_split()
        engine = slapo.build(sch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), microbatches=2)
        found += [float(engine.train_step(batch).loss) for _ in range(2)]
    return found


@pytest.mark.ranks
def test_terms_of_a_loss_that_layers_put_down_are_trained_over_ranks() -> None:
    wanted = []
    for model, batch in ((Net("list"), {"x": X}), (mixtral(), tokens())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            parts = [model(**{name: part[rows] for name, part in batch.items()}) for rows in (slice(2), slice(2, 4))]
            loss = (parts[0]["loss"] + parts[1]["loss"]) / 2
            loss.backward()
            optimizer.step()
            wanted.append(loss.item())
    assert run_ranks(losses_on_rank, world_size=2)[0] == pytest.approx(wanted, rel=1e-5)
