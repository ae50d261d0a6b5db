"""The example plugins are as short as promised, and work from their wheels like any stranger's package."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.support.overlay import Overlay

EXAMPLES = Path(__file__).parents[2] / "examples"

USE_HELLO = """
import torch, slapo_core as slapo
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
sch = slapo.create_schedule(model)
sch["1"].full_precision()
print(sch.records[0], sch.records[0].distribution, sch.records[0].version)
print(len(slapo.replay(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), sch.to_json()).records))
"""


class Installed:
    """An example, built as a wheel and installed into an environment of its own."""

    def __init__(self, name: str, root: Path) -> None:
        self.overlay = Overlay(root / "env")
        self.source = root / name
        shutil.copytree(
            EXAMPLES / name, self.source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
        )
        build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(root))
        self.overlay.run("-m", "pip", *build, str(self.source), cwd=root, check=True)
        (self.wheel,) = root.glob("*.whl")
        self.overlay.pip_install(str(self.wheel), cwd=root)
        shutil.rmtree(self.source / "src")  # what is tested now is the wheel
        self.work = root

    def python(self, code: str) -> str:
        return self.overlay.run("-c", code, cwd=self.work, check=True).stdout

    def slapo_json(self, *arguments: str) -> list[dict[str, str]] | dict[str, list[dict[str, str]]]:
        return json.loads(self.overlay.slapo(*arguments, "--json", cwd=self.work, check=True).stdout)

    def run_own_tests(self, *chosen: str) -> int:
        """Return how many pass; that one fails is an error."""
        options = ("--import-mode=importlib", "-q", "-p", "no:cacheprovider")
        done = self.overlay.run("-m", "pytest", *options, "tests", *chosen, cwd=self.source, check=True)
        (passed,) = re.findall(r"(\d+) passed", done.stdout)
        return int(passed)


@pytest.fixture(scope="module")
def hello(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed("slapo-hello", tmp_path_factory.mktemp("hello"))


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed("slapo-loop", tmp_path_factory.mktemp("loop"))


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed("slapo-fsdp", tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def fx(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed("slapo-fx", tmp_path_factory.mktemp("fx"))


@pytest.mark.parametrize(
    ("example", "most"), [("slapo-hello", 30), ("slapo-loop", 60), ("slapo-fsdp", 280), ("slapo-fx", 110)]
)
def test_an_example_is_as_short_as_promised(example: str, most: int) -> None:
    lines = [line for path in (EXAMPLES / example / "src").rglob("*.py") for line in path.read_text().splitlines()]
    assert 0 < len([line for line in lines if line.strip()]) < most
    assert max(map(len, lines)) <= 120


@pytest.mark.slow
def test_hello_is_one_module_and_is_used_from_a_schedule(hello: Installed) -> None:
    assert "slapo_hello.py" in zipfile.ZipFile(hello.wheel).namelist()
    assert hello.python("import slapo_hello; print(slapo_hello.__file__)").startswith(str(hello.overlay.site_packages))
    assert hello.python(USE_HELLO).splitlines() == ["#1 full_precision() at '1' slapo-hello 1.0.0", "1"]


@pytest.mark.slow
def test_hello_is_listed_by_the_command_line(hello: Installed) -> None:
    listed = hello.slapo_json("plugins", "list")
    assert isinstance(listed, dict)
    (plugin,) = (item for item in listed["plugins"] if item["name"] == "slapo-hello")
    assert (plugin["state"], plugin["version"], plugin["primitives"]) == ("ok", "1.0.0", ["hello.full_precision"])
    assert hello.overlay.slapo("plugins", "check", "slapo-hello", cwd=hello.work).returncode == 0


@pytest.mark.slow
def test_hello_passes_the_kit(hello: Installed) -> None:
    assert hello.run_own_tests()


@pytest.mark.slow
def test_loop_is_listed_by_the_command_line(loop: Installed) -> None:
    listed = loop.slapo_json("dialects")
    assert {"distribution": "slapo-loop", "name": "accumulate", "version": "1.0.0"} in listed


@pytest.mark.slow
@pytest.mark.breadth
def test_loop_is_a_dialect_that_trains(loop: Installed) -> None:
    assert loop.run_own_tests() > 30  # the kit's checks


@pytest.mark.slow
def test_fx_is_a_tracer_that_passes_its_checks(fx: Installed) -> None:
    assert fx.overlay.slapo("plugins", "check", "slapo-fx", cwd=fx.work).returncode == 0
    assert fx.run_own_tests() == 8


@pytest.mark.slow
def test_fsdp_trains_a_bert_as_plain_pytorch_does(fsdp: Installed) -> None:
    assert fsdp.run_own_tests("-k", "tokens_weigh_alike") == 1


@pytest.mark.slow
@pytest.mark.breadth
def test_fsdp_is_a_dialect_that_trains_on_replicas_and_beside_tensor_parallelism(fsdp: Installed) -> None:
    listed = fsdp.slapo_json("dialects")
    assert {"distribution": "slapo-fsdp", "name": "fsdp", "version": "1.0.0"} in listed
    assert fsdp.run_own_tests() > 90  # the kit's checks, on replicas and with shards
