"""`slapo stubs`: type checkers accept the calls that slapo accepts, and reject the others."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import slapo_core
from slapo_testing.distributions import FakeDistribution, primitive_source
from tests.dists.healthy import acme
from tests.messages import Messages
from tests.support.overlay import Overlay

ACME = acme(
    before=("from collections.abc import Callable", "from typing import Literal"),
    body=(
        "names: str | tuple[str, ...]",
        "axis: int = 0",
        "mode: Literal['zeros', 'edge'] = 'zeros'",
        "sizes: tuple[tuple[int, str], ...] = ()",
        "list: Callable[[int], str] | None = None",
    ),
)
BROKEN = FakeDistribution(
    "bad-slapo", "1.0", {"slapo.v1.primitives": {"bad.x": "bad_slapo:X"}}, {"bad_slapo": "import no_such_module"}
)
UNREADABLE = FakeDistribution(
    "odd-slapo",
    "1.0",
    {"slapo.v1.primitives": {"odd.x": "odd_slapo:Thing"}},
    {"odd_slapo": "from __future__ import annotations\n" + primitive_source("odd.x", body=("value: NoSuchType",))},
)

ACCEPTED = """
import slapo_core as slapo
from torch import nn

sch = slapo.create_schedule(nn.Linear(2, 2), mesh={"tp": 1})
sch["x"].pad("weight", axis=0).checkpoint()
sch["x"].acme.pad(["weight", "bias"], mode="edge").pad("weight", sizes=[(1, "a")], list=str)
sch["layers.*"].checkpoint(preserve_rng_state=False)
for layer in sch["layers.*"]:
    layer["query"].pad("weight")
sch["layers.*"][0].children[0].pad("weight")
sch.pad("weight").module.eval()
sch.acme.pad("weight").pad("bias")
sch["x"].apply(sch.records[0].primitive).pad("weight")
print(sch["x"].path, len(sch["layers.*"]), sch.explain())
reveal_type(sch["x"].pad("weight"))
reveal_type(sch["layers.*"][0].acme.pad("weight"))
"""
REVEALED = """\
accepted.py:16: note: Revealed type is "slapo_core.tree.selection.NodeOrGroup"
accepted.py:17: note: Revealed type is "slapo_core.tree.node.Node"
Success: no issues found in 1 source file
"""

REJECTED = """
import slapo_core as slapo
from torch import nn

