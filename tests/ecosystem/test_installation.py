"""Every package of this repository declares what it needs: its wheels work where nothing else is installed."""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.clean import CleanEnvironment, build_wheels

ROOT = Path(__file__).parents[2]
PROJECTS = [
    ROOT,
    *sorted(path.parent for where in ("plugins", "examples") for path in ROOT.glob(f"{where}/*/pyproject.toml")),
]

FIRST_PARTY = {"slapo-core"} | {project.parent.name for project in ROOT.glob("plugins/*/pyproject.toml")}

TINY_BERT = '''
import torch
from torch import nn


class BertConfig:
    def __init__(self, **sizes):
        self.__dict__.update(sizes)


class Block(nn.Module):
    """Children by name, called by `run(self, x)`."""

    def __init__(self, run, children):
        super().__init__()
        self.run = run
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        return self.run(self, x)


def attend(block, x):
    q, k, v = (m(x).unflatten(-1, (-1, 16)).transpose(1, 2) for m in (block.query, block.key, block.value))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def attention(block, x):
    return x + block.output(block.get_submodule("self")(x))


def dense(block, x):
    return block.dense(x)


def activated(block, x):
    return nn.functional.gelu(block.dense(x))


def layer(block, x):
    x = block.attention(x)
    return x + block.output(block.intermediate(x))


def encoder(block, x):
    for one in block.layer:
        x = one(x)
    return x


def bert(block, ids):
    return block.encoder(block.embeddings(ids))


class BertForMaskedLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        n, m = config.hidden_size, config.intermediate_size

        def make():
            inner = Block(attend, {name: nn.Linear(n, n) for name in ("query", "key", "value")})
            around = Block(attention, {"self": inner, "output": Block(dense, {"dense": nn.Linear(n, n)})})
            first, second = Block(activated, {"dense": nn.Linear(n, m)}), Block(dense, {"dense": nn.Linear(m, n)})
            return Block(layer, {"attention": around, "intermediate": first, "output": second})

        layers = nn.ModuleList(make() for _ in range(config.num_hidden_layers))
        embeddings = nn.Embedding(config.vocab_size, n)
        self.bert = Block(bert, {"embeddings": embeddings, "encoder": Block(encoder, {"layer": layers})})
        self.head = nn.Linear(n, config.vocab_size)

    def forward(self, input_ids):
        return self.head(self.bert(input_ids))
'''

HELLO = """
import torch, slapo_core as slapo
from torch import nn

class Output(nn.Module):
    def __init__(self):
        super().__init__()
        self.LayerNorm = nn.LayerNorm(4)
    def forward(self, x):
        return self.LayerNorm(x)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.output = Output()
    def forward(self, x):
        return self.output(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList([Layer(), Layer()])
    def forward(self, x):
        for layer in self.encoder.layer:
            x = layer(x)
        print(x.dtype)

model, batch = Model(), {"x": torch.randn(2, 4).bfloat16()}
sch = slapo.create_schedule(model)
"""

LOOP = """
sch = slapo.create_schedule(nn.Linear(4, 1))
batch = (torch.randn(16, 4),)
"""

TRAIN = """
engine = slapo.build(
    slapo.create_schedule(torch.nn.Linear(4, 1)),
    target="torch",
    optimizer=lambda params: torch.optim.AdamW(params),
    loss=lambda output, batch: output.mean(),
)
engine.train_step((torch.randn(2, 4),))
engine.save("checkpoint")
engine.load("checkpoint")
print("trained, saved and loaded")
"""


