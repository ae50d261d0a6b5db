"""What the documentation shows is what happens: its commands are run, its generated pages are up to date."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slapo_core as slapo
import slapo_testing as testing
from slapo_core import errors, hookspecs
from slapo_runtime import hookspecs as runtime_hookspecs
from tests.ecosystem.pages import blocks, matches, steps
from tests.support.overlay import Overlay

ROOT = Path(__file__).parents[2]
TUTORIALS = {
    "guides/write-a-primitive.md": 7,
    "guides/write-a-dialect.md": 7,
    "reference/extension-points.md": 9,
}
"""The pages whose commands are run, and how many commands they have at least."""

PRIMITIVES = [
    "core.annotate", "core.checkpoint", "core.replace", "tp.fork_rng", "tp.shard", "tp.shard_attribute", "tp.sync",
    "tp.sync_gradient",
]  # fmt: skip

OFFLINE = {
    "PIP_NO_DEPS": "1",
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip's spelling of "no isolation"
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "OMP_NUM_THREADS": "1",
}


class Shell:
    """Runs commands one after another in an environment of its own."""

    def __init__(self, root: Path) -> None:
        self.overlay = Overlay(root / "env")
        self.directory = root / "work"
        self.directory.mkdir()
        commands = {"pip": "-m pip", "pytest": "-m pytest", "slapo": "-m slapo_core.cli.main"}
        for name, arguments in commands.items():
            script = root / "env" / "bin" / name
            script.write_text(f'#!/bin/sh\nexec "{self.overlay.python}" {arguments} "$@"\n')
            script.chmod(0o755)

    def run(self, command: str) -> str:
        if command.startswith("cd "):
            self.directory /= command.removeprefix("cd ")
            return ""
        # stderr where it was printed, as on a terminal
        code = "import subprocess as s, sys; sys.exit(s.run(['bash', '-c', sys.argv[1]], stderr=s.STDOUT).returncode)"
        done = self.overlay.run("-c", code, command, cwd=self.directory, environ=OFFLINE)
        return done.stdout + (f"[exit status {done.returncode}]\n" if done.returncode else "")


@pytest.mark.breadth
@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    shell, ran = Shell(tmp_path), 0
    for block in blocks((ROOT / "docs" / name).read_text()):
        where = f"{name}:{block.line}"
        if block.key == "source":
            continue  # test_excerpts_are_in_the_sources_that_they_name
        if block.key == "file":
            file = shell.directory / block.value
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.key == "excerpt":
            package = shell.directory
            assert block.text in (package / block.value).read_text(), f"{where} is not in {block.value}"
        else:
            assert block.language == "console", f"{where}: a block that nothing checks"
            for command, expected in steps(block.text):
                got = shell.run(command)
                ran += 1
                assert matches(expected, got), f"{where}\n$ {command}\n--- shown\n{expected}--- printed\n{got}"
    assert ran >= TUTORIALS[name]


def test_excerpts_are_in_the_sources_that_they_name() -> None:
    found = 0
    for page in (ROOT / "docs").rglob("*.md"):
        for block in blocks(page.read_text()):
            if block.key == "source":
                found += 1
                assert block.text in (ROOT / block.value).read_text(), f"{page.name}:{block.line}"
    assert found >= 3


@pytest.mark.parametrize(
    ("page", "start", "most"),
    [
        ("guides/write-a-primitive.md", "the author of a primitive meets", 15),
        ("guides/write-a-dialect.md", "## The names", 25),
    ],
)
def test_an_author_meets_few_names(page: str, start: str, most: int) -> None:
    """The tables list them; all of core's are public, and those of modules are there."""
    table = (ROOT / "docs" / page).read_text().partition(start)[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    listed = [(row[1].strip(" `") if "slapo_" in row[1] else "slapo_core", row) for row in rows]
    names = [
        (module, name)
        for module, row in listed
        for name in re.findall(r"`(\w+)`", row[2] if "slapo_" in row[1] else row[1])
        if name != "dialect"
    ]
    assert 10 <= len(names) <= most
    for module, name in names:
        found = any(hasattr(importlib.import_module(each), name) for each in (module, "slapo_core.dialect"))
        assert found, f"{module} has no {name}"


def test_the_dialect_of_the_tutorial_is_as_short_as_promised() -> None:
    page = (ROOT / "docs" / "guides/write-a-dialect.md").read_text()
    (source,) = (block.text for block in blocks(page) if block.value.endswith("src/acme_guard.py"))
    lines = source.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("one\n", "one\n", True),
        ("one\n", "two\n", False),
        ("one\n", "one\nmore\n", False),
        ("one\n...\nlast\n", "one\n2\n3\nlast\n", True),
        ("one\n...", "one\n", True),
        ("took ... s\n", "took 1.3 s\n", True),
        ("took ... s\n", "took 1.3 m\n", False),
        ("", "unexpected\n", False),
    ],
)
def test_the_comparison_of_outputs_can_fail(expected: str, got: str, same: bool) -> None:
    assert matches(expected, got) is same


