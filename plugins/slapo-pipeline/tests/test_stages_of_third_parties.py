"""Partition and liveness are two entries of slapo-pipeline: each is disabled alone, and replaced by a third party's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import HookError, PluginError, PreconditionError
from slapo_runtime.launcher import run_ranks
from slapo_runtime.stages import stages
from slapo_testing.distributions import FakeDistribution, FakeEnvironment
from tests.dists.healthy import with_hooks
from tests.messages import Messages

DISABLE = "SLAPO_DISABLE_PLUGINS"
PARTITION, LIVENESS = "slapo-pipeline:pipeline.partition", "slapo-pipeline:pipeline.liveness"
STEPS = 2

CHAIN = """
from slapo_runtime.stages.partition import Output, Partition, Stage, StageModule, Value

class Layers(StageModule):
    def __init__(self, model, names, read, made):
        super().__init__()
        self.read, self.made = read, made
        for name in names:
            self.add_module(name, model.get_submodule(name))

    def forward(self, inputs, values):
        x = {**inputs, **values}[self.read]
        for layer in self.children():
            x = layer(x)
        return {self.made: x}

@hookimpl(trylast=True)  # a default, as that of slapo-pipeline
def slapo_partition(schedule, inputs):
    model, x = schedule.model, inputs["input"]
    cuts = [path for each in schedule.records for path in each.primitive.cuts(each.path)]
    names, first, stages, values, read = [name for name, _ in model.named_children()], 0, [], {}, "input"
    for index, end in enumerate([*sorted(map(names.index, cuts)), len(names) - 1]):
        own, made = names[first : end + 1], f"after {names[end]}"
        width = [model.get_submodule(name).out_features for name in own if hasattr(model.get_submodule(name), "weight")]
        module = Layers(model, own, read, made)
        last = names[end] if end < len(names) - 1 else None
        values[made] = Value(made, index, (index + 1,) if last else (), (*x.shape[:-1], width[-1]), x.dtype, True)
        stages.append(Stage(index, module, () if index else ("input",), (read,) if index else (), (made,), last))
        first, read = end + 1, made
    return Partition(tuple(stages), values, (), Output((read,), lambda made: made[read]))
"""
EVERYTHING = """
from slapo_runtime.stages.partition import Liveness

@hookimpl(trylast=True)  # a default, as that of slapo-pipeline
def slapo_liveness(partition, outputs):
    made = [[name for name, each in partition.values.items() if each.producer <= end.index] for end in partition.stages]
    return Liveness(tuple(map(tuple, made[:-1])))
"""


def stranger(source: str) -> FakeDistribution:
    return with_hooks("acme-slapo", source)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def schedule(plugin: str = "acme-slapo", **mesh: int) -> slapo.Schedule:
    sch = slapo.create_schedule(chain(), mesh=mesh or None, plugins=[plugin], example_inputs=(batch(0)[0],))
    sch["1"].pipeline_split()
    return sch


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 4, generator=generator).double(), torch.randn(4, 3, generator=generator).double()


def loss(output: torch.Tensor, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(output, given[1])


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained() -> tuple[tuple[str, str], dict[str, torch.Tensor]]:
    """Who answered about the stages, and the weights after some steps on the ranks of a pipeline."""
    sch = schedule(pp=2)
    found = stages(sch, full_output=True)
    engine = slapo.build(sch, target="torch", optimizer=sgd, loss=loss)
    for number in range(STEPS):
        engine.train_step(batch(number))
    return (found.partition_by, found.liveness_by), engine.state_dict()


def reference() -> dict[str, torch.Tensor]:
    """The same weights, of the uncut model in one process."""
    model = chain()
    optimizer = sgd(list(model.parameters()))
    for number in range(STEPS):
        optimizer.zero_grad()
        loss(model(batch(number)[0]), batch(number)).backward()
        optimizer.step()
    return model.state_dict()


def compare(partition_by: str, liveness_by: str) -> None:
    for answered, state in run_ranks(trained, world_size=2):
        assert answered == (partition_by, liveness_by)
        for name, tensor in reference().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-13)


@pytest.mark.ranks
def test_a_strangers_partition_trains_with_the_liveness_of_slapo_pipeline(
    fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_distributions.install(stranger(CHAIN))
    monkeypatch.setenv(DISABLE, PARTITION)
    compare("acme-slapo 1.0", "slapo-pipeline 0.1.0")


@pytest.mark.ranks
def test_the_partition_of_slapo_pipeline_trains_with_a_strangers_liveness(
    fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_distributions.install(stranger(EVERYTHING))
    monkeypatch.setenv(DISABLE, LIVENESS)
    compare("slapo-pipeline 0.1.0", "acme-slapo 1.0")


HALVES = {"slapo_partition": (CHAIN, PARTITION), "slapo_liveness": (EVERYTHING, LIVENESS)}


@pytest.mark.parametrize("hook", HALVES)
def test_two_defaults_for_one_hook_are_refused_until_one_is_disabled(
    hook: str, fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    source, entry = HALVES[hook]
    fake_distributions.install(stranger(source))
    sch = schedule()
    with pytest.raises(HookError) as error:
        stages(sch)
    assert "was answered by acme-slapo 1.0 and by slapo-pipeline 0.1.0" in error.value.message
    message(error.value.hint, f"{DISABLE}={entry}")
    monkeypatch.setenv(DISABLE, entry)
    found = stages(schedule())
    assert {found.partition_by, found.liveness_by} == {"acme-slapo 1.0", "slapo-pipeline 0.1.0"}


@pytest.mark.parametrize("hook", HALVES)
def test_a_cut_is_refused_where_no_plugin_answers_about_stages(
    hook: str, monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    entry = HALVES[hook][1]
    monkeypatch.setenv(DISABLE, entry)
    with pytest.raises(PreconditionError) as error:
        schedule("slapo-pipeline")
    message(error, f"no active plugin answers {hook}", f"remove {entry} from {DISABLE}", "pip install")


@pytest.mark.slow
def test_plugins_list_shows_hooks_modules_and_which_are_disabled(fake_distributions: FakeEnvironment) -> None:
    line = fake_distributions.slapo("plugins", "list", "--kind", "hooks").stdout
    assert "pipeline.liveness, pipeline.partition, pipeline.preconditions" in line
    shown = fake_distributions.slapo("plugins", "list", "--kind", "hooks", environ={DISABLE: LIVENESS}).stdout
    assert "pipeline.partition, pipeline.preconditions" in shown
    assert f"{DISABLE} names {LIVENESS}" in shown
    assert f"slapo-pipeline: remove {LIVENESS} from {DISABLE}" in shown


def test_disabling_an_unknown_hooks_module_is_an_error(monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    monkeypatch.setenv(DISABLE, "slapo-pipeline:pipeline.livenes")
    with pytest.raises(PluginError) as error:
        schedule("slapo-pipeline")
    message(error, "no hooks module 'pipeline.livenes'", "pipeline.liveness")