sch = slapo.create_schedule(nn.Linear(2, 2))
sch["x"].pad("weight", axis="no")
sch["x"].pda("weight")
sch["x"].acme.pda("weight")
sch["x"].pad()
sch["x"].pad("weight", mode="wrap")
sch["x"].acme.pad("weight", axes=0)
sch.chekpoint()
"""
COMPLAINTS = """\
rejected.py:6: error: Argument "axis" to "pad" of "NodePrimitives" has incompatible type "str"; \
expected "int"  [arg-type]
rejected.py:7: error: "NodeOrGroup" has no attribute "pda"  [attr-defined]
rejected.py:8: error: "_Namespace_acme[NodeOrGroup]" has no attribute "pda"  [attr-defined]
rejected.py:9: error: Missing positional argument "names" in call to "pad" of "NodePrimitives"  [call-arg]
rejected.py:10: error: Argument "mode" to "pad" of "NodePrimitives" has incompatible type "Literal['wrap']"; \
expected "Literal['zeros', 'edge']"  [arg-type]
rejected.py:11: error: Unexpected keyword argument "axes" for "pad" of "_Namespace_acme"  [call-arg]
rejected.py:11: note: "pad" defined in "slapo_core._vocabulary"
rejected.py:12: error: "Schedule" has no attribute "chekpoint"  [attr-defined]
Found 7 errors in 1 file (checked 1 source file)
"""

EACH = """
import contextlib, io, json, sys
from slapo_core.cli.main import main
results = []
for arguments in json.loads(sys.argv[1]):
    out, error, status = io.StringIO(), io.StringIO(), 0
    sys.argv = ["slapo", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
    results.append((status, out.getvalue(), error.getvalue()))
print(json.dumps(results))
"""


class World:
    """An environment with plugins, and a folder to work in."""

    def __init__(self, root: Path) -> None:
        self.overlay = Overlay(root / "env")
        self.work = root / "work"
        self.work.mkdir()
        (self.work / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n")

    def slapo(self, *arguments: str) -> tuple[int, str, str]:
        done = self.overlay.slapo(*arguments, cwd=self.work)
        return done.returncode, done.stdout, done.stderr

    def slapo_each(self, *commands: Sequence[str]) -> list[tuple[int, str, str]]:
        """Several commands, one after the other, in one process: each would import torch again."""
        done = self.overlay.run("-c", EACH, json.dumps(commands), cwd=self.work, check=True)
        return [(status, out, error) for status, out, error in json.loads(done.stdout)]

    def mypy(self, name: str, source: str) -> str:
        (self.work / name).write_text(source)
        return self.overlay.run("-m", "mypy", name, cwd=self.work).stdout


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """slapo-core as the developer has it (editable), one healthy plugin and two bad ones; stubs installed."""
    made = World(tmp_path_factory.mktemp("stubs"))
    for distribution in (ACME, BROKEN, UNREADABLE):
        distribution.install(made.overlay.site_packages)
    status, out, error = made.slapo("stubs", "--install")
    place = made.overlay.site_packages / "slapo_core-stubs"
    assert (status, out) == (0, f"wrote {place}; to remove it: pip uninstall slapo-core-stubs\n"), error
    return made


@pytest.mark.slow
def test_mypy_accepts_what_slapo_accepts(world: World) -> None:
    assert world.mypy("accepted.py", ACCEPTED) == REVEALED


@pytest.mark.slow
def test_mypy_rejects_what_slapo_rejects(world: World) -> None:
    assert world.mypy("rejected.py", REJECTED) == COMPLAINTS


@pytest.mark.slow
@pytest.mark.breadth
def test_stubs_work_with_an_ordinary_installation_too(tmp_path: Path) -> None:
    made = World(tmp_path)
    source = Path(slapo_core.__file__).parent
    copy = made.overlay.site_packages / "slapo_core"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    ACME.install(made.overlay.site_packages)
    where = made.overlay.run("-c", "import slapo_core; print(slapo_core.__file__)", cwd=made.work).stdout.strip()
    assert where == str(copy / "__init__.py")
    assert made.slapo("stubs", "--install")[0] == 0
    assert made.mypy("rejected.py", REJECTED) == COMPLAINTS


@pytest.mark.slow
def test_a_broken_plugin_is_left_out_with_the_reason(world: World, message: Messages) -> None:
    status, out, error = world.slapo("stubs")
    assert status == 0
    bad, odd = error.splitlines()
    message(bad, "left out: bad.x of bad-slapo 1.0: ", "'no_such_module'")
    message(odd, "left out: odd.x of odd-slapo 1.0: ", "'NoSuchType'")
    assert f"# {bad}\n" in out
    assert f"# {odd}\n" in out
    assert "bad(" not in out
    assert "def bad" not in out
    assert "def odd" not in out
    assert "from acme-slapo 1.0" in out


@pytest.mark.slow
def test_every_stub_is_python_and_every_method_has_its_first_line(world: World) -> None:
    package = world.overlay.site_packages / "slapo_core-stubs"
    files = sorted(path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file())
    assert files == ["_vocabulary.pyi", "py.typed"]
    assert (package / "py.typed").read_text() == "partial\n"
    classes = {
        node.name: node
        for path in package.rglob("*.pyi")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    methods = [item for item in classes["NodePrimitives"].body if isinstance(item, ast.FunctionDef)]
    pads = [item for item in methods if item.name == "pad"]
    assert [ast.get_docstring(pad) for pad in pads] == ["Do nothing. [acme.pad, acme-slapo 1.0]"]
    assert "__getattr__" not in {item.name for item in methods}


@pytest.mark.slow
def test_check_says_whether_the_stubs_are_up_to_date(world: World, tmp_path: Path) -> None:
    place, typings = world.overlay.site_packages / "slapo_core-stubs", tmp_path / "typings"
    installed, missing, written = world.slapo_each(
        ["stubs", "--check"],
        ["stubs", "--check", "--output", str(typings)],
        ["stubs", "--output", str(typings)],
    )
    assert installed[:2] == (0, f"the stubs at {place} are up to date\n")
    assert missing[0] == 1
    assert missing[2].splitlines()[-2:] == [
        f"error: no stubs found at {typings}/slapo_core-stubs",
        f"  hint: slapo stubs --output {typings}",
    ]
    assert written[:2] == (0, f"wrote {typings}/slapo_core-stubs\n")

    vocabulary = typings / "slapo_core-stubs" / "_vocabulary.pyi"
    vocabulary.write_text(vocabulary.read_text().replace("axis: int = 0", "axis: int = 1"))
    status, out, error = world.slapo("stubs", "--check", "--output", str(typings))
    assert status == 1
    assert {line[0] for line in out.splitlines() if "def pad" in line} == {"-", "+"}
    assert error.splitlines()[-2] == f"error: the stubs at {typings}/slapo_core-stubs are out of date"


@pytest.mark.slow
@pytest.mark.breadth
def test_pip_knows_the_stubs_and_removes_them(tmp_path: Path) -> None:
    made = World(tmp_path)
    install = ["stubs", "--install"]
    assert [status for status, _, _ in made.slapo_each(install, install)] == [0, 0], "again, over the old ones"
    listed = made.overlay.run("-m", "pip", "list", "--format", "json", cwd=made.work, check=True).stdout
    assert [item["name"] for item in json.loads(listed)].count("slapo-core-stubs") == 1
    made.overlay.run("-m", "pip", "uninstall", "--yes", "slapo-core-stubs", cwd=made.work, check=True)
    assert sorted(path.name for path in made.overlay.site_packages.iterdir()) == ["borrowed.pth"]


@pytest.mark.slow
def test_install_and_output_exclude_each_other(world: World) -> None:
    status, _, error = world.slapo("stubs", "--install", "--output", "typings")
    assert status == 2
    assert "choose one of --install and --output" in error
