"""Promises of ``fit``: within the memory it was given, as little as that takes, undone like any other step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import ArgumentError, FitError, PathError, PreconditionError, SealedError
from slapo_core.internals import Internals
from slapo_estimate.blocks import blocks_of, repeated_blocks
from slapo_estimate.fit import Fit
from slapo_testing import preload_modules
from tests.messages import Messages

preload_modules("plugins.slapo-estimate.tests.test_fit")

ADAMW: Any = functools.partial(torch.optim.AdamW, lr=1e-3)


class Wide(nn.Module):
    """Keeps much for what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(torch.sigmoid(torch.tanh(torch.sigmoid(self.fc(x)) * 2) * 2) * 2)


class Deep(nn.Module):
    """Computes much for what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.ModuleList(Deep() for _ in range(3))
        self.wide = nn.ModuleList(Wide() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.deep, *self.wide):
            x = block(x)
        return x.square().mean()


def schedule() -> slapo.Schedule:
    return slapo.create_schedule(Net(), example_inputs=torch.zeros(64, 32))


@pytest.mark.ranks
def test_no_target_is_exceeded_and_more_memory_never_costs_more() -> None:
    sch = schedule()
    sch["deep.0"].checkpoint()  # the user's own
    with pytest.raises(FitError) as refused:
        sch.fit(1, optimizer=ADAMW)
    least, whole = refused.value.least, sch.estimate(optimizer=ADAMW).memory.total
    assert refused.value.target == 1
    before: Fit | None = None
    for target in torch.linspace(least, whole, 3).int().tolist():
        fit = sch.fit(target, optimizer=ADAMW)
        assert fit.paths == tuple(record.path for record in sch.records[1:])
        assert sch.estimate(optimizer=ADAMW).memory.total == fit.peak <= target
        assert before is None or (len(fit.paths) <= len(before.paths) and fit.recomputed <= before.recomputed)
        if fit.paths:
            assert f"fit(memory='{slapo_size(target)}')" in sch.records[1].location
            assert "test_fit.py" in sch.records[1].location
        before = fit
        sch.undo(to=1)
    assert before is not None
    assert before.paths == ()
    again = sch.fit(least, optimizer=ADAMW)
    assert again.paths[:1] == ("deep.1",)
    sch.undo(to=1)
    assert sch.fit(least, optimizer=ADAMW).estimates == 0  # everything was known
    sch.undo(to=1)
    # Wide blocks free most for what they cost: named first, they go before the first of the model.
    wide = sch.fit(int(least + 0.7 * (whole - least)), optimizer=ADAMW, layers=["wide.*", "deep.*"])
    assert wide.paths[0] == "wide.0"


def slapo_size(size: int) -> str:
    from slapo_runtime.sizes import format_bytes

    return format_bytes(size)


@pytest.mark.ranks
def test_fit_error_names_the_least_peak_and_its_tensors() -> None:
    sch = schedule()
    with pytest.raises(FitError, match=r"(?s)fits 1KiB.*least peak.*KiB") as error:
        sch.fit("1KiB", layers=["wide.*", "deep.1"])
    for word in ("4 modules", "of parameters", "tp or pp"):
        assert word in str(error.value)
    assert sch.records == ()


def test_invalid_arguments_of_fit_are_refused_before_estimates(message: Messages) -> None:
    sch = schedule()
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ArgumentError, "moves activations to the host", {"offload": True}),
        (ArgumentError, "memory must be", {"memory": "much"}),
        (ArgumentError, "no argument 'rank'", {"rank": 0}),
        (PathError, "matches no module", {"layers": "encoder.*"}),
        (ArgumentError, "layers must name at least one module", {"layers": []}),
        (ArgumentError, "names 'deep.1' and its parent 'deep'", {"layers": ["deep", "deep.1"]}),
        (PreconditionError, "ModuleList", {"layers": "deep"}),
    ]
    for kind, word, arguments in cases:
        with pytest.raises(kind) as caught:
            sch.fit(**{"memory": "1GiB", **arguments})
        message(caught, word)
    with pytest.raises(slapo.SerializationError, match="optimizer cannot be pickled"):
        sch.fit("1GiB", optimizer=lambda params: torch.optim.SGD(params))
    with pytest.raises(ArgumentError, match="Deep has no repeated blocks"):
        slapo.create_schedule(Deep(), example_inputs=torch.zeros(1, 32)).fit("1GiB")
    with pytest.raises(ArgumentError, match=r"\(got Net\)"):
        slapo.fit(Net(), "1GiB")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="fit needs one batch"):
        slapo.create_schedule(Net()).fit("1GiB")
    sch.seal()
    with pytest.raises(SealedError, match="cannot fit"):
        sch.fit("1GiB")


def test_repeated_blocks_are_those_of_the_model() -> None:
    assert repeated_blocks(Net()) == [f"{kind}.{number}" for kind in ("deep", "wide") for number in range(3)]
    stages = nn.Sequential(
        *(nn.Sequential(*(Sized(size) for _ in range(3))) for size in (4, 8)), nn.Sequential(Sized(16), Sized(32))
    )
    assert repeated_blocks(stages) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2", "2.0", "2.1"]
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []


class Sized(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def test_interrupted_fit_leaves_the_schedule_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    sch = schedule()
    apply = Internals.apply

    def interrupted(*args: Any, **kwargs: Any) -> None:
        apply(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Internals, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        blocks_of(sch, None)
    assert sch.records == ()
