"""``fork_rng``: each rank draws its own dropout on its own heads, and the same again when it recomputes."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import slapo_core as slapo
from slapo_testing import run_ranks
from slapo_tp import ForkRng
from slapo_tp.fork_rng import with_own_rng
from tests.messages import Messages

SIZE = 64


class Log:
    """Outside of what a recompute takes back: a list that the module holds would be as after the first run."""

    def __init__(self) -> None:
        self.entries: list[Tensor] = []

    def append(self, entry: Tensor) -> None:
        self.entries.append(entry)


class Kept(nn.Module):
    """Dropout that remembers what it kept."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.log = nn.Dropout(0.5), Log()

    @property
    def seen(self) -> list[Tensor]:
        return self.log.entries

    def forward(self, x: Tensor) -> Tensor:
        mask = self.dropout(torch.ones_like(x))
        self.log.append(mask != 0)
        return x * mask


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split, self.whole = Kept(), Kept()

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.split(x))


def ones(device: str) -> Tensor:
    return torch.ones(SIZE, SIZE, device=device, requires_grad=True)


def everyones(mask: Tensor) -> list[Tensor]:
    masks = [torch.empty_like(mask, dtype=torch.uint8, device="cpu") for _ in range(dist.get_world_size())]
    dist.all_gather(masks, mask.to(torch.uint8).cpu())
    return masks


def scheduled(*steps: str) -> Any:
    sch = slapo.create_schedule(Model(), mesh={"tp": dist.get_world_size()})
    for step in steps:
        getattr(sch["split"], step)()
    return sch


def check_streams(device: str = "cpu") -> None:
    # Without it, every rank drops the same.
    torch.manual_seed(0)
    model = scheduled().model.to(device)
    model(ones(device))
    first, second = everyones(model.split.seen[0])
    assert torch.equal(first, second)

    for steps in (("fork_rng",), ("fork_rng", "checkpoint"), ("checkpoint", "fork_rng")):
        torch.manual_seed(0)
        sch = scheduled(*steps)
        model = sch.model.to(device)
        for _ in range(2):
            model(ones(device)).sum().backward()
        inside, around = model.split.seen, model.whole.seen
        first, second = everyones(inside[0])
        assert not torch.equal(first, second), steps  # other masks on other ranks,
        assert 0.4 < first.double().mean() < 0.6
        assert 0.4 < second.double().mean() < 0.6
        first, second = everyones(around[0])
        assert torch.equal(first, second), steps  # but not behind the module,
        assert not torch.equal(around[0], inside[0])
        assert not torch.equal(inside[0], inside[-1]), steps  # others at each call,
        if "checkpoint" in steps:
            assert len(inside) == 4
            assert torch.equal(inside[0], inside[1]), steps  # and the same ones when it is run again.
            assert torch.equal(inside[2], inside[3]), steps
        twin = copy.deepcopy(model)
        for each in (model, twin):
            torch.manual_seed(1)
            each.split.seen.clear()
            each(ones(device))
        assert torch.equal(model.split.seen[0], twin.split.seen[0])
        sch.undo(to=0)
        assert "forward" not in model.split.__dict__


@pytest.mark.ranks
def test_fork_rng_differs_by_rank_inside_only_and_recompute_repeats_it() -> None:
    run_ranks(check_streams, world_size=2)


@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_same_on_a_gpu() -> None:
    run_ranks(check_streams, "cuda", world_size=2)


def check_training() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6)), mesh={"tp": 2})
    sch["0"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["1"].fork_rng()
    sch["2"].shard("weight", axis=1).sync("forward")
    slapo.verify(sch, torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))


@pytest.mark.ranks
def test_split_pair_under_fork_rng_equals_the_reference_except_for_dropout() -> None:
    run_ranks(check_training, world_size=2)


