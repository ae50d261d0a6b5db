"""``sync(..., overlap=True)``: the same gradients, reduced while the layer computes its weight's gradient."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from slapo_tp import Sync
from tests.messages import Messages

from .overlap_model import Events, Mlp, Scenario, assert_same, gradients, outcome, split

preload_modules("transformers.pytorch_utils")

pytestmark = pytest.mark.ranks


class Twice(Mlp):
    """Calls the layer twice, once by keyword."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.up(input=self.first(x)))


class Tied(Mlp):
    """Uses the layer's weight elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up.weight.square().sum()


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    model = Mlp()
    model.up, model.down = Conv1D(8, 6), Conv1D(6, 8)
    return model


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(model: nn.Module) -> nn.Module:
    parametrize.register_parametrization(model.up, "weight", Doubled())
    return model


def split_sequence(sch: slapo.Schedule, *, overlap: bool, axis: int = 1) -> None:
    sch["up"].shard(["weight", "bias"], axis=0).sync("fwd_pre", "all_gather", axis=axis, overlap=overlap)
    sch["down"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=axis)


@pytest.fixture(scope="module")
def checked() -> dict[str, Any]:
    return run_ranks(check, world_size=2)[0]


def check() -> dict[str, Any]:
    return {"scenarios": check_scenarios(), "sequence": check_sequence()}


def twice_through(model: nn.Module, x: Tensor) -> list[Any]:
    y = model(x).square().sum()
    y.backward(retain_graph=True)
    y.backward()
    model(x).sin().sum().backward()  # accumulates
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def of_input_only(model: nn.Module, x: Tensor) -> list[Any]:
    return list(torch.autograd.grad(model(x).square().sum(), [x]))


def of_weight_only(model: nn.Module, x: Tensor) -> list[Any]:
    return list(torch.autograd.grad(model(x).square().sum(), [model.up.weight]))


def of_gradients(model: nn.Module, x: Tensor) -> list[Any]:
    (first,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
    first.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def strided(model: nn.Module, x: Tensor) -> list[Any]:
    model(x).sum().backward()  # an expanded gradient
    model(x.transpose(0, 1)).transpose(0, 1).square().sum().backward()
    model(x[0, 0]).sum().backward()  # one axis
    model(x[:1]).square().sum().backward()
    model(x[:0]).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def frozen(*names: str) -> Scenario:
    def run(model: nn.Module, x: Tensor) -> list[Any]:
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return gradients(model, x)

    return run


def nothing_before_is_trained(model: nn.Module, x: Tensor) -> list[Any]:
    model.first.requires_grad_(False)
    y = model(x.detach())
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters())]


def without_gradients(model: nn.Module, x: Tensor) -> list[Any]:
    with torch.no_grad():
        y = [model(x), model.eval()(x)]
    with torch.inference_mode():
        return [*y, model(x).clone()]


def autocast(model: nn.Module, x: Tensor) -> list[Any]:
    def run(model: nn.Module) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)(model)

    return gradients(model.float(), x.detach().float().requires_grad_(), run=run)


def bfloat16(model: nn.Module, x: Tensor) -> list[Any]:
    return gradients(model.bfloat16(), x.detach().bfloat16().requires_grad_())


def hooked(model: nn.Module, x: Tensor) -> list[Any]:
    """Tensor hooks of the parameter, which change its gradient, and those that a gradient accumulator has."""
    seen: list[Any] = []
    model.up.weight.register_hook(lambda gradient: gradient * 3)
    model.up.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    return [*gradients(model, x), *seen]


def watched(model: nn.Module, x: Tensor) -> list[Any]:
    """The user's hook of the layer watches the gradient of its input."""
    seen: list[Any] = []
    model.up.register_forward_pre_hook(lambda module, args: args[0].register_hook(seen.append) and None)
    found = gradients(model, x)
    assert len(seen) == 1
    return found


def scaled(model: nn.Module, x: Tensor) -> list[Any]:
    model.up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return gradients(model, x)


def scaled_in_place(model: nn.Module, x: Tensor) -> list[Any]:
    model.up.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))
    return gradients(model, x)


