"""Imports go down the layers only, and the contracts that say so can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = [
    sys.executable,
    "-c",
    "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())",
]


def lint_imports(folder: Path, *, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    command = [*LINT_IMPORTS, "--no-cache", "--config", "pyproject.toml"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_our_imports_keep_every_contract() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert f"Contracts: {len(contracts)} kept, 0 broken." in done.stdout


VIOLATIONS = {
    "imports go down the layers only": ("slapo_core/schedule/transaction.py", "import slapo_runtime.weights"),
    "the core knows no plugin, no runtime and no model library": (
        "plugins/slapo-runtime/slapo_runtime/build.py",
        "import slapo_tp",
    ),
    "plugins use the public names, spec and testing only": ("slapo_tp/shard.py", "import slapo_core.tree"),
    "the bundled dialect imports what any plugin may": (
        "plugins/slapo-runtime/slapo_runtime/native/engine.py",
        "import slapo_runtime.weights",
    ),
    "the launcher needs nothing but the errors": (
        "plugins/slapo-runtime/slapo_runtime/launcher.py",
        "import slapo_core.spec",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("contract", [None, *VIOLATIONS])
def test_each_contract_is_broken_by_an_import_against_it(tmp_path: Path, contract: str | None) -> None:
    """The project's own contracts, on a small project of the same shape with one wrong import (or none)."""
    files = {"slapo_core/__init__.py": "", "slapo_tp/__init__.py": "import slapo_core", "slapo_tp/shard.py": ""}
    files["slapo_pipeline/__init__.py"] = ""
    single = ("cli", "errors", "plugins", "primitives", "private", "spec", "testing", "tree", "verification", "weights")
    files |= {f"slapo_core/{name}.py": "" for name in single}
    files |= {f"slapo_core/{name}/__init__.py": "" for name in ("building", "native", "pipeline", "ranks", "schedule")}
    files |= {
        "plugins/slapo-runtime/slapo_runtime/build.py": "import slapo_runtime.weights",
        "plugins/slapo-runtime/slapo_runtime/rank_process.py": "",
    }
    files |= {
        "plugins/slapo-runtime/slapo_runtime/native/engine.py": "import slapo_core.spec",
        "plugins/slapo-runtime/slapo_runtime/launcher.py": "",
    }
    files |= {"slapo_core/schedule/transaction.py": "import slapo_core.tree"}
    if contract is not None:
        file, line = VIOLATIONS[contract]
        files[file] = line
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())

    done = lint_imports(tmp_path, path=tmp_path)

    broken = {line.partition(" BROKEN")[0] for line in done.stdout.splitlines() if " BROKEN" in line}
    expected = set() if contract is None else {contract}
    assert broken == expected, done.stdout + done.stderr
    assert done.returncode == (0 if contract is None else 1)


def test_every_contract_has_an_import_that_breaks_it() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == set(VIOLATIONS)


def test_installed_metadata_is_read_in_one_file_only() -> None:
    reader = re.compile(r"^\s*(import importlib[._]metadata|from importlib([._]metadata)? import)", re.MULTILINE)
    assert reader.search("from importlib import metadata")  # the control: it can fail
    root = ROOT / "slapo_core"
    readers = [str(file.relative_to(root)) for file in root.rglob("*.py") if reader.search(file.read_text("utf-8"))]
    assert readers == ["plugins/metadata.py"]


def test_the_architecture_page_lists_the_layers_in_their_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    described = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", page, re.MULTILINE)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(item["layers"] for item in settings["contracts"] if item["type"] == "layers")
    levels = [re.findall(r"\w+", line) for line in layers]
    single = ("errors", "live", "private")
    present = {file.stem for file in (ROOT / "slapo_core").iterdir() if file.is_dir() or file.stem in single}
    assert set(described) == present - {"__pycache__", "template"}
    level_of = {name: number for number, names in enumerate(levels) for name in names}
    assert [level_of[name] for name in described] == sorted(level_of[name] for name in described)
