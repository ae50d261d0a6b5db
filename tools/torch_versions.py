"""Run the tests with a version of torch, and keep what came out in docs/results/torch_versions.md.

python tools/torch_versions.py 2.11.0 --suite core        # pipelines, tracing and estimates
python tools/torch_versions.py 2.15.0                     # what `make test` runs, but for style
python tools/torch_versions.py                            # write the page again, from docs/results/torch_versions.json

Each run makes an environment of its own, of several gigabytes, and removes it. A version has one row: its last run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "docs" / "results" / "torch_versions.json"
PAGE = ROOT / "docs" / "results" / "torch_versions.md"
SUITES = {
    "sampled": ("--ignore=tests/architecture/test_style.py",),
    "core": (
        *("plugins/slapo-torch/tests/test_pipeline*.py", "plugins/slapo-graph/tests/test_trace*.py"),
        *("plugins/slapo-estimate/tests", "plugins/slapo-pipeline/tests"),
    ),
}
_PIN = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)
_FACTS = """
import importlib.metadata as metadata, json, platform
print(json.dumps([platform.python_version(), metadata.version("torch"), metadata.requires("torch")]))
"""

Row = dict[str, Any]


def main() -> int:
    """Run what the command line asks for; give 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="of torch, e.g. 2.11.0; without one, only the page is written")
    parser.add_argument("--suite", choices=SUITES, default="sampled", help="which tests (default: sampled)")
    parser.add_argument("--python", default=sys.executable, help="what the environment is made with (default: this)")
    parser.add_argument("--processes", type=int, default=3, metavar="N", help="that run tests at once (default: 3)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--keep", type=Path, metavar="DIR", help="make the environment there, and leave it")
    where.add_argument("--use", type=Path, metavar="DIR", help="run in this environment, as it is")
    options = parser.parse_args()
    row = _run(options) if options.version else None
    rows: list[Row] = json.loads(ROWS.read_text()) if ROWS.exists() else []
    if row is not None:
        rows = with_row(rows, row)
        ROWS.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(page(rows))
    if row is None:
        return 0
    print(f"torch {row['torch']}: {row['passed']} passed, {row['skipped']} skipped, {len(row['failed'])} failed")
    print(*(f"  {name}" for name in row["failed"]), sep="\n")
    return 1 if row["failed"] else 0


def _run(options: argparse.Namespace) -> Row:
    directory: Path = (options.use or options.keep or Path(tempfile.mkdtemp(prefix="torch-"))).absolute()
    python = directory / "bin" / "python"
    try:
        if not options.use:
            _install(options.python, directory, options.version)
        python_version, torch, _ = _facts(python)
        if Version(torch).public != options.version:
            sys.exit(f"{directory} has torch {torch}, not {options.version}")
        print(f"[3/3] running the tests: {options.suite}", flush=True)
        counted = run_tests(python, SUITES[options.suite], options.processes)
    finally:
        if not options.use and not options.keep:
            shutil.rmtree(directory, ignore_errors=True)
    return {"torch": options.version, "python": python_version, "suite": options.suite, **counted}


def _install(base: str, directory: Path, version: str) -> None:
    """Make an environment: torch first, whose requirements go before our pins."""
    print(f"[1/3] making {directory} with torch {version}", flush=True)
    call([base, "-m", "venv", "--clear", str(directory)])
    python = directory / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "-q"]
    call([*pip, f"torch=={version}"])
    pins = directory / "constraints.txt"
    pins.write_text(kept_pins((ROOT / "constraints.txt").read_text(), version, _facts(python)[2]))
    print("[2/3] installing slapo, its plugins and the development tools", flush=True)
    plugins = sorted(project.parent for project in ROOT.glob("plugins/*/pyproject.toml"))
    call([*pip, "-c", str(pins), *(part for each in (f"{ROOT}[dev]", *plugins) for part in ("-e", str(each)))])


def kept_pins(constraints: str, version: str, requirements: Sequence[str]) -> str:
    """The pins that hold beside a version of torch.

    Args:
        constraints: the text of constraints.txt.
        version: of torch; takes the place of its pin.
        requirements: torch's own; pins that contradict them are left out.
    """
    own = [
        each for each in map(Requirement, requirements) if each.marker is None or each.marker.evaluate({"extra": ""})
    ]
    required = {requirement.name.lower(): requirement.specifier for requirement in own}
    pins = [
        f"{name}=={pin}"
        for name, pin in _PIN.findall(constraints)
        if name != "torch" and (name.lower() not in required or required[name.lower()].contains(pin, prereleases=True))
    ]
    return "\n".join([*pins, f"torch=={version}"]) + "\n"


def _facts(python: Path) -> tuple[str, str, list[str]]:
    """The versions of Python and torch in an environment, and what torch requires."""
    facts = json.loads(subprocess.check_output([str(python), "-c", _FACTS], text=True, cwd=python.parent))
    return facts[0], facts[1], facts[2]


def run_tests(python: Path, suite: Sequence[str], processes: int, **environ: str) -> Row:
    """Run tests in an environment, and count what came out.

    Args:
        python: of the environment.
        suite: paths, patterns of paths, and options of pytest.
        processes: that run tests at once.
        environ: further variables of the environment.
    """
    paths = [str(path.relative_to(ROOT)) for glob in suite if "*" in glob for path in sorted(ROOT.glob(glob))]
    paths += [path for path in suite if "*" not in path]
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", f"--junitxml={report}", "-o", "junit_family=xunit1", "--tb=short"]
        command += ["--numprocesses", str(processes), "--dist", "loadfile", "--no-loadscope-reorder", *paths]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **environ}
        status = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
        if status > 1 or not report.exists():
            sys.exit(f"pytest ended with exit status {status}: no row is written")
        return counts(report.read_text())


def call(command: Sequence[str]) -> None:
    """Run a command; end with its status if it fails."""
    status = subprocess.run(command, check=False, cwd=ROOT).returncode
    if status:
        sys.exit(f"exit status {status}: {' '.join(command)}")


def counts(report: str) -> Row:
    """How many tests passed and were skipped, and which failed.

    Args:
        report: of pytest, in JUnit's XML.
    """
    outcomes: dict[str, str] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('file', case.get('classname'))}::{case.get('name')}"
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        outcomes[name] = "failed" if outcomes.get(name) == "failed" else outcome
    number = {outcome: list(outcomes.values()).count(outcome) for outcome in ("passed", "skipped")}
    return {**number, "failed": sorted(name for name, outcome in outcomes.items() if outcome == "failed")}


def with_row(rows: Sequence[Row], row: Row) -> list[Row]:
    """The rows by version, with one instead of an earlier run of its version."""
    kept = [each for each in rows if each["torch"] != row["torch"]]
    return sorted([*kept, row], key=lambda each: Version(each["torch"]))


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page, as Markdown."""
    introduction = (
        "What the tests gave with each version of torch, by `python tools/torch_versions.py VERSION`. The suite "
        "*sampled* is what `make test` runs, but for style; *core* is what it has of pipelines, tracing and estimates."
    )
    lines = ["# Versions of torch", "", *textwrap.wrap(introduction, 120, break_on_hyphens=False)]
    lines += ["", "| torch | Python | suite | passed | skipped | failed |", "|---|---|---|---|---|---|"]
    for row in rows:
        shown = [row["torch"], row["python"], row["suite"], row["passed"], row["skipped"], len(row["failed"])]
        lines.append(f"| {' | '.join(map(str, shown))} |")
    failed = [f"- torch {row['torch']}: `{name}`" for row in rows for name in row["failed"]]
    if failed:
        lines += ["", "## What failed", "", *failed]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