def full_backward_hook(model: nn.Module, x: Tensor) -> list[Any]:
    seen: list[Any] = []
    model.up.register_full_backward_hook(lambda module, inputs, outputs: seen.extend(outputs))
    return [*gradients(model, x), *seen]


def kept(model: nn.Module, x: Tensor) -> list[Any]:
    """The input that the user's hook keeps goes into the loss, too."""
    seen: list[Any] = []
    model.up.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    y = model(x)
    (y.square().sum() + seen[0].sin().sum()).backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def recomputed(model: nn.Module, x: Tensor, *, reentrant: bool) -> list[Any]:
    return gradients(model, x, run=lambda model: lambda x: checkpoint(model, x, use_reentrant=reentrant))


def replicated(model: nn.Module, x: Tensor) -> list[Any]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    replica = DistributedDataParallel(model, process_group=groups[dist.get_rank()])
    return gradients(model, x, run=lambda _: replica)


def copied(model: nn.Module, x: Tensor) -> list[Any]:
    return gradients(copy.deepcopy(model), x)


def refused_of_gradients(model: nn.Module, x: Tensor) -> list[Any]:
    with pytest.raises(slapo.ArgumentError, match="gradient of a gradient"):
        of_gradients(model, x)
    return []


SCENARIOS: list[tuple[str, Callable[[], nn.Module], Scenario, int]] = [
    ("plain", Mlp, gradients, 1),
    ("no bias", functools.partial(Mlp, bias=False), gradients, 1),
    ("Conv1D", conv1d, gradients, 1),
    ("Conv1D of gradients", conv1d, of_gradients, 1),
    ("called twice", Twice, gradients, 2),
    ("used elsewhere", Tied, gradients, 1),
    ("parametrized", Mlp, lambda model, x: gradients(parametrized(model), x), 1),
    ("retained", Mlp, twice_through, 3),
    ("of the input only", Mlp, of_input_only, 1),
    ("of the weight only", Mlp, of_weight_only, 1),
    ("of gradients", Mlp, of_gradients, 1),
    ("strided", Mlp, strided, 5),
    ("frozen weight", Mlp, frozen("up.weight"), 0),
    ("frozen bias", Mlp, frozen("up.bias"), 1),
    ("frozen layer", Mlp, frozen("up.weight", "up.bias"), 0),
    ("frozen before", Mlp, nothing_before_is_trained, 0),
    ("no gradients", Mlp, without_gradients, 0),
    ("autocast", Mlp, autocast, 1),
    ("bfloat16", Mlp, bfloat16, 1),
    ("hooks of the weight", Mlp, hooked, 1),
    ("hook of the input", Mlp, watched, 0),
    ("hook that changes the input", Mlp, scaled, 0),
    ("full backward hook", Mlp, full_backward_hook, 0),
    ("kept input", Mlp, kept, 1),
    ("checkpoint", Mlp, functools.partial(recomputed, reentrant=False), 1),
    ("reentrant checkpoint", Mlp, functools.partial(recomputed, reentrant=True), 1),
    ("replicated", Mlp, replicated, 1),
    ("copied", Mlp, copied, 1),
]


def check_scenarios() -> dict[str, tuple[int, int]]:
    found = {}
    for name, build, run, _ in SCENARIOS:
        without, before, _ = outcome(build, run, False)
        with_overlap, after, _ = outcome(build, run, True)
        assert_same(with_overlap, without, name)
        if name not in ("of the weight only", "kept input"):  # the layer and the hook both reduce there
            assert before.seen.count("start") == after.seen.count("start"), name
        found[name] = (before.overlapped, after.overlapped)
    return found


def check_sequence() -> dict[str, int]:
    """Layers that gather shards of the sequence, and scatter the gradient of their input."""
    found = {}
    for name, run in SEQUENCE:
        for axis in (0, 1) if run is gradients else (1,):
            apply = functools.partial(split_sequence, axis=axis)
            wanted, before, _ = outcome(Mlp, run, False, apply=apply, axis=axis)
            got, after, _ = outcome(Mlp, run, True, apply=apply, axis=axis)
            assert_same(got, wanted, name)
            assert before.seen.count("start") == after.seen.count("start"), name
            found[f"{name} {axis}"] = after.overlapped
    outcome(Mlp, refused_of_gradients, True, apply=split_sequence, axis=1)
    return found


