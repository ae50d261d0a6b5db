"""What `fsdp` plans on a mesh without processes, and what it refuses."""

import pytest
import torch
from slapo_fsdp import FullyShard
from slapo_fsdp.cases import Block, Stack
from torch import nn

import slapo_core as slapo
from slapo_runtime.planning import plan_of

MESH = {"dp": 2, "tp": 2}
INNER = [f"blocks.1.{name}" for name in ("norm", "up", "act", "down")]


class Tied(nn.Module):
    """Three blocks, two of which share a parameter."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Experts(nn.Module):
    """Containers within the elements of a container."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
        self.pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.GELU()]) for _ in range(2))
        self.mixed = nn.Sequential(nn.Linear(2, 2), nn.GELU())


def plan(model, mesh=MESH, **options):
    return plan_of(FullyShard(), slapo.create_schedule(model, mesh=mesh), options)


def test_the_plan_says_what_each_group_holds():
    sch = slapo.create_schedule(Stack(), mesh=MESH)
    sch["blocks.*.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    made = plan_of(FullyShard(), sch, {})
    assert str(made) == (
        "plan for target 'fsdp'\n"
        "  fully_shard over mesh_dim 'dp' (2 ranks): blocks.0, blocks.1 (2 groups), each gathered for its forward, "
        "and again for its backward\n"
        "  fully_shard over mesh_dim 'dp' (2 ranks): all other parameters, one group\n"
        "  4 parameters that the schedule splits over 'tp': each of its ranks shards its own\n"
        "  gradients are averaged over 'dp' as they are reduced, with the last micro-batch of a step"
    )
    assert made.config["wrap"] == ["blocks.0", "blocks.1"]
    assert made.config["origins"] == {
        "wrap": "the repeated blocks",
        "reshard_after_forward": "the default of fully_shard",
    }


def test_with_one_replica_nothing_is_sharded():
    assert plan(nn.Linear(2, 2), None).steps == ("mesh_dim 'dp' has one rank: every parameter stays full",)


def test_blocks_are_the_outermost_elements_with_a_forward():
    assert plan(Experts()).config["wrap"] == ["layers.0", "layers.1"]
    assert plan(nn.Sequential(Block(6), Block(6))).config["wrap"] == ["0", "1"]


@pytest.mark.parametrize(
    ("wrap", "paths"),
    [
        ("blocks.*", ["blocks.0", "blocks.1"]),
        (
            ["last", "blocks.1", "blocks.1.*"],
            ["blocks.1", *(f"blocks.1.{n}" for n in ("norm", "up", "act", "down")), "last"],
        ),
        ([], []),
    ],
)
def test_wrap_selects_as_a_schedule_does(wrap, paths):
    assert plan(Stack(), wrap=wrap).config["wrap"] == paths


def test_blocks_that_share_a_parameter_are_left_to_the_root():
    made = plan(Tied())
    assert made.config["wrap"] == ["blocks.1"]
    assert "'blocks.0' is in that group: its parameter 'blocks.0.up.weight' is 'blocks.2.up.weight', too" in made.steps
    again = plan_of(FullyShard(), slapo.create_schedule(Tied(), mesh=MESH), dict(made.config))
    assert again == made


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (Stack, {"wrap": "blocks.7"}, "wrap selects no module"),
        (Stack, {"wrap": 3}, "wrap selects no module"),
        (Stack, {"wrap": ["blocks"]}, "wrap selects 'blocks', which has no forward"),
        (Tied, {"wrap": "blocks.*"}, "'blocks.0', whose parameter 'blocks.0.up.weight' is 'blocks.2.up.weight', too"),
        (Stack, {"reshard_after_forward": 1}, "reshard_after_forward must be a bool"),
        (Stack, {"reshard_after_foward": True}, "did you mean 'reshard_after_forward'?"),
        (lambda: nn.Linear(2, 2), {}, "wrap is missing, and no ModuleList or Sequential repeats a block"),
    ],
)
def test_wrong_options_are_refused(model, options, words):
    with pytest.raises(slapo.BuildError) as caught:
        plan(model(), **options)
    assert words in str(caught.value)


def test_a_pipeline_is_refused():
    with pytest.raises(slapo.BuildError) as caught:
        plan(Stack(), {"pp": 2})
    assert "does not run mesh_dim 'pp'" in str(caught.value)


def scalar():
    model = Stack()
    model.scale = nn.Parameter(torch.ones(()))
    return model


def not_contiguous():
    model = Stack()
    model.first.weight = nn.Parameter(torch.randn(6, 7).t())
    return model


def hooked():
    model = Stack()
    model.first.weight.register_hook(lambda gradient: gradient)
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (scalar, "'scale' is a scalar"),
        (not_contiguous, "'first.weight' is not contiguous"),
        (hooked, "'first.weight' has gradient hooks"),
        (lambda: nn.Sequential(Block(6).double(), Block(6)), "one dtype (got float32, float64)"),
        (Stack, ""),
    ],
)
def test_models_that_fully_shard_does_not_train_are_refused_before_anything_is_touched(model, words):
    found = [str(violation) for violation in FullyShard().check(slapo.create_schedule(model(), mesh=MESH))]
    assert [words in text for text in found] == ([True] if words else [])
    assert list(FullyShard().check(slapo.create_schedule(model()))) == []
