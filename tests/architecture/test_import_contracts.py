"""Imports go down the layers only, and the contracts that say so can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

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
    "the core knows no other distribution, no runtime and no model library": (
        "slapo_core/schedule.py",
        "slapo_runtime",
    ),
    "imports of core go down its layers only": ("slapo_core/errors.py", "slapo_core.layout"),
    "slapo-deepspeed imports core, runtime only": ("slapo_deepspeed/__init__.py", "slapo_graph"),
    "slapo-estimate imports core, runtime only": ("slapo_estimate/__init__.py", "slapo_verify"),
    "slapo-fusion imports core, graph only": ("slapo_fusion/fuse.py", "slapo_testing"),
    "slapo-graph imports core only": ("slapo_graph/__init__.py", "slapo_runtime"),
    "slapo-lightning imports core, runtime, torch only": ("slapo_lightning/__init__.py", "slapo_tp"),
    "slapo-loss imports core only": ("slapo_loss/__init__.py", "slapo_graph"),
    "slapo-megatron imports core, runtime only": ("slapo_megatron/__init__.py", "slapo_tp"),
    "slapo-models imports core, graph, estimate only": ("slapo_models/__init__.py", "slapo_tp"),
    "slapo-pipeline imports core, runtime, graph only": (
        "slapo_pipeline/__init__.py",
        "slapo_verify",
    ),
    "slapo-runtime imports core only": ("slapo_runtime/__init__.py", "slapo_torch"),
    "slapo-testing imports core, runtime, verify only": ("slapo_testing/kit.py", "slapo_tune"),
    "slapo-torch imports core, runtime only": ("slapo_torch/engine.py", "slapo_tp"),
    "slapo-tp imports core only": ("slapo_tp/shard.py", "slapo_runtime"),
    "slapo-tune imports core, runtime, verify, estimate only": (
        "slapo_tune/__init__.py",
        "slapo_fusion",
    ),
    "slapo-verify imports core, runtime only": ("slapo_verify/__init__.py", "slapo_estimate"),
    "slapo-view imports core, runtime, graph, pipeline, estimate only": ("slapo_view/__init__.py", "slapo_verify"),
    "private modules of core are reached through slapo_core.internals": (
        "slapo_tp/shard.py",
        "slapo_core.tree",
    ),
    "slapo-transformers imports core, runtime, torch only": ("slapo_transformers/trainer.py", "slapo_tp"),
    "target torch imports what any dialect may": ("slapo_torch/engine.py", "slapo_runtime.weights"),
    "no circle between the modules of a folder": ("slapo_tp/shard.py", "slapo_tp.sync"),
}
"""Contract -> a file and what it must not import."""

CORE = "cli dialect errors hookspecs internals layout observers plugins primitive primitives private tree _vocabulary"


@pytest.mark.slow
@pytest.mark.parametrize("contract", [None, *VIOLATIONS])
def test_each_contract_is_broken_by_an_import_against_it(tmp_path: Path, contract: str | None) -> None:
    """The project's own contracts, on a small project of the same shape with one wrong import (or none)."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    files = {f"{package}/__init__.py": "" for package in packages}
    files |= {f"slapo_core/{name}.py": "" for name in CORE.split()}
    files["slapo_core/schedule.py"] = "import slapo_core.tree"
    files["slapo_fusion/cases.py"] = "import slapo_testing"  # the exception: kit cases
    files["slapo_tp/shard.py"] = "import slapo_core.internals"
    files["slapo_tp/sync.py"] = "import slapo_tp.shard"
    files |= {"slapo_fusion/fuse.py": "", "slapo_testing/kit.py": ""}
    files |= {"slapo_torch/engine.py": "import slapo_runtime.engine", "slapo_runtime/weights.py": ""}
    files["slapo_runtime/engine.py"] = "import slapo_core.layout"
    if contract is not None:
        file, module = VIOLATIONS[contract]
        files[file] = f"import {module}"
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


def allowed_imports(settings: dict[str, Any]) -> dict[str, set[str]]:
    """Return the packages that each package may import, by the contracts of its distribution."""
    packages = set(settings["root_packages"])
    allowed: dict[str, set[str]] = {}
    for contract in settings["contracts"]:
        if contract["type"] == "forbidden" and (package := contract["source_modules"][0]) in packages:
            allowed[package] = allowed.get(package, packages) - {package} - set(contract["forbidden_modules"])
    return allowed


def test_the_contracts_cover_every_distribution_and_allow_no_circle_of_them() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    plugins = {project.parent.name.replace("-", "_") for project in ROOT.glob("plugins/*/pyproject.toml")}
    (circles,) = (contract for contract in settings["contracts"] if contract["type"] == "acyclic_siblings")
    assert set(settings["root_packages"]) == set(circles["ancestors"]) == {"slapo_core", *plugins}
    allowed = allowed_imports(settings)
    assert allowed.keys() == {"slapo_core", *plugins}
    assert allowed["slapo_core"] == set()
    TopologicalSorter(allowed).prepare()  # raises CycleError
    with pytest.raises(CycleError, match="slapo_runtime"):
        TopologicalSorter({**allowed, "slapo_runtime": {"slapo_verify"}}).prepare()


READER = re.compile(r"^\s*(?:import|from) importlib[._]metadata(?: import (.+))?$", re.MULTILINE)
VERSIONS = {"PackageNotFoundError", "requires", "version"}


def readers_of_entry_points(root: Path) -> list[str]:
    """Return the files of packages that may read entry points: they import more of their metadata than versions."""
    files = (file for folder in ("slapo_core", "plugins/*/slapo_*") for file in root.glob(f"{folder}/**/*.py"))
    found = []
    for file in sorted(files):
        imported = [name for names in READER.findall(file.read_text("utf-8")) for name in names.split(", ")]
        if imported and not VERSIONS.issuperset(imported):
            found.append(str(file.relative_to(root)))
    return found


def test_entry_points_are_read_in_one_file_by_importlib_metadata(tmp_path: Path) -> None:
    assert readers_of_entry_points(ROOT) == ["slapo_core/plugins/metadata.py"]
    source = (ROOT / "slapo_core" / "plugins" / "metadata.py").read_text("utf-8")
    assert "from importlib_metadata import distributions" in source
    assert "importlib.metadata" not in source  # its behavior differs between versions of Python
    (tmp_path / "slapo_core").mkdir()
    for name, line in {
        "a": "from importlib.metadata import version",
        "b": "from importlib.metadata import entry_points, version",
        "c": "    import importlib_metadata",
    }.items():
        (tmp_path / "slapo_core" / f"{name}.py").write_text(f"{line}\n")
    assert readers_of_entry_points(tmp_path) == ["slapo_core/b.py", "slapo_core/c.py"]


def test_the_architecture_page_lists_the_folders_and_files_of_core() -> None:
    page = (ROOT / "docs" / "how" / "architecture.md").read_text()
    described = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", page, re.MULTILINE)
    core = (ROOT / "slapo_core").iterdir()
    present = {file.stem for file in core if file.is_dir() or (file.suffix == ".py" and not file.stem.startswith("_"))}
    assert set(described) == present - {"__pycache__"}
