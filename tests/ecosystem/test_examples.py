"""The example plugins are as short as promised, and work from their wheels like any stranger's package."""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.support.overlay import Overlay

EXAMPLES = Path(__file__).parents[2] / "examples"

USE_HELLO = """
import slapo_hello
print(slapo_hello.__file__)
import torch, slapo_core as slapo
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
sch = slapo.create_schedule(model)
sch["1"].full_precision()
print(sch.records[0], sch.records[0].distribution, sch.records[0].version)
print(len(slapo.replay(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), sch.to_json()).records))
"""


NAMES = ("slapo-hello", "slapo-loop", "slapo-fsdp", "slapo-fx")


class Installed:
    """An example from its wheel, in an environment."""

    def __init__(self, name: str, overlay: Overlay, work: Path) -> None:
        self.overlay, self.work, self.source = overlay, work, work / name
        (self.wheel,) = work.glob(f"{name.replace('-', '_')}-*.whl")

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
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Installed]:
    """All examples, in one environment: pip starts twice."""
    root = tmp_path_factory.mktemp("examples")
    overlay = Overlay(root / "env")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    sources = [shutil.copytree(EXAMPLES / name, root / name, ignore=ignored) for name in NAMES]
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(root))
    overlay.run("-m", "pip", *build, *map(str, sources), cwd=root, check=True)
    overlay.pip_install(*map(str, root.glob("*.whl")), cwd=root)
    for source in sources:
        shutil.rmtree(source / "src")  # what is tested now is the wheel
    return {name: Installed(name, overlay, root) for name in NAMES}


@pytest.fixture
def hello(installed: dict[str, Installed]) -> Installed:
    return installed["slapo-hello"]


@pytest.fixture
def loop(installed: dict[str, Installed]) -> Installed:
    return installed["slapo-loop"]


@pytest.fixture
def fsdp(installed: dict[str, Installed]) -> Installed:
    return installed["slapo-fsdp"]


@pytest.fixture
def fx(installed: dict[str, Installed]) -> Installed:
    return installed["slapo-fx"]


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
    place, *printed = hello.python(USE_HELLO).splitlines()
    assert place.startswith(str(hello.overlay.site_packages))
    assert printed == ["#1 full_precision() at '1' slapo-hello 1.0.0", "1"]


@pytest.mark.slow
def test_hello_is_listed_by_the_command_line(hello: Installed) -> None:
    listed = hello.slapo_json("plugins", "list")
    assert isinstance(listed, dict)
    (plugin,) = (item for item in listed["plugins"] if item["name"] == "slapo-hello")
    assert (plugin["state"], plugin["version"], plugin["primitives"]) == ("ok", "1.0.0", ["hello.full_precision"])


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("name", ["slapo-hello", "slapo-fx"])
def test_an_example_passes_the_checks_of_the_command_line(installed: dict[str, Installed], name: str) -> None:
    one = installed[name]
    assert one.overlay.slapo("plugins", "check", name, cwd=one.work).returncode == 0


@pytest.mark.slow
def test_hello_passes_the_kit(hello: Installed) -> None:
    assert hello.run_own_tests(*([] if os.environ.get("SLAPO_TEST_WHOLE") else ["-k", "not 2_ranks"]))


@pytest.mark.slow
def test_loop_is_listed_by_the_command_line(loop: Installed) -> None:
    listed = loop.slapo_json("dialects")
    assert {"distribution": "slapo-loop", "name": "accumulate", "version": "1.0.0"} in listed


@pytest.mark.slow
def test_loop_trains_as_plain_pytorch_does(loop: Installed) -> None:
    assert loop.run_own_tests("-k", "training_is_that_of_the_plain_model")


@pytest.mark.slow
@pytest.mark.breadth
def test_loop_is_a_dialect_that_trains(loop: Installed) -> None:
    assert loop.run_own_tests() > 30  # the kit's checks


@pytest.mark.slow
def test_fx_is_a_tracer_that_passes_its_checks(fx: Installed) -> None:
    assert fx.run_own_tests() == 8


@pytest.mark.slow
@pytest.mark.breadth
def test_fsdp_trains_a_bert_as_plain_pytorch_does(fsdp: Installed) -> None:
    assert fsdp.run_own_tests("-k", "tokens_weigh_alike") == 1


@pytest.mark.slow
@pytest.mark.breadth
def test_fsdp_is_a_dialect_that_trains_on_replicas_and_beside_tensor_parallelism(fsdp: Installed) -> None:
    listed = fsdp.slapo_json("dialects")
    assert {"distribution": "slapo-fsdp", "name": "fsdp", "version": "1.0.0"} in listed
    assert fsdp.run_own_tests() > 90  # the kit's checks, on replicas and with shards