Install = Callable[..., CleanEnvironment]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    return build_wheels(PROJECTS, tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def clean(wheels: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    return CleanEnvironment(wheels, tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="module")
def install(wheels: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Make an environment of some requirements; the same ones share it."""
    return functools.cache(
        lambda *requirements: CleanEnvironment(wheels, tmp_path_factory.mktemp("some"), *requirements)
    )


def program(readme: Path) -> str:
    """The first program of a README."""
    return re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)[0]


@pytest.mark.slow
def test_installation_has_no_undeclared_files(clean: CleanEnvironment) -> None:
    code = "import importlib.util as u; print([n for n in ('matplotlib', 'datasets') if u.find_spec(n)])"
    assert clean.python("-c", code) == "[]\n"


@pytest.mark.slow
def test_every_plugin_is_listed_as_ok(clean: CleanEnvironment) -> None:
    listed = clean.python("-m", "slapo_core.cli.main", "plugins", "list")
    rows = [line.split()[:3] for line in listed.splitlines() if line.startswith("slapo-")]
    texts = [(project / "pyproject.toml").read_text(encoding="utf-8") for project in PROJECTS]
    named = {tomllib.loads(text)["project"]["name"] for text in texts}
    assert {row[0]: row[2] for row in rows} == dict.fromkeys(named, "ok")
    assert len(named) >= 12


END_AT_ONCE = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""
"""After a program that made process groups: on a busy machine torch's own threads for gloo may abort a process that has
done everything and comes to its end ("terminate called without an active exception"), with slapo or without."""


@pytest.mark.ranks
def test_the_first_program_verifies_on_two_ranks(clean: CleanEnvironment) -> None:
    (clean.directory / "tiny_bert.py").write_text(TINY_BERT)
    printed = clean.script(
        "tiny.py", program(ROOT / "README.md").replace("from transformers import", "from tiny_bert import")
    )
    assert "verified: BertForMaskedLM with 46 steps agrees with the reference model (2 ranks, float64)" in printed


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_program_of_slapo_tp_runs_on_two_ranks(clean: CleanEnvironment) -> None:
    (clean.directory / "this_file.py").write_text(program(ROOT / "plugins/slapo-tp/README.md") + END_AT_ONCE)
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "this_file.py")
    assert "Linear(in_features=64, out_features=128, bias=True)" in clean.python(*run)


@pytest.mark.slow
@pytest.mark.breadth
def test_the_program_of_slapo_fusion_runs(clean: CleanEnvironment) -> None:
    printed = clean.script("fusion.py", program(ROOT / "plugins/slapo-fusion/README.md"))
    assert "bias_gelu(" in printed
    assert "verified: Sequential with 10 steps agrees with the reference model" in printed


@pytest.mark.slow
@pytest.mark.breadth
def test_the_program_of_slapo_loss_runs(clean: CleanEnvironment) -> None:
    printed = clean.script("loss.py", program(ROOT / "plugins/slapo-loss/README.md"))
    assert "the loss is computed by 'chunked' in chunks of 393 tokens (cpu)" in printed
    assert printed.endswith("torch.Size([2, 16]) torch.Size([2, 16])\n")


@pytest.mark.slow
@pytest.mark.breadth
def test_the_program_of_slapo_pipeline_runs(clean: CleanEnvironment) -> None:
    printed = clean.script("pipeline.py", program(ROOT / "plugins/slapo-pipeline/README.md"))
    assert "* tied: embed.weight, in the stages 0 and 2" in printed
    assert "verified: Model with 1 steps agrees with the reference model" in printed
    drawn = clean.python("-m", "slapo_core.cli.main", "pipeline", "draw")
    assert "bubble 27.3 %" in drawn


@pytest.mark.slow
def test_the_program_of_slapo_deepspeed_runs(clean: CleanEnvironment) -> None:
    printed = clean.script("by_deepspeed.py", program(ROOT / "plugins/slapo-deepspeed/README.md"))
    assert "ZeRO-2: replicas partition optimizer state and gradients, one replica" in printed
    assert printed.endswith("tensor(True)\n2\n")


MEGATRON = """
import torch

import slapo_core as slapo

try:
    import cpu_megatron
    sch = slapo.create_schedule(torch.nn.Linear(4, 2))
    config = {"lr": 0.01, "use_distributed_optimizer": True}
    engine = slapo.build(sch, target="megatron", optimizer_config=config, loss=lambda output, batch: output.mean())
    losses = [float(engine.train_step((torch.ones(2, 4),)).loss) for _ in range(3)]
    engine.save("by_megatron")
    print(losses[2] < losses[1] < losses[0])
except slapo.BuildError as error:
    print(error)
"""


@pytest.mark.slow
def test_slapo_megatron_has_all_that_megatron_needs(clean: CleanEnvironment) -> None:
    """Megatron-core imports more than it declares, and a save waits for ever without psutil."""
    (clean.directory / "cpu_megatron.py").write_text(
        (ROOT / "tests/support/cpu_megatron.py").read_text(encoding="utf-8")
    )
    assert clean.script("by_megatron.py", MEGATRON + END_AT_ONCE).splitlines()[-1] == "True"


@pytest.mark.slow
def test_the_programs_of_the_examples_run_and_a_trained_model_is_saved(clean: CleanEnvironment) -> None:
    hello = program(ROOT / "examples/slapo-hello/README.md").replace('"cuda"', '"cpu"')
    options = "optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda output, batch: output.mean()"
    loop = program(ROOT / "examples/slapo-loop/README.md").replace("optimizer=...", options)
    trained = program(ROOT / "plugins/slapo-torch/README.md")
    printed = clean.script("programs.py", f"{HELLO}{hello}{LOOP}{loop}print(type(loss).__name__)\n{TRAIN}{trained}")
    own, plan = printed.split("plan for target 'torch'\n")
    assert own == "torch.float32\nTensor\ntrained, saved and loaded\n"
    assert plan == "  the scheduled Sequential, 1 steps applied\ntensor(True)\nSequential\n"


# -- what a user installs ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wheels_contain_py_typed_and_no_tests(wheels: tuple[Path, ...]) -> None:
    for wheel in wheels:
        package = wheel.name.split("-")[0]
        if package.replace("_", "-") not in FIRST_PARTY:
            continue
        names = [name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name]
        assert f"{package}/py.typed" in names
        assert {name.split("/")[0] for name in names} == {package}
        assert [name for name in names if "tests/" in name and "/template/" not in name] == []
        assert [name for name in names if name.rpartition("/")[2] in ("conftest.py", "messages.txt")] == []


@pytest.mark.breadth
@pytest.mark.slow
def test_all_is_everything_but_the_dialects_of_other_runtimes(install: Install) -> None:
    others = {"slapo-deepspeed", "slapo-lightning", "slapo-megatron", "slapo-transformers"}
    assert install("slapo-core[all]").own == FIRST_PARTY - others


SHARDED = """
import os
import torch
from torch import nn
import slapo_core as slapo

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return self.fc2(self.fc1(x).relu())

def scheduled():
    torch.manual_seed(0)
    model = Mlp()
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["fc1"].shard("weight", axis=0)
    sch["fc1"].shard("bias", axis=0)
    sch["fc1"].sync("backward")
    sch["fc2"].shard("weight", axis=1)
    sch["fc2"].sync("forward")
    return sch

def main():
    torch.distributed.init_process_group("gloo")
    report = slapo.verify(scheduled(), torch.ones(4, 8))
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    engine = slapo.build(scheduled(), optimizer=sgd, loss=lambda output, batch: output.square().mean())
    losses = [float(engine.train_step((torch.ones(4, 8),)).loss) for _ in range(3)]
    shapes = {name: tuple(t.shape) for name, t in engine.state_dict().items()}
    if torch.distributed.get_rank() == 0:  # both ranks at once would write into each other's lines
        print(report, losses[2] < losses[1] < losses[0], shapes, flush=True)
    os._exit(0)  # see END_AT_ONCE

if __name__ == "__main__":
    main()
"""


@pytest.mark.ranks
def test_core_and_tp_shard_verify_build_and_train(install: Install) -> None:
    tp = install("slapo-core", "slapo-tp")
    assert tp.own == {"slapo-core", "slapo-runtime", "slapo-torch", "slapo-tp", "slapo-verify"}
    (tp.directory / "sharded.py").write_text(SHARDED)
    printed = tp.python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "sharded.py")
    shapes = {"fc1.weight": (16, 8), "fc1.bias": (16,), "fc2.weight": (8, 16), "fc2.bias": (8,)}
    assert "verified: Mlp with 5 steps agrees with the reference model (2 ranks" in printed
    assert f"True {shapes}" in printed


CORE = """
import importlib.util, json, sys
from torch import nn
import torch
import slapo_core as slapo

def said(function):
    try:
        function()
    except slapo.SlapoError as error:
        return str(error)

def gelu(old):
    return nn.GELU()

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
before, x = list(model.parameters()), torch.randn(2, 4)
sch = slapo.create_schedule(model)
sch["0"].checkpoint()
sch["1"].replace(gelu)
saved = json.loads(sch.to_json())
assert [record["primitive"] for record in saved["records"]] == ["core.checkpoint", "core.replace"], saved
model(x).sum().backward()
sch.undo(to=0)
assert type(model[1]) is nn.ReLU and all(a is b for a, b in zip(model.parameters(), before))
sch["0"].checkpoint()
again = slapo.replay(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), sch.to_json())
assert len(again.records) == 1
print(sorted(name for name in sys.modules if name.startswith("slapo_") and "." not in name))
print([name for name in ("matplotlib", "pytest", "transformers") if importlib.util.find_spec(name)])
for name in ("verify", "build", "estimate", "patterns"):
    print(said(lambda: getattr(slapo, name)))
"""


@pytest.mark.slow
def test_core_alone_schedules_and_says_what_else_there_is(install: Install) -> None:
    core = install("slapo-core")
    assert core.own == {"slapo-core"}
    listed = core.python("-m", "slapo_core.cli.main", "plugins", "list")
    assert re.findall(r"^slapo-\S+ .*", listed, flags=re.MULTILINE)[0].split()[::2][:2] == ["slapo-core", "ok"]
    assert len(re.findall(r"^slapo-", listed, flags=re.MULTILINE)) == 1
    printed = core.script("alone.py", CORE).splitlines()
    assert printed[:2] == ["['slapo_core']", "[]"]
    for name in ("verify", "runtime", "estimate", "graph"):
        assert any(f"pip install slapo-{name}" in line for line in printed), name
    refused = core.fails("-m", "slapo_core.cli.main", "plugins", "check", "slapo-core")
    assert "pip install slapo-testing" in refused
    assert "Traceback" not in refused


SUBSET = """
import importlib.util
import torch
from torch import nn
import slapo_core as slapo

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))