@pytest.mark.slow
def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, "tools/generate_docs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_hook_and_every_error_has_its_section() -> None:
    hooks, errors_page = ((ROOT / "docs" / name).read_text() for name in ("reference/hooks.md", "reference/errors.md"))
    names = [name for module in (hookspecs, runtime_hookspecs) for name in vars(module) if name.startswith("slapo_")]
    assert re.findall(r"^## (\w+)$", hooks, flags=re.MULTILINE) == names
    assert re.findall(r"^## (\w+)$", errors_page, flags=re.MULTILINE) == errors.__all__
    assert errors_page.count("**What to do**: ") == len(errors.__all__)
    assert hooks.count("Called when ") == len(names)


def reference() -> str:
    """The pages of all distributions."""
    return "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("slapo-*.md")))


def test_every_public_name_is_in_the_reference_with_its_documentation() -> None:
    page = reference()
    sections = re.findall(r"^### (\S+)$", page, flags=re.MULTILINE)
    public = [name for name in slapo.__all__ if name not in errors.__all__ and name not in ("effects", "patterns")]
    public += [*slapo.patterns.__all__, *(name for name in slapo.effects.__all__ if name != "Effect")]
    engine = [f"Engine.{name}" for name in vars(slapo.Engine) if not name.startswith("_")]
    members = re.findall(r"^#### `(\S+)`$", page, flags=re.MULTILINE)
    assert [name for name in (*public, *testing.__all__, *PRIMITIVES) if sections.count(name) != 1] == []
    assert [name for name in (*engine, "Schedule.undo", "NodeGroup.apply") if members.count(name) != 1] == []
    entries = re.split(r"^#{3,4} ", page, flags=re.MULTILINE)[1:]
    assert [entry.partition("\n")[0] for entry in entries if "*No docstring.*" in entry] == []
    assert " at 0x" not in page


def test_a_new_public_name_and_a_new_member_join_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    page = importlib.import_module("reference_page")

    def tidy_up(model: object, *, deep: bool = False) -> None:
        """Tidy a model up."""

    def bare() -> None: ...

    def check_replicas(self: object) -> None:
        """Compare the replicas."""

    tidy_up.__module__ = bare.__module__ = "slapo_runtime.build.tidying"
    monkeypatch.setattr(slapo, "__all__", [*slapo.__all__, "tidy_up", "bare"])
    monkeypatch.setattr(slapo, "tidy_up", tidy_up, raising=False)
    monkeypatch.setattr(slapo, "bare", bare, raising=False)
    monkeypatch.setattr(slapo.Engine, "check_replicas", check_replicas, raising=False)
    made = page.reference_pages("")
    core, part = (
        made[name].partition("\n## Building and training\n")[2].partition("\n## ")[0]
        for name in ("slapo-core.md", "slapo-runtime.md")
    )
    assert "### tidy_up\n\n```python\ntidy_up(model: object, *, deep: bool = False) -> None\n```\n\nTidy a mod" in part
    assert f"### bare\n\n```python\nbare() -> None\n```\n\n{page.MISSING}" in part
    assert "#### `Engine.check_replicas`\n\n```python\ncheck_replicas() -> None\n```\n\nCompare the replicas." in core


@pytest.mark.parametrize("name", ["create_schedule", "verify", "build", "replay", "run_ranks"])
def test_the_reference_explains_every_argument(name: str) -> None:
    page = reference()
    (section,) = re.findall(rf"^### {name}$(.*?)(?=^### |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    function = getattr(slapo if name in slapo.__all__ else testing, name)
    assert [each for each in inspect.signature(function).parameters if f"- `{each}`:" not in section] == []
    assert "**Raises**" in section


def anchors(text: str) -> set[str]:
    """What a link may name behind ``#``: the headings outside of code, the way the web shows them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.M):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).replace(" ", "-")
        same = sum(1 for each in found if re.sub(r"-\d+$", "", each) == slug)
        found.append(f"{slug}-{same}" if same else slug)
    return set(found)


def test_an_anchor_is_a_heading_and_no_line_of_code() -> None:
    text = "# A\n\n## [Estimate](b.md)\n\n## estimate\n\n```text\n# no heading\n```\n\n### `a.b_c`, d\n"
    assert anchors(text) == {"a", "estimate", "estimate-1", "ab_c-d"}


def test_links_between_pages_lead_somewhere() -> None:
    folders = ("*.md", "docs/**/*.md", "examples/*/README.md", "plugins/*/README.md", "benchmarks/*.md")
    pages = [page for folder in folders for page in ROOT.glob(folder)]
    assert len(pages) >= 80
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            to = page.parent / target if target else page
            assert to.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(to.read_text()), f"{page.name} links to {target}#{anchor}"