SEQUENCE: list[tuple[str, Scenario]] = [
    ("plain", gradients),
    ("autocast", autocast),
    ("checkpoint", functools.partial(recomputed, reentrant=False)),
    ("hook of the input", watched),
    ("hook in place", scaled_in_place),
    ("no gradients", without_gradients),
    ("replicated", replicated),
]
NOT_OVERLAPPED = ("hook of the input", "hook in place", "no gradients")


def test_gathered_sequences_scatter_their_gradient_beside_that_of_the_weight(checked: Any) -> None:
    counts = {f"{name} 1": 0 if name in NOT_OVERLAPPED else 1 for name, _ in SEQUENCE}
    assert checked["sequence"] == {"plain 0": 1, **counts}


def check_compiled() -> dict[str, int]:
    """Of the whole model in one graph, and of the layer alone."""
    from torch._dynamo.backends.common import aot_autograd

    found = {}
    for name, apply, axis in (("replicated", split, None), ("sequence", split_sequence, 1)):
        wanted, _, _ = outcome(Mlp, gradients, False, apply=apply, axis=axis)
        for what in ("model", "layer"):
            torch._dynamo.reset()
            events = Events()
            backend = aot_autograd(fw_compiler=Events().see_graph, bw_compiler=events.see_graph)
            options = {"backend": backend, "fullgraph": True}

            def run(model: nn.Module, x: Tensor, what: str = what, options: Any = options) -> list[Any]:
                if what == "model":
                    return gradients(model, x, run=lambda model: torch.compile(model, **options))
                up = torch.compile(model.up, **options)
                return gradients(model, x, run=lambda _: lambda x: model.down(F.gelu(up(model.first(x)))))

            got, _, _ = outcome(Mlp, run, True, apply=apply, axis=axis, watch=False)
            assert_same(got, wanted, f"compiled {what}")
            found[f"{name} {what}"] = events.overlapped
    return found


@pytest.mark.breadth
def test_a_compiled_backward_has_the_weight_between_start_and_wait() -> None:
    found = run_ranks(check_compiled, world_size=2)[0]
    assert found == dict.fromkeys(("replicated model", "replicated layer", "sequence model", "sequence layer"), 1)


def test_gradients_are_bitwise_those_without_overlap_and_the_weight_comes_between_start_and_wait(checked: Any) -> None:
    assert checked["scenarios"] == {name: (0, count) for name, _, _, count in SCENARIOS}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.norm = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x) * self.v(x)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_refusals_name_the_call_to_write(message: Messages) -> None:
    model = nn.ModuleDict({"attention": Attention(), "scaled": Scaled(6, 8), "conv": nn.Conv1d(6, 8, 1)})
    own = nn.Linear(6, 8)
    own.forward = lambda input: 2 * nn.Linear.forward(own, input)
    model["own"] = own
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    for path in ("attention.q", "attention.k", "attention.v", "scaled", "conv", "own"):
        sch[path].shard(["weight", "bias"], axis=0)
    overlapped = Sync("bwd_post", "all_reduce", overlap=True)
    for path, sync, words in (
        ("attention.q", Sync("fwd_post", "all_gather", overlap=True), "belongs to"),
        ("attention.q", Sync("fwd_pre", "all_reduce", overlap=True), "belongs to"),
        ("attention.q", Sync("bwd_post", print, overlap=True), "belongs to"),
        ("attention.norm", overlapped, "not one"),
        ("scaled", overlapped, "not one"),
        ("conv", overlapped, "not one"),
        ("own", overlapped, "another forward"),
        ("attention", overlapped, "sch['attention.q'].sync"),
    ):
        with pytest.raises(slapo.PreconditionError) as refused:
            sch[path].apply(sync)
        message(refused, f"at '{path}'", words)
    assert not sch.model["attention"].q._forward_pre_hooks