def tp(sch):
    sch["fc1"].shard("weight", axis=0)

def graph(sch):
    sch[""].trace()
    assert "self.fc2" in str(sch[""].graph)

def fusion(sch):
    sch["fc1"].compile()

def pipeline(sch):
    sch["fc1"].pipeline_split()

assert importlib.util.find_spec("pytest") is None
for use in (tp, graph, fusion, pipeline):
    try:
        mesh = {"tp": {"tp": 2}, "pipeline": {"pp": 2}}.get(use.__name__)
        use(slapo.create_schedule(Mlp(), mesh=mesh, example_inputs=torch.randn(2, 8)))
        print(use.__name__, "works")
    except (slapo.SlapoError, AttributeError) as error:
        words = str(error).replace(",", " ").split()
        print(use.__name__, "lacks", *(word for word in dict.fromkeys(words) if word == f"slapo-{use.__name__}"))
"""
EXTRAS = ("tp", "graph", "fusion", "pipeline")
BRINGS = {"fusion": {"graph"}, "pipeline": {"graph"}}
SUBSETS = [subset for size in range(5) for subset in itertools.combinations(EXTRAS, size)]
SAMPLED = (("tp",),)


@pytest.mark.slow
@pytest.mark.parametrize(
    "subset",
    [pytest.param(s, id="+".join(("core", *s)), marks=() if s in SAMPLED else pytest.mark.breadth) for s in SUBSETS],
)
def test_every_subset_works_or_names_what_is_missing(install: Install, subset: tuple[str, ...]) -> None:
    environment = install("slapo-core", *(f"slapo-{name}" for name in subset))
    there = set(subset).union(*(BRINGS.get(name, set()) for name in subset))
    printed = environment.script("subset.py", SUBSET).splitlines()
    assert printed == [f"{name} works" if name in there else f"{name} lacks slapo-{name}" for name in EXTRAS]