class Block(nn.Module):
    """Dropout between two split layers, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inside, self.down, self.behind = nn.Linear(6, 8), Kept(), nn.Linear(8, 6), Kept()

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.down(self.inside(self.up(x))))


def gradients(checkpoints: tuple[str, ...]) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor], Tensor]:
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Sequential(Block(), nn.Linear(6, 6)).double(), mesh={"tp": 2})
    sch["0.up"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["0.inside"].fork_rng()
    sch["0.down"].shard("weight", axis=1).sync("forward")
    for path in checkpoints:
        sch[path].checkpoint()
    engine = slapo.build(sch, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss=mean_square)
    torch.manual_seed(5)
    x = torch.randn(16, 6, dtype=torch.float64)
    for _ in range(2):
        engine.train_step(x)
    engine.check_replicas()
    block: Any = engine.module[0]
    named = {name: parameter.grad.clone() for name, parameter in engine.module.named_parameters()}
    return named, block.inside.seen, block.behind.seen, torch.get_rng_state()


def mean_square(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def check_recomputed_gradients() -> None:
    expected, inside, behind, state = gradients(())
    first, second = everyones(inside[0])
    assert not torch.equal(first, second)
    first, second = everyones(behind[0])
    assert torch.equal(first, second)
    for checkpoints in (("0",), ("0.inside",), ("0", "0.inside")):
        found, again, _, after = gradients(checkpoints)
        assert len(again) > 2, checkpoints  # it ran again,
        assert torch.equal(again[0], inside[0]), checkpoints
        for name, gradient in expected.items():
            assert torch.equal(found[name], gradient), (checkpoints, name)  # on the same random numbers,
        assert torch.equal(after, state), checkpoints  # and the generator stands where it would have stood.


@pytest.mark.ranks
def test_gradients_with_dropout_on_are_the_same_with_and_without_recomputation() -> None:
    run_ranks(check_recomputed_gradients, world_size=2)


class Watching(TorchFunctionMode):
    """Sees every call, as verify does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_fork_rng_gives_equal_numbers_compiled_observed_or_eager() -> None:
    def dropped(module: Any, x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, True)

    def drawn(run: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        return run(None, torch.ones(3, 4)), torch.rand(2)

    forked = with_own_rng(dropped, rank=1, own=nn.Dropout)
    compiled = torch.compile(forked, backend="eager")
    for mode in (contextlib.nullcontext(), Watching()):
        with mode:
            for one, other in zip(drawn(forked), drawn(compiled), strict=True):
                assert torch.equal(one, other)


def test_one_rank_records_an_inactive_wrapper() -> None:
    sch = slapo.create_schedule(Model(), mesh={"tp": 1})
    sch["split"].fork_rng()
    assert sch.records[-1].edits == (
        "forward wrapped by with_own_rng, inactive (nothing to do on this mesh)",
        "mesh_dim 'tp' has one rank: there is one stream",
    )
    assert "forward" not in sch.model.split.__dict__


def test_refusals_name_the_call_to_write(message: Messages) -> None:
    sch = slapo.create_schedule(nn.ModuleDict({"layers": nn.ModuleList([Model()])}), mesh={"tp": 2})
    sch["layers.0"].fork_rng()
    for path, word in (("layers.0", "#1 fork_rng() at 'layers.0'"), ("layers", "sch['layers.*'].fork_rng()")):
        with pytest.raises(slapo.PreconditionError) as refused:
            sch[path].apply(ForkRng())
        message(refused, f"fork_rng() at '{path}': ", word)


# -- verify sees what it does to copies -----------------------------------------------------------------------


class Attention(nn.Module):
    """As transformers' attentions: dropout of pieces by the module itself, and of the whole by one within it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.behind = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.dropout(self.up(x), 0.3, self.training)
        return self.behind(self.down(inner))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), Attention()
        self.up, self.inside, self.down, self.behind = (
            nn.Linear(6, 8),
            nn.Dropout(0.3),
            nn.Linear(8, 6),
            nn.Dropout(0.2),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.behind(self.down(self.inside(self.up(x))))


def split(sch: Any, *forked: str, mesh_dim: str = "tp") -> Any:
    for path in ("0.attention", "0"):
        sch[f"{path}.up"].shard(["weight", "bias"], axis=0).sync("backward")
        sch[f"{path}.down"].shard("weight", axis=1).sync("forward")
    for path in forked:
        sch[path].fork_rng(mesh_dim=mesh_dim)
    return sch


def verified(sch: Any) -> tuple[str, str | None, tuple[str, ...]]:
    """The first line or the notes, the hint, and the steps named."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    try:
        return "\n".join(slapo.verify(sch, x).notes), None, ()
    except slapo.VerifyError as error:
        return error.message, error.hint, tuple(error.steps)


def layer(mesh: dict[str, int] | None = None) -> Any:
    torch.manual_seed(0)
    return slapo.create_schedule(nn.Sequential(Layer(), nn.Linear(6, 6)), mesh=mesh or {"tp": 2})


FORKED: dict[str, tuple[str, ...]] = {
    "none": (),
    "right": ("0.inside",),
    "whole": ("0.inside", "0.behind"),
    "whole within": ("0.attention",),
    "around": ("0",),
    "nowhere": ("0.inside", "0.norm", "1"),
    "around all": ("0.inside", ""),
}


def verify_forks() -> dict[str, Any]:
    found = {name: verified(split(layer(), *paths)) for name, paths in FORKED.items()}
    moved = split(layer(), "0.inside")
    moved["0.behind"].replace(nn.Sequential(nn.Dropout(0.2)))
    found["moved, alike"] = verified(moved)
    moved["0.behind"].fork_rng()
    found["moved"] = verified(moved)
    gone = split(layer(), "0.inside")
    gone["0.behind"].replace(nn.Identity())
    found["gone"] = verified(gone)
    beside = split(layer())
    beside["0.behind"].replace(nn.Identity())
    found["gone, without fork_rng"] = verified(beside)
    return found


@pytest.fixture(scope="module")
def forks() -> dict[str, Any]:
    first, second = run_ranks(verify_forks, world_size=2)
    assert first == second
    return first


@pytest.mark.ranks
def test_verify_finds_fork_rng_around_dropout_of_full_tensors(forks: dict[str, Any], message: Messages) -> None:
    found, hint, steps = forks["whole"]
    message(found, "shared dropout of 0.behind on rank 0", "(4, 6)", "ranks 0 and 1")
    assert [step.partition(" ")[2] for step in steps] == ["fork_rng() at '0.behind'"]
    message(hint, "remove fork_rng() at '0.behind'")

    _, hint, steps = forks["whole within"]
    assert [step.partition(" ")[2] for step in steps] == ["fork_rng() at '0.attention'"]
    message(hint, "remove fork_rng() at '0.attention'")

    _, hint, steps = forks["around"]
    assert [step.partition(" ")[2] for step in steps] == ["fork_rng() at '0'"]
    message(hint, "remove fork_rng() at '0'", "sch['0.inside'].fork_rng()")

    _, hint, steps = forks["around all"]
    assert [step.partition(" ")[2] for step in steps] == ["fork_rng() at the root"]
    message(hint, "remove fork_rng() at the root", "sch['0.inside']")


@pytest.mark.ranks
def test_verify_finds_diverging_replicas_at_modules_missing_in_the_reference(
    forks: dict[str, Any], message: Messages
) -> None:
    found, _, steps = forks["moved"]
    message(found, "the RNG state differs across ranks", "ranks 0 and 1")
    assert [step.partition(" ")[2] for step in steps] == ["fork_rng() at '0.behind'"]
    assert forks["moved, alike"][1:] == (None, ())


@pytest.mark.ranks
def test_dropout_on_shards_needs_fork_rng(forks: dict[str, Any], message: Messages) -> None:
    notes, _, steps = forks["right"]
    assert steps == ()
    (note,) = notes.splitlines()[1:]
    message(note, "at '0.attention': ", "dropout of a full tensor")
    notes, _, steps = forks["none"]
    assert steps == ()
    (note,) = notes.splitlines()[1:]
    message(note, "at '0.attention' (and at 1 more)", 'sch["0.inside"].fork_rng()')


@pytest.mark.ranks
def test_fork_rng_without_dropout_is_noted(forks: dict[str, Any], message: Messages) -> None:
    notes, _, steps = forks["nowhere"]
    assert steps == ()
    (note,) = notes.splitlines()[2:]
    message(note, "no dropout", "fork_rng() at '0.norm' (and 1 more)")
    assert len(forks["right"][0].splitlines()) == 2


@pytest.mark.ranks
def test_fork_rng_does_not_hide_missing_dropout_elsewhere(forks: dict[str, Any], message: Messages) -> None:
    for case in ("gone", "gone, without fork_rng"):
        found, _, steps = forks[case]
        message(found.splitlines()[0], "dropout of 0.behind on rank 0", "p=0.2")
        assert len(steps) == 1
        assert steps[0].endswith(" at '0.behind'")


def verify_two_dimensions() -> list[Any]:
    mesh = {"dp": 2, "tp": 2}
    over_replicas = split(layer(mesh=mesh), "0.behind", mesh_dim="dp")
    both = split(layer(mesh=mesh), "0.inside")
    wrong = split(layer(mesh=mesh), "0.behind")
    return [verified(each) for each in (over_replicas, both, wrong)]


@pytest.mark.ranks
def test_data_parallel_replicas_may_drop_different_elements() -> None:
    for over_replicas, both, wrong in run_ranks(verify_two_dimensions, world_size=4):
        assert over_replicas[1:] == (None, ())
        assert both[1:] == (None, ())
        assert [step.partition(" ")[2] for step in wrong[2]] == ["fork_rng() at '0.behind'"]
