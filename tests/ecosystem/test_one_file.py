"""examples/one_file: the core explained by a program gives the records, outputs and gradients of the library."""

from __future__ import annotations

import ast
import copy
import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

FILE = Path(__file__).parents[2] / "examples" / "one_file" / "slapo_in_one_file.py"
preload_modules("slapo_tp.shard", "slapo_tp.sync")


def one_file() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FILE.parent))
        return importlib.import_module(FILE.stem)


def imported(source: str) -> set[str]:
    """Return the packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_program_has_at_most_500_lines_and_imports_torch_only() -> None:
    source = FILE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 500
    assert imported(source) - sys.stdlib_module_names == {"torch"}
    assert imported("def f():\n    from slapo_core.errors import SlapoError\n") == {"slapo_core"}


def model_and_batch() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return one_file().Mlp(), torch.randn(4, 8)


def gradients(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    output = model(batch)
    output.square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"output": output.detach(), **found}


def beside_the_library(ranks: int) -> None:
    """Make the same calls with the file and with the library, and compare all that they give."""
    one, (model, batch) = one_file(), model_and_batch()
    reference = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = [id(parameter) for parameter in model.parameters()]
    real = slapo.create_schedule(copy.deepcopy(model), mesh={"tp": ranks})
    other = copy.deepcopy(model)
    small = one.Schedule(model)
    one.split(small)
    one.split(real)

    assert list(map(str, small.records)) == list(map(str, real.records))
    replayed = slapo.replay(other, small.to_json(), mesh={"tp": ranks})
    assert replayed.records == real.records  # the file of one is a file of the other

    mine, theirs = gradients(small.model, batch), gradients(real.model, batch)
    assert mine.keys() == theirs.keys()
    assert len(mine) == 7
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []

    for given in (one.state_dict(small), slapo.state_dict(real)):
        assert given.keys() == reference.keys()
        assert all(torch.equal(given[name], tensor) for name, tensor in reference.items())

    assert f"({ranks} ranks)" in one.verify(small, batch)
    small.undo(to=0)
    assert [id(parameter) for parameter in model.parameters()] == objects
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    if ranks > 1:
        wrong_schedules(one)


def wrong_schedules(one: Any) -> None:
    """Leave one call out, or write a wrong one: `verify` says what differs, and names the step."""

    def failing(wrong: Any) -> str:
        model, batch = model_and_batch()
        sch = one.Schedule(model)
        wrong(sch)
        with pytest.raises(one.SlapoError) as caught:
            one.verify(sch, batch)
        return str(caught.value)

    def without_reduction(sch: Any) -> None:
        sch["fc1"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
        sch["fc2"].shard("weight", axis=1)

    def without_reduced_gradient(sch: Any) -> None:
        sch["fc1"].shard("weight", axis=0).shard("bias", axis=0)
        sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")

    def with_a_wrong_module(sch: Any) -> None:
        one.split(sch)
        sch["norm"].replace(doubled)

    assert "Mlp differs from the reference model: the output;" in failing(without_reduction)
    assert "the reference model: norm.weight;" in failing(without_reduced_gradient)
    assert "the output; to blame: #7 replace(doubled) at 'norm'" in failing(with_a_wrong_module)


def doubled(old: torch.nn.Module) -> torch.nn.Module:
    """A module of the same parameters, and another function."""

    class Doubled(torch.nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    return Doubled(8)


def test_on_one_rank_it_gives_what_the_library_gives() -> None:
    beside_the_library(1)


@pytest.mark.ranks
def test_on_two_ranks_it_gives_what_the_library_gives() -> None:
    run_ranks(beside_the_library, 2, world_size=2)


def test_a_failing_step_leaves_the_model_as_it_was() -> None:
    one, (model, _) = one_file(), model_and_batch()
    sch = one.Schedule(model)
    before = dict(model.named_modules())

    def failing(old: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.Linear(8, 99)

    with pytest.raises(one.SlapoError, match="must have the parameters"):
        sch["norm"].replace(failing)
    with pytest.raises(one.SlapoError, match="axis=2"):
        sch["fc1"].shard("weight", axis=2)

    @dataclass(frozen=True)
    class Halfway(one.Primitive):
        name = "acme.halfway"
        axis: int

        def apply(self, node: Any, edit: Any) -> None:
            edit.set_attribute(node, "eps", 99.0)
            edit.replace_module(node, torch.nn.Identity())
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        sch["norm"].apply(Halfway(0))
    assert dict(model.named_modules()) == before
    assert model.norm.eps == 1e-5
    assert sch.records == ()


@pytest.mark.breadth
@pytest.mark.slow
def test_the_program_trains_on_two_ranks_as_on_one() -> None:
    done = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *_, verified, two, one = done.stdout.splitlines()
    assert verified == "verified: Mlp with 6 steps agrees with the reference model (2 ranks)"
    assert two.removeprefix("two ranks: ") == one.removeprefix("one rank:  ")
