"""Every package of this repository declares what it needs: its wheels work where nothing else is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ecosystem.clean import CleanEnvironment, build_wheels

ROOT = Path(__file__).parents[2]
PROJECTS = [
    ROOT,
    *sorted(path.parent for where in ("plugins", "examples") for path in ROOT.glob(f"{where}/*/pyproject.toml")),
]

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


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    directory = tmp_path_factory.mktemp("clean")
    return CleanEnvironment(build_wheels(PROJECTS, directory), directory)


def program(readme: Path) -> str:
    """The first program of a README."""
    return re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)[0]


@pytest.mark.slow
def test_nothing_undeclared_is_there(clean: CleanEnvironment) -> None:
    code = "import importlib.util as u; print([n for n in ('matplotlib', 'pytest', 'transformers') if u.find_spec(n)])"
    assert clean.python("-c", code) == "[]\n"


@pytest.mark.slow
def test_every_plugin_is_listed_as_ok(clean: CleanEnvironment) -> None:
    listed = clean.python("-m", "slapo_core.cli.main", "plugins", "list")
    rows = [line.split()[:3] for line in listed.splitlines() if line.startswith("slapo-")]
    names = ("core", "deepspeed", "fusion", "hello", "loop", "megatron", "pipeline", "tp", "tune")
    assert {row[0]: row[2] for row in rows} == {f"slapo-{name}": "ok" for name in names}


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
    assert "verified: BertForMaskedLM with 42 steps agrees with the reference model (2 ranks, float64)" in printed


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
    printed = clean.script("programs.py", f"{HELLO}{hello}{LOOP}{loop}print(type(loss).__name__)\n{TRAIN}")
    assert printed == "torch.float32\nTensor\ntrained, saved and loaded\n"
