"""verify on an abstract mesh, for schedules whose steps hold modules, classes and functions."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core import Node
from slapo_core.internals import Edit
from tests.messages import Messages
from tests.support.failing_ranks import INPUTS, Reduce, Split, net

pytestmark = pytest.mark.ranks


class Fused(nn.Module):
    """Takes the place of a linear layer, with its weights."""

    def __init__(self, old: nn.Linear | None = None, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        made = old if old is not None else nn.Linear(8, 16)
        self.weight, self.bias = made.weight, made.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * torch.addmm(self.bias, x, self.weight.t())


def fused(old: nn.Linear) -> Fused:
    return Fused(old)


def tensor_parallel(new: Any) -> slapo.Schedule:
    """The new module in the place of ``up``, and split afterwards."""
    sch = slapo.create_schedule(net(), mesh={"tp": 2})
    sch["up"].replace(new(sch["up"].module) if new is Fused else new)
    sch["up"].apply(Split(("weight", "bias"), axis=0))
    sch["up"].apply(Reduce("backward"))
    sch["down"].apply(Split(("weight",), axis=1))
    sch["down"].apply(Reduce("forward"))
    sch["up"].checkpoint()
    return sch


@pytest.mark.parametrize(
    "new",
    [Fused(), nn.Linear(8, 16), Fused, fused, functools.partial(Fused, factor=1.0)],
    ids=["an instance", "an instance of torch's", "an instance around the old weights", "a function", "a partial"],
)
def test_a_replaced_module_that_is_split_afterwards_is_verified(new: Any) -> None:
    sch = tensor_parallel(new)
    before = {name: tensor.clone() for name, tensor in sch.model.state_dict().items()}
    report = slapo.verify(sch, INPUTS, timeout=300)
    assert (report.world_size, report.steps_verified) == (2, 6)
    assert {entry.kind: entry.compared for entry in report.largest}["gradient"] == 5
    assert all(torch.equal(before[name], tensor) for name, tensor in sch.model.state_dict().items())


def test_a_wrong_replacement_is_found_there_and_named() -> None:
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(tensor_parallel(Fused(factor=2.0)), INPUTS, timeout=300)
    assert [step.partition("(")[0] for step in caught.value.steps] == ["#1 replace"]


@dataclass(frozen=True)
class Double(slapo.Primitive):
    """Compute something else: twice the output."""

    name = "dry.double"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: Node, edit: Edit) -> None:
        edit.wrap_forward(node, lambda forward: lambda module, x: 2 * forward(module, x))


def test_steps_are_tried_on_a_module_as_it_was_before_it_was_put_in() -> None:
    sch = slapo.create_schedule(net())
    sch["up"].replace(Fused())
    sch["up"].apply(Double())
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, INPUTS)
    assert [step.partition("(")[0] for step in caught.value.steps] == ["#2 double"]


def test_a_module_of_a_class_that_others_cannot_import_is_refused_with_the_way_out(message: Messages) -> None:
    class Local(nn.Linear):
        pass

    sch = slapo.create_schedule(net(), mesh={"tp": 2})
    sch["up"].replace(Local(8, 16))
    with pytest.raises(slapo.SerializationError) as caught:
        slapo.verify(sch, INPUTS)
    assert "but argument 'new_module' of #1 replace(" in caught.value.message
    message(caught.value.hint, ".<locals>.Local at the top level", "`torchrun --nproc-per-node 2 your_script.py`")


SCRIPT = """
import sys
import torch
from torch import nn
import slapo_core as slapo
from tests.support.failing_ranks import INPUTS, Reduce, Split, net


class Mine(nn.Linear):
    def forward(self, x):
        return {factor} * torch.addmm(self.bias, x, self.weight.t())


def main():
    sch = slapo.create_schedule(net(), mesh={{"tp": 2}})
    sch["up"].replace(Mine(8, 16))
    sch["up"].apply(Split(("weight", "bias"), axis=0))
    sch["up"].apply(Reduce("backward"))
    sch["down"].apply(Split(("weight",), axis=1))
    sch["down"].apply(Reduce("forward"))
    print(slapo.verify(sch, INPUTS, timeout=300))


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        pytest.param("1", "verified: Net with 5 steps agrees", marks=pytest.mark.breadth),
        ("2", ":\n    #1 replace("),
    ],
    ids=["right", "wrong"],
)
def test_a_class_of_the_users_script_takes_the_weights_over(factor: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(factor=factor))
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert text in done.stdout + done.stderr
    assert (done.returncode == 0) == (factor == "1"), done.stderr


def test_a_search_without_a_limit_is_not_ended_with_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def stop(*args: Any, timeout: float, **kwargs: Any) -> Any:
        given.append(timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr("slapo_runtime.declared_ranks.run_ranks", stop)
    for seconds in (120.0, None, 0.0):
        with pytest.raises(KeyboardInterrupt):
            slapo.verify(tensor_parallel(Fused), INPUTS, blame_seconds=seconds, timeout=50.0)
    limited, unlimited, without = given
    assert without + 120.0 == limited < 86400.0 < unlimited
    for timeout in (0, -1.0, float("nan")):
        with pytest.raises(slapo.ArgumentError, match="timeout must be a positive number"):
            slapo.verify(tensor_parallel(Fused), INPUTS, timeout=timeout)
